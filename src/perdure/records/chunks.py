"""Content addressing: chunks of bytes, runs of records, and the names of blobs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from perdure.errors import CorruptRecordError, NotStorableError
from perdure.records.json import decode
from perdure.records.records import Record

SMALLEST: Final = 2048
LARGEST: Final = 16 * 1024
"""Bytes of a chunk; the last one may be smaller. The average is about 4 KiB."""

_ROOM = 0xFFFF_FFFF
# The high bits depend on the last 32 bytes; eleven bits: a cut at one place in 2,048.
_CUT = 0xFFE0_0000
_GEAR = tuple(
    int.from_bytes(hashlib.sha256(bytes([byte])).digest()[:4], "big") for byte in range(256)
)


class ContentChunk(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes, named by its SHA-256 in hex."""

    name: str
    size: int


def chunks_of(data: bytes, before: Sequence[ContentChunk] = ()) -> Iterator[ContentChunk]:
    """Cut bytes into chunks by content; the chunks of an earlier version only make it faster."""
    place = {chunk.name: at for at, chunk in enumerate(before)}
    start, at = 0, 0
    while start < len(data):
        chunk = _again(data, start, before, at) or _next(data, start)
        yield chunk
        start += chunk.size
        at = place.get(chunk.name, at) + 1


def _again(data: bytes, start: int, before: Sequence[ContentChunk], at: int) -> ContentChunk | None:
    """Return a known chunk, if it repeats; never the last one, which ended with its data."""
    if at >= len(before) - 1:
        return None
    chunk = before[at]
    end = start + chunk.size
    return chunk if end <= len(data) and name_of(data[start:end]) == chunk.name else None


def _next(data: bytes, start: int) -> ContentChunk:
    end = _end(data, start)
    return ContentChunk(name_of(data[start:end]), end - start)


def _end(data: bytes, start: int) -> int:
    rolling = 0
    first, stop = start + SMALLEST, min(start + LARGEST, len(data))
    for at, byte in enumerate(data[first:stop], first + 1):
        rolling = (rolling << 1) + _GEAR[byte] & _ROOM
        if not rolling & _CUT:
            return at
    return stop


_NAME = re.compile(rb'"(?:\\u0070erdure:media:[^"\\]{1,200}:)?([0-9a-f]{64})"')


class _Line(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    epoch: int
    kind: str
    end: bool
    payload: msgspec.Raw


def records_of(data: bytes) -> Iterator[Record]:
    """Yield the records of a segment."""
    for text in data.split(b"\n"):
        line = decode(text, _Line)
        yield Record(line.seq, line.epoch, line.kind, bytes(line.payload), line.end)


def name_of(data: bytes) -> str:
    """Return the name of bytes as a blob: their SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def named_in(values: Iterable[bytes]) -> set[str]:
    """Return every string in JSON values that has the form of a blob's name, or refers to media.

    The one place that says to which blobs a record, a document or another blob refers.

    >>> sorted(named_in([b'{"blob":"' + b"a" * 64 + b'","text":"b"}'])) == ["a" * 64]
    True
    """
    return {names.decode() for value in values for names in _NAME.findall(value)}


_AT_A_TIME = 128 * 1024
_LONGEST_NAME = 300


def may_name(values: Sequence[bytes]) -> bool:
    """Return whether any of many values, at one look, has such a string.

    A search keeps other threads waiting, so a long value is searched part by part.
    """
    long = [value for value in values if len(value) > _AT_A_TIME]
    short = [value for value in values if len(value) <= _AT_A_TIME] if long else values
    return _NAME.search(b"\n".join(short)) is not None or any(
        _NAME.search(value, at, at + _AT_A_TIME + _LONGEST_NAME) is not None
        for value in long
        for at in range(0, len(value), _AT_A_TIME)
    )


_BLOB_NAME = re.compile(r"(?:[0-9a-f]{64}|x[0-9a-f]{64,128})\Z")


def is_name(name: str) -> bool:
    """Return whether a blob may have this name: a hash, or a wrapper's own name."""
    return _BLOB_NAME.match(name) is not None


def is_hash(name: str) -> bool:
    """Return whether a blob's name is the hash of its bytes, and no wrapper's own."""
    return not name.startswith("x")


def fits(name: str, data: bytes) -> bool:
    """Return whether bytes may be stored under a name.

    >>> fits("x" + "0" * 64, b"bytes of a wrapper")
    True
    >>> fits("0" * 64, b"other bytes")
    False
    """
    if not is_hash(name):
        return is_name(name)
    return name_of(data) == name


def require_named(blobs: Mapping[str, bytes]) -> None:
    """Raise for blobs whose name is not their hash.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    for name, data in blobs.items():
        if not fits(name, data):
            raise NotStorableError(
                f"blob {name!r} of {len(data)} bytes is not named by its SHA-256: name it by "
                "the hash of exactly these bytes",
                blob=name,
                size=len(data),
            )


def verified(name: str, data: bytes, *, at: str = "") -> bytes:
    """Return bytes that a store has under a name; *at* is their place, for the error.

    Raises:
        CorruptRecordError: They do not match the name.

    """
    if fits(name, data):
        return data
    raise CorruptRecordError(
        f"{at or f'blob {name}'} does not match its name: put the right bytes again, or restore "
        "it from a copy",
        blob=name,
        size=len(data),
    )
