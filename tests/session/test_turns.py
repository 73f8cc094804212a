"""What a turn owns, whoever appends it, and how a turn waits for others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import trio

from perdure import (
    EngineOptions,
    InvalidArgumentError,
    Limits,
    Message,
    Session,
    SessionError,
    SessionManager,
    Shutdown,
    StoreUnavailableError,
    Turn,
    connect,
)
from perdure.events import TurnWarned
from perdure.memory.context import RetractionPayload
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.records import RETRACT, Entry
from perdure.session.base import entry_of
from perdure.session.internals import accept, registry_of, store_of
from perdure.store import Status
from perdure.sync import connect as connect_blocking
from tests import _virtual
from tests.session.test_meanwhile import Store

Append = Callable[..., object]
Choice = Callable[[Session, Turn], Append]


def memory(**options: Any) -> SessionManager:
    return connect("memory:", shutdown=Shutdown(signals=False), **options)


def said(session: Session) -> list[str]:
    return [message.text for message in session.context()]


async def tried_again(session: Session, op: str = "request-17") -> list[str]:
    """Return what there is after the next attempt has begun."""
    async with session.turn(op):
        return said(session)


@contextlib.asynccontextmanager
async def watched() -> AsyncGenerator[tuple[Session, list[TurnWarned]], None]:
    events: list[TurnWarned] = []
    async with memory() as sessions, sessions.open("ada") as session:
        sessions.on("turn_warned", events.append)
        yield session, events


# what session.append gets inside of a turn


async def at_once(append: Append) -> None:
    append(Message.user("Q"))


async def in_a_nursery(append: Append) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(at_once, append)


async def in_a_thread(append: Append) -> None:
    await anyio.to_thread.run_sync(
        lambda: anyio.from_thread.run_sync(partial(append, Message.user("Q")))
    )


async def in_a_gather(append: Append) -> None:
    await asyncio.gather(at_once(append), asyncio.sleep(0))


async def in_a_group_of_asyncio(append: Append) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(at_once(append))


async def in_a_thread_of_asyncio(append: Append) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def work() -> None:
        loop.call_soon_threadsafe(append, Message.user("Q"))
        loop.call_soon_threadsafe(told.set)

    await asyncio.to_thread(work)
    await told.wait()


async def in_a_nursery_of_trio(append: Append) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(at_once, append)


ANYWHERE = [at_once, in_a_nursery, in_a_thread]
OF_ASYNCIO = [in_a_gather, in_a_group_of_asyncio, in_a_thread_of_asyncio]


async def cut_while(way: Callable[[Append], Awaitable[None]]) -> None:
    async with watched() as (session, events):
        with pytest.raises(ConnectionError):
            async with session.turn("request-17"):
                await way(session.append)
                raise ConnectionError
        assert said(session) == ["Q"]
        assert await tried_again(session) == []
        assert events == []


@pytest.mark.anyio
@pytest.mark.parametrize("way", ANYWHERE)
async def test_a_turn_owns_what_the_tasks_append_that_it_has_started(way: Any) -> None:
    await cut_while(way)


@pytest.mark.parametrize("way", OF_ASYNCIO)
def test_so_it_is_in_the_tasks_and_threads_of_asyncio(way: Any) -> None:
    asyncio.run(cut_while(way))


def test_so_it_is_in_a_nursery_of_trio() -> None:
    trio.run(cut_while, in_a_nursery_of_trio)


@pytest.mark.anyio
async def test_a_turn_owns_its_own_retraction_and_a_history_that_it_extends() -> None:
    async with watched() as (session, events):
        start = session.append(Message.user("before"))
        with pytest.raises(ConnectionError):
            async with session.turn("request-17") as turn:
                await session.retract(after=start - 1)
                await session.extend([{"role": "user", "content": "Q"}], "openai")
                await turn.extend([{"role": "user", "content": "R"}], "openai")
                raise ConnectionError
        assert said(session) == ["Q", "R"]
        assert await tried_again(session) == ["before"]
        assert events == []


# where the context is lost


async def in_a_generator_driven_by_a_task_for_each_item(session: Session, append: Choice) -> None:
    async def answer() -> AsyncGenerator[None, None]:
        async with session.turn("request-17") as turn:
            yield
            append(session, turn)(Message.user("Q"))
            raise ConnectionError

    items = answer()
    for _ in range(2):
        await asyncio.ensure_future(anext(items))  # type: ignore[arg-type]


async def entered_by_a_helper(session: Session, append: Choice) -> None:
    async with contextlib.AsyncExitStack() as stack:
        entering = stack.enter_async_context(session.turn("request-17"))
        turn = await asyncio.create_task(entering)
        append(session, turn)(Message.user("Q"))
        raise ConnectionError


async def entered_within_a_time(session: Session, append: Choice) -> None:
    entered = session.turn("request-17")
    turn = await asyncio.wait_for(entered.__aenter__(), 60)
    append(session, turn)(Message.user("Q"))
    await turn.__aexit__(ConnectionError, ConnectionError(), None)
    raise ConnectionError


async def by_a_thread_of_an_executor(session: Session, append: Choice) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    async with session.turn("request-17") as turn:

        def work() -> None:
            loop.call_soon_threadsafe(append(session, turn), Message.user("Q"))
            loop.call_soon_threadsafe(told.set)

        await loop.run_in_executor(None, work)
        await told.wait()
        raise ConnectionError


LOST = [
    in_a_generator_driven_by_a_task_for_each_item,
    entered_by_a_helper,
    by_a_thread_of_an_executor,
]
if sys.version_info < (3, 12):  # later it awaits in the caller's own task
    LOST.append(entered_within_a_time)


async def lost_in(way: Any, append: Choice) -> tuple[list[str], list[TurnWarned]]:
    async with watched() as (session, events):
        with pytest.raises(ConnectionError):
            await way(session, append)
        return await tried_again(session), events


@pytest.mark.parametrize("way", LOST)
def test_where_the_context_is_lost_the_turn_s_own_append_is_its_own(way: Any) -> None:
    assert asyncio.run(lost_in(way, lambda _, turn: turn.append))[0] == []


@pytest.mark.parametrize("way", LOST)
def test_there_session_append_is_outside_and_that_is_told_once(
    way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    left, events = asyncio.run(lost_in(way, lambda session, _: session.append))
    assert left == ["Q"]
    assert [(str(event.key), event.turn) for event in events] == [("ada", "request-17")]
    [record] = caplog.records
    for name in ("turn 'request-17'", "turn.append", "sessions.post"):
        assert name in record.getMessage()


def test_a_turn_that_another_task_leaves_is_told_of() -> None:
    async def main() -> list[TurnWarned]:
        async with watched() as (session, events):
            for id in ("request-17", None):  # without an id there is nothing to try again
                turn = session.turn(id)
                await asyncio.create_task(turn.__aenter__())
                await turn.__aexit__(None, None, None)
            return events

    assert asyncio.run(main()) == [TurnWarned(key=SessionKey("ada"), turn="request-17", why="exit")]


# what is outside


@pytest.mark.anyio
async def test_what_other_tasks_append_meanwhile_stays_whoever_says_it() -> None:
    async with watched() as (session, events):
        begun, done = anyio.Event(), anyio.Event()

        async def other() -> None:
            await begun.wait()
            seq = session.append(Message.user("paid"), Message.tool("call", "found"))
            assert (await session.history())[-1].seq == seq == session.version
            session.append({"role": "assistant", "content": "thanks"})
            await session.extend([{"role": "user", "content": "more"}], "openai")
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            with pytest.raises(ConnectionError):
                async with session.turn("request-17"):
                    session.append(Message.user("Q"))
                    begun.set()
                    await done.wait()
                    session.append(Message.assistant("half an"))
                    raise ConnectionError
        assert said(session) == ["Q", "paid", "", "thanks", "more", "half an"]
        assert await tried_again(session) == ["paid", "", "thanks", "more"]
        assert [event.why for event in events] == ["append"]


@pytest.mark.anyio
async def test_a_task_that_outlives_its_turn_is_outside_also_of_the_next_attempt() -> None:
    async with watched() as (session, events):
        again, done = anyio.Event(), anyio.Event()
        turns: list[Turn] = []

        async def outlive() -> None:
            await again.wait()
            session.append(Message.user("late"))
            with pytest.raises(SessionError, match="turn 'request-17' of session ada has ended"):
                turns[0].append(Message.user("never"))
            done.set()

        async with anyio.create_task_group() as tasks:
            with pytest.raises(ConnectionError):
                async with session.turn("request-17") as turn:
                    turns.append(turn)
                    tasks.start_soon(outlive)
                    raise ConnectionError
            with pytest.raises(ConnectionError):
                async with session.turn("request-17"):
                    again.set()
                    await done.wait()
                    raise ConnectionError
        assert await tried_again(session) == ["late"]
        assert len(events) == 1


@pytest.mark.anyio
async def test_a_turn_takes_nothing_before_it_begins_and_after_its_end() -> None:
    async with watched() as (session, _):
        turn = session.turn("request-17")
        with pytest.raises(SessionError, match="has not begun"):
            turn.append(Message.user("never"))
        async with turn:
            assert turn.append(Message.user("Q")) == session.version
        with pytest.raises(SessionError, match="has ended"):
            turn.append(Message.user("never"))
        with pytest.raises(SessionError, match="has ended"):
            await turn.extend([{"role": "user", "content": "never"}], "openai")
        assert said(session) == ["Q"]


@pytest.mark.anyio
async def test_so_it_is_while_the_end_is_saved_and_behind_a_turn_that_had_ended_before() -> None:
    store = Store()
    async with connect(store) as sessions, sessions.open("ada") as session:
        told: list[str] = []

        async def append_now() -> None:
            with pytest.raises(SessionError, match="has ended") as caught:
                turn.append(Message.user("never"))
            told.append(str(caught.value))

        async with session.turn("request-17") as turn:
            await session.save()
            store.hooks["append_many"] = append_now
        assert len(told) == 1
        async with session.turn("request-17") as again:
            again.append(Message.user("allowed"))
        with pytest.raises(SessionError, match="has ended"):
            again.append(Message.user("never"))
        before = session.version
        assert session.append(Message.user("R")) == before + 1  # nothing marks it
        assert said(session) == ["allowed", "R"]


@pytest.mark.anyio
async def test_the_log_says_which_attempt_is_taken_back() -> None:
    async with watched() as (session, _):
        for resume in (False, False, True, False):
            with contextlib.suppress(ConnectionError):
                async with session.turn("request-17", resume=resume):
                    session.append(Message.user("Q"))
                    raise ConnectionError
        await session.save()
        begun, taken = [], []
        async for chunk in store_of(session).read_log(session.key):
            for record in chunk.records:
                value = decode(record.payload)
                if record.kind == "turn" and value["phase"] == "begin":
                    begun.append((value["attempt"], value.get("resumed", False)))
                elif record.kind == "retract":
                    taken.append(value["of"])
        assert begun == [(1, False), (2, False), (2, True), (3, False)]
        assert taken == [["request-17", 1], ["request-17", 2]]


@pytest.mark.anyio
async def test_a_turn_without_an_id_marks_nothing() -> None:
    async with watched() as (session, events), anyio.create_task_group() as tasks:
        begun, done = anyio.Event(), anyio.Event()

        async def other() -> None:
            await begun.wait()
            before = session.version
            assert session.append(Message.user("paid")) == before + 1
            done.set()

        tasks.start_soon(other)
        async with session.turn():
            begun.set()
            await done.wait()
        assert events == []


@pytest.mark.anyio
async def test_a_rollback_in_a_turn_stays_because_memory_and_states_went_back_with_it() -> None:
    async with watched() as (session, events):
        session.append(Message.user("old"))
        checkpoint = await session.checkpoints.create("before")
        session.append(Message.user("wrong"))
        with pytest.raises(ConnectionError):
            async with session.turn("request-17"):
                session.append(Message.user("Q"))
                await session.checkpoints.rollback(checkpoint.id)
                session.append(Message.user("R"))
                raise ConnectionError
        assert await tried_again(session) == ["old"]
        assert (await session.checkpoints.verify()).ok
        assert events == []


@pytest.mark.anyio
async def test_what_comes_behind_a_turn_whose_end_was_refused_is_outside() -> None:
    engine = EngineOptions(dirty_hard=1_500, dirty_soft=1_000, outage_policy="reject")
    store = Store()
    async with connect(store, engine=engine) as sessions, sessions.open("ada") as session:
        with pytest.raises(StoreUnavailableError):
            async with session.turn("request-17"):
                session.append(Message.user("Q"))
                store.refuses = Status.TRANSIENT
                while True:
                    session.append(Message.user("m" * 50))
        store.refuses = None
        await session.save()
        session.append(Message.user("paid"))
        accept(session, (entry_of(Message.user("of an adapter"), registry_of(session)),))
        posted = anyio.Event()
        sessions.on("posted", lambda _: posted.set())
        await sessions.post("ada", Message.user("posted"))
        await posted.wait()
        left = await tried_again(session)
        assert "Q" not in left
        assert left[-3:] == ["paid", "of an adapter", "posted"]


# what the context was before the attempt


async def push_out(session: Session) -> None:
    """Leave a cut attempt that has pushed an older message out of the context."""
    session.append(Message.user("old"))
    with pytest.raises(ConnectionError):
        async with session.turn("request-17"):
            for _ in range(20):
                session.append(Message.user("m" * 100))
            raise ConnectionError


@pytest.mark.anyio
async def test_a_retry_has_the_older_messages_again_that_the_attempt_had_pushed_out() -> None:
    async with memory(limits=Limits(context_bytes=1_000)) as sessions:
        session = await sessions.open("ada")
        await push_out(session)
        assert "old" not in said(session)
        assert await tried_again(session) == ["old"]


@pytest.mark.anyio
async def test_what_is_appended_while_the_context_is_read_anew_is_in_it() -> None:
    store = Store()
    limits = Limits(context_bytes=1_000)
    async with connect(store, limits=limits) as sessions, sessions.open("ada") as session:
        await push_out(session)
        asked = anyio.Event()

        async def pay() -> None:
            session.append(Message.user("paid"))
            asked.set()

        session.append(Message.user("unsaved"))
        store.after["append_many"] = pay
        assert await tried_again(session) == ["old", "unsaved", "paid"]
        assert asked.is_set()


@pytest.mark.anyio
async def test_what_is_taken_back_while_the_context_is_read_anew_is_not_in_it() -> None:
    store = Store()
    limits = Limits(context_bytes=1_000)
    async with connect(store, limits=limits) as sessions, sessions.open("ada") as session:
        await push_out(session)
        before = session.version
        session.append(Message.user("undone"))

        async def undo() -> None:
            accept(session, (Entry(RETRACT, encode(RetractionPayload(before))),))

        store.after["append_many"] = undo
        assert await tried_again(session) == ["old"]
        assert "append_many" not in store.after


# in blocking style


def test_in_blocking_style_a_turn_owns_what_its_thread_appends_and_what_is_given_to_it() -> None:
    with connect_blocking("memory:") as sessions, sessions.open("ada") as session:
        events: list[TurnWarned] = []
        sessions.on("turn_warned", events.append)

        def in_thread(act: Callable[[], object]) -> None:
            thread = threading.Thread(target=act)
            thread.start()
            thread.join(60)

        with pytest.raises(ConnectionError), session.turn("request-17") as turn:
            session.extend([{"role": "user", "content": "Q"}], "openai")
            turn.extend([{"role": "user", "content": "R"}], "openai")
            in_thread(lambda: turn.append(Message.user("of the turn")))
            session.append(Message.assistant("half an"))
            raise ConnectionError
        assert events == []
        with pytest.raises(SessionError, match="has ended"):
            turn.append(Message.user("never"))
        with pytest.raises(ConnectionError), session.turn("request-17"):
            assert session.context() == []
            in_thread(lambda: session.append(Message.user("paid")))
            raise ConnectionError
        with session.turn("request-17"):
            assert [message.text for message in session.context()] == ["paid"]
    assert events == [TurnWarned(key=SessionKey("ada"), turn="request-17", why="append")]


def test_in_blocking_style_a_turn_owns_the_retraction_of_its_thread_alone() -> None:
    with connect_blocking("memory:") as sessions, sessions.open("ada") as session:
        events: list[TurnWarned] = []
        sessions.on("turn_warned", events.append)
        start = session.append(Message.user("before"))
        with pytest.raises(ConnectionError), session.turn("request-17"):
            session.retract(after=start - 1)
            raise ConnectionError
        with pytest.raises(ConnectionError), session.turn("request-17"):
            assert [message.text for message in session.context()] == ["before"]
            assert events == []
            thread = threading.Thread(target=lambda: session.retract(after=start - 1))
            thread.start()
            thread.join(60)
            raise ConnectionError
        with session.turn("request-17"):
            assert session.context() == []
    assert events == [TurnWarned(key=SessionKey("ada"), turn="request-17", why="append")]


# how turns wait


async def begun_within(timeout: float | None, lasts: float) -> tuple[list[str], list[TurnWarned]]:
    """Begin a turn in a task that a running turn has started and waits for, for some time."""
    told: list[str] = []
    events: list[TurnWarned] = []
    async with memory() as sessions, sessions.open("ada") as session:
        sessions.on("turn_warned", events.append)

        async def second() -> None:
            try:
                async with session.turn("second", timeout=timeout):
                    told.append("second")
            except SessionError as error:
                told.append(str(error))

        async with session.turn("first"):
            with anyio.move_on_after(lasts):
                async with anyio.create_task_group() as group:
                    group.start_soon(second)
            told.append("first")
        assert sessions.health().status == "ok"
        return told, events


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_a_turn_that_the_running_one_waits_for_ends_by_its_timeout(backend: str) -> None:
    told, events = _virtual.run(backend, begun_within, 600.0, 1e5)
    assert told[1:] == ["first"]
    assert "turn 'second' has waited 600 s for turn 'first'" in told[0]
    assert events == [TurnWarned(key=SessionKey("ada"), turn="first", why="wait")]


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_without_a_timeout_it_waits_for_ever(backend: str) -> None:
    told, _ = _virtual.run(backend, begun_within, None, 1e4)
    assert told == ["first"]


async def health_of_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    async with memory() as sessions, sessions.open("ada") as session:
        done = anyio.Event()

        async def second() -> None:
            async with session.turn("second"):
                done.set()

        async with anyio.create_task_group() as group:
            async with session.turn():
                group.start_soon(second)
                await anyio.sleep(4)
                assert sessions.health().status == "ok"
                await anyio.sleep(60)
                health = sessions.health()
            with anyio.fail_after(1):
                await done.wait()
        assert health.status == "degraded"
        [reason] = health.reasons
        waits = "turn 'second' waits for turn 'turn_0001', in which it was begun"
        assert reason == f"session ada: {waits}"
        [record] = [record for record in caplog.records if waits in record.getMessage()]
        assert "turn.append" in record.getMessage()
        assert (sessions.health().status, sessions.health().reasons) == ("ok", ())


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_a_turn_that_waits_for_the_one_in_which_it_was_begun_is_told_of(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    _virtual.run(backend, health_of_a_wait, caplog)


async def others_wait() -> list[str]:
    order: list[str] = []
    async with watched() as (session, events), anyio.create_task_group() as group:

        async def one(name: str) -> None:
            async with session.turn(name):
                await anyio.sleep(60)
                order.append(name)

        group.start_soon(one, "first")
        group.start_soon(one, "second")
        await anyio.sleep(200)
        assert events == []
    return sorted(order)


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_turns_of_other_tasks_wait_without_a_word(backend: str) -> None:
    assert _virtual.run(backend, others_wait) == ["first", "second"]


async def waits_for_another() -> None:
    async with watched() as (session, events), anyio.create_task_group() as group:

        async def lasts(name: str) -> None:
            async with session.turn(name):
                await anyio.sleep(60)

        async with session.turn("first"):
            group.start_soon(lasts, "second")
            await anyio.sleep(1)
            group.start_soon(lasts, "third")
            await anyio.sleep(1)
        await anyio.sleep(30)
        assert events == []


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_once_that_turn_has_ended_it_waits_as_any_other(backend: str) -> None:
    _virtual.run(backend, waits_for_another)


async def closed_within() -> None:
    shutdown = Shutdown(signals=False, deadline=3.0, turn_grace=1.0)
    async with connect("memory:", shutdown=shutdown) as sessions, sessions.open("a") as session:
        errors: list[SessionError] = []

        async def close() -> None:
            try:
                await session.aclose()
            except SessionError as error:
                errors.append(error)

        async with session.turn():
            began = anyio.current_time()
            async with anyio.create_task_group() as group:
                group.start_soon(close)
            assert anyio.current_time() - began == pytest.approx(3, abs=1)
            session.append(Message.user("the turn goes on"))
        assert "still runs after 3.0 s" in str(errors[0])


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_a_close_that_the_turn_waits_for_ends_by_its_deadline(backend: str) -> None:
    _virtual.run(backend, closed_within)


@pytest.mark.anyio
@pytest.mark.parametrize("timeout", [-1, "3", float("nan"), True])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    async with memory() as sessions, sessions.open("a") as session:
        with pytest.raises(InvalidArgumentError, match="invalid timeout="):
            session.turn(timeout=timeout)


@pytest.mark.anyio
async def test_a_turn_that_gives_up_lets_those_behind_it_in() -> None:
    async with memory() as sessions, sessions.open("a") as session:
        begun, ended, done = anyio.Event(), anyio.Event(), anyio.Event()

        async def first() -> None:
            async with session.turn():
                begun.set()
                await ended.wait()

        async def third() -> None:
            async with session.turn():
                done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await begun.wait()
            with pytest.raises(SessionError, match="a turn without an id has waited 0 s"):
                await session.turn(timeout=0).__aenter__()
            group.start_soon(third)
            ended.set()
            with anyio.fail_after(60):
                await done.wait()
