"""Transfer of sessions: bundles, backups, and migration from one store to another.

A bundle is one session as lines of JSON: its log, its documents and the blobs that they reference.
It omits epochs and owners, so a session exports to the same bundle from every store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.session.export import export_pair as export_pair, import_pair as import_pair
    from perdure.transfer.backup_view import (
        RestoreSummary as RestoreSummary,
        VerifyReport as VerifyReport,
        restore_backup as restore_backup,
        verify_backup as verify_backup,
    )
    from perdure.transfer.backups import (
        Backup as Backup,
        backup as backup,
        follow_deletions as follow_deletions,
    )
    from perdure.transfer.bundle_files import (
        WrittenSession as WrittenSession,
        read_bundle as read_bundle,
        write_bundle as write_bundle,
    )
    from perdure.transfer.damaged import (
        MissingRecords as MissingRecords,
        Salvage as Salvage,
        salvage as salvage,
    )
    from perdure.transfer.migration import (
        Migration as Migration,
        MigrationProgress as MigrationProgress,
        migrate as migrate,
    )


_HOMES = {
    "perdure.transfer.backups": ("Backup", "backup", "follow_deletions"),
    "perdure.transfer.backup_view": (
        "RestoreSummary",
        "VerifyReport",
        "restore_backup",
        "verify_backup",
    ),
    "perdure.transfer.bundle_files": ("WrittenSession", "read_bundle", "write_bundle"),
    "perdure.transfer.migration": ("Migration", "MigrationProgress", "migrate"),
    "perdure.transfer.damaged": ("MissingRecords", "Salvage", "salvage"),
    "perdure.session.export": ("export_pair", "import_pair"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
