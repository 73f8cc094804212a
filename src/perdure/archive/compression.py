"""Compression of tar files: zstandard, gzip or none, by the file's suffix or its first bytes.

What is unpacked comes piece by piece, and is given up where it grows out of proportion. Blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, final

from perdure.archive.limits import ArchiveLimits, too_large
from perdure.errors import CorruptRecordError, InvalidArgumentError, MissingExtraError

PIECE: Final = 256 * 1024
LOOKED_AT: Final = 256 * 1024 * 1024
"""Unpacked bytes above which the ratio is checked."""
WINDOW: Final = 32 * 1024 * 1024
_LEVEL: Final = 3
_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_SUFFIXES: Final = {".tar.zst": "zstd", ".tar.gz": "gzip", ".tgz": "gzip", ".tar": "none"}


class Compressor(Protocol):
    """Port of a streaming compressor."""

    def compress(self, data: bytes, /) -> bytes:
        """Compress data, and return the output that is ready."""
        ...

    def flush(self) -> bytes:
        """Return the rest."""
        ...


class _Plain:
    def compress(self, data: bytes) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def packer_for(path: Path) -> Compressor:
    """Return the compression that a file's suffix names.

    Raises:
        InvalidArgumentError: The suffix is unknown.
        MissingExtraError: zstandard is not installed.

    """
    kind = next((kind for end, kind in _SUFFIXES.items() if path.name.endswith(end)), None)
    if kind is None:
        message = f"{path} has none of the names that archives have: {', '.join(_SUFFIXES)}"
        raise InvalidArgumentError(message, path=str(path))
    if kind == "zstd":
        packer: Compressor = (
            _zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        )
        return packer
    if kind == "gzip":
        return zlib.compressobj(6, wbits=31)
    return _Plain()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        message = (
            ".tar.zst needs zstandard: pip install 'perdure[compression]', or use a name that "
            "ends in .tar.gz"
        )
        raise MissingExtraError(message, extra="compression") from error
    return zstandard


@final
class DecompressedFile:
    """Reader of a compressed file, decompressing as it reads.

    Args:
        file: The file, at its begin.
        where: Its name, for errors.
        limits: How far it may grow.

    """

    def __init__(self, file: BinaryIO, description: str, limits: ArchiveLimits) -> None:
        self._description = description
        self._limits = limits
        self._packed = self._unpacked = 0
        self._buffer = b""
        self._pieces = self._unpack(file)

    def read(self, size: int) -> bytes:
        """Return *size* bytes, fewer only at the end.

        Raises:
            CorruptRecordError: They are damaged.
            TooLargeError: They grow beyond the ratio.

        """
        parts: list[bytes] = []
        while size:
            if not self._buffer:
                self._buffer = next(self._pieces, b"")
                if not self._buffer:
                    break
            parts.append(self._buffer[:size])
            size -= len(parts[-1])
            self._buffer = self._buffer[len(parts[-1]) :]
        return b"".join(parts)

    def _unpack(self, file: BinaryIO) -> Iterator[bytes]:
        begin = file.read(4)
        file.seek(0)
        unpack = self._plain
        if begin == _ZSTD:
            unpack = self._zstd
        elif begin.startswith(_GZIP):
            unpack = self._gzip
        for piece in filter(None, unpack(file)):
            self._unpacked += len(piece)
            self._check_ratio()
            yield piece

    def _check_ratio(self) -> None:
        ratio = self._limits.ratio
        if self._unpacked > max(LOOKED_AT, self._packed * ratio):
            what = f"{self._packed} bytes become more than"
            raise too_large(self._description, what, self._unpacked, "ratio", ratio)

    def _packed_pieces(self, file: BinaryIO) -> Iterator[bytes]:
        while data := file.read(PIECE):
            self._packed += len(data)
            yield data

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        yield from self._packed_pieces(file)

    def _gzip(self, file: BinaryIO) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            for data in self._packed_pieces(file):
                piece, waiting = bytes(PIECE), data
                while len(piece) == PIECE or (waiting and not unpacker.eof):
                    piece = unpacker.decompress(waiting, PIECE)
                    waiting = unpacker.unconsumed_tail
                    yield piece
                if unpacker.eof and (unpacker.unused_data or waiting):
                    raise self._damaged("there is data after its end")
        except zlib.error as error:
            raise self._damaged(str(error)) from None
        if not unpacker.eof:
            raise self._damaged("it ends too early")

    def _zstd(self, file: BinaryIO) -> Iterator[bytes]:
        module = _zstandard()
        source = _Source(self._packed_pieces(file))
        unpacker = module.ZstdDecompressor(max_window_size=WINDOW)
        try:
            with unpacker.stream_reader(source, read_across_frames=False) as reader:
                while piece := reader.read(PIECE):
                    yield piece
        except module.ZstdError as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, reason: str) -> CorruptRecordError:
        message = (
            f"{self._description} is damaged: {reason}; take it from a copy; nothing was changed"
        )
        return CorruptRecordError(message, where=self._description)


class _Source:
    """Binary source for the zstandard decompressor."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, size: int) -> bytes:
        """Return the next piece, of any size."""
        return next(self._pieces, b"")
