"""A stream of events reads one session, and ends with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

import perdure
from perdure import Message, SessionManager, Shutdown
from perdure.asgi import Cursor, Feed
from perdure.records.keys import SessionKey
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.integration.journeys.backends import ALL, ENVIRONMENT, store_of

KEY = SessionKey("support", tenant="acme")


@pytest.fixture(params=["memory", *ALL])
def stores(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Store, Store]:
    """Return a store as two processes open it."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    if request.param == "memory":
        backing = MemoryBacking()
        return MemoryStore(backing=backing), MemoryStore(backing=backing)
    return store_of(request.param, tmp_path), store_of(request.param, tmp_path)


async def say(sessions: SessionManager, owner: str | None, *texts: str) -> None:
    async with sessions.open("support", tenant="acme", owner=owner) as session:
        for text in texts:
            session.append(Message.user(text))
            await session.save()


async def heard(events: AsyncGenerator[object, None]) -> tuple[list[str], bool]:
    """Return what a stream says until it waits, or ends, and whether it has ended."""
    told = []
    async for event in events:
        if event is None:
            await events.aclose()
            return told, False
        told.append(str(event))
    return told, True


async def test_a_stream_does_not_read_the_session_that_has_its_id_next(
    stores: tuple[Store, Store],
) -> None:
    here, there = stores
    quiet = Shutdown(signals=False)
    async with (
        perdure.connect(here, shutdown=quiet) as ours,
        perdure.connect(there, shutdown=quiet) as theirs,
    ):
        feed = Feed(ours, poll=0)
        await say(theirs, "ada", "one", "two")
        places = [await feed.place(KEY, Cursor(seq)) for seq in (0, 1, await feed.head(KEY))]
        told, ended = await heard(feed.events(KEY, places[0]))
        assert ["'one'" in told[0], "'two'" in told[1], ended] == [True, True, False]

        await theirs.delete("support", tenant="acme")
        for place in places[1:]:
            assert await heard(feed.events(KEY, place)) == ([], True)
        await say(theirs, "bob", "secret")
        for place in places:
            assert await heard(feed.events(KEY, place)) == ([], True)
        await say(theirs, "bob", *["secret"] * 9)
        for place in places:
            assert await heard(feed.events(KEY, place)) == ([], True)


async def test_a_stream_ends_amid_the_log_that_is_replaced(stores: tuple[Store, Store]) -> None:
    here, there = stores
    quiet = Shutdown(signals=False)
    async with (
        perdure.connect(here, shutdown=quiet) as ours,
        perdure.connect(there, shutdown=quiet) as theirs,
    ):
        feed = Feed(ours, poll=0)
        await say(theirs, "ada", "one")
        events = feed.events(KEY, Cursor(0))
        assert "'one'" in str(await anext(events))
        assert await anext(events) is None
        await theirs.delete("support", tenant="acme")
        await say(theirs, "bob", *["secret"] * 9)
        assert await heard(events) == ([], True)


async def test_a_stream_ends_when_its_session_gets_an_owner() -> None:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        feed = Feed(sessions, poll=0)
        await say(sessions, None, "one")
        place = await feed.place(KEY)
        await say(sessions, "bob", "secret")
        assert await heard(feed.events(KEY, place)) == ([], True)


async def test_a_stream_of_a_session_that_does_not_exist_yet_sees_it_begin() -> None:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        feed = Feed(sessions, poll=0)
        place = await feed.place(KEY)
        await say(sessions, "ada", "one", "two")
        events = feed.events(KEY, place)
        assert ["'one'" in str(await anext(events)), "'two'" in str(await anext(events))] == [
            True,
            True,
        ]
        await events.aclose()


async def test_a_place_beyond_the_log_is_its_end() -> None:
    backing, quiet = MemoryBacking(), Shutdown(signals=False)
    async with (
        perdure.connect(MemoryStore(backing=backing), shutdown=quiet) as ours,
        perdure.connect(MemoryStore(backing=backing), shutdown=quiet) as theirs,
    ):
        feed = Feed(ours, poll=0)
        await say(theirs, "ada", "one")
        events = feed.events(KEY, Cursor(10**9))
        assert await anext(events) is None
        await say(theirs, "ada", "two")
        assert "'two'" in str(await anext(events))
        await events.aclose()
