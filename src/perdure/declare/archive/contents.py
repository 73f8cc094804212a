"""An archive's blobs, in a store: put and read back, or fetched; a few at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Final

import anyio.to_thread

from perdure._lib.several import each
from perdure.declare.archive.checking import ArchiveLimits, Checker
from perdure.declare.archive.entries import Archive, Entry, entry_of
from perdure.errors import CorruptRecordError, NotStorableError, StoreError
from perdure.model.keys import SessionKey
from perdure.store import Store

__all__ = ["BATCH_BYTES", "entries_of", "fetched", "put", "require_blobs"]

BATCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes of contents in memory at a time."""


def require_blobs(store: Store) -> None:
    """Refuse a store that keeps no blobs.

    Raises:
        NotStorableError: It does not.

    """
    if not store.capabilities.blobs:
        message = f"{store.location} keeps no blobs, which archives need: use another store"
        raise NotStorableError(message, location=store.location)


async def put(store: Store, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable, and read each back.

    Raises:
        StoreError: The store does not give back what it was given.

    """
    groups: dict[str, dict[str, bytes]] = {}
    for name, data in blobs.items():
        groups.setdefault(name[:1], {})[name] = data
    await each(list(groups.values()), lambda group: store.put_blobs(tenant, group))
    kept = await _all(store, tenant, blobs)
    for name, data in blobs.items():
        if kept[name] != data:
            message = f"{store.location} does not have blob {name}, which it has just been given"
            raise StoreError(message, blob=name)


async def fetched(store: Store, tenant: str, names: Iterable[str], where: str) -> dict[str, bytes]:
    """Read blobs.

    Raises:
        CorruptRecordError: One is lost or damaged.

    """
    found = await _all(store, tenant, set(names))
    whole = {name: data for name, data in found.items() if data is not None}
    for name in found.keys() - whole.keys():
        message = (
            f"{where} needs blob {name}, which {store.location} does not have: bring it from a "
            "copy of the store, or restore an older archive; nothing was changed"
        )
        raise CorruptRecordError(message, where=where, blob=name)
    return whole


async def _all(store: Store, tenant: str, names: Collection[str]) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}

    async def get(name: str) -> None:
        found[name] = await store.get_blob(tenant, name)

    await each(names, get)
    return found


async def entries_of(
    store: Store, key: SessionKey, archive: Archive, limits: ArchiveLimits
) -> AsyncGenerator[Entry, None]:
    """Read an archive's manifest, and judge it; nothing of it was used before.

    Raises:
        CorruptRecordError: It is lost, damaged, or lists what no archive has.
        TooLargeError: It is over a limit.

    """
    where = f"archive {archive.id} of {key}"
    checker = Checker(where, limits)
    for name in archive.pages:
        page = (await fetched(store, key.tenant, [name], where))[name]
        for entry in await anyio.to_thread.run_sync(_judged, page, where, checker):
            yield entry
    counted = (checker.files, checker.folders, checker.bytes)
    if counted != (archive.files, archive.folders, archive.bytes):
        message = f"{where}: its manifest does not have what the log says: nothing was changed"
        raise CorruptRecordError(message, where=where)


def _judged(page: bytes, where: str, checker: Checker) -> list[Entry]:
    entries = [entry_of(line, where) for line in page.splitlines()]
    for entry in entries:
        checker.add(entry)
    return entries
