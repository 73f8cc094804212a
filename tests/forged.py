"""Records that no program writes, appended through the store under a lease of their own."""

from __future__ import annotations

from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Store
from perdure.testing.conformance._kit import append_ok, take


async def forge(store: Store, id: str, *entries: Entry) -> int:
    """Append entries to a session that is not open; return the seq of the last one."""
    grant = await take(store, SessionKey(id))
    seq = await append_ok(store, grant, grant.head + 1, *entries)
    await store.release(grant.key, grant.epoch)
    return seq
