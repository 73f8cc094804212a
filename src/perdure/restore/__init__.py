"""Restore: from stored bytes back to a session. Valid, else caught up, else rebuilt."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.memory.context import WorkingContextSnapshot as WorkingContextSnapshot
    from perdure.restore.bootstrapper import Bootstrapped as Bootstrapped
    from perdure.restore.bootstrapper import RestorableMemory as RestorableMemory
    from perdure.restore.bootstrapper import SnapshotStore as SnapshotStore
    from perdure.restore.bootstrapper import SupportsRetrieve as SupportsRetrieve
    from perdure.restore.bootstrapper import (
        WorkingContextSnapshotBootstrapOptions as WorkingContextSnapshotBootstrapOptions,
    )
    from perdure.restore.bootstrapper import (
        WorkingContextSnapshotBootstrapper as WorkingContextSnapshotBootstrapper,
    )
    from perdure.restore.rebuild import CompactionSnapshotBuilder as CompactionSnapshotBuilder
    from perdure.restore.rebuild import Repair as Repair
    from perdure.restore.report import RestoreStep as RestoreStep
    from perdure.restore.serializer import (
        WorkingContextSnapshotSerializer as WorkingContextSnapshotSerializer,
    )
    from perdure.restore.snapshot_store import RunExclusively as RunExclusively
    from perdure.restore.snapshot_store import (
        WorkingContextSnapshotStore as WorkingContextSnapshotStore,
    )

# Resolved when used: every session opens through `perdure.restore.ladder`, few need these.
_HOME_OF = {
    "Bootstrapped": "bootstrapper",
    "CompactionSnapshotBuilder": "rebuild",
    "RunExclusively": "snapshot_store",
    "Repair": "rebuild",
    "RestorableMemory": "bootstrapper",
    "RestoreStep": "report",
    "SupportsRetrieve": "bootstrapper",
    "SnapshotStore": "bootstrapper",
    "WorkingContextSnapshot": "serializer",
    "WorkingContextSnapshotBootstrapOptions": "bootstrapper",
    "WorkingContextSnapshotBootstrapper": "bootstrapper",
    "WorkingContextSnapshotSerializer": "serializer",
    "WorkingContextSnapshotStore": "snapshot_store",
}

__all__ = list(_HOME_OF)


if not TYPE_CHECKING:  # a checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        module = _HOME_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'perdure.restore' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"perdure.restore.{module}"), name)
        globals()[name] = value
        return value
