"""What waits for sessions comes along, and nobody takes a session over on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

import perdure
from perdure import LeaseHeldError, Message, Shutdown, TooLargeError
from perdure.lease import LeaseOptions, OwnerWatch, acquire_lease, while_beating
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE
from perdure.store import (
    Batch,
    DeadLetter,
    InboxLimit,
    Outcome,
    PendingItem,
    Terms,
    take_after,
)
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from perdure.transfer import migrate
from tests._virtual import BACKENDS, virtual
from tests.pausing import PausingStore, meanwhile
from tests.remote import Remote

QUIET = Shutdown(signals=False)
MOST = 100
"""Bytes that a small store takes."""


class Small(DelegatingStore):
    """A store that refuses large items, as some servers do."""

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        if any(len(item.payload) > MOST for item in items):
            raise TooLargeError("an item is too large: keep large values as blobs")
        return await super().enqueue(key, items, limit=limit)


async def opened(*stores: Any) -> None:
    for store in stores:
        await store.open()


async def said(store: MemoryStore, key: SessionKey) -> list[str]:
    """Open a session, and return what it has by then."""
    again = MemoryStore(backing=store._backing)
    async with perdure.connect(again, shutdown=QUIET) as sessions:
        async with sessions.open(key.agent, session=key.session, tenant=key.tenant) as session:
            async with session.turn():
                return [message.text for message in session.context()]


async def test_posts_to_sessions_that_nobody_has_opened_come_along() -> None:
    source, target = MemoryStore(), MemoryStore()
    keys = [SessionKey("new"), SessionKey("new", "second"), SessionKey("theirs", tenant="acme")]
    async with perdure.connect(MemoryStore(backing=source._backing), shutdown=QUIET) as sessions:
        async with sessions.open("old") as session, session.turn():
            session.append(Message.user("Hello"))
        for key in keys:
            message = Message.user(f"for {key}")
            place = {"session": key.session, "tenant": key.tenant}
            await sessions.post(key.agent, message, key="op-1", **place)
    await opened(source, target)
    done = await migrate(source, target)
    assert (done.failed, done.sessions, done.copied) == ({}, 1, 1)
    assert (done.posted, done.empty) == (len(keys), len(keys))
    again = await migrate(source, target)
    assert (again.failed, again.copied, again.there, again.posted) == ({}, 0, 1, 0)
    assert await target.sessions_with_pending_items() == sorted(keys)
    for key in keys:
        assert await target.head(key) == 0
        assert await said(target, key) == [f"for {key}"]


async def test_posts_of_other_tenants_stay_where_they_are() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    theirs = SessionKey("a", tenant="acme")
    for key in (theirs, SessionKey("a")):
        await source.enqueue(
            key, [PendingItem("op", MESSAGE, b'{"role":"user","content":"x"}', 1.0)]
        )
    assert (await migrate(source, target, tenants=[""])).posted == 1
    assert await target.sessions_with_pending_items() == [SessionKey("a")]


async def test_what_waits_stays_in_the_source() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    key = SessionKey("new")
    item = PendingItem("op", MESSAGE, b'{"role":"user","content":"x"}', 1.0)
    await source.enqueue(key, [item])
    assert ((await migrate(source, target)).posted, await source.sessions_with_pending_items()) == (
        1,
        [key],
    )
    assert (await migrate(source, target)).posted == 0
    assert await said(target, key) == ["x"]
    assert "another session new" in (await migrate(source, target)).failed["new"]
    assert await target.sessions_with_pending_items() == []


async def test_posts_that_are_too_large_do_not_hold_up_those_behind_them() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    key = SessionKey("a")
    large = [PendingItem(f"big-{n}", MESSAGE, b'"%s"' % (b"x" * MOST), 1.0) for n in range(150)]
    small = [PendingItem(f"small-{n}", MESSAGE, b"{}", 2.0) for n in range(130)]
    await source.enqueue(key, [*large, *small])
    done = await migrate(source, Small(target))  # type: ignore[arg-type]
    assert done.posted == len(small)
    assert "150 of its posts cannot be stored there: an item is too large" in (done.failed["a"])
    grant = await take_after(target, key, after=0)
    assert await target.receive(key, grant.epoch, limit=1000) == small
    assert await source.holder(key) is None  # nobody takes a lease there
    assert await source.receive(key, 0, limit=1000) == [*large, *small]


# a long way


class Slow(DelegatingStore):
    """A store that takes records slowly."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.writing = anyio.Event()

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        self.writing.set()
        await anyio.sleep(60)
        return await self.inner.append_many(batches)


@pytest.mark.parametrize("anyio_backend", [virtual("asyncio"), virtual("trio")], ids=BACKENDS)
async def test_nobody_takes_a_session_over_that_is_being_copied() -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        async with sessions.open("a") as session, session.turn():
            session.append(Message.user("Hello"))
    there = MemoryBacking()
    source, target = MemoryStore(backing=backing), Slow(MemoryStore(backing=there))
    other = Remote(MemoryStore(backing=there))
    await opened(source, target, other)
    async with anyio.create_task_group() as group:
        group.start_soon(migrate, source, target)
        await target.writing.wait()
        watch = OwnerWatch(LeaseOptions(), anyio.current_time)

        async def attend() -> None:
            while True:
                await anyio.sleep(1)
                watch.renewed()

        async with anyio.create_task_group() as attending:
            attending.start_soon(attend)
            with pytest.raises(LeaseHeldError):
                await acquire_lease(
                    other,  # type: ignore[arg-type]
                    SessionKey("a"),
                    Terms(me=other.owner),
                    watch=watch,
                    on_held="steal",
                    wait=30.0,
                )
            attending.cancel_scope.cancel()
    assert await target.head(SessionKey("a")) > 0


async def test_what_is_done_meanwhile_fails_as_it_does_alone() -> None:
    store = FaultyStore(MemoryStore(), fail_on="heartbeat", times=None)
    await store.open()

    async def act() -> None:
        while not store.calls["heartbeat"]:
            await anyio.lowlevel.checkpoint()
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await while_beating(store, OwnerWatch(LeaseOptions(), anyio.current_time), act)


async def set_aside(store: MemoryStore, key: SessionKey, op_id: str) -> DeadLetter:
    """Post an item, and have a holder of the session make it a dead letter."""
    item = PendingItem(op_id, MESSAGE, msgspec.json.encode({"text": "?"}), 1.0)
    letter = DeadLetter(item, "it cannot be appended", 5, 2.0)
    await store.enqueue(key, [item])
    held = await store.holder(key)
    grant = await take_after(store, key, after=0 if held is None else held.epoch)
    await store.ack(key, grant.epoch, dead=[letter])
    await store.release(key, grant.epoch)
    return letter


async def say(store: MemoryStore, key: SessionKey, text: str) -> None:
    again = MemoryStore(backing=store._backing)
    async with perdure.connect(again, shutdown=QUIET) as sessions:
        async with sessions.open(key.agent, tenant=key.tenant) as session, session.turn():
            session.append(Message.user(text))


async def test_dead_letters_of_other_tenants_stay_where_they_are() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    for key in (SessionKey("a"), SessionKey("b", tenant="acme")):
        await say(source, key, "Hello")
        await set_aside(source, key, "large/0")
    assert (await migrate(source, target, tenants=["acme"])).dead_letters == 1
    assert await target.sessions_with_pending_items(dead_letters=True) == [
        SessionKey("b", tenant="acme")
    ]


async def test_a_copy_with_dead_letters_of_its_own_is_not_written_anew() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    key = SessionKey("a")
    await say(source, key, "one")
    await migrate(source, target)
    letter = await set_aside(target, key, "large/0")
    await say(source, key, "two")
    done = await migrate(source, target)
    assert "1 dead letters" in done.failed[str(key)]
    assert await target.dead_letters(key) == [letter]
    again = MemoryStore(backing=target._backing)
    async with perdure.connect(again, shutdown=QUIET) as sessions:
        await sessions.retry_dead_letters("a")
    done = await migrate(source, target)
    assert (done.failed, done.copied) == ({}, 1)
    held = await target.holder(key)
    assert held is not None
    assert [one.op_id for one in await target.receive(key, held.epoch, limit=9)] == ["large/0"]


async def test_what_is_posted_while_a_copy_is_written_anew_waits_there() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    key, pausing = SessionKey("a"), PausingStore(target)
    await say(source, key, "one")
    await migrate(source, pausing)
    copy = await target.holder(key)
    assert copy is not None
    grant = await take_after(target, key, after=copy.epoch)  # under a number of the source's next
    await target.release(key, grant.epoch)
    await say(source, key, "two")
    before, late = [
        PendingItem(f"{text}/0", MESSAGE, b'{"role":"user","content":"%s"}' % text.encode(), 1.0)
        for text in ("before", "late")
    ]
    await target.enqueue(key, [before])
    pause = pausing.pause("delete")
    done = await meanwhile(
        pause, lambda: migrate(source, pausing), lambda: target.enqueue(key, [late])
    )
    assert (done.failed, done.copied) == ({}, 1)
    assert sorted(await said(target, key)) == ["before", "late", "one", "two"]
