"""Checkpoints of a session, and the kernel events between them.

Decisions are pure (`chain`, `replay`); `engine` performs them. It reaches
the session through a `Journal`, so no module here depends on sessions or on a backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.checkpoints.audit_files import AuditPair as AuditPair
    from perdure.checkpoints.chain import ChainProblem as ChainProblem
    from perdure.checkpoints.engine import (
        CheckpointEngine as CheckpointEngine,
        CheckpointReader as CheckpointReader,
        CheckpointState as CheckpointState,
        Difference as Difference,
        RolledBack as RolledBack,
        ValueChange as ValueChange,
    )
    from perdure.checkpoints.events import (
        KernelEventReader as KernelEventReader,
        KernelEventStream as KernelEventStream,
        replay_files as replay_files,
    )
    from perdure.checkpoints.replay import (
        CapabilityUse as CapabilityUse,
        ReplayReport as ReplayReport,
        TimelineRow as TimelineRow,
    )
    from perdure.checkpoints.verify import Verification as Verification
    from perdure.records.checkpoints import (
        CapturedState as CapturedState,
        Checkpoint as Checkpoint,
        ExplicitState as ExplicitState,
        KernelEvent as KernelEvent,
    )

# Imported on first use: every session needs the chain, few need the other modules.
_HOME_OF = {
    "CapabilityUse": "perdure.checkpoints.replay",
    "CapturedState": "perdure.records.checkpoints",
    "ValueChange": "perdure.checkpoints.engine",
    "Checkpoint": "perdure.records.checkpoints",
    "CheckpointEngine": "perdure.checkpoints.engine",
    "CheckpointReader": "perdure.checkpoints.engine",
    "CheckpointState": "perdure.checkpoints.engine",
    "Difference": "perdure.checkpoints.engine",
    "KernelEventReader": "perdure.checkpoints.events",
    "KernelEventStream": "perdure.checkpoints.events",
    "ExplicitState": "perdure.records.checkpoints",
    "KernelEvent": "perdure.records.checkpoints",
    "ChainProblem": "perdure.checkpoints.chain",
    "ReplayReport": "perdure.checkpoints.replay",
    "RolledBack": "perdure.checkpoints.engine",
    "TimelineRow": "perdure.checkpoints.replay",
    "AuditPair": "perdure.checkpoints.audit_files",
    "Verification": "perdure.checkpoints.verify",
    "replay_files": "perdure.checkpoints.events",
}

__all__ = list(_HOME_OF)


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
