"""A turn that was cut before its end, and is tried again under its id: here or elsewhere."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import anyio
import pytest

from perdure import Message, Session, connect
from perdure.sync import connect as connect_blocking

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


@pytest.mark.parametrize("behind", ["another turn", "a message"])
async def test_what_has_an_answer_behind_it_stays(behind: str) -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await broken(session)
        if behind == "another turn":
            await ask(session, "request-18", "R")
        else:
            session.append(Message.user("R"), Message.assistant("A"))
        await ask(session)
        assert said(session) == ["Q", "R", "A", "Q", "A"]


async def test_what_an_opener_appended_behind_a_cut_turn_stays(tmp_path: Path) -> None:
    async with connect(tmp_path) as sessions:
        await broken(await sessions.open("ada"))
    async with connect(tmp_path) as sessions, sessions.open("ada") as session:
        session.append(Message.user("R"))
        await ask(session)
        assert said(session) == ["Q", "R", "Q", "A"]


async def test_other_turns_and_turns_without_an_id_take_nothing_back() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        await broken(session)
        async with session.turn() as turn:
            assert turn.messages == ()
        await ask(session, "request-18", "R")
        assert said(session) == ["Q", "R", "A"]


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
