"""Generators that block, driven from an event loop: some steps to a hop into a thread.

Cancelling ends between two hops, and closes the generator; a hop is short.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from perdure._lib.files import LinkFoundError
from perdure.errors import ConfigError, StoreUnavailableError

__all__ = ["batches", "hop"]

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
