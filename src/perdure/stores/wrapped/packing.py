"""Bytes made smaller where that pays, and back with a limit on how large they become.

Packed bytes begin with a mark: plain, or zstandard. What is unpacked grows piece by piece
and is given up at the limit, whatever its header promises. The same bytes are always
packed the same, by one release of zstandard: sending a batch again stays the same batch.
"""

from __future__ import annotations

from typing import final

from perdure.errors import ConfigError, CorruptRecordError, MissingExtraError

__all__ = ["Packing", "packing_of"]

_PLAIN = b"\x00"
_ZSTD = b"\x01"
_LEVEL = 3
_WORTH = 200
"""Bytes from which on packing is tried."""
_PIECE = 64 * 1024
_WINDOW = 8 * 1024 * 1024
LIMIT = 256 * 1024 * 1024
"""The most bytes that are packed, and that come out again."""


@final
class Packing:
    """Pack bytes with zstandard.

    Raises:
        MissingExtraError: zstandard is not installed.

    """

    def __init__(self, limit: int = LIMIT) -> None:
        try:
            import zstandard
        except ImportError as error:
            message = "compression needs zstandard: pip install 'perdure[compression]'"
            raise MissingExtraError(message, extra="compression") from error
        self._module = zstandard
        self._limit = limit

    def pack(self, data: bytes) -> bytes:
        """Return the bytes packed, or plain where that is no shorter."""
        if _WORTH <= len(data) <= self._limit:
            # One for each call: a compressor is for one thread at a time.
            packed = self._module.ZstdCompressor(level=_LEVEL).compress(data)
            if len(packed) < len(data):
                return _ZSTD + packed
        return _PLAIN + data

    def unpack(self, data: bytes, what: str) -> bytes:
        """Return the bytes again.

        Raises:
            CorruptRecordError: They are damaged, or grow beyond the limit.

        """
        mark, body = data[:1], data[1:]
        if mark == _PLAIN:
            return body
        if mark != _ZSTD:
            raise CorruptRecordError(f"{what} is damaged: it is not packed: restore it from a copy")
        pieces: list[bytes] = []
        size = 0
        try:
            decompressor = self._module.ZstdDecompressor(max_window_size=_WINDOW)
            with decompressor.stream_reader(body) as reader:
                while piece := reader.read(_PIECE):
                    size += len(piece)
                    if size > self._limit:
                        break
                    pieces.append(piece)
            whole = b"".join(pieces)
            stated = self._module.frame_content_size(body)
        except self._module.ZstdError as error:
            message = f"{what} is damaged: it cannot be unpacked: restore it from a copy"
            raise CorruptRecordError(message, size=len(data)) from error
        if size > self._limit or stated != len(whole):
            message = (
                f"{what} of {len(data)} bytes unpacks to more than the limit of {self._limit} "
                "bytes, or ends too early: perdure did not write it so; restore it from a copy"
            )
            raise CorruptRecordError(message, size=len(data), limit=self._limit)
        return whole


def packing_of(name: str | None) -> Packing | None:
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
    return Packing()
