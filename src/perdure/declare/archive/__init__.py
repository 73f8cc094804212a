"""The files of an agent's home folder, archived with its session and brought back.

`checking`, `entries`, `listing` and `selecting` decide, and are pure; `scanning`, `staging` and
`swapping` work on the disk, and block; `saving`, `restoring` and `exporting` join them to a
store, off the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.declare.archive.archives import Archives as Archives
    from perdure.declare.archive.checking import ArchiveLimits as ArchiveLimits
    from perdure.declare.archive.entries import Archive as Archive
    from perdure.declare.archive.restoring import ArchiveRestored as ArchiveRestored
    from perdure.declare.archive.saving import ArchiveProgress as ArchiveProgress
    from perdure.declare.archive.saving import ArchiveSaved as ArchiveSaved
    from perdure.declare.archive.scanning import ArchiveSkipped as ArchiveSkipped

_HOME_OF = {
    "Archive": "perdure.declare.archive.entries",
    "ArchiveLimits": "perdure.declare.archive.checking",
    "ArchiveProgress": "perdure.declare.archive.saving",
    "ArchiveRestored": "perdure.declare.archive.restoring",
    "ArchiveSaved": "perdure.declare.archive.saving",
    "ArchiveSkipped": "perdure.declare.archive.scanning",
    "Archives": "perdure.declare.archive.archives",
}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
