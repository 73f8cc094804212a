"""Which clean sessions nobody has used for a while: a wheel of its own, with slots of 5 s.

Decisions only. Each session is in the wheel once, for as long as it is tracked; using
it moves nothing, it is looked at when its slot begins.
"""

from __future__ import annotations

from math import isfinite
from typing import Final, final

from perdure.autosave.tracked import Tracked
from perdure.autosave.wheel import NEVER, Wheel

__all__ = ["IdleWheel"]

SLOT: Final = 5.0


@final
class IdleWheel:
    """Find idle sessions.

    Args:
        after: Seconds without use; infinite for never.

    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._wheel: Wheel[Tracked] = Wheel(SLOT)
        self._newest = NEVER

    @property
    def next_at(self) -> float:
        """When `advance` has something to do."""
        return self._wheel.next_at

    def add(self, t: Tracked, now: float) -> None:
        """Begin to look after a session."""
        if isfinite(self._after):
            self._put(t, now + self._after, now)

    def _put(self, t: Tracked, at: float, now: float) -> None:
        # Rounded up, unlike deadlines: nobody waits for it, and too early would be wrong.
        slot = max(self._wheel.slot(at), self._wheel.slot(now)) + 1
        if slot != self._newest:
            self._newest = slot
        t.idle_slot = self._newest  # one number for all that share it: it is memory
        self._wheel.add(t, slot)

    def advance(self, now: float, limit: int) -> list[Tracked]:
        """Return sessions that have become idle, after a look at no more than ``limit``."""
        _, begun = self._wheel.pop(now, limit)
        idle = []
        for t in begun:
            used = max(t.last_at, t.idle_since)
            if t.pins or not t.clean or t.end is not None:
                used = now
            elif used + self._after <= now:
                idle.append(t)
                used = now
            self._put(t, used + self._after, now)
        return idle

    def forget(self, t: Tracked) -> None:
        """Look after a session no more, and let go of it."""
        self._wheel.discard(t, t.idle_slot)
        t.idle_slot = NEVER
