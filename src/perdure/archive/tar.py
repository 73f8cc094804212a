"""Tar format of archives and its compression: written by the standard, read with distrust.

Regular files and folders only. A reader gets the header of one member at a time, and refuses
all else: links, devices, sparse files, global headers, attributes, names that a long header hides.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import NewFile
from perdure.archive.atomic_swap import StagingTree
from perdure.archive.blobs import fetched, hop
from perdure.archive.limits import (
    CHUNK_BYTES,
    CONTROL,
    ArchiveLimits,
    Checker,
    Selection,
    line_of,
    selection_of,
    too_large,
)
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    InvalidArgumentError,
    MissingExtraError,
    UnsupportedVersionError,
)
from perdure.records.archives import Archive, Entry, FileEntry, FolderEntry, blobs_of, entry_of
from perdure.records.json import decoder_of, encode
from perdure.records.keys import SessionKey
from perdure.store import Store

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
"""End of an archive."""
LONGEST: Final = 64 * 1024
"""Bytes of an extended header."""

Read = Callable[[int], bytes]

_FOLDER, _EXTENDED, _LONG_NAME = b"5", b"x", b"L"
_KINDS: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"K": "a link",
    b"g": "a header for all that follows",
    b"V": "a volume's label",
    b"M": "a part of another archive",
    b"D": "a dump's folder",
}
_KEYS: Final = frozenset({"atime", "comment", "ctime", "gid", "gname", "mtime", "uid", "uname"})
"""Keys of an extended header, besides path and size, that are allowed and have no effect."""


class Member(msgspec.Struct, frozen=True):
    """A member's header."""

    path: str
    is_folder: bool
    size: int


def header_of(entry: Entry) -> bytes:
    """Return an entry's header; its bytes follow, and `padding_of` them."""
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    if isinstance(entry, FileEntry):
        info.size = entry.size
        info.mtime = max(entry.mtime // 10**9, 0)
    else:
        info.type = _FOLDER
    return info.tobuf(format=tarfile.PAX_FORMAT)


def padding_of(size: int) -> bytes:
    """Return what fills a member up to whole blocks.

    >>> len(padding_of(1)), len(padding_of(512))
    (511, 0)
    """
    return bytes(-size % BLOCK)


class TarReader:
    """Read members, one after the other.

    Args:
        read: Returns exactly so many bytes, or fewer at the end.
        where: What they come from, for errors.

    """

    def __init__(self, read: Read, description: str) -> None:
        self._read = read
        self._description = description
        self._number = 0

    def next(self) -> Member | None:
        """Return the next member, whose bytes are to be read next; None at the end.

        Raises:
            CorruptRecordError: It is none that an archive of perdure's has.

        """
        self._number += 1
        extended: dict[str, str] = {}
        while True:
            block = self.exactly(BLOCK)
            if block == bytes(BLOCK):
                self._require_end(extended)
                return None
            kind = block[156:157]
            info = self._header(block)
            if kind not in {_EXTENDED, _LONG_NAME}:
                return self._member(kind, info, extended)
            if extended:
                raise self.refused("it has several headers")
            extended = self._extended(kind, info.size)

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self.refused(f"it is no tar header ({error})") from None

    def _extended(self, kind: bytes, size: int) -> dict[str, str]:
        if not 0 < size <= LONGEST:
            raise self.refused(f"its extended header has {size} bytes, the limit is {LONGEST}")
        data = self.exactly(size)
        self.exactly(-size % BLOCK)
        try:
            if kind == _LONG_NAME:
                return {"path": data.rstrip(b"\0").decode()}
            return dict(_pairs(data))
        except ValueError:
            raise self.refused("its extended header is damaged") from None

    def _member(self, kind: bytes, info: tarfile.TarInfo, extended: dict[str, str]) -> Member:
        if kind not in {b"0", b"\0", _FOLDER}:
            what = _KINDS.get(kind, f"of the unknown kind {kind!r}")
            raise self.refused(
                f"{info.name[:200]!r} is {what}; only files and folders are restored"
            )
        unknown = sorted(extended.keys() - _KEYS - {"path", "size"})
        if unknown:
            raise self.refused(f"its extended header says {unknown[0][:60]!r}")
        size = extended.get("size", str(info.size))
        if not size.isascii() or not size.isdecimal() or len(size) > 18:
            raise self.refused("its size is no number")
        path = extended.get("path", info.name)
        is_folder = kind == _FOLDER
        if is_folder:
            path = path.removesuffix("/")
        elif path.endswith("/"):
            raise self.refused("a file's name ends like a folder's")
        return Member(path, is_folder, int(size))

    def exactly(self, size: int) -> bytes:
        """Read so many bytes.

        Raises:
            CorruptRecordError: There are fewer.

        """
        data = self._read(size)
        if len(data) != size:
            raise self.refused("the file ends within it")
        return data

    def _require_end(self, extended: dict[str, str]) -> None:
        if extended or self._read(BLOCK) != bytes(BLOCK):
            raise self.refused("the archive ends within it")
        for _ in range(1024):  # tar fills up to whole records
            block = self._read(BLOCK)
            if not block:
                return
            if block.strip(b"\0"):
                break
        raise self.refused("there is more behind the archive's end")

    def refused(self, reason: str) -> CorruptRecordError:
        """Return the error for the member at hand."""
        return CorruptRecordError(
            f"{self._description}, member {self._number}: {reason}; nothing was changed",
            where=self._description,
            member=self._number,
        )


def _pairs(data: bytes) -> list[tuple[str, str]]:
    """Return what an extended header says; raise ValueError where it is damaged."""
    pairs: list[tuple[str, str]] = []
    while data:
        length, _, _ = data.partition(b" ")
        size = int(length[:6])
        line, data = data[len(length) + 1 : size], data[size:]
        if size <= len(length) + 1 or not line.endswith(b"\n"):
            raise ValueError("no record")
        key, equals, value = line[:-1].partition(b"=")
        if not equals or key.decode() in dict(pairs):
            raise ValueError("no pair, or one that is there twice")
        pairs.append((key.decode(), value.decode()))
    return pairs


# Compression of tar files: zstandard, gzip or none, by suffix or by the first bytes


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
        raise InvalidArgumentError(
            f"{path} has none of the names that archives have: {', '.join(_SUFFIXES)}",
            path=str(path),
        )
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
        raise MissingExtraError(
            ".tar.zst needs zstandard: pip install 'perdure[compression]', or use a name that "
            "ends in .tar.gz",
            extra="compression",
        ) from error
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
            raise too_large(
                self._description,
                f"{self._packed} bytes become more than",
                self._unpacked,
                "ratio",
                ratio,
            )

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
        return CorruptRecordError(
            f"{self._description} is damaged: {reason}; take it from a copy; nothing was changed",
            where=self._description,
        )


class _Source:
    """Binary source for the zstandard decompressor."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, size: int) -> bytes:
        """Return the next piece, of any size."""
        return next(self._pieces, b"")


# Exported archives: the manifest comes first, and only what it lists is extracted


FORMAT: Final = 1
MANIFEST: Final = f"{CONTROL}/archive.jsonl"
LINE_BYTES: Final = 8192
"""The longest line, on average, of a manifest."""


class ExportHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an exported archive's manifest."""

    perdure_archive: int
    """Of its format."""
    id: str = ""
    at: float = 0.0
    paths: tuple[str, ...] = ()
    whole: bool = True
    entries: int
    """Lines that follow."""


@final
class Content:
    """An exported file, open."""

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._description = str(path)
        self._limits = limits
        self._file = path.open("rb")
        self._tar = TarReader(
            DecompressedFile(self._file, self._description, limits).read, self._description
        )

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def manifest(self) -> tuple[tuple[Entry, ...], Selection]:
        """Read what it holds, and judge it.

        Raises:
            CorruptRecordError: It is no such file, it is damaged, or has what no archive has.
            TooLargeError: It is over a limit.
            UnsupportedVersionError: A newer release wrote it.

        """
        member = self._tar.next()
        if member is None or member.path != MANIFEST or member.is_folder:
            raise self._tar.refused(f"an archive of perdure's begins with {MANIFEST}")
        most = self._limits.entries * LINE_BYTES
        if member.size > most:
            raise too_large(
                self._description, "its manifest's bytes:", member.size, "entries", most
            )
        lines = self._lines(member.size)
        head = self._head(next(lines, b""))
        checker = Checker(self._description, self._limits, chunked=False)
        entries: list[Entry] = []
        for line in lines:
            entry = entry_of(line, self._description)
            checker.add(entry)
            entries.append(entry)
        if len(entries) != head.entries:
            raise self._tar.refused(f"it lists {len(entries)} entries, and says {head.entries}")
        return tuple(entries), self._selection(head, entries)

    def _lines(self, size: int) -> Iterator[bytes]:
        partial, remaining = b"", size
        while remaining:
            data = self._tar.exactly(min(remaining, CHUNK_BYTES))
            remaining -= len(data)
            *lines, partial = (partial + data).split(b"\n")
            yield from lines
            if len(partial) > CHUNK_BYTES:
                raise self._tar.refused("its manifest has a line without an end")
        if partial:
            raise self._tar.refused("its manifest ends within a line")
        self._tar.exactly(-size % BLOCK)

    def _head(self, line: bytes) -> ExportHeader:
        try:
            head = decoder_of(ExportHeader).decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._tar.refused(f"its manifest is damaged: {error}") from None
        if head.perdure_archive > FORMAT:
            raise UnsupportedVersionError(
                f"{self._description} is an archive of format {head.perdure_archive}, this release "
                f"reads up to {FORMAT}: use a newer release",
                path=self._description,
            )
        return head

    def _selection(self, head: ExportHeader, entries: list[Entry]) -> Selection:
        try:
            selection = selection_of(head.paths, whole=head.whole)
        except ConfigError as error:
            raise CorruptRecordError(
                f"{self._description}: {error}; nothing was changed", where=self._description
            ) from None
        for entry in entries:
            fate = selection.fate(entry.path)
            if fate != "taken" and not (fate == "entered" and isinstance(entry, FolderEntry)):
                raise CorruptRecordError(
                    f"{self._description}: {entry.path[:200]!a} is refused: the archive's own "
                    "paths leave it out; nothing was changed",
                    where=self._description,
                    path=entry.path[:200],
                )
        return selection

    def into(self, stage: StagingTree, entries: tuple[Entry, ...]) -> Iterator[tuple[int, int]]:
        """Write the members, which have to be the entries; give how many files and bytes, by steps.

        Raises:
            CorruptRecordError: They are others, or damaged.

        """
        for entry in entries:
            member = self._tar.next()
            size = entry.size if isinstance(entry, FileEntry) else 0
            wanted = (entry.path, isinstance(entry, FolderEntry), size)
            if member is None or (member.path, member.is_folder, member.size) != wanted:
                raise self._tar.refused(f"its manifest has {entry.path[:200]!r} here, as {wanted}")
            yield from self._one(stage, entry)
        if self._tar.next() is not None:
            raise self._tar.refused("its manifest does not list it")

    def _one(self, stage: StagingTree, entry: Entry) -> Iterator[tuple[int, int]]:
        if isinstance(entry, FolderEntry):
            stage.folder(entry)
            yield 0, 0
            return
        stage.begin(entry)
        remaining = entry.size
        while remaining:
            data = self._tar.exactly(min(remaining, CHUNK_BYTES))
            stage.write(data)
            remaining -= len(data)
            yield 0, len(data)
        self._tar.exactly(-entry.size % BLOCK)
        stage.end()
        yield 1, 0


# An archive as a file of its own: a tar that other tools read, with its manifest first


PART: Final = 1024 * 1024
"""Bytes that are packed and written at a time."""


async def export(
    store: Store, key: SessionKey, archive: Archive, entries: Sequence[Entry], path: Path
) -> int:
    """Write an archive into a new file, and return the file's size in bytes.

    Raises:
        ConfigError: The file is there, or its name says nothing of its compression.
        MissingExtraError: zstandard is not installed.
        CorruptRecordError: A blob is lost or damaged.

    """
    packer = packer_for(path)
    new = await hop(str(path), NewFile, path)
    waiting: list[bytes] = []
    size = 0

    def write(blocks: list[bytes], *, last: bool = False) -> None:
        new.add(packer.compress(b"".join(blocks)))
        if last:
            new.add(packer.flush())
        new.write()

    try:
        async with aclosing(_parts(store, key, archive, entries)) as parts:
            async for data in parts:
                waiting.append(data)
                size += len(data)
                if size >= PART:
                    await hop(str(path), write, waiting)
                    waiting, size = [], 0
        await hop(str(path), lambda: write(waiting, last=True))
        return await hop(str(path), new.publish)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(new.close)


async def _parts(
    store: Store, key: SessionKey, archive: Archive, entries: Sequence[Entry]
) -> AsyncGenerator[bytes, None]:
    for data in _manifest(archive, entries):
        yield data
    description = f"archive {archive.id} of {key}"
    for entry in entries:
        yield header_of(entry)
        for name in blobs_of(entry):
            yield (await fetched(store, key.blobs, [name], description))[name]
        if isinstance(entry, FileEntry):
            yield padding_of(entry.size)
    yield END


def _manifest(archive: Archive, entries: Sequence[Entry]) -> list[bytes]:
    head = ExportHeader(
        perdure_archive=FORMAT,
        id=archive.id,
        at=archive.at,
        paths=archive.paths,
        whole=archive.whole,
        entries=len(entries),
    )
    lines = [encode(head) + b"\n", *(line_of(_alone(entry)) for entry in entries)]
    text = b"".join(lines)
    mtime = int(archive.at) * 10**9
    about = FileEntry(MANIFEST, len(text), "", mtime=mtime)
    return [header_of(about), text, padding_of(len(text))]


def _alone(entry: Entry) -> Entry:
    """Return an entry without the names of blobs, which mean nothing elsewhere."""
    if isinstance(entry, FolderEntry):
        return entry
    return msgspec.structs.replace(entry, chunks=())
