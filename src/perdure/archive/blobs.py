"""An archive's blobs, in a store: put and read back, or fetched; a few at a time.

Cancelling ends between two hops, and closes the generator; a hop is short.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from perdure._lib.files import LinkFoundError
from perdure._lib.tasks import each
from perdure.archive.entries import Archive, Entry, entry_of
from perdure.archive.limits import ArchiveLimits, Checker
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    NotStorableError,
    StoreError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.store import Store

# Generators that block, driven from an event loop: some steps to a hop into a thread


T = TypeVar("T")


async def hop(place: str, function: Callable[..., T], *args: Any) -> T:
    """Call something that blocks in a thread; cancelled, it is waited for.

    Raises:
        ConfigError: A link stands where a folder should be.
        StoreUnavailableError: The operating system refuses.

    """
    try:
        return await anyio.to_thread.run_sync(partial(function, *args))
    except LinkFoundError as error:
        message = (
            f"{error.filename} is a symbolic link, and may lead out of the home {place}: put a "
            "folder in its place; nothing was changed"
        )
        raise ConfigError(message, path=str(error.filename)) from error
    except OSError as error:
        message = (
            f"{_path_of(error, place)}: {error.strerror}: mend that, and try again; "
            "no archive was changed"
        )
        raise StoreUnavailableError(message, path=place, errno=error.errno) from error


def _path_of(error: OSError, place: str) -> str:
    """Return what an error is about: of what lies below an open folder, it knows the name alone."""
    name = os.fsdecode(error.filename or place)
    return name if os.path.isabs(name) else f"{name!r} in {place}"  # noqa: PTH117


@asynccontextmanager
async def batches(
    place: str, items: Iterator[T], size_of: Callable[[T], int], most: int
) -> AsyncGenerator[AsyncGenerator[list[T], None], None]:
    """Give a blocking generator's items in batches, and close it in the end.

    Args:
        place: Where it works, for errors.
        items: The generator.
        size_of: Returns what an item counts.
        most: A batch ends with the item that brings it to this.

    """

    async def some() -> AsyncGenerator[list[T], None]:
        while batch := await hop(place, _take, items, size_of, most):
            yield batch

    given = some()
    try:
        yield given
    finally:
        with anyio.CancelScope(shield=True):
            await given.aclose()
            await anyio.to_thread.run_sync(getattr(items, "close", lambda: None))


def _take(items: Iterator[T], size_of: Callable[[T], int], most: int) -> list[T]:
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= most:
            break
    return batch


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
    stored = await _all(store, tenant, blobs)
    for name, data in blobs.items():
        if stored[name] != data:
            message = f"{store.location} does not have blob {name}, which it has just been given"
            raise StoreError(message, blob=name)


async def fetched(store: Store, tenant: str, names: Iterable[str], place: str) -> dict[str, bytes]:
    """Read blobs.

    Raises:
        CorruptRecordError: One is lost or damaged.

    """
    chunk = await _all(store, tenant, set(names))
    is_whole = {name: data for name, data in chunk.items() if data is not None}
    for name in chunk.keys() - is_whole.keys():
        message = (
            f"{place} needs blob {name}, which {store.location} does not have: bring it from a "
            "copy of the store, or restore an older archive; nothing was changed"
        )
        raise CorruptRecordError(message, where=place, blob=name)
    return is_whole


async def _all(store: Store, tenant: str, names: Collection[str]) -> dict[str, bytes | None]:
    pages: dict[str, bytes | None] = {}

    async def get(name: str) -> None:
        pages[name] = await store.get_blob(tenant, name)

    await each(names, get)
    return pages


async def entries_of(
    store: Store, key: SessionKey, archive: Archive, limits: ArchiveLimits
) -> AsyncGenerator[Entry, None]:
    """Read an archive's manifest, and judge it; nothing of it was used before.

    Raises:
        CorruptRecordError: It is lost, damaged, or lists what no archive has.
        TooLargeError: It is over a limit.

    """
    place = f"archive {archive.id} of {key}"
    checker = Checker(place, limits)
    for name in archive.pages:
        page = (await fetched(store, key.tenant, [name], place))[name]
        for entry in await anyio.to_thread.run_sync(_judged, page, place, checker):
            yield entry
    counted = (checker.files, checker.folders, checker.bytes)
    if counted != (archive.files, archive.folders, archive.bytes):
        message = f"{place}: its manifest does not have what the log says: nothing was changed"
        raise CorruptRecordError(message, where=place)


def _judged(page: bytes, place: str, checker: Checker) -> list[Entry]:
    entries = [entry_of(line, place) for line in page.splitlines()]
    for entry in entries:
        checker.add(entry)
    return entries
