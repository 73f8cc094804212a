"""Opening and closing over a network: round trips, as a proxy before the server counts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.stores.wire import CountingProxy, postgres_round_trips
from perdure import Autosave, Message, Shutdown, connect
from perdure.errors import LeaseLostError
from perdure.session.manager import SessionManager
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance._kit import KEY, append_ok, group, take
from perdure.testing.conformance.inbox import posted
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


async def test_an_open_is_three_round_trips(
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
        assert {name: min(counts) for name, counts in spent.items()} == {
            "new": 3,
            "existing": 3,
            "closing": 3,
        }


async def test_what_an_open_read_beforehand_is_not_read_after_an_append(
    store: PostgresStore,
) -> None:
    grant = await take(store)
    await store.read_documents(KEY, ())
    await append_ok(store, grant, 2, *group("new"))
    found = [record async for chunk in store.read_log(KEY) for record in chunk.records]
    assert [record.seq for record in found] == [1, 2]


async def test_a_post_after_the_read_of_an_open_notifies_its_owner(
    open_store: OpenStore,
) -> None:
    store, other = await open_store("one"), await open_store("two")
    grant = await take(store)
    await store.read_documents(KEY, ())
    items = posted("late")
    await other.post(KEY, items)
    assert await store.take(KEY, grant.epoch) == []  # as of the read
    requests = await store.heartbeat()
    assert requests.mail == (KEY,)
    assert await store.take(KEY, grant.epoch) == items


async def test_a_holder_that_was_read_long_ago_grants_nothing(open_store: OpenStore) -> None:
    """The row is acquired only from the state that was read."""
    store, other = await open_store("one"), await open_store("two")
    first = await take(store)
    await append_ok(store, first, 2, *group("a"))
    await other.holder(KEY)
    await append_ok(store, first, 3, *group("b"))  # the holder that was read goes on
    second = await other.acquire(KEY, after=1)
    assert (second.epoch, second.head) == (2, 4)
    with pytest.raises(LeaseLostError):
        await store.take(KEY, first.epoch)
    found = [record async for chunk in other.read_log(KEY) for record in chunk.records]
    assert [record.seq for record in found] == [1, 2, 3, 4]
