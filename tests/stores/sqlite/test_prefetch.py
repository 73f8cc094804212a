"""What an open reads in one snapshot is used for the reads that follow, and only where it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

import perdure
from perdure import Message
from perdure.errors import CorruptRecordError
from perdure.lineage.store import followed
from perdure.store import PendingItem
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance._kit import KEY, append_ok, group, read


@pytest.fixture
async def store(tmp_path: Path) -> SqliteStore:
    store = SqliteStore(tmp_path / "kept" / "x.db")
    await store.open()
    return store


def count_reads(store: SqliteStore) -> list[object]:
    """Note each read of the database from now on."""
    reads = store._database.reads
    calls: list[object] = []
    start = reads.start

    def counted(function: object, *args: object, **options: object) -> object:
        calls.append(function)
        return start(function, *args, **options)  # type: ignore[arg-type]

    reads.start = counted  # type: ignore[method-assign, assignment]
    return calls


async def test_opening_a_session_again_takes_two_reads_and_a_page_of_history_one(
    tmp_path: Path,
) -> None:
    quiet = perdure.Shutdown(signals=False)
    async with perdure.connect(f"sqlite:///{tmp_path}/a.db", shutdown=quiet) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("a"))
            await session.aclose()
        inner = followed(sessions._store).inner
        assert isinstance(inner, SqliteStore)
        calls = count_reads(inner)
        async with sessions.open("ada") as session:
            assert len(calls) == 2  # its holder, then all the rest after the lease was acquired
            await session.history(limit=1)
            assert len(calls) == 3


async def test_records_that_came_after_the_documents_were_read_are_not_missing(
    store: SqliteStore,
) -> None:
    grant = await store.acquire(KEY, after=0)
    await store.read_documents(KEY)
    await append_ok(store, grant, 2, *group("a", "b"))
    assert [record.seq for record in await read(store, KEY)] == [1, 2, 3]
    assert [record.seq for record in await read(store, KEY)] == [1, 2, 3]
    await store.aclose()


async def test_what_is_posted_before_and_after_an_open_is_received(store: SqliteStore) -> None:
    def posted(name: str) -> PendingItem:
        return PendingItem(name, "message", b"{}", 1.0)

    await store.enqueue(KEY, [posted("a")])
    grant = await store.acquire(KEY, after=0)
    await store.read_documents(KEY)
    assert [item.op_id for item in await store.receive(KEY, grant.epoch)] == ["a"]
    await store.ack(KEY, grant.epoch, ["a"])
    await store.release(KEY, grant.epoch)

    grant = await store.acquire(KEY, after=grant.epoch)
    await store.read_documents(KEY)
    await store.enqueue(KEY, [posted("b")])
    assert (await store.heartbeat()).mail == (KEY,)
    assert await store.receive(KEY, grant.epoch) == []
    assert [item.op_id for item in await store.receive(KEY, grant.epoch)] == ["b"]
    await store.aclose()


async def test_a_damaged_tail_is_reported_by_the_read_that_needs_it(store: SqliteStore) -> None:
    grant = await store.acquire(KEY, after=0)
    await append_ok(store, grant, 2, *group("a"))
    await store.release(KEY, grant.epoch)
    with store._database.engine.transaction() as con:
        con.execute("UPDATE log SET data = x'00' WHERE first = 2")
    await store.acquire(KEY, after=grant.epoch)
    assert (await store.read_documents(KEY)).found == {}
    with pytest.raises(CorruptRecordError):
        await read(store, KEY)
    await store.aclose()
