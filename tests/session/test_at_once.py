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

from perdure import (
    Message,
    NotStorableError,
    Session,
    SessionError,
    SessionManager,
    Shutdown,
    connect,
)

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


STARTS = [wait_for_it, gather, await_a_task_of_a_task, group_of_asyncio, in_a_child]


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
