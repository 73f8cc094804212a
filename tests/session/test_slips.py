"""Slips of a first hour: each error says what to write."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    Autosave,
    ConfigError,
    InvalidArgumentError,
    LeaseOptions,
    Limits,
    Message,
    NotStorableError,
    Retention,
    SessionError,
    Shutdown,
    WrongLoopError,
    connect,
    sync,
)
from perdure.agent import Agent, AgentConfig, CompactionPolicy, ScriptedModel
from perdure.stores.wrapped.compressed import CompressedStore
from perdure.stores.wrapped.encrypted import EncryptedStore

pytestmark = pytest.mark.anyio


def agent(**options: Any) -> AgentConfig:
    return AgentConfig(name="ada", model=ScriptedModel("Yes"), **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Autosave(interval=5),
            r"Autosave\(\) has no option 'interval'.* It has debounce, ",
        ),  # type: ignore[call-arg]
        (lambda: Shutdown(deadlines=3), r"Shutdown\(\) .*: did you mean 'deadline'\?"),  # type: ignore[call-arg]
        (lambda: LeaseOptions(hearbeat=3), r"LeaseOptions\(\) .* 'hearbeat': did you mean 'heartb"),  # type: ignore[call-arg]
        (lambda: Retention(keep_turn=3), "did you mean 'keep_turns'"),  # type: ignore[call-arg]
        (lambda: AgentConfig(modle="x"), "did you mean 'model'"),  # type: ignore[call-arg]
        (lambda: CompactionPolicy(max_token=3), "did you mean 'max_tokens'"),  # type: ignore[call-arg]
        (lambda: connect("memory:", autosav=None), r"connect\(\) .*: did you mean 'autosave'\?"),  # type: ignore[call-arg]
        (lambda: sync.connect("memory:", limit=None), "did you mean 'limits'"),  # type: ignore[call-arg]
    ],
)
def test_an_option_that_a_group_does_not_have_is_named_with_the_nearest(
    make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Autosave(max_delay="5"), "max_delay='5': it must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: Autosave(max_delay=-1), "max_delay=-1: it must be a number of seconds"),
        (lambda: LeaseOptions(ttl="9"), "numbers of seconds"),  # type: ignore[arg-type]
        (lambda: Limits(record_bytes=32 << 20), "no store takes a record of more than 16777216"),
        (lambda: Message.user(5), "content of type int: give text"),  # type: ignore[arg-type]
        (lambda: Retention(keep_turns="10"), r"keep_turns='10'\): it must be a whole"),  # type: ignore[arg-type]
        (lambda: agent(tools=print), "invalid tools=.*: give a list"),
        (lambda: agent(mcp="uvx server"), "invalid mcp=.*: give a list, such as .'uvx server'"),
        (lambda: agent(tool_timeout="5"), "invalid tool_timeout='5': give seconds above 0"),
        (lambda: agent(summarizer=5), "invalid summarizer=5: it needs a method summarize"),
        (lambda: agent(memory_storage={}), "invalid memory_storage={}: it needs a method flush"),
        (lambda: agent(compaction=5), r"invalid compaction=5: give CompactionPolicy\("),
        (lambda: agent(features={"memory": True}), r"invalid features=.*: give Features\("),
        (lambda: EncryptedStore("sqlite:///a.db", b"k" * 32), "a str in place of a store"),  # type: ignore[arg-type]
        (lambda: CompressedStore("a"), "CompressedStore got a str in place of a store"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_cannot_be_is_refused_where_it_is_given(
    make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        make()


async def test_a_path_that_names_a_database_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "agents.db"
    for given in (str(place), place):
        with pytest.raises(ConfigError, match=f"write 'sqlite:///{place}', or 'file:{place}'"):
            connect(given)
    async with connect(f"file:{place}") as sessions:
        assert await sessions.list() == []
    async with connect(place):  # a store of files that is there is opened as before
        pass


async def test_an_option_that_an_open_does_not_have_is_named_with_the_nearest() -> None:
    async with connect("memory:") as sessions:
        with pytest.raises(TypeError, match=r"open\(\) has no option 'ownr': .* 'owner'\?"):
            sessions.open("ada", ownr="x")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="open"):
            sessions.open()  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="'instruction' is no option: .* 'instructions'"):
        await Agent.create("ada", model=ScriptedModel("Yes"), instruction="Be brief.")
    with pytest.raises(InvalidArgumentError, match="5 is no tool: give a function"):
        await Agent.create("ada", model=ScriptedModel("Yes"), tools=[5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("url", "meant"), [("postgre://host/x", "'postgres'"), ("sqllite:///x", "'sqlite'")]
)
def test_a_kind_of_store_that_is_misspelt_is_named_with_the_nearest(url: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}. Use a path"):
        connect(url)
    with pytest.raises(ConfigError, match="by 'mysql': use a path"):
        connect("mysql://host/x")


async def test_what_is_async_says_so_where_it_is_entered_by_with() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(TypeError, match="`async with sessions.open"):
            with sessions.open("ada"):  # type: ignore[attr-defined]
                pass
        with pytest.raises(TypeError, match=r"`async with session.turn\(\)`"):
            with session.turn():  # type: ignore[attr-defined]
                pass


async def test_a_method_by_another_name_says_its_name() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        agent = await Agent.create("bob", model=ScriptedModel("Yes"))
        names = [
            (sessions, "close", "sessions.aclose"),
            (sessions, "create", "sessions.open"),
            (sessions, "get", "sessions.open.*sessions.load"),
            (session, "close", "session.aclose"),
            (session, "messages", "session.context"),
            (session, "add_message", r"session.append\(Message.user"),
            (agent, "aclose", "agent.stop"),
            (agent, "run", "agent.ask"),
        ]
        for thing, name, cure in names:
            assert not hasattr(thing, name)
            with pytest.raises(AttributeError, match=cure) as raised:
                getattr(thing, name)
            assert "Did you mean" not in "".join(traceback.format_exception(raised.value))
        await agent.stop()


async def test_what_is_no_item_says_how_it_is_appended() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(NotStorableError, match=r"append\(\*items\)"):
            session.append([Message.user("Q")])
        with pytest.raises(NotStorableError, match="the dict has no role"):
            session.append({"content": "Q"})
        with pytest.raises(NotStorableError, match="invalid role 'human'"):
            session.append({"role": "human", "content": "Q"})
        with pytest.raises(InvalidArgumentError, match="context format 5 is unknown"):
            session.context(5)  # type: ignore[call-overload]
        assert session.context() == []


async def test_a_turn_that_waited_for_the_turn_it_was_begun_in_names_the_cure() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:

        async def child() -> None:
            with pytest.raises(SessionError, match="'one', in which it was begun.*turn.append"):
                async with session.turn("two", timeout=0.0):
                    raise AssertionError

        async with session.turn("one"), anyio.create_task_group() as tasks:
            tasks.start_soon(child)


async def test_a_model_of_a_coroutine_function_is_refused() -> None:
    async def answer(messages: Any) -> str:
        raise AssertionError

    with pytest.raises(InvalidArgumentError, match="coroutine function 'answer'"):
        ScriptedModel(answer)  # type: ignore[arg-type]


async def test_the_ways_that_another_thread_is_told_of_work(anyio_backend_name: str) -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(WrongLoopError) as raised:
            await anyio.to_thread.run_sync(session.append, Message.user("Q"))
        for way in ("anyio.from_thread.run_sync", "call_soon_threadsafe", "run_coroutine_threads"):
            assert way in str(raised.value)

        def by_anyio() -> None:
            anyio.from_thread.run_sync(session.append, Message.user("Q"))

        await anyio.to_thread.run_sync(by_anyio)
        assert len(session.context()) == 1
        if anyio_backend_name != "asyncio":
            return
        loop, done = asyncio.get_running_loop(), anyio.Event()

        def by_loop() -> None:
            loop.call_soon_threadsafe(session.append, Message.user("Q"))
            asyncio.run_coroutine_threadsafe(session.save(), loop).result()
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=by_loop).start()
        await done.wait()
        assert len(session.context()) == 2
