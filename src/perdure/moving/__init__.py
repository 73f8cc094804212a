"""Sessions on their way: bundles, which lose nothing, and from one store into another.

A bundle is one session as lines of JSON: its log, its documents, the blobs that it reaches. What
only says who wrote when (epochs, owners) is not in it, so that the same session gives
the same bundle out of every store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.moving.backups import Backup as Backup
    from perdure.moving.backups import backup as backup
    from perdure.moving.backups import follow_deletions as follow_deletions
    from perdure.moving.files import read_bundle as read_bundle
    from perdure.moving.files import write_bundle as write_bundle
    from perdure.moving.landing import Landed as Landed
    from perdure.moving.migrating import Migration as Migration
    from perdure.moving.migrating import Progress as Progress
    from perdure.moving.migrating import migrate as migrate
    from perdure.moving.restoring import Restored as Restored
    from perdure.moving.restoring import Verified as Verified
    from perdure.moving.restoring import restore_backup as restore_backup
    from perdure.moving.restoring import verify_backup as verify_backup
    from perdure.moving.salvaging import MissingRecords as MissingRecords
    from perdure.moving.salvaging import Salvage as Salvage
    from perdure.moving.salvaging import salvage as salvage
    from perdure.session.pairs import export_pair as export_pair
    from perdure.session.pairs import import_pair as import_pair

_HOMES = {
    "perdure.moving.backups": ("Backup", "backup", "follow_deletions"),
    "perdure.moving.restoring": ("Restored", "Verified", "restore_backup", "verify_backup"),
    "perdure.moving.files": ("read_bundle", "write_bundle"),
    "perdure.moving.landing": ("Landed",),
    "perdure.moving.migrating": ("Migration", "Progress", "migrate"),
    "perdure.moving.salvaging": ("MissingRecords", "Salvage", "salvage"),
    "perdure.session.pairs": ("export_pair", "import_pair"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
