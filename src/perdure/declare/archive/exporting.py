"""An archive as a file of its own: a tar that other tools read, with its manifest first."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.new_file import NewFile
from perdure.codec.json import encode
from perdure.declare.archive.contents import fetched
from perdure.declare.archive.entries import (
    Archive,
    Entry,
    FileEntry,
    FolderEntry,
    blobs_of,
    line_of,
)
from perdure.declare.archive.hops import hop
from perdure.declare.archive.squeezing import packer_for
from perdure.declare.archive.tarring import END, header_of, padding_of
from perdure.declare.archive.unpacking import FORMAT, MANIFEST, Head
from perdure.model.keys import SessionKey
from perdure.store import Store

__all__ = ["export"]

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

    def write(rest: list[bytes], *, last: bool = False) -> None:
        new.add(packer.compress(b"".join(rest)))
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
    where = f"archive {archive.id} of {key}"
    for entry in entries:
        yield header_of(entry)
        for name in blobs_of(entry):
            yield (await fetched(store, key.tenant, [name], where))[name]
        if isinstance(entry, FileEntry):
            yield padding_of(entry.size)
    yield END


def _manifest(archive: Archive, entries: Sequence[Entry]) -> list[bytes]:
    head = Head(
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
