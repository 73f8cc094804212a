"""The manager: sharing, leases, closing, and callers that go away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading

import anyio
import pytest

from perdure import (
    ConfigError,
    LeaseHeldError,
    LeaseLostError,
    Message,
    Session,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    Shutdown,
    UnsavedChangesError,
    WrongLoopError,
    connect,
)
from perdure.autosave.options import Autosave, EngineOptions
from perdure.events import Closed
from perdure.lease import LeaseOptions
from perdure.records.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.store import Held, Taken, Terms, take_after
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import ManualClock
from perdure.testing.faulty import FaultyStore
from tests.session.conftest import Connect

QUIET = Shutdown(signals=False)


async def test_two_opens_of_one_id_share_one_object(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("a") as one, sessions.open("a") as two:
            assert one is two
        async with sessions.open("a") as three:
            assert three is one


async def test_many_opens_at_once_load_once(again: Connect) -> None:
    found: list[object] = []
    async with again() as sessions:

        async def get() -> None:
            found.append(await sessions.open("a"))

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(get)
        assert len({id(one) for one in found}) == 1
        assert found[0].epoch == 1  # type: ignore[attr-defined]


async def test_a_new_session_is_never_a_resume(again: Connect) -> None:
    """S4-G3: ``open(new=True)`` demands that there is nothing of this id, open or stored."""
    async with again() as sessions:
        async with sessions.open("a", new=True) as session:
            with pytest.raises(SessionError, match="session a exists.*leave out new=True"):
                await sessions.open("a", new=True)
            assert await sessions.open("a") is session
    async with again() as sessions:
        with pytest.raises(SessionError, match="session a exists.*delete it first"):
            await sessions.open("a", new=True)
        await sessions.delete("a")
        await sessions.open("a", new=True)
        with pytest.raises(ConfigError, match="create=False forbids it"):
            await sessions.open("b", new=True, create=False)


async def test_of_many_who_ask_for_a_new_session_one_gets_it(again: Connect) -> None:
    """S4-G3: in one process, and in two."""
    got: list[str] = []
    refused: list[str] = []

    async def ask(sessions: SessionManager, name: str) -> None:
        try:
            async with sessions.open("a", new=True, wait=0):
                got.append(name)
        except (SessionError, LeaseHeldError):
            refused.append(name)

    async with again() as one, again() as two, anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask, one, "one")
            group.start_soon(ask, two, "two")
    assert len(got) == 1
    assert len(refused) == 9


async def test_who_comes_second_for_a_new_session_leaves_it_to_the_first() -> None:
    """S4-G3: a session that appears while we take its lease is no new one."""
    backing = MemoryBacking()
    theirs = MemoryStore(backing=backing)
    await theirs.open()

    class Overtaken(DelegatingStore):
        async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
            if await self.inner.holder(key) is None:
                grant = await take_after(theirs, key, after=0)
                await theirs.release(key, grant.epoch)
            return await self.inner.acquire(key, terms)

    async with connect(Overtaken(MemoryStore(backing=backing)), shutdown=QUIET) as sessions:
        with pytest.raises(SessionError, match="session a exists"):
            await sessions.open("a", new=True)
        async with sessions.open("a") as session:
            assert session.epoch == 2


async def test_missing_session_is_not_made_unless_asked(again: Connect) -> None:
    async with again() as sessions:
        with pytest.raises(SessionNotFoundError, match="create=False"):
            await sessions.open("a", create=False)
        assert await sessions.load("a") is None
        assert not await sessions.exists("a")
        assert await sessions.list() == []


async def test_deleted_session_is_gone_and_begins_anew(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("secret"))
        assert await sessions.delete("a")
        assert not await sessions.delete("a")
        assert not await sessions.exists("a")
        with pytest.raises(SessionNotFoundError):
            session.append(Message.user("late"))
        async with sessions.open("a") as fresh:
            assert fresh.context() == []
            assert fresh.epoch > session.epoch


async def test_listing_pages_by_key(again: Connect) -> None:
    async with again() as sessions:
        for name in ("b", "A", "a/b", ".."):
            async with sessions.open(name) as session:
                session.append(Message.user(name))
        pages = []
        after = None
        while page := await sessions.list(after=after, limit=2):
            pages += [info.key.agent for info in page]
            after = page[-1]
        assert sorted(pages) == sorted(["b", "A", "a/b", ".."])


async def test_another_manager_gets_the_session_by_handover(again: Connect) -> None:
    lease = LeaseOptions(heartbeat=0.05, ttl=5)
    async with again(lease=lease) as one, again(lease=lease) as two:
        mine = await one.open("a")
        mine.append(Message.user("from one"))
        theirs = await two.open("a")
        assert [message.content for message in theirs.context()] == ["from one"]
        assert theirs.epoch > mine.epoch
        with pytest.raises(LeaseLostError, match="handed over"):
            mine.append(Message.user("too late"))


async def test_a_short_tail_is_not_folded_while_somebody_waits(again: Connect) -> None:
    lease = LeaseOptions(heartbeat=0.05, ttl=5)
    folds: list[object] = []
    async with again(lease=lease) as one, again(lease=lease) as two:
        for manager in (one, two):
            manager.on("folded", folds.append)
        for number in range(6):
            session = await (one, two)[number % 2].open("a")
            session.append(Message.user(str(number)))
        assert len(folds) == 1  # the first: a session that was never folded is in no list
        session.append(*[Message.user("more")] * 50)
        last = await one.open("a")
        assert len(folds) == 2
        assert [m.text for m in last.context()] == [*map(str, range(6)), *["more"] * 50]


async def test_handover_waits_for_the_end_of_the_turn(again: Connect) -> None:
    lease = LeaseOptions(heartbeat=0.05, ttl=5)
    async with again(lease=lease) as one, again(lease=lease) as two:
        mine = await one.open("a")
        async with anyio.create_task_group() as group:
            entered = anyio.Event()

            async def other() -> None:
                entered.set()
                theirs = await two.open("a")
                assert [m.content for m in theirs.context()] == ["first", "last"]

            async with mine.turn():
                mine.append(Message.user("first"))
                group.start_soon(other)
                await entered.wait()
                await anyio.sleep(0.2)
                mine.append(Message.user("last"))


async def test_held_lease_is_refused_with_the_holder_and_the_cure(again: Connect) -> None:
    async with again() as one, again() as two:
        await one.open("a")
        with pytest.raises(LeaseHeldError, match="on_held"):
            await two.open("a", on_held="raise")
        with pytest.raises(LeaseHeldError, match=r"load\(\)"):
            await two.open("a", on_held="steal", wait=0.0)


async def test_view_of_a_held_session_needs_no_lease(again: Connect) -> None:
    async with again() as one, again() as two:
        session = await one.open("a")
        session.append(Message.user("x"))
        await session.save()
        view = await two.load("a")
        assert view is not None
        assert [message.content for message in view.context()] == ["x"]
        session.append(Message.user("y"))
        await session.save()


async def test_cancelled_open_does_not_stop_the_load(again: Connect) -> None:
    async with again() as sessions:
        with anyio.move_on_after(0):
            await sessions.open("a")
        async with sessions.open("a") as session:
            assert session.epoch == 1


async def test_idle_session_hibernates_and_comes_back(again: Connect) -> None:
    clock = ManualClock()
    async with again(clock=clock, engine=EngineOptions(hibernate_after=60)) as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("x"))
            await session.save()
        await clock.advance(100)
        assert not session.is_writable
        async with sessions.open("a") as back:
            assert back is not session
            assert [message.content for message in back.context()] == ["x"]


async def test_a_session_that_was_only_looked_at_hibernates(again: Connect) -> None:
    async with again() as sessions, sessions.open("a") as session:
        session.append(Message.user("x"))
    clock = ManualClock()
    async with again(clock=clock, engine=EngineOptions(hibernate_after=60)) as sessions:
        closed: list[Closed] = []
        sessions.on("closed", closed.append)
        async with sessions.open("a"):
            await clock.advance(100)
            assert closed == []
        await clock.advance(100)
        assert [event.why for event in closed] == ["hibernated"]


async def test_hooks_are_told_and_before_save_is_awaited(again: Connect) -> None:
    told: list[str] = []
    async with again(autosave=None) as sessions:

        async def before(session: object) -> None:
            told.append("before")

        sessions.on("before_save", before)
        take_off = sessions.on("saved", lambda event: told.append("saved"))
        async with sessions.open("a") as session:
            session.append(Message.user("x"))
            await session.save()
            assert told == ["before", "saved"]
            take_off()
            session.append(Message.user("y"))
            await session.save()
            assert told == ["before", "saved", "before"]
        with pytest.raises(ConfigError, match="unknown"):
            sessions.on("no such event", print)  # type: ignore[arg-type]


async def test_a_hook_before_saves_counts_for_sessions_that_are_open_already(
    again: Connect,
) -> None:
    told: list[str] = []
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        take_off = sessions.on("before_save", lambda session: told.append(session.id))
        session.append(Message.user("x"))
        await session.save()
        assert told == ["a"]
        for _ in range(2):
            take_off()
        session.append(Message.user("y"))
        await session.save()
        assert told == ["a"]


async def test_what_a_second_opener_says_of_a_session_counts(again: Connect) -> None:
    async with again() as sessions, sessions.open("a", tags=["one"]) as session:
        async with sessions.open("a", owner="ada", tags=["two"], autosave=None):
            metadata = session.info.metadata
            assert (metadata.owner, metadata.tags) == ("ada", ("two",))
            assert session.autosave.setting is None
        version = session.version
        async with sessions.open("a", owner="ada"):
            assert session.version == version
            assert session.autosave.setting is None
        async with sessions.open("a", autosave=Autosave.server()):
            assert session.autosave.setting == Autosave.server()


async def test_store_that_stays_down_is_reported_at_the_end() -> None:
    store = FaultyStore(MemoryStore(), fail_on="append_many", nth=1, times=10**9)
    with pytest.raises(UnsavedChangesError) as caught:
        async with connect(
            store, shutdown=Shutdown(deadline=0.3, turn_grace=0, signals=False)
        ) as s:
            session = await s.open("a")
            session.append(Message.user("x"))
    assert "a" in str(caught.value)


async def test_manager_that_is_closed_says_so(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
    with pytest.raises(SessionClosedError):
        session.append(Message.user("late"))
    with pytest.raises(SessionClosedError, match="connect"):
        await sessions.open("a")
    report = await sessions.aclose()
    assert report.clean


async def test_manager_that_is_not_connected_says_so() -> None:
    sessions = connect("memory:")
    with pytest.raises(SessionClosedError, match="async with"):
        await sessions.open("a")


async def test_use_from_another_thread_is_refused(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                session.append(Message.user("x"))
            except WrongLoopError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        assert "thread" in str(errors[0])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_use_in_a_forked_child_is_refused(again: Connect) -> None:
    async with again() as sessions:
        session = await sessions.open("a")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # no test machinery here: report and leave
            try:
                session.append(Message.user("x"))
                os.write(write, b"no error")
            except WrongLoopError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read, "rb") as pipe:
            assert b"connect again in the child" in pipe.read()


def test_use_from_a_second_loop_is_refused() -> None:
    backing = MemoryBacking()

    async def first() -> object:
        sessions = await connect(MemoryStore(backing=backing), shutdown=QUIET)
        return await sessions.open("a")

    async def second(session: object) -> None:
        with pytest.raises(WrongLoopError, match="connect again inside this loop"):
            session.append(Message.user("x"))  # type: ignore[attr-defined]

    session = asyncio.run(first())
    asyncio.run(second(session))


def test_manager_may_be_opened_in_one_task_and_closed_in_another() -> None:
    async def main() -> None:
        stack = contextlib.AsyncExitStack()

        async def enter() -> object:
            return await stack.enter_async_context(connect("memory:", shutdown=QUIET))

        sessions = await asyncio.create_task(enter())
        session = await sessions.open("a")  # type: ignore[attr-defined]
        session.append(Message.user("x"))
        await asyncio.create_task(stack.aclose())
        assert session.durable_version == session.version

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "wait_for", "timeout", "move_on_after"])
def test_a_cancelled_save_goes_on(how: str) -> None:
    """I6: no way of cancelling a caller cuts a save in half."""
    store = FaultyStore(MemoryStore(), fail_on="append_many", nth=10**9)

    async def main() -> None:
        async with connect(store, autosave=None, shutdown=QUIET) as sessions:
            session = await sessions.open("a")
            session.append(Message.user("x"))
            task = asyncio.create_task(session.save())
            await asyncio.sleep(0)
            if how == "cancel":
                task.cancel()
            elif how == "wait_for":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(task, 0)
            elif how == "timeout":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        await task
            else:
                with anyio.move_on_after(0):
                    await task
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await session.wait_durable()
            assert session.durable_version == session.version

    asyncio.run(main())


def test_loop_that_ends_under_an_open_manager_still_saves() -> None:
    backing = MemoryBacking()

    async def main() -> None:
        sessions = await connect(MemoryStore(backing=backing), autosave=None, shutdown=QUIET)
        session = await sessions.open("a")
        session.append(Message.user("x"))

    async def look() -> list[object]:
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            view = await sessions.load("a")
            return [message.content for message in view.context()] if view else []

    asyncio.run(main())
    assert asyncio.run(look()) == ["x"]


async def test_tune_changes_running_sessions(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        session.append(Message.user("x"))
        sessions.tune(Autosave.write_through())
        session.append(Message.user("y"))
        await session.wait_durable()
        assert sessions.health().unsaved == {}


async def test_a_save_with_nothing_to_do_stands_for_no_later_one(again: Connect) -> None:
    """What is asked before a save is asked before each that brings something."""
    asked: list[int] = []
    async with again(autosave=Autosave.write_through()) as sessions:

        async def ask(session: Session) -> None:
            asked.append(session.version)

        sessions.on("before_save", ask)
        session = await sessions.open("a")
        for clean in (session.save, sessions.flush):
            await session.save()
            await clean()
            before = len(asked)
            session.append(Message.user("one"))
            await session.wait_durable()
            assert len(asked) > before
