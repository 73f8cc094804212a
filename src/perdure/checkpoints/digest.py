"""The digest of a run of the log's records: what a checkpoint of a session is sealed with.

What the store and its housekeeping write on their own account (epochs, bases, notes of forks)
does not count, since a copy of a session that has moved has others. Pure.
"""

from __future__ import annotations

import hashlib
from typing import final

from perdure.model.records import BASE, ENDING, EPOCH, FORK

__all__ = ["LogDigest"]

_UNCOUNTED = frozenset({EPOCH, BASE, FORK, ENDING, "gap"})


@final
class LogDigest:
    """A digest that grows with the log; records may come twice, and count once."""

    __slots__ = ("_hash", "seq", "since")

    def __init__(self, since: int) -> None:
        self.since: int = since
        """The record behind which it begins."""
        self.seq: int = since
        """The last record that is in it."""
        self._hash = hashlib.sha256()

    def feed(self, seq: int, kind: str, payload: bytes) -> None:
        """Take in a record, if it is the next one."""
        if seq != self.seq + 1:
            return
        self.seq = seq
        if kind not in _UNCOUNTED:
            self._hash.update(b"%d %b %d\n" % (seq, kind.encode(), len(payload)))
            self._hash.update(payload)

    def copy(self) -> LogDigest:
        """Return one that goes on by itself."""
        other = LogDigest(self.since)
        other.seq, other._hash = self.seq, self._hash.copy()
        return other

    @property
    def value(self) -> str:
        """The digest as of now."""
        return f"sha256:{self._hash.hexdigest()}"
