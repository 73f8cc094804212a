"""A lazy timer wheel: what is to be looked at again, by slots of time.

Decisions only. An entry is put into the slot in which its time lies, and comes out when
that slot *begins*, so never late by rounding. A change that moves a time later costs nothing
here: whoever added the entry looks again when it comes out, and handles it or adds it anew.
What is of no interest any more is taken out at once, or the wheel would keep it in memory.
"""

from __future__ import annotations

import heapq
from typing import Final, Generic, TypeVar, final

__all__ = ["NEVER", "Wheel"]

T = TypeVar("T")

NEVER: Final = 1 << 62
"""A slot that does not come: the slot of what is in no slot."""


@final
class Wheel(Generic[T]):
    """Keep entries by slot; cost and memory go with the entries, not with the time.

    Args:
        width: Seconds that a slot lasts.

    """

    __slots__ = ("_buckets", "_order", "next_at", "width")

    def __init__(self, width: float) -> None:
        self.width: float = width
        self.next_at: float = float("inf")
        """When the first slot that holds something begins."""
        self._buckets: dict[int, dict[T, None]] = {}
        self._order: list[int] = []

    def slot(self, at: float) -> int:
        """Return the slot in which a time lies."""
        return int(at / self.width)

    def add(self, entry: T, slot: int) -> bool:
        """Put an entry into a slot; return whether it is now the first one."""
        bucket = self._buckets.get(slot)
        if bucket is not None:
            bucket[entry] = None
            return False
        self._buckets[slot] = {entry: None}
        heapq.heappush(self._order, slot)
        self.next_at = self._order[0] * self.width
        return self._order[0] == slot

    def discard(self, entry: T, slot: int) -> None:
        """Take an entry out of a slot, if it is there; the slot itself stays."""
        bucket = self._buckets.get(slot)
        if bucket is not None:
            bucket.pop(entry, None)

    def pop(self, now: float, limit: int) -> tuple[int, list[T]]:
        """Take at most ``limit`` entries out of the first slot that has begun.

        Returns the slot and the entries; none if no slot has begun, or all have left it.
        """
        if self.next_at > now:
            return NEVER, []
        slot = self._order[0]
        bucket = self._buckets[slot]
        taken = [bucket.popitem()[0] for _ in range(min(limit, len(bucket)))]
        if not bucket:
            del self._buckets[slot]
            heapq.heappop(self._order)
            self.next_at = self._order[0] * self.width if self._order else float("inf")
        return slot, taken
