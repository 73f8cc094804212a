"""Listings by the last activity and by owner, while sessions are saved and deleted beside them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest

from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.store import Batch, SessionQuery, Status, Taken
from perdure.stores.redis import RedisStore, log, store as engine
from perdure.stores.redis.connection import RedisCall
from perdure.stores.redis.layout import STEP
from perdure.testing.conformance._kit import KEY, group, take
from tests.servers.cutting import CuttingProxy
from tests.servers.valkey import Valkey
from tests.stores.redis.conftest import OpenStore


class Clock:
    """What the log takes for the time: later than every session's beginning."""

    def __init__(self) -> None:
        self.now = (time.time() // STEP + 10) * STEP

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    return clock


async def save(store: RedisStore, grant: Taken, first: int, about: About | None = None) -> Status:
    batch = Batch(grant.key, grant.epoch, first, group("x"), turns=1, about=about)
    (outcome,) = await store.append_many([batch])
    return outcome.status


async def saved(store: RedisStore, clock: Clock, names: str, apart: int) -> dict[str, Taken]:
    """Begin sessions, each saved some seconds after the one before."""
    grants = {name: await take(store, SessionKey(name)) for name in names}
    for grant in grants.values():
        clock.now += apart
        assert await save(store, grant, 2) is Status.OK
    return grants


def between_reads(
    monkeypatch: pytest.MonkeyPatch, store: RedisStore, act: Callable[[], Awaitable[object]]
) -> None:
    """Do something once, behind the first read of those that were active."""
    send, done = store._link.send, list[bool]()

    async def then_act(calls: Sequence[RedisCall]) -> list[Any]:
        replies = await send(calls)
        if calls[0].name == b"ZREVRANGEBYSCORE" and not done:
            done.append(True)
            await act()
        return list(replies)

    monkeypatch.setattr(store._link, "send", then_act)


async def listed(store: RedisStore, query: SessionQuery) -> str:
    return "".join(info.key.agent for info in await store.sessions(query))


NEWEST = SessionQuery(newest_first=True)


async def test_a_session_that_is_saved_beside_a_listing_is_listed_once_and_moves_no_other(
    store: RedisStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_PAGE", 4)
    grants = await saved(store, clock, "abcdefghijkl", STEP)
    clock.now += STEP
    assert await listed(store, NEWEST) == "lkjihgfedcba"
    with monkeypatch.context() as patch:
        between_reads(patch, store, lambda: save(store, grants["l"], 3))
        assert await listed(store, NEWEST) == "lkjihgfedcba"
    with monkeypatch.context() as patch:
        between_reads(patch, store, lambda: save(store, grants["a"], 3))
        found = await listed(store, NEWEST)
        assert sorted(found.replace("a", "")) == [*"bcdefghijkl"]
        assert found.count("a") <= 1  # it was not read yet, and is newer than all that was


async def test_a_deletion_beside_a_listing_hides_no_other_session(
    store: RedisStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_PAGE", 4)
    grants = await saved(store, clock, "abcdefghijkl", STEP)
    await store.sessions(NEWEST)
    between_reads(monkeypatch, store, lambda: store.delete(grants["l"].key, grants["l"].epoch))
    assert (await listed(store, NEWEST)).removeprefix("l") == "kjihgfedcba"


async def test_many_sessions_of_one_step_are_all_listed_by_pages(
    store: RedisStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_PAGE", 3)
    await saved(store, clock, "ab", STEP)
    await saved(store, clock, "cdefghij", 1)
    clock.now += STEP
    await saved(store, clock, "kl", STEP)
    for limit in (1, 2, 5, 12):
        query, found = SessionQuery(newest_first=True, limit=limit), ""
        while page := await store.sessions(query):
            found += "".join(info.key.agent for info in page)
            query = query.after_page(page[-1])
        assert found == "lkjihgfedcba", limit


async def test_a_save_that_is_answered_in_a_later_step_is_not_taken_for_one_of_that_step(
    store: RedisStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, other, zero = [await take(store, SessionKey(name)) for name in ("late", "other", "zero")]
    assert await save(store, zero, 2) is Status.OK
    request, done = store._link.request, list[bool]()

    async def then_save(calls: Sequence[RedisCall], *, write: bool = False) -> list[Any]:
        replies = await request(calls, write=write)
        if not done:
            done.append(True)
            clock.now += STEP
            await save(store, other, 2)
        return replies

    monkeypatch.setattr(store._link, "request", then_save)
    assert await save(store, late, 2) is Status.OK
    clock.now += 1
    assert await save(store, late, 3) is Status.OK
    monkeypatch.setattr(engine, "_PAGE", 2)
    assert await listed(store, SessionQuery(newest_first=True, limit=1)) == "late"


async def test_an_append_whose_new_owner_s_index_is_not_answered_is_in_doubt(
    server: Valkey, open_store: OpenStore
) -> None:
    proxy = CuttingProxy(server.port)
    store = await open_store("me", f"redis://127.0.0.1:{proxy.port}/0?prefix={uuid4().hex}")
    grant = await take(store)
    assert await save(store, grant, 2, About(owner="ann")) is Status.OK
    proxy.cut_after(b"ann\0")  # it leaves the index
    assert await save(store, grant, 3, About(owner="bob")) is Status.IN_DOUBT
    assert proxy.cuts == 1
    assert await save(store, grant, 3, About(owner="bob")) is Status.OK
    assert [info.key for info in await store.sessions(SessionQuery(owner="bob"))] == [KEY]
    assert await store.sessions(SessionQuery(owner="ann")) == []
    proxy.close()
