"""Posting to a session, and how its holder takes what was posted: once, in order, durably."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import (
    ConfigError,
    EncodedRecord,
    InboxFullError,
    LeaseOptions,
    Limits,
    Message,
    NotStorableError,
    SessionManager,
    SessionNotFoundError,
    Shutdown,
    TooLargeError,
)
from perdure.events import Posted
from perdure.memory.documents import TAKEN_IDS, note_taken
from perdure.records.keys import SessionKey
from perdure.records.records import TAKEN
from perdure.session.session import Session
from perdure.store import take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from perdure.types import PostReceipt

pytestmark = pytest.mark.anyio

Connect = Callable[..., SessionManager]
QUICK = LeaseOptions(heartbeat=0.05, ttl=5)


def texts(session: Session) -> list[str]:
    """Return what the model would see."""
    return [message.text for message in session.context()]


class Heard:
    """A hook that keeps what it was told, and lets a test wait for it."""

    def __init__(self, sessions: SessionManager) -> None:
        self.events: list[Posted] = []
        self._more = anyio.Event()
        sessions.on("posted", self._hear)

    def _hear(self, event: Posted) -> None:
        self.events.append(event)
        self._more.set()
        self._more = anyio.Event()

    async def keys(self, count: int) -> list[str]:
        """Wait for that many posts, and return their keys."""
        with anyio.fail_after(60):
            while len(found := [key for event in self.events for key in event.posts]) < count:
                await self._more.wait()
        return found


async def test_a_post_waits_on_where_whoever_began_its_session_was_killed_before_its_log(
    tmp_path: Path,
) -> None:
    store = perdure.store_for(tmp_path)
    await store.open()
    await take_after(store, SessionKey("a"), after=0)
    await store.aclose()
    (begun,) = tmp_path.glob("agents/*/log/*")  # on files the lease is there first
    begun.unlink()
    async with perdure.connect(tmp_path, shutdown=Shutdown(signals=False)) as sessions:
        await sessions.post("a", Message.user("posted"))
        with pytest.raises(SessionNotFoundError):
            await sessions.open("a", create=False)
        assert not await sessions.exists("a")
        async with sessions.open("a") as session:
            assert texts(session) == ["posted"]


async def test_what_was_posted_is_there_when_the_session_is_opened(again: Connect) -> None:
    async with again() as one:
        receipt = await one.post("a", Message.user("hello"), key="req-1")
        assert receipt == PostReceipt(key="req-1", new=1)
        assert not await one.exists("a")
    async with again() as two:
        heard = Heard(two)
        async with two.open("a") as session:
            assert texts(session) == ["hello"]
            assert await heard.keys(1) == ["req-1"]
            assert str(heard.events[0].key) == "a"
            assert heard.events[0].version == session.version


async def test_items_are_as_for_append(again: Connect) -> None:
    async with again() as sessions:
        rating = EncodedRecord("app:rating", b'{"stars": 5}')
        await sessions.post("a", Message.user("one"), rating, Message.assistant("two"))
        async with sessions.open("a") as session:
            history = await session.history()
            assert [item.kind for item in history] == ["message", "app:rating", "message"]
            assert history[1].value == {"stars": 5}
            assert history[0].value.created_at is not None


async def test_a_holder_takes_at_once_what_others_post(again: Connect) -> None:
    async with again(lease=QUICK) as one, again(lease=QUICK) as two:
        heard = Heard(one)
        async with one.open("a") as session:
            await two.post("a", Message.user("from two"), key="k")
            await one.post("a", Message.user("from one"), key="l")
            assert await heard.keys(2) == ["k", "l"]
            assert texts(session) == ["from two", "from one"]
        view = None
        with anyio.fail_after(60):
            while view is None or len(view.context()) < 2:  # it is saved without being asked to
                view = await two.load("a")


async def test_what_is_posted_amid_a_turn_waits_for_its_end(again: Connect) -> None:
    async with again(lease=QUICK) as one, again() as two:
        heard = Heard(one)
        session = await one.open("a")
        async with session.turn():
            session.append(Message.user("first"))
            await two.post("a", Message.user("posted"))
            await anyio.sleep(0.2)  # time enough to do it wrong
            session.append(Message.assistant("last"))
            assert heard.events == []
        await heard.keys(1)
        async with session.turn():
            session.append(Message.user("next"))
        assert texts(session) == ["first", "last", "posted", "next"]


async def test_a_retry_by_key_posts_nothing_twice(again: Connect) -> None:
    async with again(lease=QUICK) as one:
        heard = Heard(one)
        assert (await one.post("a", Message.user("x"), Message.user("y"), key="k")).new == 2
        assert (await one.post("a", Message.user("x"), Message.user("y"), key="k")).new == 0
        session = await one.open("a")
        await heard.keys(1)
        await one.post("a", Message.user("x"), Message.user("y"), key="k")  # taken by now
        await one.post("a", Message.user("z"), key="l")
        assert await heard.keys(2) == ["k", "l"]
        assert texts(session) == ["x", "y", "z"]
    async with again() as two:  # the keys outlast a restart, and a fold
        await two.post("a", Message.user("x"), Message.user("y"), key="k")
        session = await two.open("a")
        assert texts(session) == ["x", "y", "z"]


async def test_an_inbox_that_nobody_opens_does_not_grow_for_ever(again: Connect) -> None:
    async with again(limits=Limits(inbox_items=5)) as sessions:
        for number in range(5):
            await sessions.post("victim", Message.user(f"{number}"), key=f"key {number}")
        with pytest.raises(InboxFullError, match=r"inbox of victim .* limit is 5 items") as caught:
            await sessions.post("victim", Message.user("5"), key="key 5")
        assert caught.value.facts["items"] == 5
        assert (await sessions.post("victim", Message.user("0"), key="key 0")).new == 0
        async with sessions.open("victim") as session:  # as the message says
            assert texts(session) == list("01234")
            for number in range(5, 25):  # who tries again gets through to a holder that takes them
                posted = False
                while not posted:
                    with contextlib.suppress(InboxFullError):
                        message = Message.user(f"{number}")
                        posted = (
                            await sessions.post("victim", message, key=f"key {number}")
                        ).new == 1
                    await anyio.sleep(0.01)
            while len(texts(session)) < 25:
                await anyio.sleep(0.01)
            assert texts(session) == [f"{number}" for number in range(25)]


async def test_the_bytes_of_an_inbox_are_limited_by_default() -> None:
    """A flood of large posts ends at 64 MiB, whoever sends them."""
    large = Message.user("x" * 8_000_000)
    async with perdure.connect(MemoryStore(), shutdown=Shutdown(signals=False)) as sessions:
        for number in range(8):
            await sessions.post("victim", large, key=f"{number}")
        with pytest.raises(InboxFullError, match="67108864 bytes"):
            await sessions.post("victim", large, key="8")
        assert await sessions.forget(id="victim")  # as the message says
        await sessions.post("victim", large)
    with pytest.raises(ConfigError, match="inbox_bytes"):
        Limits(inbox_bytes=0)


async def test_a_post_becomes_one_group(again: Connect) -> None:
    async with again() as one:
        await one.post("a", *[Message.user(str(n)) for n in range(5)], key="k")
        session = await one.open("a")
        groups = [record.end for record in session.unsaved() if record.kind != "epoch"]
        assert groups == [False] * 5 + [True]
        assert session.unsaved()[-1].kind == TAKEN


async def test_many_posts_come_in_their_order(again: Connect) -> None:
    async with again(lease=QUICK) as one:
        heard = Heard(one)
        for number in range(130):
            await one.post("a", Message.user(str(number)), key=f"k{number}")
        session = await one.open("a")
        assert await heard.keys(130) == [f"k{number}" for number in range(130)]
        messages = [item for item in await session.history(limit=500) if item.kind == "message"]
        assert [item.value.text for item in messages] == [str(n) for n in range(130)]


async def test_what_was_taken_is_settled(again: Connect) -> None:
    backing = MemoryBacking()
    store = MemoryStore(backing=backing)
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as one:
        await one.post("a", Message.user("hello"))
        session = await one.open("a")
        with anyio.fail_after(60):
            while backing.sessions[session.key].inbox:
                await anyio.sleep(0.01)
        assert session.durable_version == session.version


@pytest.mark.parametrize(
    ("items", "options", "error", "text"),
    [
        ((), {}, ConfigError, "at least one"),
        ((Message.user("x"),), {"key": ""}, ConfigError, "key=''"),
        ((Message.user("x"),), {"key": "x" * 513}, ConfigError, "1 to 512 bytes"),
        ((Message.user("x"),), {"key": 7}, ConfigError, "key=7"),
        ((Message.user("x"),), {"key": "\ud800"}, ConfigError, "key="),
        ((Message.user("x"), object()), {}, NotStorableError, "object"),
        ((Message.user("x" * 3000),), {}, TooLargeError, "over the limit"),
    ],
)
async def test_what_cannot_be_posted_is_refused_whole(
    again: Connect, items: Any, options: Any, error: type[Exception], text: str
) -> None:
    async with again(limits=Limits(record_bytes=2000)) as sessions:
        with pytest.raises(error, match=re.escape(text)):
            await sessions.post("a", *items, **options)
        session = await sessions.open("a")
        assert texts(session) == []


async def test_a_post_that_does_not_fit_the_holder_hinders_none(again: Connect) -> None:
    async with again() as one:
        await one.post("a", Message.user("x" * 3000), key="large")
        await one.post("a", Message.user("small"), key="small")
    async with again(limits=Limits(record_bytes=2000)) as two:
        heard = Heard(two)
        session = await two.open("a")
        assert await heard.keys(1) == ["small"]
        assert texts(session) == ["small"]
        assert "over the limit" in two.health().undelivered["a"]


async def test_sessions_and_tenants_have_inboxes_of_their_own(again: Connect) -> None:
    async with again() as one:
        await one.post("a", Message.user("default"), key="k")
        await one.post("a", Message.user("other"), key="k", session="other")
        await one.post("a", Message.user("tenant"), key="k", tenant="t")
        assert texts(await one.open("a")) == ["default"]
        assert texts(await one.open("a", session="other")) == ["other"]
        assert texts(await one.open("a", tenant="t")) == ["tenant"]


# what goes wrong in between

SMALL = Shutdown(signals=False, deadline=5.0)


@pytest.mark.parametrize("method", ["receive", "append_many", "ack"])
@pytest.mark.parametrize("how", ["transient", "in_doubt_lost", "in_doubt_applied"])
async def test_a_failure_at_any_step_neither_loses_nor_doubles(method: str, how: Any) -> None:
    backing = MemoryBacking()
    store = FaultyStore(MemoryStore(backing=backing), fail_on=method, how=how)
    async with perdure.connect(store, shutdown=SMALL, lease=QUICK) as one:
        heard = Heard(one)
        await one.post("a", Message.user("x"), key="k")
        session = await one.open("a")
        await one.post("a", Message.user("y"), key="l")
        assert await heard.keys(2) == ["k", "l"]
        await session.save()
        assert texts(session) == ["x", "y"]
    assert store.injected == 1
    async with perdure.connect(MemoryStore(backing=backing), shutdown=SMALL) as two:
        await two.post("a", Message.user("x"), key="k")
        await two.post("a", Message.user("y"), key="l")
        session = await two.open("a")
        assert texts(session) == ["x", "y"]


async def test_what_was_discarded_is_taken_again() -> None:
    backing = MemoryBacking()
    store = FaultyStore(MemoryStore(backing=backing), fail_on="append_many", how="permanent")
    async with perdure.connect(store, shutdown=SMALL, lease=QUICK) as one:
        heard = Heard(one)
        await one.post("a", Message.user("x"), key="k")
        session = await one.open("a")
        await heard.keys(1)
        with pytest.raises(perdure.SessionQuarantinedError):
            await session.save()
        assert await session.discard_unsaved() == 2
        assert texts(session) == []
        await one.post("a", Message.user("y"), key="l")
        assert await heard.keys(3) == ["k", "k", "l"]
        assert texts(session) == ["x", "y"]


async def test_a_store_without_an_inbox_says_so(tmp_path: Any) -> None:
    from perdure.formats import FolderStorage

    async with perdure.connect(FolderStorage(tmp_path / "a"), shutdown=SMALL) as sessions:
        with pytest.raises(NotStorableError, match="no inbox"):
            await sessions.post("a", Message.user("x"))


def test_only_the_newest_op_ids_are_remembered() -> None:
    taken: dict[str, int] = {}
    for seq in range(TAKEN_IDS + 10):
        note_taken(taken, seq, b'{"ops":["%d"],"at":1.0}' % seq)
    assert len(taken) == TAKEN_IDS
    assert list(taken)[0] == "10"
    note_taken(taken, 9999, b'{"ops":["11"]}')
    assert taken["11"] == 9999
