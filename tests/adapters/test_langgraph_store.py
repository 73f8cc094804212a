"""PerdureStore: what LangGraph's own store does, kept, and shared by processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.store.memory")

from hypothesis import given, settings, strategies as st
from langgraph.store.base import GetOp, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

import perdure
from perdure.adapters import PerdureStore
from perdure.errors import InvalidArgumentError, WrongLoopError
from perdure.stores.memory import MemoryStore
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
            with pytest.raises(InvalidArgumentError, match="no semantic search"):
                await store.asearch(("a",), query="what")
            with pytest.raises(InvalidArgumentError, match="unknown operator '\\$in'"):
                await store.abatch([SearchOp(("a",), {"n": {"$in": [1]}})])
            with pytest.raises(NotImplementedError):
                await store.aput(("a",), "k", {"n": 3}, ttl=1)

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
