"""A lazy timer wheel: what is to be looked at again, by slots of time.

Decisions only. An entry is put into the slot in which its time lies, and comes out when
that slot *begins*, so never late by rounding. Nothing is ever taken out or moved: whoever
added it looks again when it comes out, and drops it, handles it, or adds it anew. So a
change that moves a time later costs nothing here.
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
        self._buckets: dict[int, list[T]] = {}
        self._order: list[int] = []

    def slot(self, at: float) -> int:
        """Return the slot in which a time lies."""
        return int(at / self.width)

    def add(self, entry: T, slot: int) -> bool:
        """Put an entry into a slot; return whether it is now the first one."""
        bucket = self._buckets.get(slot)
        if bucket is not None:
            bucket.append(entry)
            return False
        self._buckets[slot] = [entry]
        heapq.heappush(self._order, slot)
        self.next_at = self._order[0] * self.width
        return self._order[0] == slot

    def pop(self, now: float, limit: int) -> tuple[int, list[T]]:
        """Take at most ``limit`` entries out of the first slot that has begun.

        Returns the slot and the entries, none if no slot has begun.
        """
        if self.next_at > now:
            return NEVER, []
        slot = self._order[0]
        bucket = self._buckets[slot]
        taken = bucket[-limit:]
        del bucket[-limit:]
        if not bucket:
            del self._buckets[slot]
            heapq.heappop(self._order)
            self.next_at = self._order[0] * self.width if self._order else float("inf")
        return slot, taken
