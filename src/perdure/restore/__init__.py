"""Restore: from stored bytes back to a session. Valid, else caught up, else rebuilt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.memory.context import WorkingContextSnapshot as WorkingContextSnapshot
    from perdure.restore.bootstrapper import (
        Bootstrapped as Bootstrapped,
        RestorableMemory as RestorableMemory,
        SnapshotStore as SnapshotStore,
        WorkingContextSnapshotBootstrapOptions as WorkingContextSnapshotBootstrapOptions,
        WorkingContextSnapshotBootstrapper as WorkingContextSnapshotBootstrapper,
    )
    from perdure.restore.rebuild import CompactionSnapshotBuilder as CompactionSnapshotBuilder
    from perdure.restore.report import RestoreStep as RestoreStep
    from perdure.restore.serializer import (
        WorkingContextSnapshotSerializer as WorkingContextSnapshotSerializer,
    )
    from perdure.restore.snapshot_store import (
        RunExclusively as RunExclusively,
        WorkingContextSnapshotStore as WorkingContextSnapshotStore,
    )

# Resolved when used: every session opens through `perdure.restore.ladder`, few need these.
_HOME_OF = {
    "Bootstrapped": "perdure.restore.bootstrapper",
    "CompactionSnapshotBuilder": "perdure.restore.rebuild",
    "RunExclusively": "perdure.restore.snapshot_store",
    "RestorableMemory": "perdure.restore.bootstrapper",
    "RestoreStep": "perdure.restore.report",
    "SnapshotStore": "perdure.restore.bootstrapper",
    "WorkingContextSnapshot": "perdure.memory.context",
    "WorkingContextSnapshotBootstrapOptions": "perdure.restore.bootstrapper",
    "WorkingContextSnapshotBootstrapper": "perdure.restore.bootstrapper",
    "WorkingContextSnapshotSerializer": "perdure.restore.serializer",
    "WorkingContextSnapshotStore": "perdure.restore.snapshot_store",
}

__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
