"""A session's logical clock, as its records tell it. Pure.

It is one number, and goes up by one with each kernel event, each checkpoint and each pruning of
checkpoints. The records hold its times, so it goes on where it was after any restore.
"""

from __future__ import annotations

from perdure.codec.json import decode
from perdure.errors import FormatError
from perdure.model.events import Stamp
from perdure.model.records import CHECKPOINT, CHECKPOINTS_PRUNED, EVENT

__all__ = ["TIMED_KINDS", "stamp_of"]

TIMED_KINDS = frozenset({EVENT, CHECKPOINT, CHECKPOINTS_PRUNED})
"""Kinds whose records have a time on the clock."""


def stamp_of(payload: bytes) -> int:
    """Return a record's time; 0 for one that has none, since somebody else wrote it.

    >>> stamp_of(b'{"timestamp":7,"kind":"custom"}')
    7
    """
    try:
        return decode(payload, Stamp).timestamp
    except FormatError:
        return 0
