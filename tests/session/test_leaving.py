"""How a session leaves memory, what may go wrong then, and that it is never half-way out."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from perdure import (
    LeaseHeldError,
    Message,
    Session,
    SessionClosedError,
    SessionError,
    SessionManager,
    SessionQuarantinedError,
    Shutdown,
    UnsavedChangesError,
    connect,
)
from perdure.autosave.options import EngineOptions
from perdure.autosave.reports import ShutdownReport
from perdure.session.events import EventName
from perdure.session.internals import let_go
from perdure.store import Outcome, Status
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore, SwitchedStore
from tests._virtual import BACKENDS, run
from tests.asking import ask
from tests.conftest import ROOT
from tests.session.conftest import Connect, Place
from tests.session.lives import said
from tests.session.test_meanwhile import QUIET, Store

pytestmark = pytest.mark.anyio


async def by_close(session: Session, _: MemoryBacking) -> None:
    await session.aclose()


async def by_idleness(session: Session, _: MemoryBacking) -> None:
    await let_go(session)


async def by_handover(session: Session, backing: MemoryBacking) -> None:
    await ask(backing, session.id)
    with anyio.fail_after(60):
        while session.is_writable:
            await anyio.sleep(0.005)


@pytest.mark.parametrize("leave", [by_close, by_idleness, by_handover])
async def test_a_session_whose_release_failed_opens_again(
    leave: Callable[[Session, MemoryBacking], Any], caplog: pytest.LogCaptureFixture
) -> None:
    backing = MemoryBacking()
    store = SwitchedStore(MemoryStore(backing=backing))
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("one"))
        await session.save()
        store.fail_next("release")
        await leave(session, backing)
        again = await sessions.open("a")
        assert "release failed" in caplog.text
        assert again is not session
        again.append(Message.user("two"))
        assert said(again) == ["one", "two"]


async def test_a_lease_that_was_not_released_is_given_to_whoever_asks() -> None:
    backing = MemoryBacking()
    store = SwitchedStore(MemoryStore(backing=backing))
    one, two = (connect(place, shutdown=QUIET) for place in (store, MemoryStore(backing=backing)))
    async with one, two:
        session = await one.open("a")
        session.append(Message.user("one"))
        store.fail_next("release")
        await session.aclose()
        assert said(await two.open("a")) == ["one"]


async def test_a_session_that_could_not_be_saved_in_time_goes_on_though_it_was_sealed() -> None:
    store = Store()
    shutdown = Shutdown(signals=False, deadline=0.1, turn_grace=0)
    async with connect(store, shutdown=shutdown, autosave=None) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("saved"))

        async def late() -> None:
            session.append(Message.user("late"))
            store.refuses = Status.TRANSIENT

        store.after["append_many"] = late
        with pytest.raises(UnsavedChangesError, match="it stays open"):
            await session.aclose()
        session.append(Message.user("later"))
        assert await sessions.open("a") is session
        store.refuses = None
        await session.aclose()
        assert said(await sessions.open("a")) == ["saved", "late", "later"]


async def test_a_fold_that_breaks_keeps_no_session_in_memory() -> None:
    store, failed = Store(), []
    async with connect(store, shutdown=QUIET) as sessions:
        sessions.on("fold_failed", failed.append)
        session = await sessions.open("a")
        session.append(Message.user("one"))

        async def breaks() -> None:
            raise RuntimeError("a driver's own error")

        store.hooks["write_documents"] = breaks
        await session.aclose()
        assert [str(event.error) for event in failed] == ["a driver's own error"]
        assert said(await sessions.open("a")) == ["one"]
        store.hooks["write_documents"] = breaks
    async with connect(MemoryStore(backing=store._backing), shutdown=QUIET) as sessions:
        assert said(await sessions.open("a", on_held="raise")) == ["one"]


async def test_a_fold_that_hangs_keeps_no_session_in_memory() -> None:
    store, engine = Store(), EngineOptions(exclusive_timeout=0.02)
    async with connect(store, shutdown=QUIET, engine=engine) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("one"))
        store.hooks["write_documents"] = anyio.sleep_forever
        await session.aclose()
        assert said(await sessions.open("a")) == ["one"]


async def test_every_close_waits_until_the_session_is_closed(again: Connect) -> None:
    async with again(autosave=None) as sessions:
        session = await sessions.open("a")
        begun, end = anyio.Event(), anyio.Event()
        durable: list[bool] = []

        async def turn() -> None:
            async with session.turn():
                begun.set()
                await end.wait()
                session.append(Message.user("one"))

        async def close() -> None:
            await session.aclose()
            durable.append(session.durable_version == session.version and not session.is_writable)

        async with anyio.create_task_group() as group:
            group.start_soon(turn)
            await begun.wait()
            group.start_soon(close)
            group.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            end.set()
        assert durable == [True, True]


async def test_turns_that_wait_already_come_before_the_close(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")

        async def turn(text: str) -> None:
            async with session.turn():
                await anyio.lowlevel.checkpoint()
                session.append(Message.user(text))

        async with anyio.create_task_group() as group, session.turn():
            for text in ("one", "two"):
                group.start_soon(turn, text)
                await anyio.wait_all_tasks_blocked()
            group.start_soon(session.aclose)
            await anyio.wait_all_tasks_blocked()
        assert said(await sessions.open("a")) == ["one", "two"]


async def test_a_close_within_a_turn_is_refused_instead_of_waiting_for_it(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session, session.turn():
        with pytest.raises(SessionError, match="end the turn before closing"):
            await session.aclose()
        session.append(Message.user("one"))


async def test_a_session_that_is_closed_with_its_manager_says_so(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        session.append(Message.user("one"))
    await session.aclose()
    for act in (
        session.turn().__aenter__,
        session.discard_unsaved,
        lambda: session.fork_unsaved("b"),
        lambda: session.retract(after=0),
    ):
        with pytest.raises(SessionClosedError, match=r"connect\(…\)"):
            await act()
    assert (await session.save()).version == session.version


async def test_a_load_that_waits_for_others_ends_when_its_manager_drains(place: Place) -> None:
    store = FaultyStore(place(), times=0)
    async with connect(place(), shutdown=QUIET) as one, connect(store, shutdown=QUIET) as two:
        session = await one.open("a")
        refused = anyio.Event()

        async def want() -> None:
            with pytest.raises(SessionClosedError, match="stopping"):
                await two.open("a", wait=1000)
            refused.set()

        async with anyio.create_task_group() as group, session.turn():
            group.start_soon(want)
            with anyio.fail_after(20):
                while not store.calls["request_handover"]:
                    await anyio.sleep(0)
                two.drain()
                await refused.wait()


class Hanging(MemoryStore):
    """A store that takes records, and then does nothing more."""

    async def write_documents(self, *_: Any) -> None:
        await anyio.sleep_forever()

    async def release(self, *_: Any) -> None:
        await anyio.sleep_forever()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_that_hangs_at_the_end_costs_no_more_than_was_promised(backend: str) -> None:
    """I8: within ``deadline + hard_grace``, folds and releases included."""

    async def main() -> None:
        shutdown = Shutdown(signals=False, deadline=3, turn_grace=1, hard_grace=0.5)
        sessions = await connect(Hanging(), shutdown=shutdown)
        for id in "abc":
            (await sessions.open(id)).append(Message.user("one"))
        report = await sessions.aclose()
        assert report.clean
        assert 3 <= report.duration <= 3.5

    run(backend, main)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("store", [MemoryStore, Hanging])
def test_a_store_that_does_not_close_costs_no_more_than_a_second(
    backend: str, store: type[MemoryStore], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        shutdown = Shutdown(signals=False, deadline=3, turn_grace=1, hard_grace=0.5)
        hanging = FaultyStore(store(), fail_on="aclose", how="hang")
        sessions = await connect(hanging, shutdown=shutdown)
        (await sessions.open("a")).append(Message.user("one"))
        began = anyio.current_time()
        assert (await sessions.aclose()).clean
        assert anyio.current_time() - began <= (4.5 if store is Hanging else 3.5)

    run(backend, main)
    assert "the store did not close in time" in caplog.text


TOLD_TO_END = """
import os, signal, sys
import anyio
from perdure import Message, Shutdown, connect
from perdure._lib import signals
from tests._virtual import run
from tests.session.test_leaving import Hanging

async def main():
    sessions = await connect(Hanging(), shutdown=Shutdown(deadline=3, turn_grace=1, hard_grace=0.5))
    (await sessions.open("a")).append(Message.user("one"))
    began = anyio.current_time()

    def end():
        print(anyio.current_time() - began, flush=True)
        os._exit(0)

    signals.end_process = end
    signal.raise_signal(signal.SIGTERM)
    while True:  # whatever it is told
        try:
            await anyio.sleep_forever()
        except BaseException:
            pass

run(sys.argv[1], main)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_that_is_told_to_end_has_ended_when_it_was_promised(backend: str) -> None:
    """By ``deadline + hard_grace``, though neither its body nor its store comes to an end."""
    command = [sys.executable, "-c", TOLD_TO_END, backend]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) <= 3.5


class Watched(MemoryStore):
    """A store that says whether it was closed."""

    closed = False

    async def aclose(self) -> None:
        await super().aclose()
        self.closed = True


def test_a_close_that_is_cancelled_twice_leaves_nothing_running() -> None:
    store = Watched()

    async def main() -> None:
        sessions = await connect(store, shutdown=QUIET)
        session = await sessions.open("a")
        session.append(Message.user("one"))
        begun = asyncio.Event()
        sessions.on("drain", lambda _: begun.set())
        task = asyncio.create_task(sessions.aclose())
        await begun.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.durable_version == session.version
        assert store.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def interrupt_soon() -> None:
    """Have Ctrl-C come while the loop does something of its own."""
    if trio.lowlevel.in_trio_run():
        soon: Callable[..., object] = trio.lowlevel.current_trio_token().run_sync_soon
    else:
        soon = asyncio.get_running_loop().call_soon
    soon(signal.raise_signal, signal.SIGINT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_while_the_manager_closes_because_of_ctrl_c_loses_nothing(backend: str) -> None:
    """The second one ends the loop, and on asyncio the save that the first one began."""
    backing = MemoryBacking()
    saves: list[int] = []

    class Store(MemoryStore):
        async def append_many(self, batches: Any) -> list[Outcome]:
            saves.append(len(batches))
            if len(saves) == 1:
                interrupt_soon()
                await anyio.sleep(0.05)
            return await super().append_many(batches)

    async def main() -> None:
        async with connect(Store(backing=backing), autosave=None, shutdown=QUIET) as sessions:
            (await sessions.open("a")).append(Message.user("one"))
            interrupt_soon()
            await anyio.sleep_forever()

    async def look() -> list[str]:
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            return said(await sessions.load("a"))

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main, backend=backend)
    assert saves
    assert asyncio.run(look()) == ["one"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_ends_under_a_manager_closes_its_store(backend: str) -> None:
    store = Watched()

    async def main() -> None:
        sessions = await connect(store, shutdown=QUIET)
        (await sessions.open("a")).append(Message.user("one"))

    anyio.run(main, backend=backend)
    assert store.closed


async def test_a_session_in_quarantine_is_not_given_and_stays_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backing = MemoryBacking()
    store = SwitchedStore(MemoryStore(backing=backing))
    async with connect(store, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        async with session.turn():  # so that a handover need not wait for one
            pass
        store.fail_next(how="permanent")
        session.append(Message.user("refused"))
        with pytest.raises(SessionQuarantinedError):
            await session.save()
        caplog.clear()
        await ask(backing, "a")
        assert caplog.text == ""
        session.retry()
        await session.save()


async def test_a_load_that_fails_behind_its_lease_leaves_nothing(tmp_path: Path) -> None:
    backing = MemoryBacking()
    shutdown = Shutdown(signals=False, deadline=0.1, turn_grace=0, spill=str(tmp_path))
    store = SwitchedStore(MemoryStore(backing=backing))
    sessions = await connect(store, shutdown=shutdown)
    session = await sessions.open("a")
    store.fail_next(times=10**6)
    session.append(Message.user("spilled"))
    assert (await sessions.aclose()).spilled
    store = SwitchedStore(MemoryStore(backing=backing))
    async with connect(store, shutdown=shutdown) as sessions:
        store.fail_next(how="permanent")
        with pytest.raises(SessionQuarantinedError):
            await sessions.open("a")
        assert sessions.health().sessions == 0
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as others:
            await others.open("a", on_held="raise")
        assert said(await sessions.open("a")) == ["spilled"]


@pytest.mark.parametrize("steps", [0, 1, 3, 10])
def test_a_program_that_cancels_its_tasks_itself_keeps_what_was_accepted(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cancels all tasks when it is told to stop, as many do, and then asyncio.run does."""

    async def stop() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for _ in range(steps):
            await asyncio.sleep(0)

    async def main() -> None:
        options = Shutdown(signals=False, spill=False)
        sessions = await connect(tmp_path, shutdown=options)
        session = await sessions.open("a")
        session.append(Message.user("accepted"))
        await asyncio.create_task(stop())

    async def look() -> list[str]:
        async with connect(tmp_path) as sessions, sessions.open("a") as session:
            return said(session)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert asyncio.run(look()) == ["accepted"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closing_that_is_cancelled_while_the_store_closes_closes_it_whole(steps: int) -> None:
    class Slow(MemoryStore):
        closing = closed = 0

        async def aclose(self) -> None:
            self.closing += 1
            for _ in range(5):
                await asyncio.sleep(0)
            await super().aclose()
            self.closed += 1

    async def main() -> None:
        store = Slow()
        sessions = await connect(store, shutdown=QUIET)
        closing = asyncio.create_task(sessions.aclose())
        async with asyncio.timeout(60):
            while not store.closing:
                await asyncio.sleep(0)
            for _ in range(steps):
                await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        assert store.closed == store.closing == 1

    asyncio.run(main())


@pytest.mark.parametrize("event", ["opened", "saved", "folded", "drain"])
async def test_a_hook_may_close_the_manager(event: EventName) -> None:
    reports: list[ShutdownReport] = []
    with anyio.fail_after(60):
        async with connect("memory:", shutdown=Shutdown(signals=False)) as sessions:

            async def close(_: object) -> None:
                reports.append(await sessions.aclose())

            session = await sessions.open("ada")
            sessions.on(event, close)
            with contextlib.suppress(SessionClosedError):
                if event == "opened":
                    await sessions.open("grace")
                session.append(Message.user("Hello"))
                await session.save()
    assert [report.clean for report in reports] == [True]


async def test_a_close_that_a_turn_keeps_waiting_says_so() -> None:
    shutdown = Shutdown(signals=False, deadline=0.2, turn_grace=0.1)
    async with connect("memory:", shutdown=shutdown) as sessions:
        session = await sessions.open("ada")
        begun, ended = anyio.Event(), anyio.Event()

        async def turn() -> None:
            async with session.turn():
                await session.save()
                begun.set()
                await ended.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            await begun.wait()
            with pytest.raises(SessionError, match="a turn of session ada still runs after"):
                await session.aclose()
            ended.set()
        await session.aclose()


@contextlib.asynccontextmanager
async def held_elsewhere() -> AsyncGenerator[tuple[Session, SessionManager], None]:
    """Yield a session that one manager has, and another manager of the same store."""
    backing = MemoryBacking()
    async with (
        connect(MemoryStore(backing=backing), shutdown=QUIET) as others,
        connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions,
    ):
        yield await others.open("ada"), sessions


async def test_who_joins_a_load_waits_for_another_process_no_longer_than_wanted() -> None:
    async with held_elsewhere() as (held, sessions):
        async with held.turn(), anyio.create_task_group() as tasks:  # it is not handed over

            async def load() -> None:
                await sessions.open("ada", wait=600.0)

            tasks.start_soon(load)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(60):
                for how in ({"wait": 0.1}, {"on_held": "raise"}):
                    with pytest.raises(LeaseHeldError):
                        await sessions.open("ada", **how)
                tasks.cancel_scope.cancel()


async def test_who_joins_a_load_waits_on_when_that_has_given_up() -> None:
    async with held_elsewhere() as (held, sessions):
        async with anyio.create_task_group() as tasks:
            async with held.turn():
                given_up = anyio.Event()

                async def give_up() -> None:
                    with pytest.raises(LeaseHeldError):
                        await sessions.open("ada", wait=0.2)
                    given_up.set()

                async def join() -> None:
                    session = await sessions.open("ada", wait=600.0)
                    assert session.is_writable

                tasks.start_soon(give_up)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(join)
                await given_up.wait()
