"""Bundles as files: written whole or not at all, and read twice, so that a damaged one lands
nothing."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final, final

import anyio
import anyio.to_thread

from perdure._lib.files import Folder, write_all
from perdure._lib.ids import random_id
from perdure._lib.platform import sync_data
from perdure.errors import ConfigError, CorruptRecordError, SessionNotFoundError
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.moving.bundle import Folded, Head, Item, Reader, Writer
from perdure.moving.landing import Landed, land
from perdure.moving.taking import items
from perdure.store import Store

__all__ = ["bundle_key", "is_bundle", "read_bundle", "write_bundle"]

MARK: Final = b'{"perdure_bundle":'
PART: Final = 1024 * 1024
"""Bytes that go to the disk at a time."""


async def write_bundle(store: Store, key: SessionKey, path: Path) -> int:
    """Write a session as a bundle into a new file, and return the file's size in bytes.

    Reads without a lease, and shows what is durable when it begins. What was posted and is not
    taken yet belongs to nobody's log, and stays behind.

    Args:
        store: An open store.
        key: Which session.
        path: A file that is not there.

    Raises:
        SessionNotFoundError: There is no such session.
        ConfigError: The file is there already.
        CorruptRecordError: The session is damaged.

    """
    if not await store.head(key):
        raise SessionNotFoundError(f"there is no session {key} in {store.location}", key=str(key))
    new = await anyio.to_thread.run_sync(_NewFile, path)
    try:
        writer = Writer()
        async with aclosing(items(store, key)) as found:
            async for item in found:
                if new.add(writer.line(item)) >= PART:
                    await anyio.to_thread.run_sync(new.write)
        return await anyio.to_thread.run_sync(new.publish)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(new.close)


@final
class _NewFile:
    """A file that nobody sees before it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[bytes] = []
        self._waiting = self._size = 0
        self._folder = Folder.root(str(path.absolute().parent))
        self._temporary = f".{random_id()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._fd = self._folder.open(self._temporary, flags)

    def add(self, data: bytes) -> int:
        """Take something in, and return how much waits to be written."""
        self._parts.append(data)
        self._waiting += len(data)
        return self._waiting

    def write(self) -> None:
        data, self._parts = b"".join(self._parts), []
        self._waiting = 0
        self._size += write_all(self._fd, data)

    def publish(self) -> int:
        self.write()
        sync_data(self._fd)
        if not self._folder.link(self._temporary, self._path.name):
            message = f"{self._path} is there already: choose a new file, or remove it"
            raise ConfigError(message, path=str(self._path))
        self._folder.sync()
        return self._size

    def close(self) -> None:
        os.close(self._fd)
        self._folder.remove(self._temporary)
        self._folder.close()


async def read_bundle(store: Store, path: Path, *, key: SessionKey | None = None) -> Landed:
    """Write a bundle's session into a store that does not have it.

    Args:
        store: An open store.
        path: The bundle.
        key: The session's key here. Default: the one that it had.

    Raises:
        ConfigError: The store has a session of this key.
        CorruptRecordError: The bundle is damaged; nothing was written.
        UnsupportedVersionError: A newer release wrote it; nothing was written.

    """
    was = await bundle_key(path)
    return await land(store, key or was, _items(path, renamed=key not in {None, was}))


async def is_bundle(path: Path) -> bool:
    """Say whether a path is a file that begins as bundles do."""
    if not await anyio.Path(path).is_file():
        return False
    async with await anyio.open_file(path, "rb") as file:
        return (await file.read(len(MARK))) == MARK


async def bundle_key(path: Path) -> SessionKey:
    """Read a bundle in whole, and return its session's key; errors as `read_bundle`."""
    reader = Reader(str(path))
    key: SessionKey | None = None
    async with await anyio.open_file(path, "rb") as file:
        while line := await file.readline():
            item = reader.item(line)
            if isinstance(item, Head):
                key = item.key
    if key is None or not reader.ended:
        message = f"{path} is not a whole bundle: its end is missing; export the session again"
        raise CorruptRecordError(message, path=str(path))
    return key


async def _items(path: Path, *, renamed: bool) -> AsyncGenerator[Item, None]:
    reader = Reader(str(path))
    async with await anyio.open_file(path, "rb") as file:
        while line := await file.readline():
            item = reader.item(line)
            # Documents say whose they are: under another id they are made anew from the log.
            if not (renamed and isinstance(item, (Folded, Manifest))):
                yield item
