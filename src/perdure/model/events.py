"""Kernel events: what an agent did, in order, on the session's logical clock.

An event is a record of the kind ``event``. Its time is a number that the session counts, never
the machine's clock, so that a replay sees the same times. Checkpoints count on the same clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["PRUNED", "SNAPSHOT_CREATED", "KernelEvent", "Stamp"]

SNAPSHOT_CREATED = "snapshot_created"
"""The kind of the event that stands in one group with each checkpoint."""

PRUNED = "pruned"
"""In the detail of one that is in a file, or was in one: its checkpoint is gone."""


class KernelEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event."""

    token_id: int
    """The number of the turn that caused it, 0 outside of one."""
    timestamp: int
    """When, on the session's logical clock."""
    kind: str
    label: str | None = None
    detail: dict[str, Any] = {}


class Stamp(msgspec.Struct, frozen=True):
    """What tells the time of a record that has one."""

    timestamp: int
