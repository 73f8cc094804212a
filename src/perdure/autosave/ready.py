"""Sessions that are due, earliest deadline first, in two lanes.

Decisions only. Those that somebody waits for have a lane of their own; while both lanes
hold something they take turns, so that callers of ``save`` get at most every other place
and can never starve autosave. Within a lane the earliest deadline comes first, then the
smaller session, then the one that was due first.

A session moves between lanes by being pushed again: its ticket names its only valid
place. What is left behind in the other lane is a number without a session, and is skipped.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias, final

from perdure.autosave.tracked import Tracked

__all__ = ["Ready"]

_Place: TypeAlias = tuple[float, int, int]
"""Deadline, bytes, ticket."""


@final
class Ready:
    """Keep the sessions that wait for a place in a batch."""

    __slots__ = ("_calm", "_last", "_tickets", "_urgent", "_urgent_next")

    def __init__(self) -> None:
        self._urgent: list[_Place] = []
        self._calm: list[_Place] = []
        self._urgent_next = True
        self._last = 0
        self._tickets: dict[int, Tracked] = {}
        """The tickets that are valid."""

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, t: Tracked, deadline: float, *, urgent: bool) -> None:
        """Add a session, or move it; its ticket says that it is here."""
        self.drop(t)
        self._last = t.ticket = ticket = self._last + 1
        self._tickets[ticket] = t
        lane = self._urgent if urgent else self._calm
        heapq.heappush(lane, (deadline, t.pending_bytes, ticket))

    def drop(self, t: Tracked) -> None:
        """Take a session out, if it is here."""
        if t.ticket:
            del self._tickets[t.ticket]
            t.ticket = 0

    def pop(self) -> Tracked | None:
        """Take the next session out; None if there is none."""
        lane = self._next_lane()
        if lane is None:
            return None
        t = self._tickets.pop(heapq.heappop(lane)[2])
        t.ticket = 0
        return t

    def _next_lane(self) -> list[_Place] | None:
        urgent, calm = self._holds(self._urgent), self._holds(self._calm)
        if not (urgent and calm):
            return self._urgent if urgent else self._calm if calm else None
        chosen = self._urgent if self._urgent_next else self._calm
        self._urgent_next = not self._urgent_next
        return chosen

    def _holds(self, lane: list[_Place]) -> bool:
        while lane and lane[0][2] not in self._tickets:
            heapq.heappop(lane)
        return bool(lane)
