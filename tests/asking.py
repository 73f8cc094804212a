"""Asking for a session as another process does."""

from __future__ import annotations

import anyio

from perdure.records.keys import SessionKey
from perdure.stores.memory import MemoryBacking, MemoryStore


async def ask(backing: MemoryBacking, id: str) -> None:
    """Ask the holder of a session for it; return once its manager has heard, and acts on it."""
    store = MemoryStore(backing=backing)
    await store.open()
    holder = await store.holder(SessionKey(id))
    assert holder is not None
    await store.request_handover(SessionKey(id), holder)
    with anyio.fail_after(60):
        while backing.owners[holder.owner].handovers:
            await anyio.sleep(0)
    await anyio.wait_all_tasks_blocked()
    await store.aclose()
