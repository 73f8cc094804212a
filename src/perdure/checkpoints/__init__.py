"""Checkpoints of a session, and the kernel events between them.

Decisions are pure (`chain`, `chunks`, `tree`, `difference`, `retention`); `engine` acts. What it
needs of a session it asks of a `Journal`, so nothing here knows sessions or which store they
are in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.checkpoints.chain import Problem as Problem
    from perdure.checkpoints.difference import Change as Change
    from perdure.checkpoints.difference import Difference as Difference
    from perdure.checkpoints.engine import CheckpointEngine as CheckpointEngine
    from perdure.checkpoints.engine import RolledBack as RolledBack
    from perdure.checkpoints.events import EventReader as EventReader
    from perdure.checkpoints.events import EventStream as EventStream
    from perdure.checkpoints.playing import replay_files as replay_files
    from perdure.checkpoints.reader import CheckpointReader as CheckpointReader
    from perdure.checkpoints.reader import CheckpointState as CheckpointState
    from perdure.checkpoints.replay import CapabilityUse as CapabilityUse
    from perdure.checkpoints.replay import ReplayReport as ReplayReport
    from perdure.checkpoints.replay import Row as Row
    from perdure.checkpoints.saving import TakenPair as TakenPair
    from perdure.checkpoints.verifying import Verification as Verification
    from perdure.model.checkpoints import Captured as Captured
    from perdure.model.checkpoints import Checkpoint as Checkpoint
    from perdure.model.checkpoints import Given as Given
    from perdure.model.events import KernelEvent as KernelEvent

# Resolved when used: every session has the chain at hand, few need the rest.
_HOME_OF = {
    "CapabilityUse": "perdure.checkpoints.replay",
    "Captured": "perdure.model.checkpoints",
    "Change": "perdure.checkpoints.difference",
    "Checkpoint": "perdure.model.checkpoints",
    "CheckpointEngine": "perdure.checkpoints.engine",
    "CheckpointReader": "perdure.checkpoints.reader",
    "CheckpointState": "perdure.checkpoints.reader",
    "Difference": "perdure.checkpoints.difference",
    "EventReader": "perdure.checkpoints.events",
    "EventStream": "perdure.checkpoints.events",
    "Given": "perdure.model.checkpoints",
    "KernelEvent": "perdure.model.events",
    "Problem": "perdure.checkpoints.chain",
    "ReplayReport": "perdure.checkpoints.replay",
    "RolledBack": "perdure.checkpoints.engine",
    "Row": "perdure.checkpoints.replay",
    "TakenPair": "perdure.checkpoints.saving",
    "Verification": "perdure.checkpoints.verifying",
    "replay_files": "perdure.checkpoints.playing",
}

__all__ = list(_HOME_OF)


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
