"""Heartbeats while leases are held for long, so that nobody takes for dead who is only busy."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio

from perdure.errors import StoreError
from perdure.lease.terms import Lease
from perdure.lease.watch import OwnerWatch, beat
from perdure.store import Store

__all__ = ["while_beating"]

T = TypeVar("T")


async def while_beating(
    stores: Sequence[Store],
    act: Callable[[], Awaitable[T]],
    *,
    watches: Mapping[str, OwnerWatch] | None = None,
    every: float = Lease().heartbeat,
) -> T:
    """Do something, and renew this owner's heartbeat in each store until it is done.

    Who asks for a session meanwhile gets it when it is released.

    Args:
        stores: Open stores.
        act: What is done; its errors are raised as they are.
        watches: By a store's owner: what is to note the heartbeats of others.
        every: Seconds between two heartbeats.

    """
    done: list[T] = []
    failed: Exception | None = None
    async with anyio.create_task_group() as group:
        for store in stores:
            watch = watches[store.owner] if watches else OwnerWatch(Lease(), anyio.current_time)
            group.start_soon(_beat, store, watch, every)
        try:
            done.append(await act())
        except Exception as error:  # noqa: BLE001  # raised below, outside of the group
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return done[0]


async def _beat(store: Store, watch: OwnerWatch, every: float) -> None:
    while True:
        with contextlib.suppress(StoreError):  # what is under way will say so, if it does not pass
            await beat(store, watch)
        await anyio.sleep(every)
