"""Checkpoints of sessions that lie elsewhere by now, or in a storage of whole states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import perdure
from perdure import Message, Shutdown
from perdure.stores import StateStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.transfer import migrate

QUIET = Shutdown(signals=False)
LARGE = {"text": "x" * 100, "items": list(range(2000))}


async def filled(sessions: perdure.SessionManager) -> None:
    async with sessions.open("a") as session:
        session.append(Message.user("one"))
        await session.checkpoints.create("one")
        session.append(Message.user("two"))
        await session.checkpoints.create("given", LARGE)
        await session.checkpoints.create("two")
        await session.checkpoints.prune(keep=[2, 3])
        await session.aclose()


async def goes_on(sessions: perdure.SessionManager) -> None:
    """Verify, go back, and make one more."""
    async with sessions.open("a") as session:
        assert (await session.checkpoints.verify()).problems == ()
        restored = await session.checkpoints.restore(2)
        assert restored is not None
        assert restored.state == LARGE
        session.append(Message.user("three"))
        await session.checkpoints.rollback(3)
        assert [message.text for message in session.context()] == ["one", "two"]
        assert (await session.checkpoints.create("more")).id == 5
        assert (await session.checkpoints.verify()).problems == ()


async def test_a_moved_session_has_its_checkpoints(tmp_path: Path) -> None:
    backing = MemoryBacking()
    target = perdure.store_for(tmp_path / "store")
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await filled(sessions)
    source: Any = MemoryStore(backing=backing, owner="mover")
    for store in (source, target):
        await store.open()
    assert (await migrate(source, target)).failed == {}
    for store in (source, target):
        await store.aclose()
    async with perdure.connect(tmp_path / "store", shutdown=QUIET) as sessions:
        await goes_on(sessions)


async def test_a_fork_that_outlives_its_parent_has_its_checkpoints() -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await filled(sessions)
        await sessions.rename("a", "old")
        await sessions.fork("old", "a")
        await sessions.delete("old")
        await goes_on(sessions)


class Kept:
    """A storage of whole states, in memory."""

    def __init__(self) -> None:
        self.state: Any = None

    async def save(self, state: Any) -> None:
        self.state = state

    async def load(self) -> Any:
        return self.state

    async def exists(self) -> bool:
        return self.state is not None

    async def delete(self) -> None:
        self.state = None

    def get_path(self) -> str:
        return "memory"

    async def get_last_modified(self) -> None:
        return None


async def test_a_storage_of_whole_states_keeps_them() -> None:
    storage = Kept()
    async with perdure.connect(StateStore(storage), shutdown=QUIET) as sessions:
        await filled(sessions)
    async with perdure.connect(StateStore(storage), shutdown=QUIET) as sessions:
        await goes_on(sessions)
