"""The workload that a store has seen: read from its logs, times and sizes only."""

from __future__ import annotations

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
