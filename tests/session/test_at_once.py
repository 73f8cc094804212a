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
