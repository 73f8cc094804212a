"""Storages of working memory, as users write them; it only has to check."""

from __future__ import annotations

from typing import assert_type

from perdure.agent import (
    Agent,
    AgentConfig,
    EchoModel,
    FileMemoryStorage,
    MemoryInfo,
    MemoryItem,
    MemoryStorage,
    PersistentSession,
    SessionMemoryStorage,
)
from perdure.session.session import Session


class Remembered:
    """A storage of a user's own."""

    def __init__(self) -> None:
        self.items: dict[str, MemoryItem] = {}

    async def get(self, key: str) -> MemoryItem | None:
        return self.items.get(key)

    async def set(self, item: MemoryItem) -> None:
        self.items[item.key] = item

    async def delete(self, key: str) -> None:
        self.items.pop(key, None)

    async def has(self, key: str) -> bool:
        return key in self.items

    async def entries(self, *, scope: str | None = None) -> list[MemoryInfo]:
        return [MemoryInfo(key=key) for key in self.items]

    async def clear(self, *, scope: str | None = None) -> None:
        self.items.clear()

    async def size(self) -> int:
        return 0

    async def flush(self) -> None: ...

    async def aclose(self) -> None: ...


async def storages(session: Session) -> None:
    own: MemoryStorage = Remembered()
    of_session: MemoryStorage = SessionMemoryStorage(session)
    async with FileMemoryStorage("somewhere", flush_interval=5.0) as file:
        of_file: MemoryStorage = file
        assert_type(file.path, str)
        assert_type(file.findings[0].what, str)
        await file.set(MemoryItem(key="k", value=[1], priority="low", pinned=True))
        assert_type(await file.get("k"), MemoryItem | None)
        assert_type(await file.has("k"), bool)
        assert_type((await file.entries(scope="task"))[0].size_bytes, int)
        await file.delete("k")
        await file.clear(scope="task")
        assert_type(await file.size(), int)
        await file.flush()
    for one in (own, of_session, of_file):
        await one.aclose()
    config = AgentConfig(name="ada", model=EchoModel(), memory_storage=own)
    kept = PersistentSession(memory=of_file)
    async with Agent.create(config=config, persistent_session=kept) as agent:
        assert_type(agent.memory_storage, MemoryStorage)
        assert_type(agent.context.memory_storage, MemoryStorage)
