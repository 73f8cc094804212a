"""Measurements of a store: what it can take, and the workload that it has seen.

`measure` saves sessions of a tenant of their own together, then removes them. `observed` reads
times and sizes from logs; `made_up` stands in where there are none yet.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter
from typing import Final

import anyio
import msgspec

from perdure._lib.tasks import each
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry, Record
from perdure.session.stored import followed
from perdure.store import Batch, Outcome, SessionInfo, SessionQuery, Status, Store, take_after
from perdure.tuning.advice import (
    LoadLevel,
    StoreMeasurement,
    Workload,
    WorkloadChange,
    changes_of,
    workload_of,
)

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
    async with _sessions(store, max(levels)) as logs:
        share = seconds / len(levels)
        measured = [await _level(store, logs, count, payload, share) for count in levels]
    return StoreMeasurement(tuple(measured), size, store.capabilities.batch_max > 1)


class _Log(msgspec.Struct):
    """A session that is written to, and where its log ends."""

    key: SessionKey
    epoch: int
    head: int


async def _level(
    store: Store, logs: list[_Log], count: int, payload: bytes, seconds: float
) -> LoadLevel:
    """Save some of the sessions again and again; the ends of their logs move."""
    until = perf_counter() + seconds
    took: list[float] = []
    some = logs[:count]
    while len(took) < _ROUNDS or perf_counter() < until:
        entry = (Entry(MESSAGE, payload),)
        batches = [Batch(log.key, log.epoch, log.head + 1, entry) for log in some]
        start = perf_counter()
        await _save(store, batches)
        took.append(perf_counter() - start)
        for log in some:
            log.head += 1
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
            raise StoreUnavailableError(
                f"{store.location} could not be measured: {outcome.error or outcome.status}",
                path=store.location,
            ) from outcome.error


@asynccontextmanager
async def _sessions(store: Store, count: int) -> AsyncGenerator[list[_Log], None]:
    """Create sessions, yield the ends of their logs, and delete the sessions afterwards."""
    run = secrets.token_hex(4)
    logs: list[_Log] = []

    async def make(n: int) -> None:
        key = SessionKey(f"{run}-{n:03d}", tenant=TENANT)
        grant = await take_after(store, key, after=0)
        logs.append(_Log(key, grant.epoch, grant.head))

    async def remove(log: _Log) -> None:
        await store.delete(log.key, log.epoch)

    try:
        await each(range(count), make)
        yield logs
    finally:
        with anyio.CancelScope(shield=True):
            await each(logs, remove)


async def _clear(store: Store) -> None:
    """Delete what a run has left that was killed."""
    while infos := await store.sessions(SessionQuery(tenant=TENANT, limit=1000)):
        keys = [info.key for info in infos]
        deleted = [key for key in keys if await _delete(store, key)]
        if len(deleted) < len(keys):
            return  # another run is measuring at the same time


async def _delete(store: Store, key: SessionKey) -> bool:
    holder = await store.holder(key)
    if holder is None or not (holder.released or holder.alive is False):
        return False
    grant = await take_after(store, key, after=holder.epoch)
    await store.delete(key, grant.epoch)
    return True


# The workload that a store has seen: read from its logs, times and sizes only


_LISTED: Final = 10_000
"""The newest sessions of a tenant that are looked at."""
_DAY: Final = 24 * 3600.0
"""Seconds in which sessions are drawn by chance: the newest ones change more often than others."""
_EACH: Final = 1_000
"""The newest records of a session that are looked at."""


async def observed(store: Store, *, most: int = 20_000) -> Workload:
    """Return how the sessions of a store have changed.

    They are drawn from those of the last day; where that is too little, older ones follow, the
    newest first. Nothing of their content is kept, and no lease is taken. A session whose log is
    damaged is passed over.

    Args:
        store: An open one.
        most: About how many changes to read.

    """
    lineage = followed(store)
    infos: list[SessionInfo] = []
    for tenant in await store.tenants():
        if tenant != TENANT:
            query = SessionQuery(tenant=tenant, newest_first=True, limit=_LISTED)
            infos += await store.sessions(query)
    infos.sort(key=lambda info: info.last_used, reverse=True)
    a_day_ago = infos[0].last_used[0] - _DAY if infos else 0.0
    recent = [info for info in infos if info.last_used[0] >= a_day_ago]
    older = infos[len(recent) :]
    random.Random(0).shuffle(recent)
    sessions: list[list[WorkloadChange]] = []
    remaining = most
    for info in recent + older:
        if remaining <= 0:
            break
        changes = await _changes(lineage, info.key)
        sessions.append(changes)
        remaining -= len(changes)
    sessions = [changes for changes in sessions if changes]
    return workload_of(sessions, f"{len(sessions)} of the newest sessions in {store.location}")


async def _changes(store: Store, key: SessionKey) -> list[WorkloadChange]:
    records: list[Record] = []
    try:
        async for chunk in store.read_log(key, limit=_EACH, reverse=True):
            records += chunk.records
        return changes_of(reversed(records))
    except CorruptRecordError:
        return []


# A workload for those who have none yet: agents in conversation, with tools


_THINKS: Final = (20.0, 1.0)
"""A person's time between an answer and the next question: median, spread (lognormal)."""


_STEP: Final = (3.0, 0.8)
"""A model's or a tool's time."""


_SIZE: Final = (700, 1.0)
"""Bytes of a message."""


_STEPS: Final = 2.5
"""Steps with tools in a turn, on average (geometric)."""


def made_up(*, sessions: int = 50, seconds: float = 900.0, seed: int = 0) -> Workload:
    """Return the changes of agents that are asked, work in steps, and answer.

    Turns are heavy-tailed: most are short, some have dozens of steps.

    Args:
        sessions: How many.
        seconds: For how long each.
        seed: The same workload for the same number.

    """
    chance = random.Random(seed)
    sessions_changes = [_session(chance, seconds) for _ in range(sessions)]
    return workload_of(
        sessions_changes, f"{sessions} made-up agents with tools, {seconds / 60:g} minutes each"
    )


def _session(chance: random.Random, seconds: float) -> list[WorkloadChange]:
    at, changes = 0.0, []
    while at < seconds:
        steps = int(math.log(1.0 - chance.random()) / math.log(1.0 - 1.0 / (_STEPS + 1.0)))
        changes.append(WorkloadChange(at, _drawn(chance, _SIZE)))
        for _ in range(2 * steps):  # a call, and its result
            at += chance.lognormvariate(math.log(_STEP[0]), _STEP[1])
            changes.append(WorkloadChange(at, _drawn(chance, _SIZE)))
        at += chance.lognormvariate(math.log(_STEP[0]), _STEP[1])
        changes.append(WorkloadChange(at, _drawn(chance, _SIZE), ends_turn=True))
        at += chance.lognormvariate(math.log(_THINKS[0]), _THINKS[1])
    return changes


def _drawn(chance: random.Random, about: tuple[float, float]) -> int:
    return max(round(chance.lognormvariate(math.log(about[0]), about[1])), 20)
