"""How much of a session one save takes: whole groups, up to a limit.

Decisions only, over values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from perdure.autosave.tracked import OVERHEAD, Tracked
from perdure.model.records import Entry

__all__ = ["as_group", "drop_first", "size_of", "whole_groups"]


def size_of(entries: Sequence[Entry]) -> int:
    """Return what entries count as unsaved bytes."""
    return sum([len(entry.payload) for entry in entries]) + OVERHEAD * len(entries)


def as_group(entries: Sequence[Entry], *, closed: bool) -> tuple[Entry, ...]:
    """Return entries as one group: none but the last has ``end``, and that if ``closed``."""
    last = len(entries) - 1
    return tuple(
        [
            entry if entry.end is ends else entry._replace(end=ends)
            for entry, ends in [(entry, closed and n == last) for n, entry in enumerate(entries)]
        ]
    )


def drop_first(t: Tracked, count: int) -> None:
    """Forget the first records of a session, which are durable."""
    records = t.records
    if records is not None:
        del records[:count]
        if not records:
            t.records = None


def whole_groups(
    pending: Sequence[Entry], *, limit: int, most_records: int, most_bytes: int
) -> tuple[int, int]:
    """Return how many records of ``pending[:limit]`` to take, and their bytes.

    As many whole groups as ``most_records`` and ``most_bytes`` allow, but at least one.
    """
    size = taken = taken_bytes = 0
    for count, entry in enumerate(islice(pending, limit), 1):
        size += len(entry.payload) + OVERHEAD
        if taken and (count > most_records or size > most_bytes):
            break
        if entry.end:
            taken, taken_bytes = count, size
    return taken, taken_bytes
