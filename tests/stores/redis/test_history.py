"""Old history in another store: moved when it is folded, read as if it had never left."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from perdure import connect, store_for
from perdure.errors import ConfigError, CorruptRecordError, StoreError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import Store, Taken, Terms, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.redis import RedisStore
from perdure.testing.conformance._kit import KEY, append_ok, group, manifest_of, read, take
from perdure.testing.faulty import FaultyStore
from tests.servers.cutting import CuttingProxy
from tests.servers.valkey import Valkey

LINE = "x" * 20_000
ROUNDS = 160
"""Times two lines: several segments' worth."""


async def opened(url: str, history: Store | None, owner: str = "one") -> RedisStore:
    store = RedisStore(url, owner=owner, history=history)
    await store.open()
    return store


async def fill(store: RedisStore, grant: Taken, rounds: int = ROUNDS) -> int:
    head = await store.head(KEY)
    for n in range(rounds):
        head = await append_ok(store, grant, head + 1, *group(f"{n}a{LINE}", f"{n}b{LINE}"))
    return head


async def fold(store: RedisStore, grant: Taken, as_of_seq: int) -> None:
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, as_of_seq, documents))


def entries_left(server: Valkey, url: str) -> int:
    prefix = url.partition("prefix=")[2]
    return int(server.say("XLEN", f"{prefix}:{{:agent:default}}:l")[1:])


async def test_what_is_folded_moves_and_is_read_as_before(server: Valkey, url: str) -> None:
    backing = MemoryBacking()
    store = await opened(url, MemoryStore(backing=backing))
    assert not store.capabilities.memory_bound
    grant = await take(store)
    head = await fill(store, grant)
    before = await read(store)
    await fold(store, grant, 100)
    left = entries_left(server, url)
    assert ROUNDS - 50 <= left < ROUNDS  # what is not folded stays
    await fold(store, grant, head)
    assert entries_left(server, url) < left
    assert len(backing.blobs[""]) >= 4
    assert await read(store) == before
    assert await read(store, reverse=True) == before[::-1]
    for after, stop in ((0, 2), (49, 60), (100, 250), (head - 3, head + 1), (7, None)):
        wanted = before[after : stop - 1 if stop else None]
        assert await read(store, after=after, before=stop) == wanted
        assert await read(store, after=after, before=stop, limit=5) == wanted[:5]
        assert (
            await read(store, after=after, before=stop, limit=5, reverse=True) == wanted[::-1][:5]
        )
    assert await store.head(KEY) == head
    assert (await take_after(store, KEY, after=1)).head == head + 1
    await store.aclose()


async def test_a_trim_and_a_deletion_reach_the_other_store(server: Valkey, url: str) -> None:
    backing = MemoryBacking()
    store = await opened(url, MemoryStore(backing=backing))
    grant = await take(store)
    head = await fill(store, grant)
    await fold(store, grant, head)
    before = await read(store)
    segments = len(backing.blobs[""])
    assert await store.trim(KEY, grant.epoch, 120) > 1_000_000
    assert 0 < len(backing.blobs[""]) < segments
    left = await read(store)
    assert left == before[-len(left) :]
    assert 2 < left[0].seq <= 120
    await store.trim(KEY, grant.epoch, head)
    assert len(backing.blobs[""]) == 0
    assert len(await read(store)) <= 2
    await fill(store, grant)
    await fold(store, grant, await store.head(KEY))
    assert backing.blobs[""]
    await store.delete(KEY, grant.epoch)
    assert not backing.blobs[""]
    assert await read(store) == []
    await store.aclose()


async def test_the_newest_entry_never_moves(server: Valkey, url: str) -> None:
    """It tells where the log ends: without it nobody could append, or open the session."""
    store = await opened(url, MemoryStore())
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group(LINE * 60))  # a segment's worth by itself
    before = await read(store)
    await fold(store, grant, head)
    assert entries_left(server, url) >= 1
    assert await store.head(KEY) == head
    assert await read(store) == before
    await append_ok(store, grant, head + 1, *group("and on"))
    assert (await take(store)).head == head + 2
    await store.aclose()


async def test_history_that_moved_is_not_missing_where_a_session_is_taken(
    server: Valkey, url: str
) -> None:
    """Without its manifest, a restore needs all of the log."""
    store = await opened(url, MemoryStore())
    grant = await take(store)
    head = await fill(store, grant)
    await fold(store, grant, head)
    prefix = url.partition("prefix=")[2]
    taken = await store.acquire(KEY, Terms(me=store.owner))
    assert isinstance(taken, Taken)
    assert taken.found is not None
    assert [record.seq for record in taken.found.records or ()] == [head + 1]
    server.say("HSET", f"{prefix}:{{:agent:default}}:s", "m", "damaged")
    taken = await store.acquire(KEY, Terms(me=store.owner))
    assert isinstance(taken, Taken)
    assert taken.found is not None
    assert (taken.found.after, taken.found.records) == (0, None)
    assert len(await read(store)) == taken.head
    await store.aclose()


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_reader_goes_on_where_history_moves_under_it(
    server: Valkey, url: str, *, reverse: bool
) -> None:
    backing = MemoryBacking()
    store = await opened(url, MemoryStore(backing=backing))
    reader = await opened(url, MemoryStore(backing=backing), "reader")
    grant = await take(store)
    head = await fill(store, grant, 110)
    before = await read(store, reverse=reverse)
    found: list[Record] = []
    async for chunk in reader.read_log(KEY, reverse=reverse):
        if not found:
            await fold(store, grant, head)
        found += chunk.records
    assert len(backing.blobs[""]) >= 4
    assert found == before
    await store.aclose()
    await reader.aclose()


async def test_history_that_is_elsewhere_is_not_taken_for_none(server: Valkey, url: str) -> None:
    backing = MemoryBacking()
    store = await opened(url, MemoryStore(backing=backing))
    grant = await take(store)
    head = await fill(store, grant)
    await fold(store, grant, head)
    without = await opened(url, None, "other")
    with pytest.raises(StoreUnavailableError, match="history="):
        await read(without)
    assert len(await read(without, after=head - 1)) == 1
    blob = next(iter(backing.blobs[""].values()))
    blob.data = blob.data[:-1]
    with pytest.raises(CorruptRecordError):
        await read(store)
    backing.blobs[""].clear()
    with pytest.raises(CorruptRecordError, match="segment"):
        await read(store)
    await store.aclose()
    await without.aclose()


async def test_a_fold_does_not_fail_with_the_other_store(
    server: Valkey, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    history = FaultyStore(MemoryStore(), fail_on="put_blobs", nth=2)
    store = await opened(url, history)
    grant = await take(store)
    head = await fill(store, grant)
    before = await read(store)
    await fold(store, grant, head)
    assert "history was not moved" in caplog.text
    assert (await store.read_documents(KEY)).manifest is not None
    left = entries_left(server, url)
    assert await read(store) == before
    await fold(store, grant, head)
    assert entries_left(server, url) < left
    assert await read(store) == before
    await store.aclose()


async def test_a_move_whose_answer_is_lost_goes_on_with_the_next_fold(server: Valkey) -> None:
    proxy = CuttingProxy(server.port)
    store = await opened(f"redis://127.0.0.1:{proxy.port}/0?prefix={uuid4().hex}", MemoryStore())
    grant = await take(store)
    head = await fill(store, grant)
    before = await read(store)
    proxy.cut_after(b"}:x\r\n")
    await fold(store, grant, head)
    assert proxy.cuts == 1
    assert await read(store) == before
    await fold(store, grant, head)
    assert await read(store) == before
    await store.aclose()
    proxy.close()


async def test_what_a_killed_deletion_left_is_swept(server: Valkey, url: str) -> None:
    """Whoever is forgotten leaves nothing in the other store either."""
    backing = MemoryBacking()
    store = await opened(url, FaultyStore(MemoryStore(backing=backing), fail_on="remove_blobs"))
    grants = [await take(store, SessionKey(name, tenant="t")) for name in ("kept", "gone")]
    for grant in grants:
        head = await append_ok(store, grant, 2, *group(LINE * 60))
        head = await append_ok(store, grant, head + 1, *group("newest"))
        documents = {"session.json": b"{}"}
        await store.write_documents(grant.key, documents, manifest_of(grant, head, documents))
    kept = await read(store, grants[0].key)
    assert len(backing.blobs["t"]) == 2
    with pytest.raises(StoreUnavailableError):
        await store.delete(grants[1].key, 1)
    assert len(backing.blobs["t"]) == 2
    for _ in range(2):
        await store.sweep("t", (), 0.0)
    assert len(backing.blobs["t"]) == 1
    assert await read(store, grants[0].key) == kept
    await store.aclose()


async def test_a_url_names_the_other_store(url: str, tmp_path: Path) -> None:
    store = store_for(f"{url}&history=file:{tmp_path / 'old'}")
    assert isinstance(store, RedisStore)
    assert isinstance(store._history, FileStore)
    assert "old" not in store.location
    with pytest.raises(ConfigError, match="history=store"):
        RedisStore(f"{url}&history=memory:")
    async with connect(store) as sessions:
        assert not store.capabilities.memory_bound
        await sessions.list()
    assert (tmp_path / "old").is_dir()
    with pytest.raises(StoreError):
        await store.head(KEY)
