"""Opening over a network: round trips, as a proxy before the server counts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from benchmarks.opening import connected
from benchmarks.stores.wire import CountingProxy, redis_round_trips
from perdure import Message, SessionManager
from perdure.records.manifest import FORMAT
from perdure.store import Taken, Terms
from perdure.stores.redis import RedisStore
from perdure.testing.conformance._kit import KEY, append_ok, group, manifest_of, take
from tests.servers.valkey import Valkey
from tests.stores.redis.conftest import OpenStore


@pytest.fixture
def proxy(server: Valkey) -> Iterator[CountingProxy]:
    with CountingProxy(server.port, redis_round_trips) as proxy:
        yield proxy


@pytest.fixture
async def store(server: Valkey, proxy: CountingProxy, url: str) -> RedisStore:
    """Not open yet."""
    return RedisStore(url.replace(str(server.port), str(proxy.port)))


@pytest.fixture
async def sessions(store: RedisStore) -> AsyncIterator[SessionManager]:
    async with connected(store) as sessions:
        async with sessions.open("warm") as session:
            session.append(Message.user("hello"))
        await session.aclose()
        yield sessions


async def test_an_open_is_one_round_trip(sessions: SessionManager, proxy: CountingProxy) -> None:
    spent: dict[str, list[int]] = {"new": [], "existing": [], "either": []}
    for number in range(3):
        for which, counts in spent.items():
            proxy.take()
            session = await sessions.open(
                f"agent-{number}", new=which == "new", create=which != "existing"
            )
            counts.append(len(proxy.take()))
            session.append(Message.user("hello"))
            await session.aclose()
    # A heartbeat may come between.
    assert [min(counts) for counts in spent.values()] == [1, 1, 1]


async def test_a_holder_is_looked_at_and_then_its_session_is_taken(
    sessions: SessionManager, proxy: CountingProxy, open_store: OpenStore
) -> None:
    """It is in another slot than the session, whose script sees nothing of it."""
    other = await open_store("other")
    await take(other)
    await other.aclose()
    proxy.take()
    session = await sessions.open("agent")
    assert len(proxy.take()) == 3
    assert session.version == 2
    await session.aclose()


@pytest.mark.parametrize("how", ["manifest of a newer format", "a long log"])
async def test_what_cannot_be_used_as_it_was_read_is_read_by_itself(
    open_store: OpenStore, how: str
) -> None:
    store = await open_store("one")
    grant = await take(store)
    if how == "a long log":
        await append_ok(store, grant, 2, *group(*["x" * 100_000] * 12))
    else:
        newer = manifest_of(grant, 1, {}, format=FORMAT + 1)
        await store.write_documents(KEY, {}, newer)
    answer = await store.acquire(KEY, Terms(me="one"))
    assert isinstance(answer, Taken)
    assert answer.epoch == 2
    if how == "a long log":
        assert answer.found is not None
        assert answer.found.records is None
    else:
        assert answer.found is None
