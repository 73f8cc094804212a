"""Databases that LangGraph's own savers have written, imported."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from anyio import to_thread

pytest.importorskip("langgraph.checkpoint.sqlite.aio")

import ormsgpack
from langchain_core.messages import AnyMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import _messages_delta_reducer, add_messages
from langgraph.types import Command, interrupt

import perdure
from perdure import Message, SessionManager
from perdure.adapters import PerdureSaver
from perdure.adapters.imports import SdkImport, import_sessions
from perdure.adapters.langgraph_import import source_of
from perdure.errors import ConfigError, FormatError, SessionError
from tests.adapters.import_kills import killed_imports
from tests.servers.pooler import WAYS, reached
from tests.servers.postgres import database


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """LangGraph runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


@dataclass
class Plan:
    steps: list[str]


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    notes: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer, snapshot_frequency=3)]
    total: Annotated[int, operator.add]
    plan: Plan
    parts: set[str]


class Inner(TypedDict):
    total: Annotated[int, operator.add]
    answer: str


def built(saver: BaseCheckpointSaver[Any]) -> Any:
    """Return a graph with a subgraph, an approval, a delta channel and a class of one's own."""

    async def ask(state: Inner) -> dict[str, Any]:
        return {"total": 1, "answer": interrupt("sail?")}

    inner = StateGraph(Inner)
    inner.add_node(ask)
    inner.add_edge(START, "ask")

    async def think(state: State) -> dict[str, Any]:
        text = f"thing {len(state['messages'])}"
        return {
            "messages": [("ai", text)],
            "notes": [{"role": "ai", "content": text, "id": text}],
            "total": 2,
            "plan": Plan([text]),
            "parts": {text},
        }

    graph = StateGraph(State)
    graph.add_node(think)
    graph.add_node("inner", inner.compile())
    graph.add_edge(START, "think")
    graph.add_edge("think", "inner")
    return graph.compile(checkpointer=saver)


def config(thread: str, **more: Any) -> Any:
    return {"configurable": {"thread_id": thread, **more}}


async def talk(graph: Any, thread: str, turns: int, *, is_answered: bool = True) -> None:
    for turn in range(turns):
        given = {"messages": [("user", f"question {turn}")], "notes": [], "total": 0}
        await graph.ainvoke(given, config(thread))
        if is_answered or turn < turns - 1:
            await graph.ainvoke(Command(resume=f"yes {turn}"), config(thread))


async def filled(saver: BaseCheckpointSaver[Any]) -> None:
    graph = built(saver)
    await talk(graph, "ada", 4)
    await talk(graph, "waiting", 2, is_answered=False)
    history = [each async for each in graph.aget_state_history(config("ada"))]
    await graph.aupdate_state(history[5].config, {"total": 100})  # a fork
    await graph.aupdate_state(config("noted"), {"messages": [("user", "noted")], "notes": []})


@asynccontextmanager
async def own_saver(path: Path, **options: Any) -> AsyncIterator[AsyncSqliteSaver]:
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        saver.serde = JsonPlusSerializer(
            allowed_msgpack_modules=[(Plan.__module__, "Plan")], **options
        )
        yield saver


async def imported(url: object, sessions: SessionManager, **options: Any) -> SdkImport:
    async with source_of(str(url)) as source:
        return await import_sessions(source, sessions, **options)


async def all_of(saver: BaseCheckpointSaver[Any], *threads: str) -> list[CheckpointTuple]:
    found = [
        each
        for thread in threads
        async for each in saver.alist({"configurable": {"thread_id": thread}})
    ]
    return sorted(found, key=lambda each: str(each.config))


THREADS = "ada", "noted", "waiting"


async def require_equal(own: BaseCheckpointSaver[Any], saver: PerdureSaver) -> None:
    assert await all_of(saver, *THREADS) == await all_of(own, *THREADS)
    for thread in THREADS:
        theirs, ours = built(own), built(saver)
        state = await theirs.aget_state(config(thread))
        assert await ours.aget_state(config(thread)) == state
        history = [each async for each in theirs.aget_state_history(config(thread))]
        assert [each async for each in ours.aget_state_history(config(thread))] == history


async def test_threads_read_back_as_langgraph_has_them(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    async with own_saver(path) as own:
        await filled(own)
        done = await imported(path, sessions)
        assert (done.sessions, done.imported, done.failed) == (3, 3, {})
        assert done.added == len(await all_of(own, *THREADS))
        saver = PerdureSaver(sessions, types=[Plan])
        await require_equal(own, saver)

        for each in (own, saver):  # and both go on alike
            await built(each).ainvoke(Command(resume="yes"), config("waiting"))
        state = await built(own).aget_state(config("waiting"))
        assert (await built(saver).aget_state(config("waiting"))).values == state.values


async def test_the_source_is_not_changed(tmp_path: Path, sessions: SessionManager) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "threads.db"
    async with own_saver(path) as own:
        await filled(own)
    os.chmod(path, 0o444)
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns

    assert not (await imported(path, sessions)).failed

    assert (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) == before
    assert [each.name for each in folder.iterdir()] == ["threads.db"]


async def test_an_import_is_repeated_and_doubles_nothing(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    async with own_saver(path) as own:
        await filled(own)
        first = await imported(path, sessions)
        again = await imported(path, sessions)
        assert (again.there, again.added) == (3, 0)

        # Also the writes of a checkpoint that was the newest one then.
        await built(own).ainvoke(Command(resume="yes"), config("waiting"))
        await talk(built(own), "ada", 1)
        more = await imported(path, sessions)
        assert (more.continued, more.there, more.failed) == (2, 1, {})
        assert 0 < more.added < first.added
        await require_equal(own, PerdureSaver(sessions, types=[Plan]))


async def test_an_import_that_was_killed_goes_on(tmp_path: Path, sessions: SessionManager) -> None:
    path = tmp_path / "threads.db"
    async with own_saver(path) as own:
        await filled(own)
        async with source_of(str(path)) as source:
            read, calls = source._read, []

            async def killed(*about: Any) -> Any:
                calls.append(about)
                if len(calls) == 20:  # a batch is stored, the next one is not
                    raise KeyboardInterrupt
                return await read(*about)

            source._read = killed  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                await import_sessions(source, sessions)

        done = await imported(path, sessions)
        assert (done.continued, done.failed) == (1, {})
        await require_equal(own, PerdureSaver(sessions, types=[Plan]))


@pytest.mark.deep
async def test_an_import_that_is_killed_anywhere_ends_as_one_that_was_not(tmp_path: Path) -> None:
    path, store = tmp_path / "threads.db", tmp_path / "killed"
    async with own_saver(path) as own:
        await filled(own)
        kills = await to_thread.run_sync(lambda: killed_imports("langgraph", path, store, step=15))
        assert kills > 2
        async with perdure.connect(store) as sessions:
            await require_equal(own, PerdureSaver(sessions, types=[Plan]))


async def test_a_thread_that_went_on_here_is_left_alone(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    async with own_saver(path) as own:
        await filled(own)
        await imported(path, sessions)
        saver = PerdureSaver(sessions, types=[Plan])
        await built(saver).ainvoke(Command(resume="here"), config("waiting"))
        await talk(built(saver), "ada", 1)
        assert (await imported(path, sessions)).there == 3
        before = await all_of(saver, "ada")

        await talk(built(own), "ada", 1)
        done = await imported(path, sessions)

        assert list(done.failed) == ["ada"]
        assert "it has gone on since" in done.failed["ada"]
        assert await all_of(saver, "ada") == before


async def test_a_class_that_nobody_named_is_kept_for_whoever_names_it(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    async with own_saver(path) as own:
        await filled(own)
        await imported(path, sessions)
        with pytest.raises(FormatError, match="channel 'plan' cannot be read back.*Plan"):
            await PerdureSaver(sessions).aget_tuple(config("ada"))
        found = await PerdureSaver(sessions, types=[Plan]).aget_tuple(config("ada"))
        assert found is not None
        assert isinstance(found.checkpoint["channel_values"]["plan"], Plan)


class Running:
    """What runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


async def test_stored_code_is_not_run(tmp_path: Path, sessions: SessionManager) -> None:
    path, marker = tmp_path / "threads.db", tmp_path / "was run"
    call = ormsgpack.packb(["os", "mkdir", str(marker)])
    evil = ormsgpack.Ext(0, call)
    async with own_saver(path, pickle_fallback=True) as own:
        saved = await own.aput(
            config("pickled", checkpoint_ns=""),
            {**empty_checkpoint(), "channel_values": {"x": Running(marker)}},
            {},
            {"x": 1},
        )
        saved = await own.aput(config("evil", checkpoint_ns=""), empty_checkpoint(), {}, {})
        await own.aput_writes(saved, [("x", Running(marker)), ("y", 1)], "task")
    with closing(sqlite3.connect(path)) as connection:
        (stored,) = connection.execute(
            "SELECT checkpoint FROM checkpoints WHERE thread_id = 'evil'"
        ).fetchone()
        plain = ormsgpack.unpackb(stored, option=ormsgpack.OPT_NON_STR_KEYS)
        plain |= {"channel_values": {"e": evil}, "channel_versions": {"e": 1}}
        connection.execute(
            "UPDATE checkpoints SET checkpoint = ? WHERE thread_id = 'evil'",
            [ormsgpack.packb(plain, option=ormsgpack.OPT_NON_STR_KEYS)],
        )
        connection.commit()

    done = await imported(path, sessions)

    assert "stored as pickle as a whole" in done.failed["pickled"]
    assert done.imported == 1
    with pytest.raises(FormatError, match="os.mkdir, which is not allowed"):
        await PerdureSaver(sessions).aget_tuple(config("evil"))
    assert not marker.exists()


async def test_a_database_of_an_old_version_is_imported(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    plain = {**empty_checkpoint(), "v": 1, "channel_versions": {"messages": 3, "n": 3}}
    message = {
        "lc": 2,
        "type": "constructor",
        "id": ["langchain_core", "messages", "human", "HumanMessage"],
        "kwargs": {"content": "Hello", "type": "human", "id": "1"},
    }
    plain["channel_values"] = {"messages": [message], "n": 3}
    with closing(sqlite3.connect(path)) as connection:  # as in 2024: JSON, and no path of a task
        connection.executescript(OLD)
        row = "ada", "", plain["id"], "json", json.dumps(plain), json.dumps({"step": 1})
        connection.execute("INSERT INTO checkpoints VALUES (?, ?, ?, NULL, ?, ?, ?)", row)
        row = "ada", "", plain["id"], "task", 0, "n", "json", b"4"
        connection.execute("INSERT INTO writes VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.commit()

    assert (await imported(path, sessions)).failed == {}

    saver = PerdureSaver(sessions)
    async with own_saver(path) as own:
        assert await all_of(saver, "ada") == await all_of(own, "ada")
    (found,) = await all_of(saver, "ada")
    assert found.checkpoint["channel_values"]["messages"][0].content == "Hello"


OLD = """
CREATE TABLE checkpoints (thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL DEFAULT '',
    checkpoint_id TEXT NOT NULL, parent_checkpoint_id TEXT, type TEXT, checkpoint BLOB,
    metadata BLOB, PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id));
CREATE TABLE writes (thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL DEFAULT '',
    checkpoint_id TEXT NOT NULL, task_id TEXT NOT NULL, idx INTEGER NOT NULL, channel TEXT NOT NULL,
    type TEXT, value BLOB,
    PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, task_id, idx));
"""


async def test_a_write_keeps_its_index(tmp_path: Path, sessions: SessionManager) -> None:
    path = tmp_path / "threads.db"
    writes = [("a", 1), ("__interrupt__", "i"), ("b", 2), ("__resume__", "r"), ("c", 3)]
    async with own_saver(path) as own:
        saved = await own.aput(config("ada", checkpoint_ns=""), empty_checkpoint(), {}, {})
        await own.aput_writes(saved, writes, "task", "path")
        await imported(path, sessions)
        saver = PerdureSaver(sessions)
        await saver.aput_writes(saved, writes, "task", "path")  # as a run that is repeated does
        assert await all_of(saver, "ada") == await all_of(own, "ada")


@pytest.mark.parametrize("way", WAYS)
async def test_threads_in_postgresql_are_read_in_read_only_transactions(
    sessions: SessionManager, way: str
) -> None:
    savers = pytest.importorskip("langgraph.checkpoint.postgres.aio")
    with database("langgraph") as url:
        serde = JsonPlusSerializer(allowed_msgpack_modules=[(Plan.__module__, "Plan")])
        async with savers.AsyncPostgresSaver.from_conn_string(url, serde=serde) as own:
            await own.setup()
            await filled(own)
            with reached(url, way) as address:
                done = await imported(address, sessions)
                assert (done.imported, done.failed) == (3, {})
                await require_equal(own, PerdureSaver(sessions, types=[Plan]))

                async with source_of(address) as source:
                    with pytest.raises(Exception, match="read-only transaction"):
                        await source._saver.adelete_thread("ada")


async def test_what_is_no_database_of_the_sdk_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").close()
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="no table checkpoints"):
            await stack.enter_async_context(source_of(str(tmp_path / "empty.db")))
        with pytest.raises(ConfigError, match="mysql:// cannot be imported"):
            await stack.enter_async_context(source_of("mysql://localhost/agents"))


async def test_a_session_of_another_sdk_is_left_alone(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        for thread in ("ada", "bob"):
            where = config(thread, checkpoint_ns="")
            await saver.aput(where, empty_checkpoint(), {"source": "loop", "step": 1}, {})
    async with sessions.open("ada") as session:
        session.append(Message(role="user", content="hello"))
        await session.save()

    done = await imported(path, sessions)

    assert (done.imported, list(done.failed)) == (1, ["ada"])
    assert "no LangGraph thread" in done.failed["ada"]
    await PerdureSaver(sessions).aprune(["ada"])
    view = await sessions.load("ada")
    assert view is not None
    assert [item.value.content for item in await view.history()] == ["hello"]


async def test_a_thread_takes_no_items_of_another_sdk(
    tmp_path: Path, sessions: SessionManager
) -> None:
    pytest.importorskip("agents")
    from perdure.adapters import PerdureSession

    saver = PerdureSaver(sessions)
    where = config("ada", checkpoint_ns="")
    await saver.aput(where, empty_checkpoint(), {"source": "loop", "step": 1}, {})
    with pytest.raises(SessionError, match="is a LangGraph thread"):
        await PerdureSession("ada", sessions).add_items([{"role": "user", "content": "hello"}])
    await saver.release("ada")
    with pytest.raises(SessionError, match="is a LangGraph thread"):
        await PerdureSession("ada", sessions).add_items([{"role": "user", "content": "hello"}])


async def test_a_thread_that_cannot_be_stored_holds_up_no_other(
    tmp_path: Path, sessions: SessionManager
) -> None:
    path = tmp_path / "threads.db"
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        for thread, note in (("", ""), ("large", "x" * 20_000_000), ("ok", "")):
            where, about = config(thread, checkpoint_ns=""), {"source": "loop", "note": note}
            await saver.aput(where, empty_checkpoint(), about, {})  # type: ignore[arg-type]

    done = await imported(path, sessions)

    assert (done.imported, [*done.failed]) == (1, ["''", "large"])
