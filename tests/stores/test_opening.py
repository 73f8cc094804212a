"""What one open reads of a session's facts: lease, manifest, documents, the files of its log.

Each test opens a session that exists and was closed. A mark says that a store reads some fact more
than once today; whoever mends that has to remove the mark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

import pytest

from benchmarks.counts import Asked, count_asked, facts_in_files, facts_in_statements
from benchmarks.opening import connected, fill, server_facts
from benchmarks.stores.network import SERVERS
from perdure.records.keys import SessionKey
from perdure.store import Documents, LeaseState, LogChunk, Store
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore

TWICE = pytest.mark.xfail(strict=True, reason="an open reads some facts more than once")

LOCAL: dict[str, Callable[[Asked], Counter[str]]] = {
    "{}/files": lambda asked: facts_in_files(asked.read),
    "sqlite:///{}/store.db": lambda asked: facts_in_statements(asked.statements),
}


class Counting(DelegatingStore):
    """Counts which facts it is asked for, by the calls of the port."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.facts: Counter[str] = Counter()

    async def holder(self, key: SessionKey) -> LeaseState | None:
        self.facts["lease"] += 1
        return await self.inner.holder(key)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        documents = await self.inner.read_documents(key, names)
        self.facts["manifest"] += 1
        self.facts.update(f"document {name}" for name in documents.found)
        return documents

    async def head(self, key: SessionKey) -> int:
        self.facts["log"] += 1
        return await self.inner.head(key)

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        self.facts["log"] += 1
        return self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)


def read_twice(facts: Counter[str]) -> dict[str, int]:
    """Return the facts that were read more than once; a test that counts none proves nothing."""
    assert len(facts) >= 3, facts
    return {fact: count for fact, count in facts.items() if count > 1}


@TWICE
async def test_an_open_asks_a_store_for_no_fact_twice() -> None:
    backing = MemoryBacking()
    async with connected(MemoryStore(backing=backing)) as sessions:
        await fill(sessions, ["ada"])
    store = Counting(MemoryStore(backing=backing))
    async with connected(store) as sessions:
        store.facts.clear()
        await sessions.open("ada")
        assert read_twice(store.facts) == {}


@TWICE
@pytest.mark.parametrize("url", LOCAL)
async def test_an_open_reads_no_fact_twice_from_the_disk(tmp_path: Path, url: str) -> None:
    with count_asked() as asked:
        async with connected(url.format(tmp_path)) as sessions:
            await fill(sessions, ["ada"])
        async with connected(url.format(tmp_path)) as sessions:
            asked.take()
            await sessions.open("ada")
            assert read_twice(LOCAL[url](asked.take())) == {}


@pytest.mark.deep
@pytest.mark.parametrize(
    "server",
    [pytest.param("postgres", marks=TWICE), pytest.param("redis", marks=TWICE), "s3"],
)
async def test_an_open_reads_no_fact_twice_from_a_server(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path) as counted:
        assert read_twice(await server_facts(server, counted.make, counted.proxy)) == {}
