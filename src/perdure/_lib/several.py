"""Several things at a time, where most of each is waiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import anyio

__all__ = ["all_of", "each"]

T = TypeVar("T")
R = TypeVar("R")


async def all_of(items: Sequence[T], act: Callable[[T], Awaitable[R]]) -> list[R]:
    """Do something with all items at once, and return what came of each, in their order."""
    if len(items) == 1:
        return [await act(items[0])]
    results: dict[int, R] = {}

    async def one(place: int, item: T) -> None:
        results[place] = await act(item)

    async with anyio.create_task_group() as group:
        for place, item in enumerate(items):
            group.start_soon(one, place, item)
    return [results[place] for place in range(len(items))]


async def each(
    items: Collection[T], act: Callable[[T], Awaitable[None]], *, at_once: int = 8
) -> None:
    """Do something with each item, some at a time; raise what the first failure raised.

    After a failure nothing more is begun, and what was begun is waited for.
    """
    failed: list[Exception] = []
    left = iter(items)

    async def some() -> None:
        for item in left:
            if failed:
                return
            try:
                await act(item)
            except Exception as error:  # noqa: BLE001  # raised when all have ended
                failed.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(min(at_once, len(items))):
            group.start_soon(some)
    if failed:
        raise failed[0]
