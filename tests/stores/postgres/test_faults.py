"""The server dies, hangs, or its answer is lost: nothing acknowledged is lost, nothing doubled."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import msgspec
import pytest

from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE
from perdure.store import Batch, PendingItem, Status, take_after
from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance._kit import (
    KEY,
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from tests.servers import LONG
from tests.servers.cutting import CuttingProxy
from tests.servers.postgres import Postgres
from tests.servers.underload import killed_under_load
from tests.stores.postgres.conftest import OpenStore, hasty


async def test_a_server_killed_under_load_comes_back_with_all_that_was_acknowledged(
    own_server: Postgres,
) -> None:
    await killed_under_load(own_server.url, own_server, lambda name: stored(own_server, name))


def stored(server: Postgres, name: str) -> list[str]:
    """Return the texts that the server has, read behind every store's back."""
    rows = server.run(
        "SELECT c.lines FROM perdure.commits c JOIN perdure.sessions s ON s.id = c.session "
        "WHERE s.agent = %s ORDER BY c.first",
        name,
    )
    lines = b"".join(bytes(row[0]) for row in rows).splitlines()
    payloads = [msgspec.json.decode(line) for line in lines]
    return [one["r"]["content"] for one in payloads if one["k"] == MESSAGE]


async def test_a_server_that_is_down_has_done_nothing(own_server: Postgres) -> None:
    store = PostgresStore(own_server.url)
    await store.open()
    grant = await take(store)
    own_server.kill()
    first = await append(store, grant, 2, *group("a"))
    assert first.status in (Status.IN_DOUBT, Status.TRANSIENT)  # its end may not be seen yet
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.TRANSIENT
    assert isinstance(outcome.error, StoreUnavailableError)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1"):
        await store.head(KEY)
    with pytest.raises(StoreUnavailableError):
        await store.heartbeat()
    await store.wait_for_notification(0)
    own_server.start()
    await append_ok(store, grant, 2, *group("a"))
    assert tuple(entries(await read(store))) == group("a")
    await store.aclose()


@pytest.mark.deep
async def test_a_server_that_hangs_is_given_up_and_used_again(own_server: Postgres) -> None:
    store = PostgresStore(f"{own_server.url}?connect_timeout=2")
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("before"))
    own_server.freeze()
    with hasty(store, 1.0):  # only now: a server may be slow and stand
        outcome = await append(store, grant, 3, *group("a"))
        assert outcome.status is Status.IN_DOUBT
        with pytest.raises(StoreUnavailableError):
            await store.head(KEY)
    own_server.thaw()
    await append_ok(store, grant, 3, *group("a"))
    await append_ok(store, grant, 4, *group("b"))
    assert tuple(entries(await read(store))) == group("before") + group("a") + group("b")
    await store.aclose()


async def test_a_row_that_somebody_locks_for_long_holds_up_nobody_for_ever(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    store = await open_store("one", f"{server.url}?timeout=2")
    grant = await take(store)
    with server.connect() as other, other.transaction():
        other.execute(f"SELECT 1 FROM {schema}.sessions FOR UPDATE".encode())
        outcome = await append(store, grant, 2, *group("a"))
        assert outcome.status is Status.TRANSIENT
        assert "lock" in str(outcome.error)
    await append_ok(store, grant, 2, *group("a"))


async def test_sessions_that_meet_in_two_batches_make_no_deadlock(open_store: OpenStore) -> None:
    store, other = await open_store("one"), await open_store("other")
    keys = [SessionKey(f"s{n}") for n in range(40)]
    grants = [await take(store, key) for key in keys]
    both: list[Status] = []

    async def send(through: PostgresStore, batches: list[Batch]) -> None:
        both.extend(outcome.status for outcome in await through.append_many(batches))

    for round_ in range(10):
        batches = [
            Batch(grant.key, grant.epoch, round_ + 2, group(f"{round_}")) for grant in grants
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, store, batches)
            tasks.start_soon(send, other, batches[::-1])
    assert both == [Status.OK] * 800
    for key in keys:
        assert len(await read(store, key)) == 11


@pytest.fixture
def proxy(server: Postgres) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
async def cut_off(proxy: CuttingProxy, server: Postgres, open_store: OpenStore) -> PostgresStore:
    port = urlsplit(server.url).port
    return await open_store("me", server.url.replace(f":{port}/", f":{proxy.port}/"))


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_an_append_whose_commit_is_not_confirmed_is_not_doubled(
    cut_off: PostgresStore, proxy: CuttingProxy, before: int
) -> None:
    """The first appends prepare the statement in a thread, the others come from the loop."""
    grant = await take(cut_off)
    for number in range(before):
        await append_ok(cut_off, grant, number + 2, *group(f"{number}"))
    first = before + 2
    proxy.cut_after(b"the lost one")
    outcome = await append(cut_off, grant, first, *group("the lost one", "x"))
    assert outcome.status is Status.IN_DOUBT
    assert proxy.cuts == 1
    assert await cut_off.head(KEY) == first + 1  # it was done
    await append_ok(cut_off, grant, first, *group("the lost one", "x"))
    # Sent again with what came after it: only that is new.
    await append_ok(cut_off, grant, first, *group("the lost one", "x"), *group("more"))
    found = entries(await read(cut_off, after=first - 1))
    assert tuple(found) == group("the lost one", "x") + group("more")
    assert await cut_off.head(KEY) == first + 2


async def test_a_cancelled_append_from_the_loop_is_whole_or_nothing(
    store: PostgresStore,
) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    head = 2
    for round_ in range(12):
        sent = group(f"{round_}", "b" * 1000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(append, store, grant, head + 1, *sent)
            for _ in range(round_):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        head = await append_ok(store, grant, head + 1, *sent)
    texts = entries(await read(store))
    assert texts[1::2] == [group(f"{round_}", "")[0] for round_ in range(12)]
    assert len(texts) == 25


async def test_only_what_was_in_doubt_is_looked_up(
    cut_off: PostgresStore, proxy: CuttingProxy
) -> None:
    keys = [SessionKey("a"), SessionKey("b"), SessionKey("c")]
    grants = [await take(cut_off, key) for key in keys]
    batches = [Batch(grant.key, grant.epoch, 2, group(grant.key.agent)) for grant in grants]
    proxy.cut_after(b'"text":"b"')
    outcomes = await cut_off.append_many(batches)
    assert {outcome.status for outcome in outcomes} == {Status.IN_DOUBT}
    batches[0] = Batch(keys[0], 1, 2, group("a") + group("a, more"))
    batches[2] = Batch(keys[2], 1, 2, group("not what was sent"))
    outcomes = await cut_off.append_many(batches)
    assert [one.status for one in outcomes] == [Status.OK, Status.OK, Status.PERMANENT]
    assert [len(await read(cut_off, key)) for key in keys] == [3, 2, 2]


async def test_an_acquire_whose_commit_is_not_confirmed_can_be_taken_up(
    cut_off: PostgresStore, proxy: CuttingProxy
) -> None:
    proxy.cut_after(b'{"owner":"me"}')
    with pytest.raises(StoreUnavailableError):
        await take_after(cut_off, KEY, after=0)
    assert proxy.cuts == 1
    holder = await cut_off.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.owner) == (1, "me")
    with pytest.raises(LeaseHeldError):
        await take_after(cut_off, KEY, after=0)
    grant = await take_after(cut_off, KEY, after=1)
    assert (grant.epoch, grant.head) == (2, 2)
    assert [record.epoch for record in await read(cut_off)] == [1, 2]


async def test_a_post_whose_commit_is_not_confirmed_is_not_doubled(
    cut_off: PostgresStore, proxy: CuttingProxy
) -> None:
    grant = await take(cut_off)
    items = [PendingItem("op-1", MESSAGE, b'"a"', 1.0), PendingItem("op-2", MESSAGE, b'"b"', 1.0)]
    proxy.cut_after(b"COMMIT")
    await cut_off.enqueue(KEY, items)  # over a new connection
    assert proxy.cuts == 1
    assert await cut_off.enqueue(KEY, items) == 0
    assert await cut_off.receive(KEY, grant.epoch) == items


async def test_a_heartbeat_whose_answer_is_lost_tells_again(
    cut_off: PostgresStore, proxy: CuttingProxy, open_store: OpenStore
) -> None:
    await take(cut_off)
    other = await open_store("other")
    holder = await other.holder(KEY)
    assert holder is not None
    await other.request_handover(KEY, holder)
    proxy.cut_after(b"heard")
    asked = await cut_off.heartbeat()  # over a new connection
    assert proxy.cuts == 1
    assert asked.handovers == (KEY,)
    assert (await cut_off.heartbeat()).handovers == ()
    await other.request_handover(KEY, holder)
    assert (await cut_off.heartbeat()).handovers == (KEY,)


async def test_a_fold_whose_commit_is_not_confirmed_is_whole(
    cut_off: PostgresStore, proxy: CuttingProxy
) -> None:
    grant = await take(cut_off)
    documents = {"session.json": b"folded", "memory.json": b"too"}
    proxy.cut_after(b'"as_of_seq"')
    await cut_off.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    assert proxy.cuts == 1
    found = await cut_off.read_documents(KEY)
    assert {name: one.data for name, one in found.found.items()} == documents


async def test_blobs_whose_answer_is_lost_are_there(
    cut_off: PostgresStore, proxy: CuttingProxy
) -> None:
    proxy.cut_after(b"large result")
    await cut_off.put_blobs("", {name_of(b"large result"): b"large result"})
    assert proxy.cuts == 1
    assert await cut_off.get_blob("", name_of(b"large result")) == b"large result"


async def test_idle_connections_that_the_server_ended_are_not_used(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    store = await open_store("one")
    grant = await take(store)
    end_connections(server, schema)
    assert await store.head(KEY) == 1
    end_connections(server, schema)
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status in (Status.OK, Status.IN_DOUBT)  # its end may not be seen yet
    await append_ok(store, grant, 2, *group("a"))


async def test_a_read_is_repeated_on_a_new_connection_when_all_were_lost(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    """As when the server restarts: the others in the pool are as dead as the first."""
    store = await open_store("one")
    await take(store)
    for _ in range(3):
        async with anyio.create_task_group() as group_of_reads:
            for _ in range(12):
                group_of_reads.start_soon(store.head, KEY)
        end_connections(server, schema)
        assert await store.head(KEY) == 1


async def test_a_server_that_takes_no_writes_is_left_for_one_that_does(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    server.run(f"CREATE ROLE {schema} LOGIN PASSWORD 'pw'")
    server.run(f"GRANT CREATE ON DATABASE postgres TO {schema}")
    url = f"postgresql://{schema}:pw@127.0.0.1:{server.port}/postgres"
    store = await open_store("one", url)
    grant = await take(store)
    server.run(f"ALTER ROLE {schema} SET default_transaction_read_only = on")
    server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", schema)
    statuses = [(await append(store, grant, 2, *group("a"))).status for _ in range(2)]
    assert statuses[1] is Status.TRANSIENT
    with pytest.raises(StoreUnavailableError, match="connect to the primary"):
        await store.heartbeat()
    server.run(f"ALTER ROLE {schema} RESET default_transaction_read_only")
    await append_ok(store, grant, 2, *group("a"))
    assert tuple(entries(await read(store))) == group("a")


async def test_news_are_heard_after_the_server_came_back(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    await store.wait_for_notification(LONG)  # it listens now
    await other.enqueue(KEY, [PendingItem("op-1", MESSAGE, b'"a"', 1.0)])
    with anyio.fail_after(LONG):
        await store.wait_for_notification(LONG * 2)
    assert (await store.heartbeat()).mail == (KEY,)
    end_connections(server, schema)
    with anyio.fail_after(LONG):
        await store.wait_for_notification(LONG * 2)  # whatever was missed meanwhile
        await other.enqueue(KEY, [PendingItem("op-2", MESSAGE, b'"b"', 1.0)])
        await store.wait_for_notification(LONG * 2)
    assert (await store.heartbeat()).mail == (KEY,)


def end_connections(server: Postgres, schema: str) -> None:
    """End every connection on which there was a statement for a schema, or a LISTEN."""
    server.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND (query LIKE 'LISTEN%%' OR query LIKE 'SELECT 1%%' OR query LIKE %s)",
        f"%{schema}%",
    )
