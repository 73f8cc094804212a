"""The snapshot as a document of the store (S0-11)."""

from __future__ import annotations

import pytest

from perdure import ConfigError, LeaseLostError, Message, Shutdown, StoreError, connect
from perdure.memory.context import SNAPSHOT
from perdure.records.keys import SessionKey
from perdure.restore import WorkingContextSnapshotSerializer, WorkingContextSnapshotStore
from perdure.store import take_after
from perdure.stores.memory import MemoryBacking, MemoryStore

KEY = SessionKey("ada")


async def folded(*texts: str) -> MemoryBacking:
    """Return a place where a session was closed, and so folded."""
    backing = MemoryBacking()
    store = MemoryStore(backing=backing)
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            session.append(*map(Message.user, texts))
    return backing


async def opened(backing: MemoryBacking) -> MemoryStore:
    store = MemoryStore(backing=backing)
    await store.open()
    return store


async def test_what_a_fold_wrote_is_read() -> None:
    """S0-11."""
    snapshots = WorkingContextSnapshotStore(await opened(await folded("x", "y")), KEY)
    assert await snapshots.exists("ada")
    payload = await snapshots.read("ada")
    assert payload is not None
    assert [one["content"] for one in payload["messages"]] == ["x", "y"]
    assert WorkingContextSnapshotSerializer().validate(payload, "ada")


async def test_where_nothing_is_nothing_is_read() -> None:
    snapshots = WorkingContextSnapshotStore(await opened(MemoryBacking()), KEY)
    assert not await snapshots.exists("ada")
    assert await snapshots.read("ada") is None


async def test_what_was_damaged_does_not_exist() -> None:
    """Defect a: a bad cache is no error, it is rebuilt."""
    backing = await folded("x")
    backing.sessions[KEY].documents[SNAPSHOT] = b'{"schema_version": 1, "messages"'
    snapshots = WorkingContextSnapshotStore(await opened(backing), KEY)
    assert not await snapshots.exists("ada")
    assert await snapshots.read("ada") is None


async def test_another_agents_snapshot_is_not_asked_for() -> None:
    snapshots = WorkingContextSnapshotStore(await opened(await folded("x")), KEY)
    with pytest.raises(ConfigError, match="not of 'bob'"):
        await snapshots.read("bob")


async def test_a_holder_replaces_the_cache_and_not_the_truth() -> None:
    store = await opened(await folded("x"))
    epoch = (await take_after(store, KEY, after=1)).epoch
    snapshots = WorkingContextSnapshotStore(store, KEY, epoch=epoch)
    payload = await snapshots.read("ada")
    assert payload is not None
    await snapshots.write("ada", {**payload, "epoch_id": 7})
    again = await snapshots.read("ada")
    assert again is not None
    assert again["epoch_id"] == 7
    before = [one async for chunk in store.read_log(KEY) for one in chunk.records]
    assert len(before) == await store.head(KEY)


async def test_a_snapshot_as_of_another_record_is_refused() -> None:
    store = await opened(await folded("x"))
    snapshots = WorkingContextSnapshotStore(store, KEY, epoch=1)
    payload = await snapshots.read("ada")
    assert payload is not None
    with pytest.raises(StoreError, match="the last fold is as of"):
        await snapshots.write("ada", {**payload, "seq": 99})


async def test_who_does_not_hold_the_session_writes_nothing() -> None:
    store = await opened(await folded("x"))
    payload = await WorkingContextSnapshotStore(store, KEY).read("ada")
    assert payload is not None
    with pytest.raises(StoreError):
        await WorkingContextSnapshotStore(store, KEY).write("ada", payload)
    await take_after(store, KEY, after=1)
    with pytest.raises(LeaseLostError):
        await WorkingContextSnapshotStore(store, KEY, epoch=1).write("ada", payload)
