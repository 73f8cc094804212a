"""The room that a session's memory has, who hears what went for it, and reading all anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure.memory.storage import MemoryInfo
from perdure.memory.working import Room
from perdure.restore.ladder import restore
from perdure.session.events import MemoryEvicted

if TYPE_CHECKING:
    from perdure.model.keys import SessionKey
    from perdure.session.runtime import Runtime
    from perdure.session.session import Session

__all__ = ["read_again", "room_of"]

MOST_SAVES = 100
"""How many saves a read may meet in a row."""


def room_of(runtime: Runtime, key: SessionKey) -> Room:
    """Return how much a session's memory holds; what goes for it is an event."""

    def told(gone: Sequence[MemoryInfo]) -> None:
        keys = tuple(entry.key for entry in gone)
        facts = MemoryEvicted(str(key), keys, sum(entry.size_bytes for entry in gone))
        runtime.hooks.emit("memory_evicted", facts)

    return Room(runtime.limits.memory_bytes, told)


async def read_again(session: Session) -> None:
    """Have a session hold what the store has."""
    runtime = session._runtime
    limit = runtime.limits.context_bytes
    restored = await restore(runtime.store, session.key, context_bytes=limit)
    for _ in range(MOST_SAVES):
        if restored.head >= session.durable_version:
            break
        # A save came between, and what it saved has left memory.
        restored = await restore(runtime.store, session.key, context_bytes=limit)
    session.renew(restored)
    await session.memory.load()
