"""What a store can take: sessions of a tenant of their own, saved together, then removed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter
from typing import Final

import anyio
import msgspec

from perdure._lib.tasks import each
from perdure.errors import StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, HeldLease, Outcome, Status, Store
from perdure.tuning.advice import LoadLevel, StoreMeasurement

# What a store can take: sessions of a tenant of their own, saved together, and removed again


TENANT: Final = "perdure-tune"
"""Whose the sessions are that are made for it."""

LEVELS: Final = (1, 8, 64)
_ROUNDS: Final = 3
"""The fewest rounds of a level, however slow the store is."""


async def measure(
    store: Store, *, size: int = 1000, seconds: float = 4.0, levels: Sequence[int] = LEVELS
) -> StoreMeasurement:
    """Save sessions to a store in the same batches as autosave does, and see how long it takes.

    They belong to the tenant `TENANT`, and are deleted afterwards; those that a killed
    run has left are deleted first.

    Args:
        store: An open one.
        size: Bytes of a record.
        seconds: For how long, about, in all.
        levels: How many sessions are due at once.

    Raises:
        StoreUnavailableError: A save failed.

    """
    await _clear(store)
    payload = msgspec.json.encode(secrets.token_hex(max(size // 2, 1)))
    async with _sessions(store, max(levels)) as heads:
        share = seconds / len(levels)
        measured = [await _level(store, heads, count, payload, share) for count in levels]
    return StoreMeasurement(tuple(measured), size)


async def _level(
    store: Store, heads: dict[HeldLease, int], count: int, payload: bytes, seconds: float
) -> LoadLevel:
    """Save some of the sessions again and again; ``heads`` are their logs' ends, and move."""
    until = perf_counter() + seconds
    took: list[float] = []
    some = list(heads)[:count]
    while len(took) < _ROUNDS or perf_counter() < until:
        entry = (Entry(MESSAGE, payload),)
        batches = [Batch(lease.key, lease.epoch, heads[lease] + 1, entry) for lease in some]
        start = perf_counter()
        await _save(store, batches)
        took.append(perf_counter() - start)
        for lease in some:
            heads[lease] += 1
    return LoadLevel(count, median(took), len(took))


async def _save(store: Store, batches: Sequence[Batch]) -> None:
    """Save as autosave would: as many batches at once as the store takes."""
    most = store.capabilities.batch_max
    waiting = [batches[at : at + most] for at in range(0, len(batches), most)]
    outcomes: list[Outcome] = []

    async def save(part: Sequence[Batch]) -> None:
        outcomes.extend(await store.append_many(part))

    await each(waiting, save, at_once=store.capabilities.parallelism)
    for outcome in outcomes:
        if outcome.status is not Status.OK:
            message = f"{store.location} could not be measured: {outcome.error or outcome.status}"
            raise StoreUnavailableError(message, path=store.location) from outcome.error


@asynccontextmanager
async def _sessions(store: Store, count: int) -> AsyncGenerator[dict[HeldLease, int], None]:
    """Create sessions, yield the ends of their logs, and delete the sessions afterwards."""
    run = secrets.token_hex(4)
    heads: dict[HeldLease, int] = {}

    async def make(n: int) -> None:
        key = SessionKey(f"{run}-{n:03d}", tenant=TENANT)
        grant = await store.acquire(key, after=0)
        heads[grant] = grant.head

    async def remove(grant: HeldLease) -> None:
        await store.delete(grant.key, grant.epoch)

    try:
        await each(range(count), make)
        yield heads
    finally:
        with anyio.CancelScope(shield=True):
            await each(list(heads), remove)


async def _clear(store: Store) -> None:
    """Delete what a run has left that was killed."""
    while infos := await store.sessions(tenant=TENANT, limit=1000):
        keys = [info.key for info in infos]
        deleted = [key for key in keys if await _delete(store, key)]
        if len(deleted) < len(keys):
            return  # another run is measuring at the same time


async def _delete(store: Store, key: SessionKey) -> bool:
    holder = await store.holder(key)
    if holder is None or not (holder.released or holder.alive is False):
        return False
    grant = await store.acquire(key, after=holder.epoch)
    await store.delete(key, grant.epoch)
    return True
