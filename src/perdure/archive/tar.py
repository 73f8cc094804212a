"""Archives as files: a tar that other tools read, with its manifest first, compressed or not.

The manifest says which members follow. A reader takes each only under the header that `export`
writes for it, and refuses all else: links, devices, sparse files, attributes, names that a long
header hides. So nothing in a tar's headers is interpreted, apart from the size of the manifest.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, Final, final

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
from perdure.records.archives import Archive, Entry, FileEntry, FolderEntry, blobs_of
from perdure.records.json import decoder_of, encode
from perdure.records.keys import SessionKey
from perdure.store import Store

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
"""End of an archive."""
MOST_END: Final = 1024 * BLOCK
"""Zeros at the end that are accepted: tar fills up to whole records."""

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


def header_of(entry: Entry) -> bytes:
    """Return an entry's header; its bytes follow, and `padding_of` them."""
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    if isinstance(entry, FileEntry):
        info.size = entry.size
        info.mtime = max(entry.mtime // 10**9, 0)
    else:
        info.type = tarfile.DIRTYPE
    return info.tobuf(format=tarfile.PAX_FORMAT)


def padding_of(size: int) -> bytes:
    """Return what fills a member up to whole blocks.

    >>> len(padding_of(1)), len(padding_of(512))
    (511, 0)
    """
    return bytes(-size % BLOCK)


# Compression: zstandard, gzip or none, by suffix or by the first bytes


LOOKED_AT: Final = 256 * 1024 * 1024
"""Unpacked bytes above which the ratio is checked."""
WINDOW: Final = 32 * 1024 * 1024
_LEVEL: Final = 3
_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_SUFFIXES: Final = {".tar.zst": "zstd", ".tar.gz": "gzip", ".tgz": "gzip", ".tar": "none"}


def packer_for(path: Path) -> Any:
    """Return the compressor that a file's suffix names, None for a plain tar.

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
        return _zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
    return zlib.compressobj(6, wbits=31) if kind == "gzip" else None


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
    """Reader of a file that may be compressed, and may grow only so far.

    Args:
        file: The file, at its begin.
        description: Its name, for errors.
        limits: How far it may grow.

    """

    def __init__(self, file: BinaryIO, description: str, limits: ArchiveLimits) -> None:
        self._file = file
        self._description = description
        self._limits = limits
        self._unpacked = 0
        self._source: Any = file
        self._errors: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error, EOFError)
        begin = file.read(4)
        file.seek(0)
        if begin == _ZSTD:
            module = _zstandard()
            unpacker = module.ZstdDecompressor(max_window_size=WINDOW)
            self._source = unpacker.stream_reader(file, closefd=False)
            self._errors = (module.ZstdError,)
        elif begin.startswith(_GZIP):
            self._source = gzip.GzipFile(fileobj=file)

    def read(self, size: int) -> bytes:
        """Return *size* bytes, fewer only at the end.

        Raises:
            CorruptRecordError: They are damaged.
            TooLargeError: They grow beyond the ratio.

        """
        try:
            data: bytes = self._source.read(size)
        except self._errors as error:
            raise CorruptRecordError(
                f"{self._description} is damaged: {error}; take it from a copy; nothing was "
                "changed",
                where=self._description,
            ) from None
        self._unpacked += len(data)
        packed, ratio = self._file.tell(), self._limits.ratio
        if self._unpacked > max(LOOKED_AT, packed * ratio):
            what = f"{packed} bytes become more than"
            raise too_large(self._description, what, self._unpacked, "ratio", ratio)
        return data


# Reading: the manifest first, and then only what it lists


@final
class Content:
    """An exported file, open at its begin: read `manifest` first, then `into`."""

    def __init__(self, file: BinaryIO, description: str, limits: ArchiveLimits) -> None:
        self._data = DecompressedFile(file, description, limits)
        self._description = description
        self._limits = limits

    def manifest(self) -> tuple[tuple[Entry, ...], Selection]:
        """Read what it holds, and judge it.

        Raises:
            CorruptRecordError: It is no such file, it is damaged, or has what no archive has.
            TooLargeError: It is over a limit.
            UnsupportedVersionError: A newer release wrote it.

        """
        try:
            about = tarfile.TarInfo.frombuf(self._exactly(BLOCK), "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._refused(f"it is no tar ({error})") from None
        if (about.name, about.type) != (MANIFEST, tarfile.REGTYPE):
            raise self._refused(f"an archive of perdure's begins with {MANIFEST}")
        most = self._limits.entries * LINE_BYTES
        if about.size > most:
            what = "its manifest's bytes:"
            raise too_large(self._description, what, about.size, "entries", most)
        lines = self._lines(about.size)
        head = self._head(next(lines, b""))
        entries = Checker(self._description, self._limits, chunked=False).read(lines)
        if len(entries) != head.entries:
            raise self._refused(f"it lists {len(entries)} entries, and says {head.entries}")
        return tuple(entries), self._selection(head, entries)

    def _lines(self, size: int) -> Iterator[bytes]:
        partial, remaining = b"", size
        while remaining > 0:
            data = self._exactly(min(remaining, CHUNK_BYTES))
            remaining -= len(data)
            *lines, partial = (partial + data).split(b"\n")
            yield from lines
            if len(partial) > CHUNK_BYTES:
                raise self._refused("its manifest has a line without an end")
        if partial:
            raise self._refused("its manifest ends within a line")
        self._exactly(-size % BLOCK)

    def _head(self, line: bytes) -> ExportHeader:
        try:
            head = decoder_of(ExportHeader).decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refused(f"its manifest is damaged: {error}") from None
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
            raise self._refused(str(error)) from None
        for entry in entries:
            fate = selection.fate(entry.path)
            if fate != "taken" and not (fate == "entered" and isinstance(entry, FolderEntry)):
                raise self._refused(f"{entry.path[:200]!a}: the archive's own paths leave it out")
        return selection

    def into(self, stage: StagingTree, entries: tuple[Entry, ...]) -> Generator[int, None, None]:
        """Write the members, which have to be the entries; give the bytes written, by steps.

        Raises:
            CorruptRecordError: They are others, or damaged.

        """
        for entry in entries:
            wanted = header_of(entry)
            if _meaning(self._exactly(len(wanted))) != _meaning(wanted):
                path = ascii(entry.path[:200])
                raise self._refused(f"its manifest has {path} where the tar has something else")
            remaining = size = entry.size if isinstance(entry, FileEntry) else 0
            while remaining > CHUNK_BYTES:
                stage.add(entry, self._exactly(CHUNK_BYTES))
                remaining -= CHUNK_BYTES
                yield CHUNK_BYTES
            stage.add(entry, self._exactly(remaining))
            yield remaining
            self._exactly(-size % BLOCK)
        rest = self._data.read(MOST_END + 1)
        if not len(END) <= len(rest) <= MOST_END or rest.strip(b"\0"):
            raise self._refused("something other than a tar's end is behind what it lists")

    def _exactly(self, size: int) -> bytes:
        data = self._data.read(size)
        if len(data) != size:
            raise self._refused("the file ends too early")
        return data

    def _refused(self, reason: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"{self._description} is refused: {reason}; nothing was changed",
            where=self._description,
        )


def _meaning(header: bytes) -> list[bytes]:
    """Return what a header says of a member; owners and times say nothing.

    A long one is three parts: that it is extended, the name and size as text, and the usual.
    """
    blocks = (header[:BLOCK], header[-BLOCK:])
    return [header[BLOCK:-BLOCK], *(block[field] for block in blocks for field in _FIELDS)]


_FIELDS: Final = (slice(0, 100), slice(124, 136), slice(156, 157), slice(345, 500))
"""Places of a member's name, size, kind, and the beginning of a longer name."""


# Writing


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
        data = b"".join(blocks)
        new.add(data if packer is None else packer.compress(data))
        if last and packer is not None:
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
    text = _manifest(archive, entries)
    about = FileEntry(MANIFEST, len(text), "", mtime=int(archive.at) * 10**9)
    yield header_of(about) + text + padding_of(len(text))
    description = f"archive {archive.id} of {key}"
    for entry in entries:
        yield header_of(entry)
        for name in blobs_of(entry):
            yield (await fetched(store, key.blobs, [name], description))[name]
        if isinstance(entry, FileEntry):
            yield padding_of(entry.size)
    yield END


def _manifest(archive: Archive, entries: Sequence[Entry]) -> bytes:
    head = ExportHeader(
        perdure_archive=FORMAT,
        id=archive.id,
        at=archive.at,
        paths=archive.paths,
        whole=archive.whole,
        entries=len(entries),
    )
    lines = [encode(head) + b"\n"]
    for entry in entries:
        # The names of blobs mean nothing elsewhere.
        is_chunked = isinstance(entry, FileEntry) and entry.chunks
        lines.append(line_of(msgspec.structs.replace(entry, chunks=()) if is_chunked else entry))
    return b"".join(lines)
