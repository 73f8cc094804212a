"""Exported archives: a tar file that other tools read, and reading one that is not trusted.

The manifest comes first; only what it lists is extracted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import NewFile
from perdure.archive.atomic_swap import StagingTree
from perdure.archive.blobs import fetched, hop
from perdure.archive.entries import (
    CHUNK_BYTES,
    Archive,
    Entry,
    FileEntry,
    FolderEntry,
    blobs_of,
    entry_of,
    line_of,
)
from perdure.archive.limits import (
    CONTROL,
    ArchiveLimits,
    Checker,
    Selection,
    selection_of,
    too_large,
)
from perdure.archive.tar import (
    BLOCK,
    END,
    DecompressedFile,
    TarReader,
    header_of,
    packer_for,
    padding_of,
)
from perdure.errors import ConfigError, CorruptRecordError, UnsupportedVersionError
from perdure.records.json import decoder_of, encode
from perdure.records.keys import SessionKey
from perdure.store import Store

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
            if selection.fate(entry.path) not in _fates(entry):
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


def _fates(entry: Entry) -> tuple[str, ...]:
    return ("taken", "entered") if isinstance(entry, FolderEntry) else ("taken",)


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
            yield (await fetched(store, key.tenant, [name], description))[name]
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
