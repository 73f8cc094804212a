"""Opening and closing over a network: round trips, as a proxy before the server counts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import psycopg
import pytest

from benchmarks.stores.wire import CountingProxy, postgres_round_trips
from perdure import Autosave, Message, Shutdown, connect
from perdure.errors import LeaseHeldError, LeaseLostError, PerdureError, StoreError
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.session.manager import SessionManager
from perdure.store import Documents, Taken, Terms, take_after
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance._kit import KEY, append_ok, group, manifest_of, take
from tests.servers.postgres import Postgres
from tests.stores.postgres.conftest import OpenStore

QUIET = Shutdown(signals=False)


@pytest.fixture
def proxy(server: Postgres) -> Iterator[CountingProxy]:
    with CountingProxy(server.port, postgres_round_trips) as proxy:
        yield proxy


@asynccontextmanager
async def sessions_on(
    server: Postgres, proxy: CountingProxy, schema: str
) -> AsyncIterator[SessionManager]:
    """Connect through the proxy, with statements prepared and no heartbeat that is counted."""
    url = server.url.replace(str(server.port), str(proxy.port)) + "?sslmode=disable"
    store = PostgresStore(url, schema=schema, connections=3)
    async with connect(store, autosave=Autosave(), shutdown=QUIET) as sessions:
        for _ in range(3):
            for name in ("warm", "warmer"):
                async with sessions.open(name) as session:
                    session.append(Message.user("hello"))
                await session.aclose()
        yield sessions


def counted(proxy: CountingProxy) -> int:
    return len(proxy.take())


async def test_an_open_is_two_round_trips_and_one_of_a_new_session(
    server: Postgres, proxy: CountingProxy, schema: str
) -> None:
    async with sessions_on(server, proxy, schema) as sessions:
        spent: dict[str, list[int]] = {"new": [], "existing": [], "closing": []}
        for number in range(5):
            counted(proxy)
            session = await sessions.open(f"agent-{number}", new=True)
            spent["new"].append(counted(proxy))
            session.append(Message.user("hello"))
            await session.save()
            counted(proxy)
            await session.aclose()
            spent["closing"].append(counted(proxy))
            session = await sessions.open(f"agent-{number}", create=False)
            spent["existing"].append(counted(proxy))
            assert session.version == 3
            await session.aclose()
        # A heartbeat may come between, and a statement may be prepared on another connection.
        least = {name: min(counts) for name, counts in spent.items()}
        assert least["new"] == 1
        assert least["existing"] == 2
        assert least["closing"] <= 3


async def test_a_holder_that_was_read_long_ago_grants_nothing(open_store: OpenStore) -> None:
    """The row is acquired only from the state that was read."""
    store, other = await open_store("one"), await open_store("two")
    first = await take(store)
    await append_ok(store, first, 2, *group("a"))
    await other.holder(KEY)
    await append_ok(store, first, 3, *group("b"))  # the holder that was read goes on
    second = await take_after(other, KEY, after=1)
    assert (second.epoch, second.head) == (2, 4)
    with pytest.raises(LeaseLostError):
        await store.receive(KEY, first.epoch)
    found = [record async for chunk in other.read_log(KEY) for record in chunk.records]
    assert [record.seq for record in found] == [1, 2, 3, 4]


async def test_many_sessions_are_closed_in_few_round_trips(
    server: Postgres, proxy: CountingProxy, schema: str
) -> None:
    count = 60
    async with sessions_on(server, proxy, schema) as sessions:
        names = [f"many-{number}" for number in range(count)]
        opened = []

        async def open_one(name: str) -> None:
            opened.append(await sessions.open(name))

        counted(proxy)
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(open_one, name)
        assert counted(proxy) < 2 * count
        for session in opened:
            session.append(Message.user("hello"))
        await sessions.flush()
        counted(proxy)
        async with anyio.create_task_group() as group:
            for session in opened:
                group.start_soon(session.aclose)
        assert counted(proxy) < count
        for name in names:
            session = await sessions.open(name, create=False)
            assert session.version == 3
        counted(proxy)
    assert counted(proxy) < count  # released as the manager stops
    async with connect(PostgresStore(server.url, schema=schema), shutdown=QUIET) as sessions:
        for name in names:
            assert (await sessions.open(name, on_held="raise")).version == 4


async def results_of(calls: Sequence[Callable[[], Awaitable[object]]]) -> list[object]:
    """Make calls at once; return what each returned, or its error."""
    results: list[object] = [None] * len(calls)

    async def one(place: int, call: Callable[[], Awaitable[object]]) -> None:
        try:
            results[place] = await call()
        except PerdureError as error:
            results[place] = error

    async with anyio.create_task_group() as group:
        for place, call in enumerate(calls):
            group.start_soon(one, place, call)
    return results


async def test_one_that_is_refused_does_not_spoil_the_others(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    store, other = await open_store("one"), await open_store("two")
    keys = [SessionKey(f"agent-{number}") for number in range(20)]
    for key in keys:
        await other.holder(key)
    for key in keys[::4]:
        await take_after(store, key, after=0)
    grants = await results_of([partial(take_after, other, key, after=0) for key in keys])
    assert [type(grant) for grant in grants] == ([LeaseHeldError] + 3 * [Taken]) * 5
    held = [grant for grant in grants if isinstance(grant, Taken)]

    server.run(f"ALTER TABLE {schema}.labels ADD CHECK (title <> 'refused')")
    documents = {"session.json": b"folded"}
    manifests = [manifest_of(grant, 1, documents, about=About(title="fine")) for grant in held]
    manifests[3] = manifest_of(held[3], 1, documents, about=About(title="refused"))
    manifests[5] = manifest_of(held[5], 1, documents, epoch=9)
    folds = [partial(other.write_documents, one.key, documents, one) for one in manifests]
    results = await results_of(folds)
    assert isinstance(results[3], StoreError)
    assert isinstance(results[5], LeaseLostError)
    assert [result for place, result in enumerate(results) if place not in {3, 5}] == 13 * [None]
    read = await results_of([partial(other.read_documents, grant.key) for grant in held])
    assert [bool(one.found) for one in read if isinstance(one, Documents)] == [
        place not in {3, 5} for place in range(15)
    ]


async def test_a_caller_that_gave_up_before_its_turn_acquires_nothing(
    store: PostgresStore,
) -> None:
    keys, terms = [SessionKey(f"agent-{number}") for number in range(30)], Terms(me=store.owner)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            for key in keys:
                group.start_soon(partial(store.acquire, key, terms))
            scope.cancel()
    calls = store._opened
    assert calls is not None
    assert not any(calls._together.values())


async def test_callers_that_gave_up_keep_no_thread_from_others(store: PostgresStore) -> None:
    calls = store._opened
    assert calls is not None
    calls._timeout = 3600.0  # for which a thread would wait
    terms = Terms(me=store.owner)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(partial(store.acquire, SessionKey(f"agent-{number}"), terms))
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    with anyio.fail_after(60):
        assert await store.holder(SessionKey("another")) is None


async def test_a_driver_without_pipelines_opens_and_closes_all_the_same(
    server: Postgres, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A libpq before version 14: each statement is a round trip and a transaction of its own."""
    monkeypatch.setattr(psycopg.Pipeline, "is_supported", classmethod(lambda _: False))
    monkeypatch.setattr(psycopg.Connection, "pipeline", None)
    async with connect(PostgresStore(server.url, schema=schema), shutdown=QUIET) as sessions:
        for cycle in range(3):
            session = await sessions.open("agent")
            assert session.version == 2 * cycle + 1
            session.append(Message.user("hello"))
            await session.aclose()
