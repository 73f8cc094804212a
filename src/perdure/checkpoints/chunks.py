"""Where to cut bytes into chunks: at places that their content decides.

A rolling hash of the last bytes decides (Gear, as in FastCDC, with cut-point skipping), so bytes
that were inserted change the chunks around them, and all others stay as they were. The same bytes
are always cut the same way.

A cut depends on the chunk's own bytes and on nothing else. So whoever knows an earlier version's
chunks finds those that are still there by their hashes, at the speed of SHA-256, and the
rolling hash has only what has changed to look at. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

__all__ = ["LARGEST", "SMALLEST", "Chunk", "chunks_of"]

SMALLEST: Final = 2048
LARGEST: Final = 16 * 1024
"""Bytes of a chunk; the last one may be smaller. On average they have about 4 KiB."""

_ROOM = 0xFFFF_FFFF
_CUT = 0xFFE0_0000
"""The high bits depend on the last 32 bytes; eleven of them: one place in 2,048 fits."""
_GEAR = tuple(
    int.from_bytes(hashlib.sha256(bytes([byte])).digest()[:4], "big") for byte in range(256)
)


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes, by the SHA-256 of them in hex."""

    name: str
    size: int


def chunks_of(data: bytes, before: Sequence[Chunk] = ()) -> Iterator[Chunk]:
    """Cut bytes; the chunks of an earlier version only make it faster."""
    place = {chunk.name: at for at, chunk in enumerate(before)}
    start, at = 0, 0
    while start < len(data):
        chunk = _again(data, start, before, at) or _next(data, start)
        yield chunk
        start += chunk.size
        at = place.get(chunk.name, at) + 1


def _again(data: bytes, start: int, before: Sequence[Chunk], at: int) -> Chunk | None:
    """Return a known chunk, if it is here again; the last one has ended where its bytes did."""
    if at >= len(before) - 1:
        return None
    chunk = before[at]
    end = start + chunk.size
    return chunk if end <= len(data) and _name(data[start:end]) == chunk.name else None


def _next(data: bytes, start: int) -> Chunk:
    end = _end(data, start)
    return Chunk(_name(data[start:end]), end - start)


def _end(data: bytes, start: int) -> int:
    rolling = 0
    first, stop = start + SMALLEST, min(start + LARGEST, len(data))
    for at, byte in enumerate(data[first:stop], first + 1):
        rolling = (rolling << 1) + _GEAR[byte] & _ROOM
        if not rolling & _CUT:
            return at
    return stop


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
