"""The files of an agent's home folder, archived with its session and brought back.

`archives` is what users hold. `limits` decides, and is pure; `tar` and `atomic_swap` work on the
disk, and block; `save`, `restore` and `blobs` join them to a store, off the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.archive.archives import Archives as Archives
    from perdure.archive.limits import ArchiveLimits as ArchiveLimits
    from perdure.archive.restore import ArchiveRestored as ArchiveRestored
    from perdure.archive.save import (
        ArchiveProgress as ArchiveProgress,
        ArchiveSaved as ArchiveSaved,
        ArchiveSkipped as ArchiveSkipped,
    )
    from perdure.records.archives import Archive as Archive


_HOME_OF = {
    "Archive": "perdure.records.archives",
    "ArchiveLimits": "perdure.archive.limits",
    "ArchiveProgress": "perdure.archive.save",
    "ArchiveRestored": "perdure.archive.restore",
    "ArchiveSaved": "perdure.archive.save",
    "ArchiveSkipped": "perdure.archive.save",
    "Archives": "perdure.archive.archives",
}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
