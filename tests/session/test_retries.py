"""A turn that was cut before its end, and is tried again under its id: here or elsewhere."""

from __future__ import annotations

import contextlib
import inspect
import pydoc
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from perdure import (
    EngineOptions,
    Message,
    Session,
    StoreUnavailableError,
    ToolCall,
    Turn,
    TurnReusedError,
    connect,
)
from perdure.agent import Agent, ScriptedModel
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.records import TURN, Entry
from perdure.session.internals import accept
from perdure.store import LogChunk, Status
from perdure.stores.memory import MemoryStore
from perdure.sync import connect as connect_blocking
from tests.session.conftest import Connect
from tests.session.test_meanwhile import Store

pytestmark = pytest.mark.anyio

KILLED = """
import asyncio, os, signal, sys
import perdure

async def main():
    async with perdure.connect(sys.argv[1]) as sessions, sessions.open("ada") as session:
        async with session.turn("first"):
            session.append(perdure.Message.user("Hello"), perdure.Message.assistant("Hello, Ada"))
        async with session.turn("request-17"):
            session.append(perdure.Message.user("Q"))
            await session.save()
            os.kill(os.getpid(), signal.SIGKILL)  # amid the model's answer

asyncio.run(main())
"""
BEFORE = ["Hello", "Hello, Ada"]


async def ask(session: Session, op: str = "request-17", text: str = "Q") -> None:
    """What an application does, the first time and every other."""
    async with session.turn(op) as turn:
        if not turn.replayed:
            session.append(Message.user(text))
            await session.save()
            session.append(Message.assistant("A"))


async def broken(session: Session, op: str = "request-17") -> None:
    with pytest.raises(ConnectionError):
        async with session.turn(op):
            session.append(Message.user("Q"))
            await session.save()
            raise ConnectionError


async def cut_amid(session: Session, message: Message | dict[str, str], *after: Message) -> None:
    """Cut a turn in which another task, from before it, has appended and saved a message."""
    in_turn, told = anyio.Event(), anyio.Event()

    async def other() -> None:
        await in_turn.wait()
        session.append(message)
        await session.save()
        told.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        with pytest.raises(ConnectionError):
            async with session.turn("request-17"):
                session.append(Message.user("Q"))
                in_turn.set()
                await told.wait()
                session.append(*after)
                raise ConnectionError


def said(session: Session) -> list[str]:
    return [message.text for message in session.context()]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("scheme", ["file", "sqlite"])
async def test_a_retry_after_a_kill_leaves_one_question_and_one_answer(
    scheme: str, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'data'}" if scheme == "file" else f"sqlite:///{tmp_path / 'x.db'}"
    died = await anyio.run_process([sys.executable, "-c", KILLED, url], check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    async with connect(url) as sessions, sessions.open("ada", wait=60) as session:
        assert said(session) == [*BEFORE, "Q"]
        await ask(session)
        await ask(session)  # the client has not seen the answer
        assert said(session) == [*BEFORE, "Q", "A"]
        history = [item.value for item in await session.history()]
        assert [one.text for one in history if isinstance(one, Message)] == [*BEFORE, "Q", "A"]
    async with connect(url) as sessions, sessions.open("ada") as session:
        assert said(session) == [*BEFORE, "Q", "A"]


async def test_a_retry_after_an_error_takes_back_what_the_attempt_had() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        session.append(Message.user("of no turn"))
        await broken(session)
        await broken(session)
        async with session.turn("request-17") as turn:
            assert [message.text for message in turn.messages] == ["Q"]
            assert (turn.replayed, turn.resumed) == (False, False)
            assert said(session) == ["of no turn"]
        await ask(session)
        assert said(session) == ["of no turn"]


@pytest.mark.parametrize("reopened", [False, True])
async def test_what_another_task_appended_amid_the_attempt_is_not_taken_back(
    reopened: bool,
) -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await cut_amid(session, Message.user("paid"), Message.assistant("half an"))
        if reopened:
            await session.aclose()
        again = await sessions.open("ada")
        await ask(again)
        assert said(again) == ["paid", "Q", "A"]
        history = [item.value for item in await again.history()]
        assert [one.text for one in history if isinstance(one, Message)] == said(again)


@pytest.mark.parametrize("size", range(100, 200, 9))
async def test_an_append_amid_another_task_s_turn_that_is_refused_appends_nothing(
    size: int,
) -> None:
    """Where there is room for one record only, that is not the message with an error."""
    engine = EngineOptions(dirty_hard=2_000, dirty_soft=1_000, outage_policy="reject")
    store = Store()
    async with connect(store, engine=engine) as sessions, sessions.open("ada") as session:
        refused = anyio.Event()

        async def other() -> None:
            with pytest.raises(StoreUnavailableError):
                while True:
                    session.append(Message.user("m" * size))
                    sent.append("m" * size)
            refused.set()

        sent: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            async with session.turn("request-17"):
                store.refuses = Status.TRANSIENT
                await refused.wait()
                assert said(session) == sent
                store.refuses = None
                await session.save()
        assert sent


async def test_what_tasks_of_the_turn_appended_is_taken_back() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:

        async def tool(text: str) -> None:
            await checkpoint()
            async with sessions.open("other") as other, other.turn():
                other.append(Message.user(text))
                session.append(Message.user(text))

        with pytest.raises(ConnectionError):
            async with session.turn("request-17"):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(tool, "one")
                    tasks.start_soon(tool, "two")
                raise ConnectionError
        assert sorted(said(session)) == ["one", "two"]
        await ask(session)
        assert said(session) == ["Q", "A"]


async def test_a_users_message_from_outside_stays_also_as_a_dict() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await cut_amid(session, {"role": "user", "content": "paid"})
        await ask(session)
        assert "paid" in said(session)


async def test_what_a_hook_of_a_save_appends_stays_whoever_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        notes = [Message.user("note")]

        async def note(session: Session) -> None:
            if notes:
                session.append(notes.pop())

        sessions.on("before_save", note)
        await broken(session)
        assert said(session) == ["Q", "note"]
        await ask(session)
        assert said(session) == ["note", "Q", "A"]
    assert caplog.records == []  # it cannot do otherwise


async def test_a_retry_that_goes_on_has_what_was_its_own() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await cut_amid(session, Message.user("paid"))
        async with session.turn("request-17", resume=True) as turn:
            assert turn.resumed
            assert [message.text for message in turn.messages] == ["Q"]
            assert said(session) == ["Q", "paid"]


async def test_what_is_saved_while_a_retry_looks_for_its_attempt_stays() -> None:
    store = Store()
    async with connect(store) as sessions, sessions.open("ada") as session:
        await broken(session)
        read_log = MemoryStore.read_log

        async def meanwhile(key: SessionKey, **where: Any) -> AsyncGenerator[LogChunk, None]:
            chunks = [chunk async for chunk in read_log(store, key, **where)]
            await store._call(store.hooks, "read_log")
            for chunk in chunks:
                yield chunk

        async def pay() -> None:
            session.append(Message.user("paid"))
            await session.save()

        store.read_log = meanwhile  # type: ignore[method-assign]
        store.hooks["read_log"] = pay
        await ask(session)
        assert not store.hooks
        assert said(session) == ["paid", "Q", "A"]


async def test_a_retry_may_go_on_from_what_the_attempts_had() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        session.append(Message.user("of no turn"))
        await broken(session)
        with pytest.raises(ConnectionError):
            async with session.turn("request-17", resume=True):
                session.append(Message.assistant("half"))
                raise ConnectionError
        async with session.turn("request-17", resume=True) as turn:
            assert turn.resumed
            assert [message.text for message in turn.messages] == ["Q", "half"]
            session.append(Message.assistant("whole"))
        assert said(session) == ["of no turn", "Q", "half", "whole"]


async def test_what_another_turn_has_continued_from_stays() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await broken(session)
        await ask(session, "request-18", "R")
        await ask(session)
        assert said(session) == ["Q", "R", "A", "Q", "A"]


@pytest.mark.parametrize("reopened", [False, True])
async def test_what_was_appended_behind_a_cut_turn_stays_and_the_turn_s_own_does_not(
    reopened: bool,
) -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await broken(session)
        session.append(Message.user("R"), Message.assistant("A"))
        if reopened:
            await session.aclose()
        again = await sessions.open("ada")
        again.append(Message.user("S"))
        await ask(again)
        assert said(again) == ["R", "A", "S", "Q", "A"]


async def test_what_an_opener_appended_behind_a_cut_turn_stays(tmp_path: Path) -> None:
    async with connect(tmp_path) as sessions:
        await broken(await sessions.open("ada"))
    async with connect(tmp_path) as sessions, sessions.open("ada") as session:
        session.append(Message.user("R"))
        await ask(session)
        assert said(session) == ["R", "Q", "A"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("how", ["plan", "agent"])
async def test_a_result_that_a_restore_made_up_goes_with_its_call(how: str, resume: bool) -> None:
    async with connect("memory:") as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("before"))
            with pytest.raises(ConnectionError):
                async with session.turn("request-17"):
                    session.append(Message.user("Q"))
                    session.append(Message.assistant(tool_calls=[ToolCall("c1", "pay", {})]))
                    raise ConnectionError
            await session.save()
            if how == "plan":
                await session.apply(await session.plan_restore())
        if how == "agent":
            async with Agent.create("ada", model=ScriptedModel("A"), sessions=sessions):
                pass
        async with sessions.open("ada") as session:
            assert [one.role for one in session.context()[1:]] == ["user", "assistant", "tool"]
            session.append(Message.tool("c1", result="paid"))  # from elsewhere: it stays
            async with session.turn("request-17", resume=resume) as turn:
                assert [one.role for one in turn.messages] == ["user", "assistant", "tool"]
                kept = ["user", "assistant", "tool"] if resume else []
                assert [one.role for one in session.context()] == ["user", *kept, "tool"]


async def test_other_turns_and_turns_without_an_id_take_nothing_back() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await broken(session)
        async with session.turn() as turn:
            assert turn.messages == ()
        await ask(session, "request-18", "R")
        assert said(session) == ["Q", "R", "A"]


@pytest.mark.parametrize("protected", [False, True])
async def test_an_attempt_of_the_format_before_is_taken_back_unless_it_protects_another_s_input(
    *, protected: bool
) -> None:
    def turned(phase: str) -> Entry:
        payload = {"turn": "request-17", "number": 1, "phase": phase, "given": True, "at": 1.0}
        return Entry(TURN, encode(payload))

    async with connect("memory:") as sessions, sessions.open("ada") as session:
        accept(session, (turned("begin"),))
        session.append(Message.user("Q"))
        if protected:
            await session.retract(after=session.version)
            session.append(Message.user("paid"))
        accept(session, (turned("interrupted"),))
        await session.aclose()
        again = await sessions.open("ada")
        await ask(again)
        assert said(again) == (["Q", "paid", "Q", "A"] if protected else ["Q", "A"])


def test_a_blocking_retry_does_the_same() -> None:
    with connect_blocking("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(ConnectionError), session.turn("request-17"):
            session.append(Message.user("Q"))
            raise ConnectionError
        with session.turn("request-17") as turn:
            assert [message.text for message in turn.messages] == ["Q"]
            assert not turn.resumed
            session.append(Message.user("Q"), Message.assistant("A"))
        assert [message.text for message in session.context()] == ["Q", "A"]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("reopened", [True, False], ids=["reopened", "open"])
async def test_an_id_that_comes_with_another_request_is_refused(
    tmp_path: Path, *, ended: bool, reopened: bool
) -> None:
    async with connect(tmp_path) as sessions:
        session = await sessions.open("ada")
        with contextlib.suppress(ConnectionError):
            async with session.turn("request-17", request="How deep?"):
                session.append(Message.user("How deep?"))
                if not ended:
                    raise ConnectionError
        if ended:
            async with session.turn("another", request=b"How deep?"):
                pass
        if reopened:
            await session.aclose()
            session = await sessions.open("ada")
        before = session.version
        with pytest.raises(TurnReusedError, match="'request-17' of session ada"):
            async with session.turn("request-17", request="Delete it"):
                raise AssertionError
        assert session.version == before
        assert said(session) == ["How deep?"]
        for request in ("How deep?", b"How deep?", None):  # None: it is not compared
            async with session.turn("request-17", request=request) as turn:
                assert turn.replayed == (ended or request != "How deep?")


async def test_a_turn_that_was_begun_without_its_request_is_replayed_for_any() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        async with session.turn("request-17"):
            session.append(Message.user("Q"))
        async with session.turn("request-17", request="other") as turn:
            assert turn.replayed


def test_a_blocking_turn_refuses_another_request() -> None:
    with connect_blocking("memory:") as sessions, sessions.open("ada") as session:
        with session.turn("request-17", request="Q"):
            pass
        with pytest.raises(TurnReusedError), session.turn("request-17", request="other"):
            pass


@pytest.mark.parametrize("resume", [False, True])
async def test_a_replayed_turn_has_its_own_messages(again: Connect, resume: bool) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        with contextlib.suppress(ConnectionError):
            async with session.turn("request-17"):
                session.append(Message.user("Q"), Message.assistant("half"))
                raise ConnectionError
        async with session.turn("request-17", resume=resume) as turn:
            assert not turn.replayed
            if not resume:
                session.append(Message.user("Q"))
            session.append(Message.assistant("A"))
        await session.checkpoints.create("after")
        kept = ["Q", "half", "A"] if resume else ["Q", "A"]
        async with session.turn("request-18"):
            session.append(Message.user("Q2"), Message.assistant("A2"))
        async with session.turn("request-17") as turn:
            assert turn.replayed
            assert [message.text for message in turn.messages] == kept
        await session.retract(after=0)
    async with again() as sessions, sessions.open("ada") as session:
        async with session.turn("request-17") as turn:  # a rollback since changes no answer
            assert [message.text for message in turn.messages] == kept
        async with session.turn("request-18") as turn:
            assert [message.text for message in turn.messages] == ["Q2", "A2"]


async def test_what_other_tasks_said_meanwhile_is_no_message_of_a_replayed_turn() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        async with session.turn("request-17") as turn, anyio.create_task_group() as tasks:
            session.append(Message.user("Q"))
            tasks.start_soon(sessions.post, "ada", Message.user("ping"))
            turn.append(Message.assistant("A"))
        async with session.turn("request-17") as turn:
            assert [message.text for message in turn.messages] == ["Q", "A"]


def test_a_replayed_turn_has_its_messages_in_blocking_style() -> None:
    with connect_blocking("memory:") as sessions, sessions.open("ada") as session:
        for _ in range(2):
            with session.turn("request-17") as turn:
                if not turn.replayed:
                    session.append(Message.user("Q"), Message.assistant("A"))
            with session.turn():
                session.append(Message.user("more"))
        assert [message.text for message in turn.messages] == ["Q", "A"]


def test_the_attributes_of_a_turn_are_described_in_help() -> None:
    text = pydoc.plain(pydoc.render_doc(Turn))
    for name in ("id", "messages", "number", "replayed", "resumed"):
        described = inspect.getdoc(inspect.getattr_static(Turn, name))
        assert described, name
        assert f"|  {name}\n |      {described.splitlines()[0]}" in text
