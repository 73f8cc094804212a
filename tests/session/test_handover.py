"""Giving a session to another process: when, in which order, and what goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from perdure import LeaseLostError, Message, SessionManager, Shutdown, connect
from perdure.records.keys import SessionKey
from perdure.session.session import Session
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import SwitchedStore

pytestmark = pytest.mark.anyio

Connect = Callable[..., SessionManager]
KEY = SessionKey("a")


async def until_asked(sessions: SessionManager) -> None:
    """Wait until a manager has begun to hand the session over."""
    runtime = sessions._connected.runtime  # type: ignore[union-attr]
    with anyio.fail_after(60):
        while KEY not in runtime.pending_loads:
            await anyio.sleep(0.005)


async def opened(sessions: SessionManager) -> None:
    """Open the session elsewhere."""
    await sessions.open("a")


async def test_a_turn_that_a_handover_waits_for_may_open_its_session(again: Connect) -> None:
    async with again() as one, again() as two:
        session = await one.open("a")
        async with anyio.create_task_group() as group, session.turn():
            group.start_soon(opened, two)
            await until_asked(one)
            with anyio.fail_after(60):
                async with one.open("a") as same:
                    assert same is session
            session.append(Message.user("still mine"))


async def test_whoever_has_just_opened_it_has_a_turn_first(again: Connect) -> None:
    async with again() as one, again() as two:
        got: list[Session] = []

        async def want() -> None:
            got.append(await two.open("a"))

        async with anyio.create_task_group() as group:
            session = await one.open("a")
            group.start_soon(want)
            await until_heard(two)
            async with session.turn():
                session.append(Message.user("first"))
        assert [message.text for message in got[0].context()] == ["first"]


async def until_heard(sessions: SessionManager) -> None:
    """Wait until a manager has asked, and the other has had the time to hear of it."""
    runtime = sessions._connected.runtime  # type: ignore[union-attr]
    with anyio.fail_after(60):
        while KEY not in runtime.pending_loads:
            await anyio.sleep(0.001)
    await anyio.sleep(0.02)


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
        other = MemoryStore(backing=backing)
        await other.open()
        holder = await other.holder(KEY)
        assert holder is not None
        await other.request_handover(KEY, holder)
        runtime = one._connected.runtime  # type: ignore[union-attr]
        with anyio.fail_after(60):
            while KEY not in one._connected.lifecycle._handing_over:  # type: ignore[union-attr]
                await anyio.sleep(0.001)
            session.append(Message.user("goes on"))
            assert await one.open("a") is session
            assert KEY not in runtime.pending_loads
            store.up()
            while KEY in runtime.sessions:
                await anyio.sleep(0.005)
        assert await other.head(KEY) == session.version


async def test_an_ask_that_comes_while_it_is_opened_is_not_forgotten() -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=Shutdown(signals=False)) as one:
        lifecycle = one._connected.lifecycle  # type: ignore[union-attr]
        async with anyio.create_task_group() as group:
            opening = anyio.Event()

            async def open_it() -> None:
                opening.set()
                await one.open("a")

            group.start_soon(open_it)
            await opening.wait()
            await until_asked(one)  # here: that it is being opened
            group.start_soon(lifecycle.hand_over, KEY)
        runtime = one._connected.runtime  # type: ignore[union-attr]
        with anyio.fail_after(60):
            while KEY in runtime.sessions:
                await anyio.sleep(0.005)
        assert lifecycle.given(KEY) == 1
        assert lifecycle.given(KEY) == 0


@pytest.mark.parametrize("stopping", [False, True])
async def test_a_handover_that_the_store_does_not_answer_is_one_line_in_the_log(
    stopping: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = SwitchedStore(MemoryStore())
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        connected = sessions._connected
        assert connected is not None
        store.down()
        if stopping:
            sessions.drain()
        await connected.runtime.host.call(connected.lifecycle.hand_over, SessionKey("elsewhere"))
        store.up()
    told = [one for one in caplog.records if "handover failed" in one.getMessage()]
    assert [one.exc_info for one in told] == ([] if stopping else [None])
    assert "background task failed" not in caplog.text
