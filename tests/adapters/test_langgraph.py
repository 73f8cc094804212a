"""`PerdureSaver` against LangGraph's conformance suite, its own savers, and other processes."""

from __future__ import annotations

import asyncio
import operator
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import anyio
import pytest

pytest.importorskip("langgraph.checkpoint.conformance")

import ormsgpack
from hypothesis import given, settings, strategies as st
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.conformance.initializer import checkpointer_test
from langgraph.checkpoint.conformance.validate import validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import _messages_delta_reducer, add_messages
from langgraph.types import Command, interrupt
from pydantic import BaseModel

import perdure
from perdure import (
    InvalidArgumentError,
    LeaseLostError,
    NotStorableError,
    OwnerMismatchError,
    SessionManager,
)
from perdure.adapters import PerdureSaver
from perdure.adapters.thread_log import read_record
from perdure.errors import FormatError, SessionError, WrongLoopError
from perdure.records.keys import SessionKey
from perdure.session.internals import session_open_here, store_below
from perdure.session.retention import Retention
from perdure.store import Batch, Outcome, take_after
from perdure.testing import FaultyStore, MemoryBacking, MemoryStore
from tests.adapters import kills
from tests.listings import NotedReads
from tests.servers.postgres import schema_of, shared

TESTS = 81
"""Of the conformance suite, over its eight capabilities."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """LangGraph runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(f"sqlite:///{tmp_path}/threads.db") as manager:
        yield manager


# LangGraph's own suite


async def passes(saver: Any) -> None:
    report = await validate(checkpointer_test(name="perdure")(saver))
    failed = {name: each.failures for name, each in report.results.items() if each.failures}
    assert not failed
    assert all(each.passed for each in report.results.values())
    assert sum(each.tests_passed for each in report.results.values()) == TESTS


@pytest.mark.parametrize(
    "store",
    ["sqlite", *(pytest.param(each, marks=pytest.mark.deep) for each in ("file", "postgres"))],
)
async def test_the_conformance_suite_passes(tmp_path: Path, store: str) -> None:
    urls = {"sqlite": f"sqlite:///{tmp_path}/threads.db", "file": str(tmp_path / "threads")}
    url = urls.get(store) or f"{shared().url}?schema={schema_of(tmp_path)}"

    async def saver() -> AsyncIterator[PerdureSaver]:
        async with PerdureSaver.from_conn_string(url) as opened:
            yield opened

    await passes(saver)


# As LangGraph's own


CHANNELS = ("a", "b", "items")
VALUES = st.one_of(
    st.integers(-3, 3),
    st.text(max_size=3),
    st.none(),
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(st.builds(HumanMessage, st.text(max_size=3), id=st.sampled_from("xyz")), max_size=5),
    st.lists(st.dictionaries(st.text(max_size=2), st.integers(-9, 9)), max_size=4),
    st.binary(max_size=3),
)


@dataclass(frozen=True)
class Put:
    ns: str
    parent: int
    values: dict[str, Any]
    kept: set[str]


@dataclass(frozen=True)
class Writes:
    ns: str
    at: int
    task: str
    path: str
    writes: list[tuple[str, Any]]


NAMESPACES = st.sampled_from(["", "child:1"])
OPERATIONS = st.lists(
    st.one_of(
        st.builds(
            Put,
            NAMESPACES,
            st.integers(0, 3),
            st.dictionaries(st.sampled_from(CHANNELS), VALUES),
            st.sets(st.sampled_from(CHANNELS)),
        ),
        st.builds(
            Writes,
            NAMESPACES,
            st.integers(0, 3),
            st.sampled_from(["t1", "t2"]),
            st.sampled_from(["", "~p"]),
            st.lists(
                st.tuples(st.sampled_from([*CHANNELS, "__error__", "__resume__"]), VALUES),
                max_size=3,
            ),
        ),
    ),
    max_size=12,
)


class Pair:
    """The same operations on both savers."""

    def __init__(self, *savers: BaseCheckpointSaver[Any]) -> None:
        self.savers = savers
        self.ids: dict[str, list[str]] = {"": [], "child:1": []}
        self.versions: dict[str, int] = dict.fromkeys(CHANNELS, 0)

    async def apply(self, operation: Put | Writes) -> None:
        ids = self.ids[operation.ns]
        if isinstance(operation, Put):
            checkpoint = {**empty_checkpoint(), "id": f"{len(ids):08}"}
            new = {name: self.versions[name] + 1 for name in operation.values}
            self.versions |= new
            kept = {name: self.versions[name] for name in operation.kept if self.versions[name]}
            checkpoint["channel_versions"] = kept | new
            checkpoint["channel_values"] = operation.values
            parent = ids[-1 - operation.parent] if operation.parent < len(ids) else None
            about = {"thread_id": "t", "checkpoint_ns": operation.ns, "checkpoint_id": parent}
            metadata: Any = {"source": "loop", "step": len(ids), "extra": (1, "é")}
            for saver in self.savers:
                await saver.aput({"configurable": about}, checkpoint.copy(), metadata, new)  # type: ignore[arg-type]
            ids.append(checkpoint["id"])
        else:
            id_ = ids[-1 - operation.at] if operation.at < len(ids) else "none"
            about = {"thread_id": "t", "checkpoint_ns": operation.ns, "checkpoint_id": id_}
            for saver in self.savers:
                await saver.aput_writes(
                    {"configurable": about}, operation.writes, operation.task, operation.path
                )

    async def same(self) -> None:
        one, other = [await everything(saver) for saver in self.savers]
        assert one == other
        for ns, ids in self.ids.items():
            for id_ in [None, *ids]:
                about = {"thread_id": "t", "checkpoint_ns": ns, "checkpoint_id": id_}
                config: Any = {"configurable": about}
                histories = [
                    await saver.aget_delta_channel_history(config=config, channels=CHANNELS)
                    for saver in self.savers
                ]
                assert histories[0] == histories[1]
                found = [await saver.aget_tuple(config) for saver in self.savers]
                assert plain(found[0]) == plain(found[1])


def plain(found: CheckpointTuple | None) -> Any:
    """A tuple's content; the id of a parent that is None may stand in a config or not."""
    if found is None:
        return None
    config = {name: value for name, value in found.config["configurable"].items() if value}
    return (config, *found[1:])


async def everything(saver: BaseCheckpointSaver[Any]) -> list[Any]:
    found = [plain(each) async for each in saver.alist({"configurable": {"thread_id": "t"}})]
    return sorted(
        found, key=lambda each: (each[0].get("checkpoint_ns", ""), each[0]["checkpoint_id"])
    )


@settings(max_examples=40)
@given(OPERATIONS, st.integers(0, 12))
def test_it_gives_back_what_the_saver_in_memory_does(
    operations: list[Put | Writes], restart: int
) -> None:
    async def run() -> None:
        backing, ours = MemoryBacking(), InMemorySaver()
        pair = Pair(ours)
        for half in (operations[:restart], operations[restart:]):
            async with perdure.connect(MemoryStore(backing=backing)) as sessions:
                pair.savers = (PerdureSaver(sessions), ours)
                for operation in half:
                    await pair.apply(operation)
                await pair.same()

    asyncio.run(run())


# Graphs


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    count: Annotated[int, operator.add]


class Rebuilt(TypedDict):
    messages: Annotated[
        list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=3)
    ]
    count: Annotated[int, operator.add]


def chat(shape: Any, saver: Any) -> Any:
    """A graph with a subgraph that asks a person, and an answer of two parts."""

    def ask(state: Any) -> Any:
        text = state["messages"][-1].content
        said = interrupt(f"may I? {text}") if "ask" in text else "no need"
        return {"messages": [AIMessage(said, id=f"s{len(state['messages'])}")], "count": 1}

    def answer(state: Any) -> Any:
        number = len(state["messages"])
        return {"messages": [AIMessage(f"answer {number}", id=f"a{number}")], "count": 1}

    def forget(state: Any) -> Any:
        gone = [RemoveMessage(id=state["messages"][0].id)] if len(state["messages"]) > 6 else []
        return {"messages": gone, "count": 10}

    inner = StateGraph(shape)
    inner.add_node("ask", ask)
    inner.add_edge(START, "ask")
    outer = StateGraph(shape)
    outer.add_node("inner", inner.compile())
    outer.add_node("answer", answer)
    outer.add_node("forget", forget)
    outer.add_edge(START, "inner")
    outer.add_edge("inner", "answer")
    outer.add_edge("inner", "forget")
    return outer.compile(checkpointer=saver)


async def states(graph: Any, config: Any) -> list[Any]:
    """A thread's history without what is made by chance: ids and times."""
    found = []
    async for state in graph.aget_state_history(config):
        tasks = [(task.name, task.interrupts, task.error, task.result) for task in state.tasks]
        interrupts = [[each.value for each in task[1]] for task in tasks]
        names = [(task[0], task[2], task[3]) for task in tasks]
        about = {key: state.metadata.get(key) for key in ("source", "step")}
        found.append((state.values, state.next, names, interrupts, about))
    return found


async def conversation(graph: Any, config: Any) -> None:
    def said(text: str, id_: str) -> Any:
        return {"messages": [HumanMessage(text, id=id_)], "count": 0}

    for number in range(3):
        await graph.ainvoke(said(f"turn {number}", f"h{number}"), config)
    await graph.ainvoke(said("please ask", "h3"), config)
    await graph.ainvoke(Command(resume="yes"), config)
    history = [state async for state in graph.aget_state_history(config)]
    fork = await graph.aupdate_state(history[4].config, {"count": 100}, as_node="answer")
    await graph.ainvoke(None, fork)
    await graph.ainvoke(said("after the fork", "h4"), config, durability="sync")
    await graph.ainvoke(said("and at the end", "h5"), config, durability="exit")


CONFIG: Any = {"configurable": {"thread_id": "t"}}


@pytest.mark.parametrize("shape", [State, Rebuilt])
async def test_a_graph_has_the_history_that_it_has_in_memory(tmp_path: Path, shape: Any) -> None:
    memory = chat(shape, InMemorySaver())
    await conversation(memory, CONFIG)
    expected = await states(memory, CONFIG)
    url = f"sqlite:///{tmp_path}/threads.db"
    async with PerdureSaver.from_conn_string(url) as saver:
        await conversation(chat(shape, saver), CONFIG)
        assert await states(chat(shape, saver), CONFIG) == expected
    async with PerdureSaver.from_conn_string(url) as saver:
        assert await states(chat(shape, saver), CONFIG) == expected


@pytest.mark.parametrize("shape", [State, Rebuilt])
async def test_pruning_leaves_the_state_as_it_is(sessions: SessionManager, shape: Any) -> None:
    saver = PerdureSaver(sessions)
    graph = chat(shape, saver)
    await conversation(graph, CONFIG)
    before = await graph.aget_state(CONFIG)
    await saver.aprune(["t"])
    fresh = chat(shape, PerdureSaver(sessions))
    for each in (graph, fresh):
        assert await each.aget_state(CONFIG) == before
        assert len([state async for state in each.aget_state_history(CONFIG)]) == 1
    await graph.ainvoke({"messages": [HumanMessage("more", id="h9")], "count": 0}, CONFIG)
    after = await graph.aget_state(CONFIG)
    assert "h9" in [message.id for message in after.values["messages"]]


async def test_pruning_frees_what_nothing_needs(sessions: SessionManager) -> None:
    saver = PerdureSaver(sessions)
    graph = chat(State, saver)
    for number in range(20):
        message = HumanMessage(f"{number}" * 2000, id="the same")
        await graph.ainvoke({"messages": [message], "count": 0}, CONFIG)
    before = await logged(sessions)
    await saver.aprune(["t"])
    assert await logged(sessions) < before / 3
    state = await graph.aget_state(CONFIG)
    contents = {message.id: message.content for message in state.values["messages"]}
    assert contents["the same"] == "19" * 2000


async def logged(sessions: SessionManager) -> int:
    """The bytes of a thread's log."""
    log = store_below(sessions).read_log(SessionKey("t"))
    return sum([len(record.payload) async for chunk in log for record in chunk.records])


# What is stored, and what comes back


def put_of(values: dict[str, Any], *, number: int = 1) -> tuple[Any, Any, Any]:
    """Checkpoint, metadata and versions with these values."""
    versions = dict.fromkeys(values, number)
    checkpoint = {**empty_checkpoint(), "id": f"{number:08}", "channel_versions": versions}
    return checkpoint | {"channel_values": values}, {"source": "loop", "step": number}, versions


class Own(BaseModel):
    """A class of an application."""

    name: str
    below: list[Own] = []


async def stored(saver: PerdureSaver, values: dict[str, Any]) -> dict[str, Any]:
    await saver.aput({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, *put_of(values))
    return await kept(saver)


async def kept(saver: PerdureSaver) -> dict[str, Any]:
    found = await saver.aget_tuple({"configurable": {"thread_id": "t"}})
    assert found is not None
    return found.checkpoint["channel_values"]


async def test_a_class_that_is_not_allowed_raises_and_names_the_channel(
    sessions: SessionManager,
) -> None:
    values = {"plan": {"deep": [Own(name="x", below=[Own(name="y")])]}}
    with pytest.raises(FormatError, match=r"channel 'plan' .* a tests\.adapters\..*Own, which"):
        await stored(PerdureSaver(sessions), values)
    assert await kept(PerdureSaver(sessions, types=[Own])) == values
    strict = PerdureSaver(sessions).with_allowlist([(Own.__module__, "Own")])
    assert await kept(strict) == values


async def test_what_a_constructor_makes_is_not_run_by_reading_it(sessions: SessionManager) -> None:
    evil = ormsgpack.packb(
        ormsgpack.Ext(0, ormsgpack.packb(("os", "mkdir", "/tmp/made-by-reading")))  # noqa: S108
    )

    class Forged(JsonPlusSerializer):
        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            return "msgpack", evil

    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    await PerdureSaver(sessions, serde=Forged()).aput(config, *put_of({"a": 1}))
    with pytest.raises(FormatError, match=r"channel 'a' .* a os\.mkdir, which is not allowed"):
        await kept(PerdureSaver(sessions))
    with pytest.raises(InvalidArgumentError, match="pickle_fallback"):
        PerdureSaver(sessions, serde=JsonPlusSerializer(pickle_fallback=True))


async def test_a_value_that_cannot_be_stored_names_its_channel(sessions: SessionManager) -> None:
    with pytest.raises(NotStorableError, match="channel 'number'"):
        await stored(PerdureSaver(sessions), {"number": 2**70})
    assert not await sessions.exists("t")


async def test_large_values_are_stored_in_parts(sessions: SessionManager) -> None:
    values = {"file": "é" * 9_000_000, "list": [HumanMessage("x" * 5_000_000, id="1")]}
    assert await stored(PerdureSaver(sessions), values) == values
    assert await kept(PerdureSaver(sessions)) == values


async def test_an_object_that_was_read_belongs_to_its_reader(sessions: SessionManager) -> None:
    saver = PerdureSaver(sessions)
    values = {"messages": [HumanMessage("a", id="1", additional_kwargs={"n": {"deep": 1}})]}
    await stored(saver, values)
    first, read = await kept(saver), await kept(saver)
    assert first == read == values
    assert read["messages"][0].model_fields_set == first["messages"][0].model_fields_set
    read["messages"][0].additional_kwargs["n"]["deep"] = 2
    assert await kept(saver) == values


async def read_once(saver: PerdureSaver) -> Any:
    """The message that the next reader may be given, too: nobody has it any more."""
    return (await kept(saver))["messages"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message.additional_kwargs["n"].update(deep=True),
        lambda message: message.additional_kwargs.update(n={"deep": 1.0}),
        lambda message: message.additional_kwargs["list"].append(2),
        lambda message: message.additional_kwargs.update(x=message.additional_kwargs.pop("x")),
        lambda message: message.additional_kwargs["n"].update(low=message.additional_kwargs["n"].pop("deep")),
        lambda message: setattr(message, "name", "ada"),
        lambda message: message.model_fields_set.clear(),
        lambda message: message.model_extra.update(more=1),
    ],
)  # fmt: skip
async def test_what_a_reader_changed_and_let_go_of_is_not_given_to_the_next(
    sessions: SessionManager, change: Any
) -> None:
    saver = PerdureSaver(sessions)
    inner = {"n": {"deep": 1}, "list": [1], "x": None, "y": None}
    await stored(saver, {"messages": [HumanMessage("a", id="1", additional_kwargs=inner)]})
    await read_once(saver)
    message = await read_once(saver)
    before, fields = repr(message), set(message.model_fields_set)
    del message
    change(await read_once(saver))
    assert repr(again := await read_once(saver)) == before
    assert again.model_fields_set == fields


class Slotted(HumanMessage):
    """A message with something that is no field."""

    __slots__ = ("note",)


async def test_what_a_reader_put_into_a_slot_is_not_given_to_the_next(
    sessions: SessionManager,
) -> None:
    saver = PerdureSaver(sessions, types=[Slotted])
    await stored(saver, {"messages": [Slotted("a", id="1")]})
    message = await read_once(saver)
    assert type(message) is Slotted
    object.__setattr__(message, "note", "mine")
    del message
    assert not hasattr(await read_once(saver), "note")


@pytest.mark.parametrize(
    "part",
    [
        lambda message: message,
        vars,
        lambda message: message.additional_kwargs["n"],
        lambda message: message.model_fields_set,
        lambda message: message.model_extra,
    ],
)
async def test_what_somebody_has_a_part_of_is_not_given_to_the_next(
    sessions: SessionManager, part: Any
) -> None:
    saver = PerdureSaver(sessions)
    inner = {"n": {"deep": 1}}
    await stored(saver, {"messages": [HumanMessage("a", id="1", additional_kwargs=inner)]})
    held = part(await read_once(saver))
    assert part(await read_once(saver)) is not held
    assert part(await read_once(saver)) is not held


async def test_a_message_that_nobody_has_is_given_again(sessions: SessionManager) -> None:
    saver = PerdureSaver(sessions)
    inner = {"n": {"deep": 1}}
    await stored(saver, {"messages": [HumanMessage("a", id="1", additional_kwargs=inner)]})
    await read_once(saver)
    first = id(await read_once(saver))
    assert id(await read_once(saver)) == first


async def test_a_message_that_was_changed_in_place_is_stored_as_it_is(
    sessions: SessionManager,
) -> None:
    saver = PerdureSaver(sessions)
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    messages = [HumanMessage(f"{at}", id=f"{at}") for at in range(5)]
    for number in range(1, 6):
        messages[number - 1].additional_kwargs["seen"] = {"times": number}
        await saver.aput(config, *put_of({"messages": messages}, number=number))
        for reader in (saver, PerdureSaver(sessions)):
            assert await kept(reader) == {"messages": messages}


@pytest.mark.parametrize("messages", [[{"n": 1}, {"n": 0}], [HumanMessage("a", id="1")]])
async def test_a_number_that_became_an_equal_one_of_another_type_is_stored(
    sessions: SessionManager, messages: list[Any]
) -> None:
    saver = PerdureSaver(sessions)
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    first = messages[0] if type(messages[0]) is dict else messages[0].additional_kwargs
    for number, value in enumerate((1, True, 1.0, 1), 1):
        first["n"] = value
        await saver.aput(config, *put_of({"messages": messages}, number=number))
        assert repr(await kept(PerdureSaver(sessions))) == repr({"messages": messages})


async def test_what_a_growing_list_costs_is_what_was_added(sessions: SessionManager) -> None:
    saver, config = (
        PerdureSaver(sessions),
        {"configurable": {"thread_id": "t", "checkpoint_ns": ""}},
    )
    messages: list[AnyMessage] = []
    sizes = []
    for number in range(1, 61):
        messages.append(HumanMessage("x" * 300, id=f"{number}"))
        await saver.aput(config, *put_of({"messages": messages}, number=number))  # type: ignore[arg-type]
        sizes.append(await logged(sessions))
    assert sizes[-1] - sizes[-2] < 1.1 * (sizes[1] - sizes[0])


# Order, durability, and other processes


async def test_writes_are_in_the_log_before_the_checkpoint_that_follows_them(
    sessions: SessionManager,
) -> None:
    """Calls are appended in their order, whether the session is held yet or not."""
    saver = PerdureSaver(sessions)
    for number in (1, 2):
        about = {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": f"{number - 1:08}"}
        config: Any = {"configurable": about}
        async with asyncio.TaskGroup() as tasks:
            for task in "abc":
                tasks.create_task(saver.aput_writes(config, [("x", task)], f"{task}{number}"))
            tasks.create_task(saver.aput(config, *put_of({"x": "abc"}, number=number)))
    log = store_below(sessions).read_log(SessionKey("t"))
    records = [read_record(record) async for chunk in log for record in chunk.records]
    order = [each.put.id if each.put else each.writes.task for each in records if each]  # type: ignore[union-attr]
    assert order == ["a1", "b1", "c1", "00000001", "a2", "b2", "c2", "00000002"]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_what_a_run_has_returned_is_durable(tmp_path: Path, durability: Any) -> None:
    async with perdure.connect(f"sqlite:///{tmp_path}/threads.db") as sessions:
        graph = chat(State, PerdureSaver(sessions))
        for number in range(3):
            message = HumanMessage(f"{number}", id=f"h{number}")
            await graph.ainvoke({"messages": [message], "count": 0}, CONFIG, durability=durability)
            session = session_open_here(sessions, SessionKey("t"))
            assert session is not None
            assert session.durable_version == session.version


async def test_a_slow_store_gets_many_supersteps_at_once() -> None:
    store = SlowStore(MemoryStore(), nth=10**6)
    async with perdure.connect(store) as sessions:
        steps = 100
        graph = counter(PerdureSaver(sessions), steps)
        config: Any = {**CONFIG, "recursion_limit": steps + 5}
        await graph.ainvoke({"count": 0}, config, durability="async")
        assert store.calls["append_many"] < steps / 3


class SlowStore(FaultyStore):
    """A store that is far away."""

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        await anyio.sleep(0.02)
        return await super().append_many(batches)


def counter(saver: Any, steps: int) -> Any:
    """A graph that counts, a superstep for each number."""

    async def add(_: Any) -> Any:
        return {"count": 1}

    class Count(TypedDict):
        count: Annotated[int, operator.add]

    graph = StateGraph(Count)
    graph.add_node("add", add)
    graph.add_edge(START, "add")
    graph.add_conditional_edges("add", lambda state: "add" if state["count"] < steps else END)
    return graph.compile(checkpointer=saver)


async def test_two_runs_of_a_thread_at_the_same_time_lose_nothing(
    sessions: SessionManager,
) -> None:
    """Each is a branch of the history, as with LangGraph's own savers."""
    graph = chat(State, PerdureSaver(sessions))
    await graph.ainvoke({"messages": [HumanMessage("0", id="h0")], "count": 0}, CONFIG)
    results = await asyncio.gather(
        *(
            graph.ainvoke({"messages": [HumanMessage(text, id=f"h{text}")], "count": 0}, CONFIG)
            for text in "12"
        )
    )
    again = chat(State, PerdureSaver(sessions))
    history = [state.values.get("messages") async for state in again.aget_state_history(CONFIG)]
    assert all(result["messages"] in history for result in results)


async def test_a_run_that_was_overtaken_is_refused_and_told_by_whom() -> None:
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(one) as mine, perdure.connect(other) as theirs:
        saver, overtaker = PerdureSaver(mine), PerdureSaver(theirs)
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        await saver.aput(config, *put_of({"a": 1}))
        await overtaker.aget_tuple(config)
        await overtaker.aput(config, *put_of({"a": 2}, number=2))
        for _ in range(2):
            with pytest.raises(LeaseLostError, match=f"continued by .*{other.owner}"):
                await saver.aput(config, *put_of({"a": 3}, number=3))
        assert (await kept(saver)) == {"a": 2}  # which is what a new run begins with
        await saver.aput(config, *put_of({"a": 4}, number=4))
        assert (await kept(overtaker)) == {"a": 4}


@pytest.mark.parametrize("goes_on", [False, True], ids=["reads", "goes on"])
async def test_a_run_that_was_overtaken_is_refused_whoever_else_reads_the_thread_here(
    goes_on: bool,
) -> None:
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(one) as mine, perdure.connect(other) as theirs:
        saver, overtaker = PerdureSaver(mine), PerdureSaver(theirs)
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        first = await saver.aput(config, *put_of({"a": 1}))
        await overtaker.aget_tuple(config)
        theirs_now = await overtaker.aput(first, *put_of({"a": 2}, number=2))
        await overtaker.release("t")
        assert (await kept(saver)) == {"a": 2}
        if goes_on:
            await saver.aput(theirs_now, *put_of({"a": 3}, number=3))
        newest = await kept(saver)
        with pytest.raises(LeaseLostError, match=f"continued by .*{other.owner}"):
            await saver.aput(first, *put_of({"a": 4}, number=4))
        with pytest.raises(LeaseLostError, match=f"continued by .*{other.owner}"):
            await saver.aput_writes(first, [("a", 4)], "task")
        assert (await kept(saver)) == newest
        assert await saver.aget_tuple(first) is not None  # a run may begin with it now
        await saver.aput(first, *put_of({"a": 5}, number=5))


async def test_what_could_not_be_stored_is_not_shown() -> None:
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(one) as mine:
        saver = PerdureSaver(mine)
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        await saver.aput(config, *put_of({"a": 1}))
        await other.open()
        holder = await other.holder(SessionKey("t"))
        assert holder is not None
        await take_after(other, SessionKey("t"), after=holder.epoch)
        with pytest.raises(LeaseLostError, match=f"taken over by .*{other.owner}"):
            await saver.aput(config, *put_of({"a": 2}, number=2))
        assert await kept(saver) == {"a": 1}
        for lost in mine.lost:
            await lost.discard_unsaved()


async def test_a_thread_that_another_process_deleted_or_pruned_is_read_anew() -> None:
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(one) as mine, perdure.connect(other) as theirs:
        saver, another = PerdureSaver(mine), PerdureSaver(theirs)
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        for number in range(1, 5):
            await saver.aput(config, *put_of({"a": number}, number=number))
        await another.aprune(["t"])
        assert len([each async for each in saver.alist(config)]) == 1
        await another.adelete_thread("t")
        assert await saver.aget_tuple(config) is None
        await another.aput(config, *put_of({"a": "new"}))
        assert await kept(saver) == {"a": "new"}


@pytest.mark.parametrize("within", [False, True], ids=["graph", "subgraph"])
@pytest.mark.parametrize("next_run", [False, True], ids=["gone", "begun again"])
@pytest.mark.parametrize("how", ["adelete_thread", "forget"])
async def test_a_run_does_not_bring_a_deleted_thread_back(
    sessions: SessionManager, how: str, next_run: bool, within: bool
) -> None:
    class Log(TypedDict):
        log: Annotated[list[str], operator.add]

    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def wait(state: Log) -> Any:
        if "a telephone number" in state["log"]:
            begun.set()
            await goes_on.wait()
        return {"log": ["waited"]}

    inner = StateGraph(Log)
    inner.add_node("wait", wait)
    inner.add_node("end", lambda state: {"log": ["end"]})
    inner.add_edge(START, "wait")
    inner.add_edge("wait", "end")
    outer = StateGraph(Log)
    outer.add_node("first", lambda state: {"log": ["first"]})
    outer.add_node("second", inner.compile() if within else wait)
    outer.add_edge(START, "first")
    outer.add_edge("first", "second")
    saver = PerdureSaver(sessions)
    graph = outer.compile(checkpointer=saver)
    run = asyncio.create_task(graph.ainvoke({"log": ["a telephone number"]}, CONFIG))
    await begun.wait()
    while not [each async for each in saver.alist(CONFIG)]:
        await asyncio.sleep(0)
    thread_id = CONFIG["configurable"]["thread_id"]
    await (saver.adelete_thread(thread_id) if how != "forget" else sessions.forget(thread_id))
    if next_run:
        await graph.ainvoke({"log": ["new"]}, CONFIG)
    goes_on.set()
    with pytest.raises(LeaseLostError, match="was deleted"):
        await run
    state = (await graph.aget_state(CONFIG)).values
    assert state.get("log", ["new"])[0] == "new"
    assert bool(state) == next_run
    kept = [each async for each in saver.alist({"configurable": {"thread_id": thread_id}})]
    assert bool(kept) == next_run
    assert "a telephone number" not in str(kept)


async def test_a_thread_is_copied_once(sessions: SessionManager) -> None:
    saver = PerdureSaver(sessions)
    await stored(saver, {"a": 1})
    await saver.acopy_thread("t", "copy")
    copied = {"configurable": {"thread_id": "copy"}}
    assert (
        [found.checkpoint async for found in saver.alist(copied)]
        == [found.checkpoint async for found in saver.alist({"configurable": {"thread_id": "t"}})]
        != []
    )
    await stored(saver, {"a": 2})
    with pytest.raises(SessionError, match="copy"):
        await saver.acopy_thread("t", "copy")


# Synchronous calls


async def test_synchronous_calls_work_in_other_threads(sessions: SessionManager) -> None:
    saver = PerdureSaver(sessions)
    graph = chat(State, saver)
    message = {"messages": [HumanMessage("hello", id="h")], "count": 0}
    await anyio.to_thread.run_sync(lambda: graph.invoke(message, CONFIG))
    state = await graph.aget_state(CONFIG)
    assert await anyio.to_thread.run_sync(lambda: graph.get_state(CONFIG)) == state
    listed = await anyio.to_thread.run_sync(lambda: list(saver.list(CONFIG)))
    assert listed == [each async for each in saver.alist(CONFIG)]
    with pytest.raises(WrongLoopError, match="ainvoke"):
        graph.get_state(CONFIG)


def test_a_program_without_an_event_loop_uses_with(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/threads.db"
    with pytest.raises(WrongLoopError, match="with PerdureSaver.from_conn_string"):
        PerdureSaver.from_conn_string(url).get_tuple(CONFIG)
    for number in range(2):
        with PerdureSaver.from_conn_string(url) as saver:
            graph = chat(State, saver)
            message = HumanMessage(f"{number}", id=f"h{number}")
            values = graph.invoke({"messages": [message], "count": 0}, CONFIG)
            assert len(values["messages"]) == 3 * (number + 1)


# A session like any other


async def test_a_thread_is_a_session_that_is_listed_and_deleted(sessions: SessionManager) -> None:
    await conversation(chat(State, PerdureSaver(sessions)), CONFIG)
    (info,) = await sessions.list()
    assert info.key == SessionKey("t")
    await sessions.prune(Retention(keep_turns=0))
    fresh = chat(State, PerdureSaver(sessions))
    assert (await fresh.aget_state(CONFIG)).values
    await sessions.copy("t", "copy")
    assert await sessions.delete("t")
    copied: Any = {"configurable": {"thread_id": "copy"}}
    assert (await fresh.aget_state(copied)).values
    assert (await fresh.aget_state(CONFIG)).values == {}


@pytest.mark.deep
def test_a_killed_run_loses_nothing_that_was_said(tmp_path: Path) -> None:
    """Many more: ``python -m tests.adapters.kills langgraph``."""
    kills.run("langgraph", str(tmp_path / "store"), kills=3)


async def test_a_value_that_is_called_old_and_is_not_stored_is_stored(
    sessions: SessionManager,
) -> None:
    saver = PerdureSaver(sessions)
    config: Any = {"configurable": {"thread_id": "ada", "checkpoint_ns": ""}}
    values = {"text": "low tide", "list": [{"at": "noon"}], "none": None}
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, 3)
    first = await saver.aput(config, checkpoint, {}, {})  # as of a checkpoint made by hand
    second = {**empty_checkpoint(), "channel_versions": {"text": 4, "list": 3, "none": 3}}
    second["channel_values"] = {**values, "text": "high tide"}
    await saver.aput(first, second, {}, {"text": 4})
    for at, wanted in ((first, values), (config, {**values, "text": "high tide"})):
        found = await PerdureSaver(sessions).aget(at)
        assert found is not None
        assert found["channel_values"] == wanted


@pytest.mark.skipif(
    not hasattr(sys, "getrefcount"), reason="PyPy counts no references: each reader gets copies"
)
def test_a_message_that_a_weak_reference_has_is_not_given_again() -> None:
    from perdure.adapters.thread_values import LentItems, Original

    message = HumanMessage("hello")
    lent = LentItems()
    same = id(lent.give(("a",), [Original(message, message.__dict__)])[0])

    def given() -> Any:
        return lent.give((), [])[0]

    assert id(given()) == same
    watched = weakref.ref(given())
    assert given() is not watched()
    changed = given()
    changed.__class__ = AIMessage
    del changed
    assert type(given()) is HumanMessage


def test_an_item_that_cannot_be_compared_is_stored_as_changed() -> None:
    class Ambiguous:
        def __eq__(self, other: object) -> bool:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    from perdure.adapters import thread_values

    stored = thread_values._Stored([dict], [{"a": None}], ["x"], {})
    assert thread_values._same(stored, [dict], [{"a": Ambiguous()}]) == 0


async def test_a_put_that_waits_for_the_lease_stores_values_as_they_were(
    sessions: SessionManager,
) -> None:
    saver = PerdureSaver(sessions)
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    values: dict[str, Any] = {"a": ["before"], "b": 1}
    checkpoint, metadata, _ = put_of(values)
    versions = {"b": 1}  # "a" is not named as new, and no value of it is stored
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(saver.aput, config, checkpoint, metadata, versions)
        await anyio.lowlevel.checkpoint()
        values["a"].append("after")
    assert (await kept(saver))["a"] == ["before"]


def test_a_store_that_does_not_open_leaves_no_thread_behind(tmp_path: Path) -> None:
    with (
        pytest.raises(perdure.PerdureError),
        PerdureSaver.from_conn_string(f"sqlite:///{tmp_path}/missing/folder/a.db"),
    ):
        pass
    names = [thread.name for thread in threading.enumerate()]
    assert not any("perdure adapter" in name for name in names)  # or the process never ends


def test_a_synchronous_call_while_the_loop_does_not_run_is_refused() -> None:
    loop = asyncio.new_event_loop()
    manager = perdure.connect("memory:")
    saver = PerdureSaver(loop.run_until_complete(manager.__aenter__()))
    with pytest.raises(WrongLoopError, match="is not running"):
        saver.get_tuple(CONFIG)
    loop.run_until_complete(manager.__aexit__(None, None, None))
    loop.close()


# Lists


async def put(
    saver: BaseCheckpointSaver[Any], thread: str, n: str, ns: str = "", **about: Any
) -> None:
    config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ns, **about}}
    await saver.aput(config, empty_checkpoint(), {"n": n, **about}, {})  # type: ignore[typeddict-unknown-key]


async def listed(saver: BaseCheckpointSaver[Any], config: Any = None, **options: Any) -> list[str]:
    return [each.metadata["n"] async for each in saver.alist(config, **options)]  # type: ignore[typeddict-item]


async def test_the_newest_checkpoints_are_listed_first_over_threads_and_namespaces() -> None:
    store = NotedReads(MemoryStore())
    async with perdure.connect(store) as sessions:
        saver = PerdureSaver(sessions)
        for round in range(3):
            for thread in "abc":
                await put(saver, thread, f"{thread}{round}", "sub" if round == 1 else "")
        newest = [f"{thread}{round}" for round in (2, 1, 0) for thread in "cba"]
        assert await listed(saver) == newest
        assert await listed(saver, limit=3) == newest[:3]
        assert await listed(saver, limit=3, filter={"n": "a1"}) == ["a1"]
        assert await listed(saver, {"configurable": {"thread_id": "a"}}) == ["a2", "a1", "a0"]
        only = {"configurable": {"thread_id": "a", "checkpoint_ns": "sub"}}
        assert await listed(saver, only) == ["a1"]
    async with perdure.connect(NotedReads(store.inner)) as again:  # as another process
        assert await listed(PerdureSaver(again)) == newest


async def test_a_few_checkpoints_are_listed_without_reading_every_thread() -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        saver = PerdureSaver(sessions, owner="user_id")
        for number in range(20):
            await put(saver, f"t{number}", f"{number}", user_id="ann" if number < 2 else "bob")
        store = NotedReads(MemoryStore(backing=backing))
        async with perdure.connect(store) as other:  # while the first one has them in use
            saver = PerdureSaver(other, owner="user_id")
            store.forget()
            assert await listed(saver, limit=3) == ["19", "18", "17"]
            assert len(store.queries) == 1
            assert len(store.read) <= 4
            store.forget()
            assert await listed(saver, filter={"user_id": "ann"}) == ["1", "0"]
            assert {key.agent for key in store.read} == {"t0", "t1"}
        assert [info.owner for info in await sessions.list(limit=3)] == ["ann", "ann", "bob"]


@pytest.mark.parametrize("where", ["here", "closed", "elsewhere"])
async def test_a_thread_has_one_owner(where: str) -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        saver = PerdureSaver(sessions, owner="user_id")
        await put(saver, "t", "1", user_id="ann")
        if where == "closed":
            await (await sessions.open("t")).aclose()
        async with perdure.connect(MemoryStore(backing=backing)) as other:
            if where == "elsewhere":
                saver = PerdureSaver(other, owner="user_id")
            for _ in range(2):  # what was refused once is refused again
                bob: Any = {"configurable": {"thread_id": "t", "user_id": "bob"}}
                with pytest.raises(OwnerMismatchError):
                    await saver.aget_tuple(bob)
                with pytest.raises(OwnerMismatchError):
                    await listed(saver, bob)
                with pytest.raises(OwnerMismatchError):
                    await saver.aget_delta_channel_history(config=bob, channels=["log"])
                with pytest.raises(OwnerMismatchError):
                    await put(saver, "t", "2", user_id="bob")
            for about in ({"user_id": "ann"}, {}):
                config: Any = {"configurable": {"thread_id": "t", **about}}
                assert await listed(saver, config) == ["1"]
            await put(saver, "t", "3", user_id="ann")
