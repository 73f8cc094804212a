"""History in a session's own keeping: runs of records as blobs, and what a blob names.

The same history always makes the same pieces, so that forks of one parent share theirs.
Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

import msgspec

from perdure.codec.json import decode, encode
from perdure.model.records import Record

__all__ = ["PIECE_BYTES", "Cutter", "name_of", "named_in", "records_of"]

PIECE_BYTES = 1024 * 1024
"""A piece ends with the record that takes it over this."""

_NAME = re.compile(rb'"([0-9a-f]{64})"')


class _Line(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    epoch: int
    kind: str
    end: bool
    payload: msgspec.Raw


class Cutter:
    """Cut a history, fed oldest record first, into pieces."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._first = self._last = 0

    def feed(self, record: Record) -> tuple[int, int, bytes] | None:
        """Take in a record; return the piece that it fills: its first and last seq, its bytes."""
        payload = msgspec.Raw(record.payload)
        line = _Line(record.seq, record.epoch, record.kind, record.end, payload)
        self._first = self._first or record.seq
        self._last = record.seq
        self._lines.append(encode(line))
        self._size += len(self._lines[-1])
        return self.rest() if self._size >= PIECE_BYTES else None

    def rest(self) -> tuple[int, int, bytes] | None:
        """Return what is left as a piece, if anything is."""
        if not self._lines:
            return None
        piece = (self._first, self._last, b"\n".join(self._lines))
        self._lines, self._size, self._first = [], 0, 0
        return piece


def records_of(data: bytes) -> Iterator[Record]:
    """Give the records of a piece."""
    for text in data.split(b"\n"):
        line = decode(text, _Line)
        yield Record(line.seq, line.epoch, line.kind, bytes(line.payload), line.end)


def name_of(data: bytes) -> str:
    """Return the name under which bytes are kept as a blob."""
    return hashlib.sha256(data).hexdigest()


def named_in(values: Iterable[bytes]) -> set[str]:
    """Return every string in JSON values that may name a blob; it may name none.

    >>> sorted(named_in([b'{"blob":"' + b"a" * 64 + b'","text":"b"}'])) == ["a" * 64]
    True
    """
    return {found.decode() for value in values for found in _NAME.findall(value)}
