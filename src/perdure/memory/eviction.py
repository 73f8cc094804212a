"""Eviction from the working memory: what goes when a new value does not fit. Pure.

Pinned entries stay, whatever their priority. Of the others the least in priority goes
first, and among equals the one that was used longest ago.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, get_args

from perdure.errors import InvalidArgumentError, TooLargeError
from perdure.memory.index import MemoryEntry

Priority = Literal["low", "normal", "high", "critical"]


_WEIGHTS: Final = {name: weight for weight, name in enumerate(get_args(Priority))}


def weight_of(priority: str) -> int:
    """Return how much a priority weighs; one that is not known counts as normal.

    >>> weight_of("low") < weight_of("normal") == weight_of("whatever") < weight_of("critical")
    True
    """
    return _WEIGHTS.get(priority, _WEIGHTS["normal"])


def check_priority(priority: str) -> None:
    """Refuse a priority that is not known.

    Raises:
        InvalidArgumentError: It is none of those there are.

    """
    if priority not in _WEIGHTS:
        message = f"memory: invalid priority={priority!r}: choose {', '.join(_WEIGHTS)}"
        raise InvalidArgumentError(message, option="priority", value=priority)


def evicted(
    entries: Iterable[MemoryEntry], *, total: int, key: str, size: int, limit: int
) -> list[MemoryEntry]:
    """Return what has to go, so that a value of ``size`` bytes fits under ``key``.

    Args:
        entries: All that there are.
        total: Bytes of all their values.
        key: The entry that is set; it does not go for its own sake.
        size: Bytes of its new value.
        limit: The most that all values may have together.

    Raises:
        TooLargeError: The value alone is larger than the limit, or pinned entries leave no
            room for it; nothing goes then.

    """
    if size > limit:
        message = (
            f"the value for memory key {key!r} has {size} bytes, all values together may have "
            f"{limit}: keep it elsewhere and a reference here, or raise Limits(memory_bytes=…)"
        )
        raise TooLargeError(message, memory_key=key, size=size, limit=limit)
    others = [entry for entry in entries if entry.key != key]
    used = sum(entry.size_bytes for entry in others) if total + size > limit else 0
    removed: list[MemoryEntry] = []
    for entry in sorted((other for other in others if not other.pinned), key=_order):
        if used + size <= limit:
            break
        removed.append(entry)
        used -= entry.size_bytes
    if used + size > limit:
        message = (
            f"the value for memory key {key!r} has {size} bytes, and pinned entries have {used} "
            f"of the {limit} there are: unpin or drop some, or raise Limits(memory_bytes=…)"
        )
        raise TooLargeError(message, memory_key=key, size=size, limit=limit, pinned=used)
    return removed


def _order(entry: MemoryEntry) -> tuple[int, int]:
    return weight_of(entry.base_priority), entry.last_accessed_at
