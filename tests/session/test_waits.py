"""What takes a wait, a timeout or a deadline ends by it, though the store answers no more."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from perdure import (
    InvalidArgumentError,
    Message,
    Retention,
    Session,
    SessionManager,
    Shutdown,
    StoreUnavailableError,
    connect,
)
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore
from tests._virtual import BACKENDS, run
from tests.pausing import PausingStore

QUIET = Shutdown(signals=False)
WAIT = 3.0

CALLS: dict[str, Callable[[SessionManager], Awaitable[object]]] = {
    "open": lambda sessions: sessions.open("closed", wait=WAIT).__aenter__(),
    "open a new one": lambda sessions: sessions.open("new", wait=WAIT).__aenter__(),
    "fork": lambda sessions: sessions.fork("closed", "new", wait=WAIT),
    "fork of an open one": lambda sessions: sessions.fork("a", "new", wait=WAIT),
    "copy": lambda sessions: sessions.copy("closed", "new", wait=WAIT),
    "copy of an open one": lambda sessions: sessions.copy("a", "new", wait=WAIT),
    "rename": lambda sessions: sessions.rename("closed", "new", wait=WAIT),
    "rename of an open one": lambda sessions: sessions.rename("a", "new", wait=WAIT),
    "delete": lambda sessions: sessions.delete("closed", wait=WAIT),
    "delete of an open one": lambda sessions: sessions.delete("a", wait=WAIT),
    "forget": lambda sessions: sessions.forget("closed", wait=WAIT),
    "forget a tag": lambda sessions: sessions.forget(tag="x", wait=WAIT),
    "prune": lambda sessions: sessions.prune(Retention(keep_turns=1), id="closed", wait=WAIT),
    "prune all": lambda sessions: sessions.prune(Retention(keep_turns=1), wait=WAIT),
    "rebuild": lambda sessions: sessions.rebuild_working_context("closed", wait=WAIT),
    "flush": lambda sessions: sessions.flush(WAIT),
}
THREADED, FIRST = ("prune", "prune all", "rebuild"), 4
"""Calls that fold in a thread, which a virtual clock may jump past; not before the fifth call."""


async def filled(sessions: SessionManager) -> Session:
    for id in ("closed", "a"):
        session = await sessions.open(id, tags=["x"])
        for text in ("one", "two"):
            async with session.turn():
                session.append(Message.user(text))
        if id == "closed":
            await session.aclose()
    session.append(Message.user("unsaved"))
    return session


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_by_its_wait_whenever_the_store_falls_silent(backend: str, call: str) -> None:
    async def main(nth: int) -> bool:
        store = PausingStore(MemoryStore())
        sessions = await connect(store, shutdown=QUIET, autosave=None)
        await filled(sessions)
        store.left = nth
        began, ended = anyio.current_time(), True
        try:
            ended = await CALLS[call](sessions) is not False
        except StoreUnavailableError:
            ended = False
        assert anyio.current_time() - began <= WAIT + 0.1, nth
        left, store.left = store.left, None
        await sessions.aclose(1)
        return ended and left > 0

    nth = 0
    while (call not in THREADED or nth < FIRST) and not run(backend, main, nth):
        nth += 1
    assert nth > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_open_that_joins_another_waits_no_longer_than_it_asked(backend: str) -> None:
    async def main() -> None:
        store = PausingStore(MemoryStore())
        sessions = await connect(store, shutdown=QUIET)
        store.left = 0
        took: list[float] = []

        async def opens(wait: float) -> None:
            began = anyio.current_time()
            with pytest.raises(StoreUnavailableError, match=f"has not answered for {wait:g} s"):
                await sessions.open("a", wait=wait)
            took.append(anyio.current_time() - began)

        async with anyio.create_task_group() as group:
            for wait in (9, 3, 6):
                group.start_soon(opens, wait)
        assert took == pytest.approx([3, 6, 9])
        store.left = None
        await sessions.aclose(1)

    run(backend, main)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_that_takes_its_time_is_waited_for(backend: str) -> None:
    async def main() -> None:
        store = PausingStore(MemoryStore())
        async with connect(store, shutdown=QUIET) as sessions:
            await (await filled(sessions)).aclose()
            for method, call in (
                ("acquire", lambda: sessions.open("closed", wait=WAIT)),
                ("write_documents", lambda: sessions.copy("a", "copy", wait=WAIT)),
                ("write_documents", lambda: sessions.rename("a", "new", wait=WAIT)),
            ):
                slow, began = store.pause(method), anyio.current_time()
                async with anyio.create_task_group() as group:

                    async def later(slow: Any = slow) -> None:
                        await slow.reached.wait()
                        await anyio.sleep(60)
                        slow.go()

                    group.start_soon(later)
                    assert await call() is not None
                assert anyio.current_time() - began >= 60

    run(backend, main)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flush_says_whether_all_is_durable(backend: str) -> None:
    async def main() -> None:
        store = PausingStore(MemoryStore())
        async with connect(store, shutdown=QUIET, autosave=None) as sessions:
            assert await sessions.flush(WAIT)
            session = await sessions.open("a")
            session.append(Message.user("one"))
            assert await sessions.flush()
            assert session.durable_version == session.version
            slow = store.pause("append_many")
            session.append(Message.user("two"))
            assert not await sessions.flush(WAIT)
            slow.go()
            assert await sessions.flush(WAIT)
            session.append(Message.user("three"))
            await sessions.delete("a")
            assert await sessions.flush(WAIT)

    run(backend, main)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flush_that_leaves_a_refused_record_says_so(backend: str) -> None:
    async def main() -> None:
        store = FaultyStore(MemoryStore(), fail_on="append_many", how="permanent", times=None)
        sessions = await connect(store, shutdown=QUIET, autosave=None)
        session = await sessions.open("a")
        session.append(Message.user("one"))
        assert not await sessions.flush()
        assert not await sessions.flush()
        await session.discard_unsaved()
        assert await sessions.flush()
        await sessions.aclose(1)

    run(backend, main)


@pytest.mark.parametrize("wait", [None, -1, "3", float("nan")])
@pytest.mark.parametrize("call", ["fork", "copy", "rename", "delete", "forget"])
async def test_a_wait_that_is_no_number_of_seconds_is_refused(call: str, wait: Any) -> None:
    async with connect(MemoryStore(), shutdown=QUIET) as sessions:
        arguments = ("a", "b") if call in ("fork", "copy", "rename") else ("a",)
        with pytest.raises(InvalidArgumentError, match="invalid wait"):
            await getattr(sessions, call)(*arguments, wait=wait)


async def test_an_answer_whose_caller_was_cancelled_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as other:
        await other.open("held")
        await (await other.open("taken")).aclose()
        store = PausingStore(MemoryStore(backing=backing))
        async with connect(store, shutdown=QUIET) as sessions:
            await (await filled(sessions)).save()
            for act in (
                lambda: sessions.fork("nobody", "new"),
                lambda: sessions.copy("nobody", "new"),
                lambda: sessions.rename("nobody", "new"),
                lambda: sessions.fork("a", "taken"),
                lambda: sessions.rename("a", "taken"),
                lambda: sessions.delete("held", on_held="raise", wait=0),
                lambda: sessions.open("held", on_held="raise", wait=0).__aenter__(),
                lambda: sessions.rebuild_working_context("nobody"),
            ):
                pause = store.pause(None)
                async with anyio.create_task_group() as group:
                    group.start_soon(act)
                    await pause.reached.wait()
                    group.cancel_scope.cancel()
                pause.go()
                await anyio.wait_all_tasks_blocked()
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
