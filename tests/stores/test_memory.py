"""The memory store's own traits; what it shares with all stores is in tests/conformance."""

from __future__ import annotations

import hashlib

import anyio
import anyio.lowlevel
import pytest

from perdure.errors import LeaseLostError, NotStorableError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Capabilities, Status, take_after
from perdure.stores.memory import MemoryBacking, MemoryStore

KEY = SessionKey("agent")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_says_that_it_is_not_durable() -> None:
    capabilities: Capabilities = MemoryStore().capabilities
    assert capabilities.durability == "memory"
    assert capabilities.memory_bound
    assert capabilities.batch_max >= 64
    assert MemoryStore().location == "memory:"


async def test_stores_without_a_backing_share_nothing() -> None:
    one, other = MemoryStore(), MemoryStore()
    await take_after(one, KEY, after=0)
    assert await other.holder(KEY) is None


async def test_owners_are_told_apart_without_a_name() -> None:
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    await one.open()
    await other.open()
    await take_after(one, KEY, after=0)
    first = await other.holder(KEY)
    await take_after(other, KEY, after=1)
    second = await one.holder(KEY)
    assert first is not None
    assert second is not None
    assert first.owner != second.owner


async def test_a_call_is_one_checkpoint_and_one_step() -> None:
    store = MemoryStore()
    grant = await take_after(store, KEY, after=0)
    steps: list[str] = []

    async def append() -> None:
        batch = Batch(KEY, grant.epoch, 2, (Entry(MESSAGE, b"1"),))
        await store.append_many([batch])
        steps.append("appended")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append)
        for _ in range(4):
            await anyio.lowlevel.checkpoint()
        steps.append("four checkpoints later")
    assert steps == ["appended", "four checkpoints later"]


async def test_a_reader_is_not_shaken_by_a_deletion() -> None:
    store = MemoryStore()
    grant = await take_after(store, KEY, after=0)
    records = tuple(Entry(MESSAGE, str(n).encode()) for n in range(1000))
    await store.append_many([Batch(KEY, grant.epoch, 2, records)])
    seen = []
    async for chunk in store.read_log(KEY):
        if not seen:
            await store.delete(KEY, grant.epoch)
        seen += [record.seq for record in chunk.records]
    assert seen == list(range(1, 1002))
    assert await store.head(KEY) == 0


async def test_a_reader_is_not_shaken_by_a_trim() -> None:
    store = MemoryStore()
    grant = await take_after(store, KEY, after=0)
    records = tuple(Entry(MESSAGE, str(n).encode()) for n in range(1000))
    await store.append_many([Batch(KEY, grant.epoch, 2, records)])
    seen = []
    async for chunk in store.read_log(KEY, after=1):
        if not seen:
            assert await store.trim(KEY, grant.epoch, 900) > 0
        seen += [record.payload for record in chunk.records]
    assert seen == [entry.payload for entry in records]
    first = [chunk.records[0].seq async for chunk in store.read_log(KEY)][0]
    assert first == 900


async def test_a_blob_under_a_wrong_name_is_refused_as_elsewhere() -> None:
    store = MemoryStore()
    with pytest.raises(NotStorableError, match="not named by its SHA-256"):
        await store.put_blobs("", {"0" * 64: b"other bytes", hashlib.sha256(b"").hexdigest(): b""})
    assert await store.blob_names("") == []


async def test_ages_are_measured_on_the_backings_clock() -> None:
    clock = Clock()
    store = MemoryStore(backing=MemoryBacking(clock=clock))
    data = b"a blob"
    name = hashlib.sha256(data).hexdigest()
    await store.put_blobs("", {name: data})
    clock.now += 59
    assert (await store.sweep("", (), 60)).quarantined == 0
    await store.put_blobs("", {name: data})
    clock.now += 59
    assert (await store.sweep("", (), 60)).quarantined == 0
    clock.now += 1
    assert (await store.sweep("", (), 60)).quarantined == 1
    clock.now += 59
    assert (await store.sweep("", (), 60)).removed == 0
    clock.now += 1
    assert (await store.sweep("", (), 60)).removed == 1


async def test_the_directory_tells_when_a_session_changed() -> None:
    clock = Clock()
    store = MemoryStore(backing=MemoryBacking(clock=clock))
    grant = await take_after(store, KEY, after=0)
    clock.now += 5
    await store.append_many([Batch(KEY, grant.epoch, 2, (Entry(MESSAGE, b"1"),))])
    (info,) = await store.sessions()
    assert (info.created_at, info.updated_at, info.head) == (1000.0, 1005.0, 2)


async def test_a_conflict_says_what_the_newest_epoch_is() -> None:
    store = MemoryStore()
    await take_after(store, KEY, after=0)
    await take_after(store, KEY, after=1)
    (outcome,) = await store.append_many([Batch(KEY, 1, 2, (Entry(MESSAGE, b"1"),))])
    assert outcome.status is Status.CONFLICT
    assert isinstance(outcome.error, LeaseLostError)
    assert outcome.error.facts == {"key": str(KEY), "epoch": 1, "newest": 2}


async def test_written_counts_only_what_is_new() -> None:
    store = MemoryStore()
    await take_after(store, KEY, after=0)
    records = (Entry(MESSAGE, b'"four"'), Entry(MESSAGE, b"22"))
    written = [
        (await store.append_many([Batch(KEY, 1, 2, sent)]))[0].written
        for sent in (records[:1], records, records)
    ]
    assert written == [6, 2, 0]
