"""The server dies, hangs, or its answer is lost: nothing acknowledged is lost, nothing doubled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from uuid import uuid4

import anyio
import anyio.to_thread
import pytest

from perdure import Message, Shutdown, connect
from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE
from perdure.store import Batch, PendingItem, Status, take_after
from perdure.stores.redis import RedisStore
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
from tests.servers.underload import killed_under_load, texts_of
from tests.servers.valkey import Valkey
from tests.stores.redis.conftest import OpenStore, hasty


async def test_a_server_killed_under_load_comes_back_with_all_that_was_acknowledged(
    own_server: Valkey,
) -> None:
    await killed_under_load(own_server.url, own_server)


async def test_a_server_that_is_down_has_done_nothing(own_server: Valkey) -> None:
    store = RedisStore(own_server.url)
    await store.open()
    grant = await take(store)
    own_server.kill()
    first = await append(store, grant, 2, *group("a"))
    assert first.status in (Status.IN_DOUBT, Status.TRANSIENT)  # its end may not be seen yet
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.TRANSIENT
    assert isinstance(outcome.error, StoreUnavailableError)
    with pytest.raises(StoreUnavailableError, match="127.0.0.1"):
        await store.head(KEY)
    await store.wait_for_notification(0)
    own_server.start()
    await append_ok(store, grant, 2, *group("a"))
    assert tuple(entries(await read(store))) == group("a")
    await store.aclose()


async def test_a_server_that_hangs_leaves_an_append_in_doubt(own_server: Valkey) -> None:
    store = RedisStore(own_server.url)
    await store.open()
    grant = await take(store)
    own_server.freeze()
    with hasty(store, 0.2):  # only now: a server may be slow and stand
        outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.IN_DOUBT
    own_server.thaw()
    await append_ok(store, grant, 2, *group("a"))
    await append_ok(store, grant, 3, *group("b"))
    assert tuple(entries(await read(store))) == group("a") + group("b")
    await store.aclose()


async def test_a_server_that_forgot_the_scripts_learns_them_again(
    open_store: OpenStore, server: Valkey
) -> None:
    store = await open_store()
    keys = [SessionKey(f"s{n}") for n in range(5)]
    grants = [await take(store, key) for key in keys]
    server.say("SCRIPT", "FLUSH")
    batches = [Batch(grant.key, grant.epoch, 2, group("a")) for grant in grants]
    outcomes = await store.append_many(batches)
    assert {outcome.status for outcome in outcomes} == {Status.OK}
    assert [await store.head(key) for key in keys] == [2] * 5


@pytest.fixture
def proxy(server: Valkey) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
async def cut_off(proxy: CuttingProxy, open_store: OpenStore) -> RedisStore:
    return await open_store("me", f"redis://127.0.0.1:{proxy.port}/0?prefix={uuid4().hex}")


async def test_an_append_whose_answer_is_lost_is_not_doubled(
    cut_off: RedisStore, proxy: CuttingProxy
) -> None:
    grant = await take(cut_off)
    proxy.cut_after(b"the lost one")
    outcome = await append(cut_off, grant, 2, *group("the lost one", "x"))
    assert outcome.status is Status.IN_DOUBT
    assert proxy.cuts == 1
    assert await cut_off.head(KEY) == 3  # it was done
    await append_ok(cut_off, grant, 2, *group("the lost one", "x"))
    # Sent again with what came after it: only that is new.
    await append_ok(cut_off, grant, 2, *group("the lost one", "x"), *group("more"))
    found = entries(await read(cut_off))
    assert tuple(found) == group("the lost one", "x") + group("more")


async def test_an_acquire_whose_answer_is_lost_can_be_taken_up(
    cut_off: RedisStore, proxy: CuttingProxy
) -> None:
    proxy.cut_after(b'{"agent":"agent"')
    with pytest.raises(StoreUnavailableError):
        await take_after(cut_off, KEY, after=0)
    holder = await cut_off.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.owner, holder.alive) == (1, "me", True)
    with pytest.raises(LeaseHeldError):
        await take_after(cut_off, KEY, after=0)
    grant = await take_after(cut_off, KEY, after=1)
    assert (grant.epoch, grant.head) == (2, 2)


async def test_a_post_whose_answer_is_lost_is_not_doubled(
    cut_off: RedisStore, proxy: CuttingProxy
) -> None:
    items = [PendingItem("op-1", MESSAGE, b'"a"', 1.0), PendingItem("op-2", MESSAGE, b'"b"', 1.0)]
    proxy.cut_after(b"op-2")
    with pytest.raises(StoreUnavailableError):
        await cut_off.enqueue(KEY, items)
    assert await cut_off.enqueue(KEY, items) == 0
    grant = await take(cut_off)
    assert await cut_off.receive(KEY, grant.epoch) == items


async def test_a_heartbeat_whose_answer_is_lost_tells_again(
    cut_off: RedisStore, proxy: CuttingProxy, open_store: OpenStore
) -> None:
    await take(cut_off)
    other = await open_store("other", cut_off.location)
    holder = await other.holder(KEY)
    assert holder is not None
    await other.request_handover(KEY, holder)
    proxy.cut_after(b":asks")
    asked = await cut_off.heartbeat()  # over a new connection
    assert proxy.cuts == 1
    assert asked.handovers == (KEY,)
    assert (await cut_off.heartbeat()).handovers == ()
    await other.request_handover(KEY, holder)
    assert (await cut_off.heartbeat()).handovers == (KEY,)


async def test_a_fold_whose_answer_is_lost_is_whole(
    cut_off: RedisStore, proxy: CuttingProxy
) -> None:
    grant = await take(cut_off)
    documents = {"session.json": b"folded", "memory.json": b"too"}
    proxy.cut_after(b"folded")
    with pytest.raises(StoreUnavailableError):
        await cut_off.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    found = await cut_off.read_documents(KEY)
    assert {name: one.data for name, one in found.found.items()} == documents


async def test_blobs_whose_answer_is_lost_are_there(
    cut_off: RedisStore, proxy: CuttingProxy
) -> None:
    proxy.cut_after(b"large result")
    with pytest.raises(StoreUnavailableError):
        await cut_off.put_blobs("", {name_of(b"large result"): b"large result"})
    assert await cut_off.get_blob("", name_of(b"large result")) == b"large result"


_HOLDER = """
import anyio, sys
from perdure.stores.redis import RedisStore
from perdure.records.keys import SessionKey
from perdure.store import take_after

async def main():
    store = RedisStore(sys.argv[1], owner="child")
    await store.open()
    await take_after(store, SessionKey("agent"), after=0)
    print("held", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_holder_of_this_machine_that_was_killed_is_known_to_be_dead(
    open_store: OpenStore, url: str
) -> None:
    store = await open_store()
    with subprocess.Popen([sys.executable, "-c", _HOLDER, url], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert await anyio.to_thread.run_sync(child.stdout.readline) == b"held\n"
        holder = await store.holder(KEY)
        assert holder is not None
        assert (holder.owner, holder.alive, holder.pid) == ("child", None, child.pid)
        child.kill()
        await anyio.to_thread.run_sync(child.wait)
    holder = await store.holder(KEY)
    assert holder is not None
    assert holder.alive is False


async def test_a_reader_is_woken_by_a_post_and_by_an_ask(open_store: OpenStore) -> None:
    store, other = await open_store("one"), await open_store("other")
    await take(store)
    await store.wait_for_notification(LONG)  # the subscription stands
    holder = await other.holder(KEY)
    assert holder is not None
    for act in (lambda: other.request_handover(KEY, holder), lambda: other.enqueue(KEY, [ITEM])):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act)
            with anyio.fail_after(LONG):
                await store.wait_for_notification(10 * LONG)  # not by its own time
        asked = await store.heartbeat()
        assert asked.handovers + asked.mail == (KEY,)


async def test_listening_goes_on_after_the_server_was_away(own_server: Valkey) -> None:
    store, other = RedisStore(own_server.url), RedisStore(own_server.url)
    await store.open()
    await take(store)
    await store.wait_for_notification(LONG)
    own_server.kill()
    own_server.start()
    await other.open()
    with anyio.fail_after(LONG):
        await store.wait_for_notification(
            10 * LONG
        )  # the new subscription stands: something may have been missed
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.enqueue, KEY, [ITEM])
            await store.wait_for_notification(10 * LONG)
    assert (await store.heartbeat()).mail == (KEY,)
    await store.aclose()
    await other.aclose()


ITEM = PendingItem("op", MESSAGE, b'"a"', 1.0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_is_left_is_saved_as_the_event_loop_ends(url: str, backend: str) -> None:
    async def leave() -> None:
        sessions = await connect(url, shutdown=Shutdown(signals=False))  # and never closed
        session = await sessions.open("left")
        session.append(Message.user("saved"))
        await session.save()
        session.append(Message.user("not yet"))

    async def look() -> list[str]:
        store = RedisStore(url)
        await store.open()
        records = await read(store, SessionKey("left"))
        await store.aclose()
        return texts_of(records)

    anyio.run(leave, backend=backend)
    assert anyio.run(look, backend=backend) == ["saved", "not yet"]
