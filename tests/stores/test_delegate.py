"""Stores around a store: what a wrapper changes is not bypassed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Message, Shutdown, connect
from perdure.records.keys import SessionKey
from perdure.store import Batch, Documents, LogChunk, Outcome, Store
from perdure.stores.delegate import DelegatingStore
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore


class Passing:
    """A wrapper as people write one: it counts two calls, and passes on whatever else there is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.batches = self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        self.batches += len(batches)
        return await self._store.append_many(batches)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        self.reads += 1
        return await self._store.read_documents(key, names)


@pytest.mark.parametrize("kind", [FileStore, SqliteStore])
async def test_a_wrapper_that_passes_on_all_else_is_not_bypassed(
    kind: type[FileStore | SqliteStore], tmp_path: Path
) -> None:
    store = Passing(kind(tmp_path / "kept"))
    options = {"shutdown": Shutdown(signals=False), "autosave": None}
    async with connect(store, **options) as sessions, sessions.open("a") as session:
        for text in ("one", "two"):
            session.append(Message.user(text))
            await session.save()
        assert store.batches == 2
        before = store.reads
        assert await sessions.load("a") is not None
        assert store.reads > before


class Unsettled(DelegatingStore):
    """A store amid a takeover: each read ends with the word that the log may have gone on."""

    async def read_log(self, key: SessionKey, **options: Any) -> AsyncGenerator[LogChunk, None]:
        async for chunk in self.inner.read_log(key, **options):
            yield chunk
        yield LogChunk((), settled=False)


async def test_a_page_of_history_is_read_amid_a_takeover() -> None:
    store = Unsettled(MemoryStore())
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("one"))
            await session.save()
            assert [item.value.text for item in await session.history(limit=5)] == ["one"]
            assert await session.history(before=1) == []
