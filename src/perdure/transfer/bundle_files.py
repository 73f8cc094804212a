"""Bundle files: export and import of one session.

A file is published complete or not at all. An import reads the file twice, so a damaged bundle
writes nothing to the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from perdure._lib.files import NewFile
from perdure.errors import CorruptRecordError, SessionNotFoundError, StoreError
from perdure.lease import while_beating
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.posts import DeadLetter
from perdure.session.options import require_no_backup
from perdure.store import Store
from perdure.transfer.bundle import BundleDocument, BundleHeader, BundleWriter, Item, Reader
from perdure.transfer.read import items
from perdure.transfer.write import WrittenSession, land

MARK: Final = b'{"perdure_bundle":'
PART: Final = 1024 * 1024
"""Bytes written to disk at a time."""


async def write_bundle(store: Store, key: SessionKey, path: Path) -> int:
    """Write a session as a bundle into a new file, and return the file's size in bytes.

    Reads without a lease. Exports what is durable when it begins, dead letters included. Items that
    are still pending in the inbox are in no log yet and are not exported.

    Args:
        store: An open store.
        key: The session to export.
        path: A file that does not exist yet.

    Raises:
        SessionNotFoundError: There is no such session.
        ConfigError: The file exists already.
        CorruptRecordError: The session is damaged.

    """
    if not await store.head(key):
        raise SessionNotFoundError(f"there is no session {key} in {store.location}", key=str(key))
    return await write_items(path, items(store, key, dead_letters=True))


async def write_items(path: Path, items: AsyncGenerator[Item, None]) -> int:
    """Write a bundle's items into a new file, and return the file's size in bytes."""
    new = await anyio.to_thread.run_sync(NewFile, path)
    try:
        writer = BundleWriter()
        async with aclosing(items) as source:
            async for item in source:
                if new.add(writer.line(item)) >= PART:
                    await anyio.to_thread.run_sync(new.write)
        return await anyio.to_thread.run_sync(new.publish)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(new.close)


async def read_bundle(store: Store, path: Path, *, key: SessionKey | None = None) -> WrittenSession:
    """Import a bundle's session into a store that does not have it.

    Args:
        store: An open store.
        path: The bundle.
        key: The session's key in the store. Default: the bundle's.

    Raises:
        ConfigError: The store has a session of this key, or is a backup.
        CorruptRecordError: The bundle is damaged; nothing was written.
        StoreError: It has dead letters, and the store does not support them; nothing was written.
        UnsupportedVersionError: A newer release wrote it; nothing was written.

    """
    was, has_letters = await _look(path)
    await require_no_backup(store)
    if has_letters and not store.capabilities.dead_letters:
        message = f"{path} holds dead letters, and {store.location} keeps none: use another store"
        raise StoreError(message, path=str(path))
    source = _items(path, renamed=key not in {None, was})
    return await while_beating((store,), lambda: land(store, key or was, source))


async def is_bundle(path: Path) -> bool:
    """Say whether a path is a file that begins like a bundle."""
    if not await anyio.Path(path).is_file():
        return False
    async with await anyio.open_file(path, "rb") as file:
        return (await file.read(len(MARK))) == MARK


async def bundle_key(path: Path) -> SessionKey:
    """Read and check all of a bundle, and return its session's key; errors as `read_bundle`."""
    return (await _look(path))[0]


async def _look(path: Path) -> tuple[SessionKey, bool]:
    """Return a bundle's key, and whether it holds dead letters."""
    reader = Reader(str(path))
    key: SessionKey | None = None
    has_letters = False
    async with await anyio.open_file(path, "rb") as file:
        while line := await file.readline():
            item = reader.item(line)
            if isinstance(item, BundleHeader):
                key = item.key
            has_letters = has_letters or isinstance(item, DeadLetter)
    if key is None or not reader.ended:
        message = f"{path} is not a whole bundle: its end is missing; export the session again"
        raise CorruptRecordError(message, path=str(path))
    return key, has_letters


async def _items(path: Path, *, renamed: bool) -> AsyncGenerator[Item, None]:
    reader = Reader(str(path))
    async with await anyio.open_file(path, "rb") as file:
        while line := await file.readline():
            item = reader.item(line)
            # Documents contain the session's key: under another id they are rebuilt from the log.
            if not (renamed and isinstance(item, (BundleDocument, Manifest))):
                yield item
