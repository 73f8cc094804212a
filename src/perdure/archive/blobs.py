"""Blobs of archives in a store: written and read back, or fetched, a few at a time.

Cancelling ends between two hops, and closes the generator; a hop is short.
"""

from __future__ import annotations

import os
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from perdure._lib.files import LinkFoundError
from perdure._lib.tasks import each
from perdure.archive.limits import ArchiveLimits, Checker
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    StoreError,
    StoreUnavailableError,
)
from perdure.records.archives import Archive, Entry
from perdure.records.keys import SessionKey
from perdure.store import Store

# Blocking generators, driven from an event loop: several items per call of a thread.


T = TypeVar("T")


async def hop(place: str, function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a thread; cancellation waits for it.

    Raises:
        ConfigError: A link is in place of a folder.
        StoreUnavailableError: The operating system refuses the operation.

    """
    try:
        return await anyio.to_thread.run_sync(partial(function, *args))
    except LinkFoundError as error:
        raise ConfigError(
            f"{error.filename} is a symbolic link, and may lead out of the home {place}: put a "
            "folder in its place; nothing was changed",
            path=str(error.filename),
        ) from error
    except OSError as error:
        path = os.fsdecode(error.filename or place)
        if not os.path.isabs(path):  # noqa: PTH117  # an entry of an open folder
            path = f"{path!r} in {place}"
        raise StoreUnavailableError(
            f"{path}: {error.strerror}: mend that, and try again; no archive was changed",
            path=place,
            errno=error.errno,
        ) from error


async def batches(
    place: str, items: Generator[T, None, None], size_of: Callable[[T], int], most: int
) -> AsyncGenerator[list[T], None]:
    """Give a blocking generator's items in batches; closing this closes it as well.

    Args:
        place: Where it works, for errors.
        items: The generator.
        size_of: Returns what an item counts.
        most: A batch ends with the item that brings it to this.

    """
    try:
        while batch := await hop(place, next_batch, items, size_of, most):
            yield batch
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(items.close)


def next_batch(items: Iterator[T], size_of: Callable[[T], int], most: int) -> list[T]:
    """Return the next items, up to the one that brings their sizes to a sum; none at the end."""
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
ITEM_BYTES: Final = 4096
"""Size that an entry counts besides its bytes: many small files do not make a hop too long."""


async def put(store: Store, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable, and read each back.

    Raises:
        StoreError: The store returned different data.

    """
    groups: dict[str, dict[str, bytes]] = {}
    for name, data in blobs.items():
        groups.setdefault(name[:1], {})[name] = data
    await each(list(groups.values()), lambda group: store.put_blobs(tenant, group))
    stored = await _all(store, tenant, blobs)
    for name, data in blobs.items():
        if stored[name] != data:
            raise StoreError(
                f"{store.location} does not have blob {name}, which it has just been given",
                blob=name,
            )


async def fetched(
    store: Store, tenant: str, names: Iterable[str], description: str
) -> dict[str, bytes]:
    """Read blobs.

    Raises:
        CorruptRecordError: A blob is missing or damaged.

    """
    blobs = await _all(store, tenant, set(names))
    readable = {name: data for name, data in blobs.items() if data is not None}
    for name in blobs.keys() - readable.keys():
        raise CorruptRecordError(
            f"{description} needs blob {name}, which {store.location} does not have: bring it from "
            "a copy of the store, or restore an older archive; nothing was changed",
            where=description,
            blob=name,
        )
    return readable


async def _all(store: Store, tenant: str, names: Collection[str]) -> dict[str, bytes | None]:
    blobs: dict[str, bytes | None] = {}

    async def get(name: str) -> None:
        blobs[name] = await store.get_blob(tenant, name)

    await each(names, get)
    return blobs


async def entries_of(
    store: Store, key: SessionKey, archive: Archive, limits: ArchiveLimits
) -> AsyncGenerator[Entry, None]:
    """Read an archive's manifest, and validate each entry before it is used.

    Raises:
        CorruptRecordError: It is missing, damaged, or lists entries that no archive may have.
        TooLargeError: It is over a limit.

    """
    description = f"archive {archive.id} of {key}"
    checker = Checker(description, limits)
    for name in archive.pages:
        page = (await fetched(store, key.blobs, [name], description))[name]
        for entry in await anyio.to_thread.run_sync(checker.read, page.splitlines()):
            yield entry
    counted = (checker.files, checker.folders, checker.bytes)
    if counted != (archive.files, archive.folders, archive.bytes):
        raise CorruptRecordError(
            f"{description}: its manifest does not have what the log says: nothing was changed",
            where=description,
        )
