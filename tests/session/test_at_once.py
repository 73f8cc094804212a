"""What can never succeed is refused at once, and what is asked for costs no more than it needs."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from perdure import (
    Message,
    NotStorableError,
    Session,
    SessionError,
    SessionManager,
    Shutdown,
    connect,
)
from perdure.session import base

GUARD = 30.0
"""Seconds after which something hangs."""


def memory(**options: Any) -> SessionManager:
    return connect("memory:", shutdown=Shutdown(signals=False), **options)


# metadata


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("value", "kind", "where"),
    [
        (float("nan"), "float", "metadata.k"),
        ({"deep": [1, float("inf")]}, "float", "metadata.k.deep[1]"),
        ({3, 1}, "set", "metadata.k"),
        ([b"\xff"], "bytes", "metadata.k"),
        (dt.datetime(2020, 1, 1), "datetime", "metadata.k"),
        ({1: 2}, "dict", "metadata.k"),
    ],
)
async def test_metadata_that_would_come_back_changed_is_refused(
    value: object, kind: str, where: str
) -> None:
    async with memory() as sessions, sessions.open("a") as session:
        version = session.version
        with pytest.raises(NotStorableError) as caught:
            session.describe(fine=1, k=value)
        assert where in str(caught.value)
        assert kind in str(caught.value)
        assert session.version == version
        session.describe(k={"deep": [1, 2.5, None, True, "x"]})
        assert session.info.metadata.extra["k"]


# hooks

Call = Callable[[SessionManager, Session], Awaitable[object]]


async def begin_a_turn(_sessions: SessionManager, session: Session) -> None:
    async with session.turn():
        pass


CALLS: dict[str, Call] = {
    "save": lambda _, session: session.save(),
    "wait_durable": lambda _, session: session.wait_durable(),
    "aclose": lambda _, session: session.aclose(),
    "turn": begin_a_turn,
    "flush": lambda sessions, _: sessions.flush(),
    "close the manager": lambda sessions, _: sessions.aclose(),
    "rename": lambda sessions, _: sessions.rename("a", "b"),
    "save in a child": lambda _, session: in_a_child(session.save),
}


async def in_a_child(call: Callable[[], Awaitable[object]]) -> None:
    errors: list[SessionError] = []

    async def child() -> None:
        try:
            await call()
        except SessionError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(child)
    if errors:
        raise errors[0]


@pytest.mark.anyio
@pytest.mark.parametrize("what", CALLS)
async def test_what_would_wait_for_its_own_hook_is_refused(what: str) -> None:
    seen: list[str] = []
    async with memory() as sessions, sessions.open("a") as session:

        async def hook(same: Session) -> None:
            assert same is session
            if not seen:
                with pytest.raises(SessionError, match="before_save hook") as caught:
                    await CALLS[what](sessions, session)
                seen.append(str(caught.value))
                session.append(Message.user("from the hook"))

        sessions.on("before_save", hook)
        session.append(Message.user("hello"))
        await session.save()
        assert len(seen) == 1
        texts = [message.text for message in session.context()]
        assert texts == ["hello", "from the hook"]
        assert session.durable_version == session.version


@pytest.mark.deep
@pytest.mark.anyio
async def test_hooks_of_two_sessions_do_not_wait_for_each_other() -> None:
    seen: list[str] = []
    async with memory() as sessions, sessions.open("a") as a, sessions.open("b") as b:
        others = {a.id: b, b.id: a}

        async def hook(session: Session) -> None:
            try:
                await others[session.id].save()
            except SessionError:
                seen.append(session.id)

        sessions.on("before_save", hook)
        a.append(Message.user("hello"))
        b.append(Message.user("hello"))
        await a.save()
        assert seen == ["b"]
        assert a.durable_version == a.version
        assert b.durable_version == b.version


class OddError(BaseException):
    """As test frameworks use to skip or to fail."""


async def awaits_a_cancelled_task(_: object) -> None:
    task = asyncio.ensure_future(asyncio.sleep(GUARD))
    task.cancel()
    await task


def asks_a_cancelled_future(_: object) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


async def is_odd(_: object) -> None:
    raise OddError


def is_odd_at_once(_: object) -> None:
    raise OddError


BADLY = [awaits_a_cancelled_task, asks_a_cancelled_future, is_odd, is_odd_at_once]


@pytest.mark.parametrize("event", ["before_save", "saved", "opened", "closed", "drain"])
@pytest.mark.parametrize("hook", BADLY)
def test_a_hook_that_ends_badly_fails_as_any_other(event: Any, hook: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD):
            async with memory() as sessions:
                sessions.on(event, hook)
                async with sessions.open("a") as session:
                    for _ in range(2):
                        session.append(Message.user("hello"))
                        await session.save()
                    assert sessions.health().status == "ok"
                    await session.aclose()
            assert sessions.lost == ()

    asyncio.run(main())


# turns


async def wait_for_it(call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.wait_for(call(), GUARD)  # type: ignore[arg-type]


async def gather(call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(call(), asyncio.sleep(0))


async def await_a_task_of_a_task(call: Callable[[], Awaitable[object]]) -> None:
    async def outer() -> None:
        await asyncio.create_task(call())  # type: ignore[arg-type]

    await asyncio.create_task(outer())


async def group_of_asyncio(call: Callable[[], Awaitable[object]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(call())  # type: ignore[arg-type]
    except* SessionError as errors:
        raise errors.exceptions[0] from None


async def group_that_is_left_late(call: Callable[[], Awaitable[object]]) -> None:
    errors: list[SessionError] = []

    async def child() -> None:
        try:
            await call()
        except SessionError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(child)
        await anyio.sleep(0.05)  # the child waits already, and nobody can tell for what
    raise errors[0]


async def gather_in_gather(call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(asyncio.gather(call(), asyncio.sleep(0)), asyncio.sleep(0))


async def gather_of_two(call: Callable[[], Awaitable[object]]) -> None:
    for one in await asyncio.gather(call(), call(), return_exceptions=True):
        if isinstance(one, SessionError):
            raise one


async def gather_in_a_task(call: Callable[[], Awaitable[object]]) -> None:
    await asyncio.create_task(gather(call))


STARTS = [
    wait_for_it,
    gather,
    gather_in_gather,
    gather_of_two,
    gather_in_a_task,
    await_a_task_of_a_task,
    group_of_asyncio,
    in_a_child,
]


@pytest.mark.parametrize("start", [*STARTS, group_that_is_left_late])
def test_a_turn_that_its_own_turn_waits_for_is_refused(start: Any) -> None:
    async def main() -> int:
        async with memory() as sessions, sessions.open("a") as session:

            async def inner() -> None:
                async with session.turn():
                    session.append(Message.user("never"))

            async with session.turn():
                with pytest.raises(SessionError, match="running turn waits for this task|already"):
                    async with asyncio.timeout(GUARD):
                        await start(inner)
                session.append(Message.user("the turn goes on"))
            async with session.turn():
                session.append(Message.user("and so do others"))
            return len(session.context())

    assert asyncio.run(main()) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["turn", "aclose"])
async def test_a_nursery_s_child_does_not_wait_for_the_turn_around_it(what: str) -> None:
    async with memory() as sessions, sessions.open("a") as session:
        async with session.turn():
            with anyio.fail_after(GUARD), pytest.raises(SessionError, match="waits for this task"):
                await in_a_child(lambda: CALLS[what](sessions, session))
            session.append(Message.user("the turn goes on"))
        assert len(session.context()) == 1


async def first_completed(task: asyncio.Task[None]) -> None:
    await asyncio.wait(
        {task, asyncio.create_task(asyncio.sleep(MOMENT))}, return_when=asyncio.FIRST_COMPLETED
    )


async def wait_a_moment(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task}, timeout=MOMENT)


async def wait_for_its_shield(task: asyncio.Task[None]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), MOMENT)


async def shield_with_a_timeout(task: asyncio.Task[None]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(MOMENT):
            await asyncio.shield(task)


async def sibling_that_fails(task: asyncio.Task[None]) -> None:
    async def fail() -> None:
        await asyncio.sleep(MOMENT)
        raise LookupError

    with pytest.raises(LookupError):
        await asyncio.gather(task, fail())


async def callback_that_holds_it(task: asyncio.Task[None]) -> None:
    other = asyncio.get_running_loop().create_future()
    task.add_done_callback(lambda _: other.done())
    asyncio.get_running_loop().call_later(MOMENT, other.set_result, None)
    await other


MOMENT = 0.05
"""Seconds after which the other task waits already, and is left to itself."""
MAY_END = [
    first_completed,
    wait_a_moment,
    wait_for_its_shield,
    shield_with_a_timeout,
    sibling_that_fails,
    callback_that_holds_it,
]


@pytest.mark.parametrize("wait", MAY_END)
def test_a_turn_whose_wait_may_end_is_not_refused(wait: Any) -> None:
    async def main() -> list[str]:
        async with memory() as sessions, sessions.open("a") as session:

            async def second() -> None:
                async with session.turn():
                    session.append(Message.user("second"))

            async with asyncio.timeout(GUARD):
                async with session.turn():
                    task = asyncio.create_task(second())
                    await wait(task)
                    session.append(Message.user("first"))
                await task
            return [message.text for message in session.context()]

    assert asyncio.run(main()) == ["first", "second"]


def test_a_wait_that_may_never_end_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "CHECK_INTERVAL", 0.001)

    async def main() -> None:
        async with memory() as sessions, sessions.open("a") as session:

            async def second() -> None:
                async with session.turn():
                    pass

            task = asyncio.create_task(asyncio.sleep(0))
            with pytest.raises(asyncio.CancelledError):
                async with session.turn():
                    task = asyncio.create_task(second())
                    leave_when_told(asyncio.current_task())
                    await asyncio.shield(task)
            await task

    def leave_when_told(task: Any) -> None:
        if "which seems to wait for it" in caplog.text:
            task.cancel()
        else:
            asyncio.get_running_loop().call_later(0.001, leave_when_told, task)

    asyncio.run(main())
    assert len(caplog.records) == 1


def test_a_turn_that_is_about_to_begin_may_wait_for_a_task_all_the_same() -> None:
    """Between the end of a turn and the begin of the next, nobody has the session's turn."""

    async def main() -> None:
        async with memory() as sessions, sessions.open("a") as session:

            async def wait_in_a_turn(task: asyncio.Task[None]) -> None:
                async with session.turn():
                    await task

            async def twice() -> None:
                async with session.turn():
                    me = asyncio.current_task()
                    assert me is not None
                    others.append(asyncio.create_task(wait_in_a_turn(me)))
                    await asyncio.sleep(MOMENT)
                async with session.turn():
                    raise AssertionError("two turns at once")

            others: list[asyncio.Task[None]] = []
            async with asyncio.timeout(GUARD):
                with pytest.raises(SessionError, match="running turn waits for this task"):
                    await asyncio.create_task(twice())
                with pytest.raises(SessionError):
                    await others[0]

    asyncio.run(main())


def test_a_wait_for_a_turn_that_ends_as_it_is_checked_is_waited_out() -> None:
    """Such as that of a gather, another of whose tasks was cancelled in the same step."""

    async def main() -> list[str]:
        async with memory() as sessions, sessions.open("a") as session:
            told = asyncio.Event()

            async def cancelled() -> None:
                async with session.turn():
                    raise AssertionError("it is cancelled while it waits")

            async def second() -> None:
                await told.wait()
                async with session.turn():
                    session.append(Message.user("second"))

            async with asyncio.timeout(GUARD), session.turn():
                tasks = [asyncio.create_task(cancelled()), asyncio.create_task(second())]

                def cancel() -> None:
                    tasks[0].cancel()
                    told.set()

                asyncio.get_running_loop().call_later(MOMENT, cancel)
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.gather(*tasks)
                await asyncio.sleep(MOMENT)
                session.append(Message.user("first"))
            await tasks[1]
            return [message.text for message in session.context()]

    assert asyncio.run(main()) == ["first", "second"]


def test_a_turn_that_is_left_within_a_nursery_lets_its_child_in() -> None:
    async def main() -> list[str]:
        async with memory() as sessions, sessions.open("a") as session:

            async def second() -> None:
                async with session.turn():
                    session.append(Message.user("second"))

            turn = session.turn()
            with trio.fail_after(GUARD):
                await turn.__aenter__()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(second)
                    await trio.testing.wait_all_tasks_blocked()
                    session.append(Message.user("first"))
                    await turn.__aexit__(None, None, None)
            return [message.text for message in session.context()]

    assert trio.run(main) == ["first", "second"]


@pytest.mark.anyio
async def test_a_task_that_outlives_the_turn_waits_for_it(again: Any) -> None:
    async with again() as sessions, sessions.open("a") as session:

        async def next_turn() -> None:
            async with session.turn():
                session.append(Message.user("second"))

        with anyio.fail_after(GUARD):
            async with anyio.create_task_group() as group, session.turn():
                group.start_soon(next_turn)
                await anyio.sleep(1.2)
                session.append(Message.user("first"))
        assert [message.text for message in session.context()] == ["first", "second"]


# history


@dataclass
class Note:
    """Counts how often one is made."""

    text: str

    def __post_init__(self) -> None:
        made.append(self.text)


made: list[str] = []


@pytest.mark.anyio
@pytest.mark.parametrize("saved", [0, 20, 300])
async def test_history_decodes_what_it_shows_and_no_more(saved: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"autosave": None, "types": [Note]}
    async with connect(tmp_path, shutdown=Shutdown(signals=False), **options) as sessions:
        async with sessions.open("a") as session:
            for n in range(300):
                session.append(Note(str(n)))
                if n + 1 == saved:
                    await session.save()
            for limit, before in ((5, None), (5, 200), (50, None), (0, None)):
                made.clear()
                items = await session.history(limit=limit, before=before)
                assert len(made) == len(items) == limit
                end = 300 if before is None else before - session.version + 299
                assert [item.value.text for item in items] == [
                    str(n) for n in range(end - limit, end)
                ]
            await session.save()
