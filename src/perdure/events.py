"""Payloads of a manager's events: the argument that each hook of ``sessions.on`` gets.

    from perdure.events import Saved

    def saved(event: Saved) -> None:
        print(f"session {event.key}: {event.records} records in {event.took:.3f} s")

    sessions.on("saved", saved)

The event ``save_failed`` has the payload `SaveFailed`, and so on; only ``before_save`` gets the
session. ``docs/events.md`` lists them with their fields.
"""

from __future__ import annotations

from perdure.autosave.events import (
    Degraded,
    LoopBlocked,
    Lost,
    Quarantined,
    Recovered,
    Resumed,
    Saved,
    SaveFailed,
    Stalled,
    StoreWarned,
)
from perdure.session.events import (
    Closed,
    Drain,
    Folded,
    FoldFailed,
    MediaLeftOut,
    MemoryEvicted,
    MemorySearched,
    Opened,
    Posted,
    TurnWarned,
)
from perdure.session.retention import PruneReport

__all__ = [
    "Closed",
    "Degraded",
    "Drain",
    "FoldFailed",
    "Folded",
    "LoopBlocked",
    "Lost",
    "MediaLeftOut",
    "MemoryEvicted",
    "MemorySearched",
    "Opened",
    "Posted",
    "PruneReport",
    "Quarantined",
    "Recovered",
    "Resumed",
    "SaveFailed",
    "Saved",
    "Stalled",
    "StoreWarned",
    "TurnWarned",
]
