"""Bytes made smaller where that pays, and back with a limit on how large they become.

Packed bytes begin with a mark: plain, or zstandard. What promises to be larger than anything
that perdure packs is not unpacked at all; the rest grows piece by piece and is given up at
the limit, whatever its header promises. A record has a limit of its own, the largest that a
store takes: few bytes that somebody put into a log cannot fill the memory of who reads it.
The same bytes are always packed the same, by one release of zstandard: sending a batch again
stays the same batch.
"""

from __future__ import annotations

from typing import final

from perdure.codec.limits import MAX_RECORD_BYTES
from perdure.errors import ConfigError, CorruptRecordError, MissingExtraError

__all__ = ["Packing", "packing_of"]

_PLAIN = b"\x00"
_ZSTD = b"\x01"
_LEVEL = 3
_WORTH = 200
"""Bytes from which on packing is tried."""
_PIECE = 64 * 1024
_WINDOW = 8 * 1024 * 1024
_LINK = 1024
"""Bytes that a link to the records before may add to a payload."""
_PAYLOADS = frozenset({"record", "linked", "inbox"})
"""Places of what is appended to a log, or will be."""
LIMIT = 256 * 1024 * 1024
"""The most bytes that are packed, and that come out again."""


@final
class Packing:
    """Pack bytes with zstandard.

    Args:
        limit: The most bytes that come out of a document, a blob or a dead letter.
        record_limit: The most that come out of a record or a post.

    Raises:
        MissingExtraError: zstandard is not installed.

    """

    def __init__(self, limit: int = LIMIT, *, record_limit: int = MAX_RECORD_BYTES) -> None:
        try:
            import zstandard
        except ImportError as error:
            message = "compression needs zstandard: pip install 'perdure[compression]'"
            raise MissingExtraError(message, extra="compression") from error
        self._module = zstandard
        self._limit = limit
        self._record_limit = record_limit + _LINK

    def pack(self, data: bytes) -> bytes:
        """Return the bytes packed, or plain where that is no shorter."""
        if _WORTH <= len(data) <= self._limit:
            # One for each call: a compressor is for one thread at a time.
            packed = self._module.ZstdCompressor(level=_LEVEL).compress(data)
            if len(packed) < len(data):
                return _ZSTD + packed
        return _PLAIN + data

    def unpack(self, data: bytes, what: str, kind: object = None) -> bytes:
        """Return the bytes again.

        Args:
            data: As they were packed.
            what: What they are, for people.
            kind: What the name of their place begins with.

        Raises:
            CorruptRecordError: They are damaged, or grow beyond the limit.

        """
        limit = self._record_limit if kind in _PAYLOADS else self._limit
        mark, body = data[:1], data[1:]
        if mark == _PLAIN:
            return body
        if mark != _ZSTD:
            raise CorruptRecordError(f"{what} is damaged: it is not packed: restore it from a copy")
        pieces: list[bytes] = []
        size = 0
        try:
            stated = self._module.frame_content_size(body)
            if stated > limit:
                raise _too_large(what, len(data), limit)
            decompressor = self._module.ZstdDecompressor(max_window_size=_WINDOW)
            with decompressor.stream_reader(body) as reader:
                while piece := reader.read(_PIECE):
                    size += len(piece)
                    if size > limit:
                        raise _too_large(what, len(data), limit)
                    pieces.append(piece)
            whole = b"".join(pieces)
        except self._module.ZstdError as error:
            message = f"{what} is damaged: it cannot be unpacked: restore it from a copy"
            raise CorruptRecordError(message, size=len(data)) from error
        if stated != len(whole):
            message = (
                f"{what} of {len(data)} bytes unpacks to {len(whole)} bytes, and not to what it "
                "says: perdure did not write it so; restore it from a copy"
            )
            raise CorruptRecordError(message, size=len(data))
        return whole


def _too_large(what: str, size: int, limit: int) -> CorruptRecordError:
    message = (
        f"{what} of {size} bytes unpacks to more than the limit of {limit} bytes: perdure did not "
        "write it so, and somebody else did; restore the session from a copy, or get at the rest "
        "with `perdure export ID --salvage`"
    )
    return CorruptRecordError(message, size=size, limit=limit)


def packing_of(name: str | None, *, record_limit: int = MAX_RECORD_BYTES) -> Packing | None:
    """Return what an option ``compression`` names.

    Raises:
        ConfigError: Nothing has this name.
        MissingExtraError: It is not installed.

    """
    if name is None:
        return None
    if name != "zstd":
        message = f"compression={name!r} is not known: use zstd, or leave it out"
        raise ConfigError(message, option="compression", value=name)
    return Packing(record_limit=record_limit)
