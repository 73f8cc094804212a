"""The workload that a store has seen: read from its logs, times and sizes only."""

from __future__ import annotations

import math
import random
from typing import Final

from perdure.errors import CorruptRecordError
from perdure.lineage.store import followed
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import SessionInfo, Store
from perdure.tuning.measure import TENANT
from perdure.tuning.workload import Workload, WorkloadChange, changes_of, workload_of

_LISTED: Final = 10_000


_EACH: Final = 1_000
"""The newest records of a session that are looked at."""


async def observed(store: Store, *, most: int = 20_000) -> Workload:
    """Return how the sessions of a store have changed, the newest first.

    Nothing of their content is kept, and no lease is taken. A session whose log is damaged is
    passed over.

    Args:
        store: An open one.
        most: About how many changes to read.

    """
    lineage = followed(store)
    sessions: list[list[WorkloadChange]] = []
    remaining = most
    for info in await _newest(store):
        if remaining <= 0:
            break
        changes = await _changes(lineage, info.key)
        sessions.append(changes)
        remaining -= len(changes)
    sessions = [changes for changes in sessions if changes]
    return workload_of(sessions, f"the newest of {len(sessions)} sessions in {store.location}")


async def _newest(store: Store) -> list[SessionInfo]:
    infos: list[SessionInfo] = []
    for tenant in await store.tenants():
        after: SessionKey | None = None
        while tenant != TENANT and len(infos) < _LISTED:
            page = await store.sessions(tenant=tenant, after=after, limit=1000)
            infos += page
            if not page:
                break
            after = page[-1].key
    return sorted(infos, key=lambda info: info.updated_at or 0.0, reverse=True)


async def _changes(store: Store, key: SessionKey) -> list[WorkloadChange]:
    records: list[Record] = []
    try:
        async for chunk in store.read_log(key, limit=_EACH, reverse=True):
            records += chunk.records
    except CorruptRecordError:
        return []
    return changes_of(reversed(records))


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
    source = f"{sessions} made-up agents with tools, {seconds / 60:g} minutes each"
    return workload_of(sessions_changes, source)


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
