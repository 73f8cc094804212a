"""Opening and closing on a bucket: requests, as a proxy before the service counts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.counts import count_asked
from benchmarks.stores.wire import CountingProxy, http_requests
from perdure import Autosave, LeaseOptions, Message, Shutdown, connect
from perdure.store import take_after
from perdure.stores.objects import leases, log, reader
from perdure.stores.objects.layout import with_checksum
from perdure.testing.conformance._kit import KEY, append_ok, group, take
from perdure.testing.conformance.inbox import posted
from tests.servers.s3 import S3Server, store_on
from tests.stores.s3.conftest import OpenS3

QUIET = Shutdown(signals=False)
RARE = LeaseOptions(heartbeat=300, ttl=1200)  # so that nothing else is called in a thread


@pytest.fixture
def proxy(server: S3Server) -> Iterator[CountingProxy]:
    with CountingProxy(server.port, http_requests) as proxy:
        yield proxy


def asked(proxy: CountingProxy) -> list[str]:
    """Return the requests that are not heartbeats."""
    return [one for one in proxy.take() if "owners" not in one and "asks%2F" not in one]


async def test_an_open_is_six_requests(
    server: S3Server, proxy: CountingProxy, tmp_path: Path
) -> None:
    store = store_on(server, tmp_path, endpoint=f"http://127.0.0.1:{proxy.port}")
    async with connect(store, autosave=Autosave(), shutdown=QUIET) as sessions:
        asked(proxy)
        session = await sessions.open("agent")
        assert len(asked(proxy)) <= 5, "a new session"
        session.append(Message.user("x" * 100_000))  # its context is large
        await session.aclose()
        spent: list[int] = []
        for _ in range(5):
            asked(proxy)
            session = await sessions.open("agent", create=False)
            spent.append(len(asked(proxy)))
            session.append(Message.user("hello"))
            await session.aclose()
        # From its second fold on, the context and what describes the session are one object. Some
        # more requests may be those of a fold in the background, which the close gave up.
        assert min(spent[1:]) <= 6


async def test_an_open_is_one_call_in_a_thread(server: S3Server, tmp_path: Path) -> None:
    with count_asked() as asked:
        async with connect(store_on(server, tmp_path), shutdown=QUIET, lease=RARE) as sessions:
            for what in ("new", "closed"):
                asked.take()
                session = await sessions.open("agent")
                assert asked.take().hops == 1, what
                session.append(Message.user("hello"))
                await session.aclose()


async def test_objects_are_removed_in_one_request(
    server: S3Server, proxy: CountingProxy, tmp_path: Path
) -> None:
    store = store_on(server, tmp_path, endpoint=f"http://127.0.0.1:{proxy.port}")
    await store.open()
    try:
        names = [f"{number:064x}" for number in range(40)]
        bucket = store._open_bucket
        for name in names:
            bucket.put(f"blobs/t/{name}", b"x")
        asked(proxy)
        bucket.remove([f"blobs/t/{name}" for name in names])
        assert len(asked(proxy)) == 1
        assert bucket.listed("blobs/t/") == []
    finally:
        await store.aclose()


async def test_a_head_of_another_release_is_opened_by_a_listing(open_store: OpenS3) -> None:
    """An older release neither writes where the newest commit is, nor keeps it."""
    store = await open_store("one")
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    await store.release(KEY, grant.epoch)
    bucket = store._open_bucket
    current = reader.read_head(bucket, KEY)
    assert current is not None
    head = current[0]
    assert head.newest == 2
    older = msgspec.structs.replace(head, newest=0)
    assert b"newest" not in with_checksum(older)
    assert leases.replace_head(bucket, KEY, current, older)
    other = await open_store("two")
    assert (await take_after(other, KEY, after=1)).head == 3
    found = [record async for chunk in other.read_log(KEY) for record in chunk.records]
    assert [record.seq for record in found] == [1, 2, 3]


async def test_an_emptied_inbox_costs_an_open_no_read(open_store: OpenS3) -> None:
    store = await open_store("one")
    grant = await take(store)
    await store.enqueue(KEY, posted("a", "b"))
    assert [item.op_id for item in await store.receive(KEY, grant.epoch)] == ["a", "b"]
    await store.ack(KEY, grant.epoch, ["a", "b"])
    await store.release(KEY, grant.epoch)
    grant = await take(store)
    assert await store.receive(KEY, grant.epoch) == []
    await store.enqueue(KEY, posted("c"))
    assert [item.op_id for item in await store.receive(KEY, grant.epoch)] == ["c"]


async def test_a_listing_costs_a_save_no_request_but_once_a_minute(
    server: S3Server, proxy: CountingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_on(server, tmp_path, endpoint=f"http://127.0.0.1:{proxy.port}")
    other = store_on(server, tmp_path, owner="other")
    async with (
        connect(store, autosave=Autosave(), shutdown=QUIET, lease=RARE) as sessions,
        connect(other, shutdown=QUIET, lease=RARE) as others,
    ):
        session = await sessions.open("agent", owner="ann")
        (info,) = await others.list(owner="ann")
        assert (info.key.agent, info.turns) == ("agent", 0)
        await session.save()  # which brings the labels

        async def turn() -> int:
            asked(proxy)
            async with session.turn():
                session.append(Message.user("hello"))
            return len(asked(proxy))

        assert [await turn() for _ in range(3)] == [1, 1, 1]
        assert [info.turns for info in await sessions.list()] == [3]
        assert [info.turns for info in await others.list()] == [0]
        monkeypatch.setattr(log, "LISTED_EVERY", 0.0)  # a minute is over
        assert await turn() == 2
        assert [info.turns for info in await others.list()] == [4]
        monkeypatch.undo()
        assert await turn() == 1
        session.describe(title="The agent")
        asked(proxy)
        await session.save()
        assert len(asked(proxy)) == 2
        (info,) = await others.list()
        assert (info.title, info.turns) == ("The agent", 5)
        assert await turn() == 1
        await session.aclose()
        assert [info.turns for info in await others.list()] == [6]
