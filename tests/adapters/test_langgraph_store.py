"""PerdureStore: what LangGraph's own store does, kept, and shared by processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("langgraph.store.memory")

from hypothesis import given, settings, strategies as st
from langgraph.store.base import GetOp, InvalidNamespaceError, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

import perdure
from perdure import OwnerMismatchError, Retention
from perdure.adapters import PerdureStore
from perdure.errors import InvalidArgumentError, NotStorableError, TooLargeError, WrongLoopError
from perdure.records.keys import SCOPES
from perdure.session.internals import store_below
from perdure.store import Capabilities
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryStore
from perdure.stores.wrapped import EncryptedStore
from perdure.transfer.migration import migrate
from tests.listings import NotedReads

NAMES = st.sampled_from([("a",), ("a", "b"), ("ab",), ("a", "b/c"), ("a", "%2F", "é")])
KEYS = st.sampled_from(["k", "l", "m/n"])
VALUES = st.fixed_dictionaries({"n": st.integers(0, 3), "tag": st.sampled_from(["x", "y"])})
FILTERS: list[Any] = [
    *(None, {}, {"n": 1}, {"n": {"$gte": 1, "$ne": 2}}, {"tag": "x", "n": {"$lt": 2}}),
    *({"tag": {"$eq": "y"}}, {"none": 1}),
]
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, KEYS, VALUES),
    st.tuples(st.just("delete"), NAMES, KEYS, st.none()),
    st.tuples(st.just("restart"), st.none(), st.none(), st.none()),
)


def shown(items: Any) -> Any:
    return sorted((item.namespace, item.key, repr(item.value)) for item in items)


async def same(ours: PerdureStore, theirs: InMemoryStore) -> None:
    for prefix in ((), ("a",), ("a", "b"), ("none",)):
        for wanted in FILTERS:
            mine = await ours.asearch(prefix, filter=wanted, limit=99)
            assert shown(mine) == shown(await theirs.asearch(prefix, filter=wanted, limit=99))
            first = await ours.asearch(prefix, filter=wanted, limit=1, offset=1)
            assert first == mine[1:2]
    full = sorted({item.namespace for item in await theirs.asearch((), limit=99)})
    assert await ours.alist_namespaces() == full
    assert (
        await ours.alist_namespaces(prefix=("a",), limit=1, offset=1)
        == [one for one in full if one[0] == "a"][1:2]
    )
    assert await ours.alist_namespaces(suffix=("*", "b")) == [
        one for one in full if len(one) > 1 and one[-1] == "b"
    ]
    assert await ours.alist_namespaces(max_depth=1) == sorted({one[:1] for one in full})


@settings(max_examples=8, deadline=None)
@given(steps=st.lists(STEPS, max_size=10))
def test_it_does_what_the_sdk_s_own_store_does(
    steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("store") / "kept"

    async def run() -> None:
        theirs, ours = InMemoryStore(), PerdureStore.from_conn_string(place)
        try:
            for what, namespace, key, value in steps:
                if what == "restart":
                    await ours.aclose()
                    ours = PerdureStore.from_conn_string(place)
                    continue
                for store in (ours, theirs):
                    await (
                        store.aput(namespace, key, value)
                        if what == "put"
                        else store.adelete(namespace, key)
                    )
                mine, other = await ours.aget(namespace, key), await theirs.aget(namespace, key)
                assert (mine and mine.value) == (other and other.value)
            await same(ours, theirs)
        finally:
            await ours.aclose()

    asyncio.run(run())


async def run_together(ours: PerdureStore) -> list[Any]:
    put = PutOp(("a",), "k", {"n": 1})
    return await ours.abatch([put, GetOp(("a",), "k"), PutOp(("a",), "k", {"n": 2}), put])


def test_reads_of_a_batch_see_what_was_before_and_the_last_put_counts() -> None:
    async def main() -> None:
        async with PerdureStore.in_memory() as store:
            assert await run_together(store) == [None, None, None, None]
            first = await store.aget(("a",), "k")
            assert first is not None
            assert first.value == {"n": 1}
            assert first.created_at == first.updated_at
            await store.aput(("a",), "k", {"n": 3})
            second = await store.aget(("a",), "k")
            assert second is not None
            assert second.created_at == first.created_at < second.updated_at
            assert len(await store.asearch(("a",), query="what")) == 1  # as the SDK's own
            with pytest.raises(InvalidArgumentError, match="unknown operator '\\$in'"):
                await store.abatch([SearchOp(("a",), {"n": {"$in": [1]}})])
            await store.setup()
            assert (store.setup(), await store.aget(("b",), "k"))[1] is None

    asyncio.run(main())


def test_a_graph_remembers_in_the_next_process_and_from_threads(tmp_path: Path) -> None:
    from langgraph.graph import END, START, StateGraph
    from langgraph.store.base import BaseStore

    def node(state: dict[str, Any], *, store: BaseStore) -> dict[str, Any]:
        known = store.get(("facts", "ada"), "boat")
        store.put(("facts", "ada"), "boat", {"name": state["said"]})
        return {"said": known.value["name"] if known else "nothing"}

    def ask(said: str) -> Any:
        graph = StateGraph(dict)
        graph.add_node("node", node)
        graph.add_edge(START, "node")
        graph.add_edge("node", END)
        with PerdureStore.from_conn_string(tmp_path / "kept") as store:
            return graph.compile(store=store).invoke({"said": said})

    assert ask("Sula")["said"] == "nothing"
    assert ask("Tern")["said"] == "Sula"

    async def look() -> None:
        async with perdure.connect(tmp_path / "kept") as sessions:
            store = PerdureStore(sessions)
            with pytest.raises(WrongLoopError, match="no event loop yet"):
                PerdureStore.in_memory().get(("facts", "ada"), "boat")
            with pytest.raises(WrongLoopError, match="would wait for itself"):
                store.get(("facts", "ada"), "boat")
            item = await asyncio.to_thread(store.get, ("facts", "ada"), "boat")
            assert item is not None
            assert item.value == {"name": "Tern"}
            assert await sessions.list() == []
            changes = await sessions.scope("langgraph:facts/ada").history()
            assert len(changes) == 2

    asyncio.run(look())


async def test_a_search_reads_the_namespaces_that_were_saved_last() -> None:
    place = NotedReads(MemoryStore())
    async with perdure.connect(place) as sessions:
        store = PerdureStore(sessions)
        for number in range(20):
            await store.aput(("users", f"u{number}"), "k", {"n": number})
        await store.aput(("users", "u3"), "late", {"n": 33})
        place.forget()
        found = await store.asearch(("users",), limit=3)
        assert [item.value["n"] for item in found] == [33, 19, 18]
        assert len(place.read) <= 4
        assert len(await store.asearch(("users",), limit=99)) == 21


@pytest.fixture
def anyio_backend() -> str:
    """LangGraph runs on asyncio."""
    return "asyncio"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"when": {"$gt": "2026-01-01"}}, ["b"]),
        ({"when": {"$lte": "2026-01-01"}}, ["a"]),
        ({"n": {"$gt": "9"}}, ["b"]),  # numbers, even as text
        ({"n": {"$lt": 5}}, []),
        ({"none": {"$lt": "x"}}, []),
        ({"by.name": "ada"}, ["a"]),
        ({"d.o.t": 1, "by": {"name": "eve"}}, ["b"]),
    ],
)
async def test_a_range_compares_texts_and_numbers(wanted: Any, found: list[str]) -> None:
    async with PerdureStore.in_memory() as store:
        await store.aput(("x",), "a", {"when": "2026-01-01", "n": 9, "by": {"name": "ada"}})
        more = {"by": {"name": "eve"}, "d.o.t": 1}
        await store.aput(("x",), "b", {"when": "2026-01-02", "n": "10", **more})
        assert [item.key for item in await store.asearch(("x",), filter=wanted)] == found


@pytest.mark.parametrize("namespace", [(), ("a.b",), ("",), ("a", 1)])
async def test_a_batch_with_a_wrong_namespace_changes_nothing(namespace: Any) -> None:
    async with PerdureStore.in_memory() as store:
        good = PutOp(("a",), "k", {"n": 1})
        with pytest.raises(InvalidNamespaceError):
            await store.abatch([good, PutOp(namespace, "k", {"n": 1})])
        with pytest.raises(NotStorableError, match=r"'l' in \('b',\).*\$\.x"):
            await store.abatch([good, PutOp(("b",), "l", {"x": object()})])
        with pytest.raises(InvalidArgumentError, match="namespace.* 1024"):
            await store.aput(("x" * 2000,), "k", {"n": 1})
        assert await store.alist_namespaces() == []


async def test_an_item_may_be_large(tmp_path: Path) -> None:
    value = {"text": "é" * 9_000_000, "raw": b"x"}
    async with PerdureStore.from_conn_string(tmp_path / "kept") as store:
        await store.aput(("a",), "k", value)
        await store.aput(("a",), "small", {"n": 1})
        item = await store.aget(("a",), "k")
        assert item is not None
        assert item.value == value
        found = await store.asearch(("a",), filter={"raw": b"x"})
        assert [each.value for each in found] == [value]
        assert len(await store.asearch(("a",))) == 2
        scope = (await store._connection.manager()).scope("langgraph:a")
        assert len(repr(await scope.get("k"))) < 1000
        await store.aput(("a",), "k", {"n": 2})
        assert len(await store.asearch(("a",), filter={"n": 2})) == 1
        await store.adelete(("a",), "k")
        assert await scope.keys() == ["small"]


async def test_a_large_item_keeps_its_vectors_and_its_time(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    value = {"text": "tide" * 2_000_000}
    async with PerdureStore.from_conn_string(tmp_path / "kept", index=INDEX) as store:
        await store.aput(("a",), "k", value, ttl=60)
        (found,) = await store.asearch(("a",), query="tide", refresh_ttl=True)
        assert found.value == value
        assert found.score == pytest.approx(1)
        scope = (await store._connection.manager()).scope("langgraph:a")
        stored = await scope.get("k")
        await scope.set("k", {**stored, "expires_at": stored["expires_at"] - 3000})
        (found,) = await store.asearch(("a",), query="tide", refresh_ttl=True)
        assert found.value == value
        kept = await scope.get("k")
        assert kept.keys() == stored.keys()
        assert kept["expires_at"] >= stored["expires_at"]


class Plain(DelegatingStore):
    """A store that keeps no blobs."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, blobs=False)


async def test_without_blobs_a_large_item_is_named_and_nothing_is_stored() -> None:
    async with perdure.connect(Plain(MemoryStore())) as sessions:
        store = PerdureStore(sessions)
        await store.aput(("a",), "k", {"text": "x" * 5_000_000})
        large = PutOp(("b",), "l", {"text": "x" * 17_000_000})
        with pytest.raises(TooLargeError, match=r"'l' in \('b',\) takes"):
            await store.abatch([PutOp(("a",), "m", {"n": 1}), large])
        assert [item.key for item in await store.asearch(())] == ["k"]


@pytest.mark.deep
async def test_a_large_item_is_kept_by_all_that_removes_and_copies(tmp_path: Path) -> None:
    value = {"text": "x" * 60_000_000}
    key, other = bytes(32), bytes(range(32))
    async with perdure.connect(EncryptedStore(MemoryStore(), key)) as sessions:
        store = PerdureStore(sessions)
        await store.aput(("a",), "k", value)
        for n in range(3):
            await store.aput(("a",), "n", {"n": n})
        report = await sessions.prune(Retention(keep_turns=1))
        assert [each.key.agent for each in report.pruned] == [SCOPES]
        async with perdure.connect(EncryptedStore(MemoryStore(), other)) as there:
            done = await migrate(store_below(sessions), store_below(there))
            assert done.failed == {}
            item = await PerdureStore(there).aget(("a",), "k")
            assert item is not None
            assert item.value == value


async def test_forget_by_owner_removes_the_namespaces_of_somebody(tmp_path: Path) -> None:
    def owner(namespace: tuple[str, ...]) -> str | None:
        return namespace[1] if namespace[0] == "facts" else None

    async with perdure.connect(tmp_path / "kept") as sessions:
        store = PerdureStore(sessions, owner=owner)
        large = {"text": "x" * 5_000_000}
        for namespace in (("facts", "ada"), ("facts", "ada", "old"), ("facts", "ben"), ("app",)):
            await store.aput(namespace, "k", large)
        found = await sessions.list_scopes(owner="ada")
        assert len(found) == 2
        await store.adelete(("facts", "ada", "old"), "k")
        report = await sessions.forget(owner="ada")
        assert len(report.sessions) == 2
        assert await store.aget(("facts", "ada"), "k") is None
        assert await store.alist_namespaces() == [("app",), ("facts", "ben")]
        assert [item.value for item in await store.asearch(())] == [large] * 2
        await store.aput(("facts", "ada"), "k", {"n": 1})
        other = PerdureStore(sessions, owner=lambda _: "ben")
        with pytest.raises(OwnerMismatchError):
            await other.aput(("facts", "ada"), "k", {"n": 2})


async def test_what_has_expired_is_not_there_and_is_removed() -> None:
    async with perdure.connect("memory:") as sessions:
        store = PerdureStore(sessions, ttl={"default_ttl": 60.0})
        await store.aput(("a",), "k", {"n": 1})
        await store.aput(("a",), "gone", {"n": 2}, ttl=0)
        await store.aput(("b",), "gone", {"n": "x" * 5_000_000}, ttl=0)
        await store.aput(("a",), "stays", {"n": 3}, ttl=None)
        assert await store.aget(("a",), "gone") is None
        assert [item.key for item in await store.asearch(())] == ["stays", "k"]
        assert await store.alist_namespaces() == [("a",)]
        assert await asyncio.to_thread(store.sweep_ttl) == 2
        assert await store.sweep_ttl() == 0
        scope = sessions.scope("langgraph:a")
        assert await scope.keys() == ["k", "stays"]
        assert await sessions.scope("langgraph:b").keys() == []

        stored = await scope.get("k")
        soon = {**stored, "expires_at": stored["expires_at"] - 3000}
        for refresh in (False, True):
            await scope.set("k", soon)
            await store.aget(("a",), "k", refresh_ttl=refresh)
            kept = (await scope.get("k"))["expires_at"]
            await scope.set("k", soon)
            await store.asearch(("a",), refresh_ttl=refresh)
            assert kept >= stored["expires_at"] if refresh else kept == soon["expires_at"]
            assert ((await scope.get("k"))["expires_at"] > soon["expires_at"]) is refresh
        assert "expires_at" not in await scope.get("stays")


# Semantic search


WORDS = ["tide", "boat", "storm"]


def embed(texts: Any) -> list[list[float]]:
    """Return how often each word is in a text."""
    return [[float(text.count(word)) for word in WORDS] for text in texts]


INDEX: Any = {"embed": embed, "dims": 3, "fields": ["text", "notes[*].text"]}
TEXTS = st.lists(st.sampled_from([*WORDS, "calm"]), max_size=3).map(" ".join)


@settings(max_examples=20, deadline=None)
@given(
    items=st.dictionaries(
        st.tuples(NAMES, KEYS), st.tuples(TEXTS, st.lists(TEXTS, max_size=2)), max_size=6
    ),
    query=st.sampled_from(["tide", "boat storm", "boat boat tide"]),
)
def test_a_query_finds_what_the_store_in_memory_finds(items: Any, query: str) -> None:
    pytest.importorskip("numpy")

    async def run() -> None:
        theirs = InMemoryStore(index=INDEX)
        async with PerdureStore.in_memory(index=INDEX) as ours:
            for (namespace, key), (text, notes) in items.items():
                # Two equal texts of an item are an error of the store in memory.
                numbered = [{"text": f"{note} {at}"} for at, note in enumerate(notes)]
                value = {"text": text, "notes": numbered}
                for store in (theirs, ours):
                    await store.aput(namespace, key, value)
            for prefix in ((), ("a",), ("a", "b")):
                found = [
                    {
                        (item.namespace, item.key): item.score and round(item.score, 4)
                        for item in await store.asearch(prefix, query=query, limit=99)
                    }
                    for store in (theirs, ours)
                ]
                assert found[0] == found[1]
                ordered = await ours.asearch(prefix, query=query, limit=99)
                scores = [item.score for item in ordered if item.score is not None]
                assert scores == sorted(scores, reverse=True)
                assert await ours.asearch(prefix, query=query, limit=2, offset=1) == ordered[1:3]

    asyncio.run(run())


async def test_vectors_are_kept_with_their_items(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    place = tmp_path / "kept"
    async with PerdureStore.from_conn_string(place, index=INDEX) as store:
        await store.aput(("a",), "k", {"text": "tide", "lang": "en"})
        await store.aput(("a",), "other", {"name": "tide"}, index=["name"])
        await store.aput(("a",), "unseen", {"text": "tide"}, index=False)
        await store.aput(("a",), "boat", {"text": "a boat", "lang": "en"})
    calls: list[str] = []

    async def counted(texts: Any) -> list[list[float]]:
        calls.extend(texts)
        return embed(texts)

    async with PerdureStore.from_conn_string(place, index={**INDEX, "embed": counted}) as store:
        found = await store.asearch(("a",), query="tide")
        assert [item.key for item in found] == ["other", "k", "boat", "unseen"]
        assert [item.score for item in found] == [1.0, 1.0, 0.0, None]
        found = await store.asearch(("a",), query="tide", filter={"lang": "en"}, limit=1)
        assert [(item.key, item.value) for item in found] == [("k", {"text": "tide", "lang": "en"})]
        assert calls == ["tide", "tide"]
    async with PerdureStore.from_conn_string(place, index={"embed": lambda _: [[1.0]]}) as store:
        with pytest.raises(InvalidArgumentError, match="not the 1 dimensions of this query"):
            await store.asearch(("a",), query="tide")
    for wrong, match in (
        ({"embed": embed, "distance_type": "l2"}, 'only "cosine"'),
        ({"dims": 3}, 'has no "embed"'),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            PerdureStore.in_memory(index=wrong)
    async with PerdureStore.in_memory(index={"embed": embed, "dims": 4}) as store:
        with pytest.raises(InvalidArgumentError, match=r"shape \(3,\).* 4 dimensions"):
            await store.aput(("a",), "k", {"text": "x"})


async def test_a_search_that_refreshes_undoes_nothing_that_came_meanwhile() -> None:
    """A read of a large item takes a while, in which it may be put again, deleted or forgotten."""
    async with perdure.connect("memory:") as sessions:
        store = PerdureStore(sessions, ttl={"default_ttl": 60.0}, owner=lambda name: name[0])
        text = "x" * 5_000_000
        for number in range(4):
            await store.aput(("ada",), "k", {"n": number, "text": text}, ttl=0.1)
            await asyncio.sleep(0.1)  # a hundredth of its time to live
            meanwhile = store.aput(("ada",), "k", {"n": -number, "text": text}, ttl=0.1)
            await asyncio.gather(store.asearch(("ada",)), meanwhile)
            item = await store.aget(("ada",), "k")
            assert item is not None
            assert item.value["n"] == -number
        for _ in range(3):
            await store.aput(("ada",), "k", {"text": text}, ttl=0.1)
            await asyncio.sleep(0.1)
            await asyncio.gather(store.asearch(("ada",)), store.adelete(("ada",), "k"))
            assert await store.aget(("ada",), "k") is None
        await store.aput(("ada",), "small", {"n": 1}, ttl=0.1)
        await asyncio.sleep(0.1)
        await asyncio.gather(store.asearch(("ada",)), sessions.forget(owner="ada"))
        assert await sessions.list_scopes() == []
