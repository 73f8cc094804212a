"""What one open reads of a session's facts: lease, manifest, documents, the files of its log.

A mark says that something is read more than once today; whoever mends that has to remove the mark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

import pytest

from benchmarks.counts import Asked, count_asked, facts_in_files, facts_in_statements
from benchmarks.opening import connected, fill, server_facts
from benchmarks.stores.network import SERVERS
from perdure import Retention, store_for
from perdure.agent import Agent
from perdure.agent.llm.scripted import ScriptedModel
from perdure.memory.context import SNAPSHOT
from perdure.records.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.store import Documents, Held, LeaseState, LogChunk, Store, Taken, Terms, take_after
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.wrapped import EncryptedStore

MASTER = "5a" * 32

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

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        self.facts["lease"] += 1
        answer = await self.inner.acquire(key, terms)
        if isinstance(answer, Taken) and answer.found is not None:
            self.facts["manifest"] += 1
            self.facts.update(f"document {name}" for name in answer.found.documents.found)
            if answer.found.records is not None:
                self.facts[f"log after {answer.found.after} before None"] += 1
        return answer

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        documents = await self.inner.read_documents(key, names)
        self.facts["manifest"] += 1
        self.facts.update(f"document {name}" for name in documents.found)
        return documents

    async def head(self, key: SessionKey) -> int:
        self.facts["head"] += 1
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
        self.facts[f"log after {after} before {before}"] += 1
        return self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)


async def leave(make: Callable[[], Store], how: str) -> None:
    """Leave a session that was closed, that was pruned as well, or whose holder has died."""
    async with connected(make()) as sessions:
        await fill(sessions, ["ada"])
        if how == "pruned":
            await sessions.prune(Retention(keep_turns=1), id="ada")
    if how == "dead":
        store = make()
        await store.open()
        await take_after(store, SessionKey("ada"), after=1)
        await store.aclose()


def read_twice(facts: Counter[str]) -> dict[str, int]:
    """Return the facts that were read more than once; a test that counts none proves nothing."""
    if len(facts) < 3:
        pytest.fail(f"nothing was counted: {facts}")
    return {fact: count for fact, count in facts.items() if count > 1}


@pytest.mark.parametrize("how", ["closed", "pruned", "dead"])
async def test_an_open_asks_a_store_for_no_fact_twice(how: str) -> None:
    backing = MemoryBacking()
    await leave(lambda: MemoryStore(backing=backing), how)
    store = Counting(MemoryStore(backing=backing))
    async with connected(store) as sessions:
        store.facts.clear()
        await sessions.open("ada", create=False)
        assert read_twice(store.facts) == {}


@pytest.mark.parametrize("how", ["closed", "pruned", "dead"])
async def test_an_encrypted_open_reads_its_key_before_and_all_else_with_the_lease(how: str) -> None:
    backing = MemoryBacking()
    await leave(lambda: EncryptedStore(MemoryStore(backing=backing), MASTER), how)
    store = Counting(MemoryStore(backing=backing))
    async with connected(EncryptedStore(store, MASTER)) as sessions:
        await sessions.open("warm")  # the tenant's key
        store.facts.clear()
        await sessions.open("ada", create=False)
        keys = {fact: count for fact, count in store.facts.items() if "document keys/" in fact}
        assert list(keys.values()) == [1]
        assert store.facts["manifest"] == 3  # which key; with it; with the lease
        assert read_twice(store.facts - Counter(keys) - Counter(manifest=2)) == {}
        assert not store.facts["head"]


async def test_a_new_encrypted_session_is_not_read_once_it_is_there() -> None:
    store = Counting(MemoryStore())
    async with connected(EncryptedStore(store, MASTER)) as sessions:
        await sessions.open("warm")
        store.facts.clear()
        await sessions.open("ada")
        # Whether there is a key, also beside a damaged manifest; then the lease.
        assert store.facts == {"manifest": 3, "lease": 1, "log after 0 before None": 1}


@pytest.mark.parametrize("how", ["closed", "pruned", "dead"])
@pytest.mark.parametrize("url", LOCAL)
async def test_an_open_reads_no_fact_twice_from_the_disk(
    tmp_path: Path, url: str, how: str
) -> None:
    with count_asked() as asked:
        await leave(lambda: store_for(url.format(tmp_path)), how)
        async with connected(url.format(tmp_path)) as sessions:
            asked.take()
            await sessions.open("ada", create=False)
            assert read_twice(LOCAL[url](asked.take())) == {}


@pytest.mark.deep
@pytest.mark.parametrize(
    "server",
    ["postgres", "redis", "s3"],
)
async def test_an_open_reads_no_fact_twice_from_a_server(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path) as counted:
        assert read_twice(await server_facts(server, counted.make, counted.proxy)) == {}


def agent(sessions: SessionManager) -> Agent:
    model = ScriptedModel("hello")
    return Agent.create("ada", model=model, sessions=sessions, persistent_session=True)


async def test_an_agent_that_is_restored_reads_its_snapshot_once() -> None:
    backing = MemoryBacking()
    async with connected(MemoryStore(backing=backing)) as sessions, agent(sessions) as one:
        await one.ask("hello")
    store = Counting(MemoryStore(backing=backing))
    async with connected(store) as sessions:
        store.facts.clear()
        async with agent(sessions):
            facts = store.facts.copy()
    if not facts[f"document {SNAPSHOT}"]:
        pytest.fail(f"it was not restored: {facts}")
    assert facts[f"document {SNAPSHOT}"] == 1
