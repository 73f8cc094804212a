"""Giving a session to another process: when, in which order, and what goes on meanwhile."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from perdure import LeaseLostError, Message, SessionManager, Shutdown, connect
from perdure.lease import COURTESY
from perdure.records.keys import SessionKey
from perdure.session.lifecycle import FIRST_TURN
from perdure.store import take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore, SwitchedStore
from tests._virtual import BACKENDS, run
from tests.asking import ask
from tests.pausing import PausingStore
from tests.session.conftest import Connect
from tests.session.lives import said

pytestmark = pytest.mark.anyio

KEY = SessionKey("a")
QUIET = Shutdown(signals=False)


def closings(sessions: SessionManager) -> list[Any]:
    """Note what of a manager's leaves memory from now on."""
    closed: list[Any] = []
    sessions.on("closed", closed.append)
    return closed


async def until_given(closed: list[Any]) -> None:
    """Wait until a session was handed over."""
    with anyio.fail_after(60):
        while not closed:
            await anyio.sleep(0.005)
    assert [one.why for one in closed] == ["handed over"]


async def test_a_turn_that_a_handover_waits_for_may_open_its_session() -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as one:
        closed = closings(one)
        session = await one.open("a")
        async with session.turn():
            await ask(backing, "a")
            with anyio.fail_after(60):
                async with one.open("a") as same:
                    assert same is session
            session.append(Message.user("still mine"))
        await until_given(closed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whoever_has_just_opened_it_has_a_turn_first(backend: str) -> None:
    async def main() -> None:
        backing = MemoryBacking()
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as one:
            closed = closings(one)
            session = await one.open("a")
            await ask(backing, "a")
            await anyio.sleep(0.9 * FIRST_TURN)
            async with session.turn():
                session.append(Message.user("first"))
            await until_given(closed)
            assert said(await one.open("a")) == ["first"]

    run(backend, main)


async def test_turns_that_wait_already_come_before_the_handover(again: Connect) -> None:
    async with again() as one, again() as two:
        session = await one.open("a")
        begun = anyio.Event()

        async def turn(number: int) -> None:
            async with session.turn():
                begun.set()
                await anyio.sleep(0.01)
                session.append(Message.user(str(number)))

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(turn, number)
            await begun.wait()
            theirs = await two.open("a")
        assert sorted(message.text for message in theirs.context()) == list("01234")
        with pytest.raises(LeaseLostError, match="open it again"):
            async with session.turn():
                raise AssertionError


async def test_two_managers_take_turns_and_lose_none(again: Connect) -> None:
    async with again() as one, again() as two:

        async def work(sessions: SessionManager, name: str) -> None:
            for number in range(8):
                async with sessions.open("a", wait=30) as session, session.turn():
                    session.append(Message.user(f"{name}{number}"))

        async with anyio.create_task_group() as group:
            group.start_soon(work, one, "x")
            group.start_soon(work, two, "y")
        view = await one.load("a")
        assert view is not None
        found = [message.text for message in view.context()]
        for name in "xy":
            mine = [text for text in found if text[0] == name]
            assert mine == [f"{name}{number}" for number in range(8)]


async def test_turns_go_on_while_a_handover_waits_for_the_store() -> None:
    backing = MemoryBacking()
    store = SwitchedStore(MemoryStore(backing=backing))
    options = {"shutdown": Shutdown(signals=False, deadline=5)}
    async with connect(store, **options) as one:  # type: ignore[arg-type]
        session = await one.open("a")
        async with session.turn():
            session.append(Message.user("saved"))
        session.append(Message.user("not yet"))
        store.fail_next("append_many", times=1000)
        closed = closings(one)
        await ask(backing, "a")
        with anyio.fail_after(60):
            session.append(Message.user("goes on"))
            assert await one.open("a") is session
        assert not closed
        store.up()
        await until_given(closed)
        assert await store.head(KEY) == session.version


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ask_that_comes_while_it_is_opened_is_not_forgotten(backend: str) -> None:
    async def main() -> None:
        backing = MemoryBacking()
        store = PausingStore(MemoryStore(backing=backing))
        async with connect(store, shutdown=QUIET) as one:
            closed = closings(one)
            acquired = store.pause("acquire", after=True)
            async with anyio.create_task_group() as group:
                group.start_soon(opened, one)
                await acquired.reached.wait()
                await ask(backing, "a")
                acquired.go()
            await until_given(closed)
            began = anyio.current_time()
            await one.open("a")  # it lets whoever asked have it first
            assert anyio.current_time() - began >= COURTESY

    run(backend, main)


async def opened(sessions: SessionManager) -> None:
    await sessions.open("a")


@pytest.mark.parametrize("stopping", [False, True])
async def test_a_handover_that_the_store_does_not_answer_is_one_line_in_the_log(
    stopping: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backing = MemoryBacking()
    counted = FaultyStore(MemoryStore(backing=backing), times=0)
    store = SwitchedStore(counted)
    async with connect(store, shutdown=QUIET) as sessions:
        await take_after(store, KEY, after=0)  # as of an open that has failed
        if stopping:
            sessions.drain()
        store.fail_next("holder")
        looks = counted.calls["holder"]
        await ask(backing, "a")
        await store.holder(KEY)  # raises unless it was asked before
        assert counted.calls["holder"] == looks + 1
    told = [one for one in caplog.records if "handover failed" in one.getMessage()]
    assert [one.exc_info for one in told] == ([] if stopping else [None])
    assert "background task failed" not in caplog.text
