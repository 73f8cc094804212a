"""What a restore needs is read in one snapshot, and used only as long as it holds."""

from __future__ import annotations

import base64
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import perdure
from perdure import Message
from perdure.errors import CorruptRecordError
from perdure.restore.ladder import restore
from perdure.session.stored import followed
from perdure.store import Documents, PendingItem, RestoreData, take_after
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance._kit import KEY, append_ok, group, manifest_of, read


@pytest.fixture
async def store(tmp_path: Path) -> SqliteStore:
    store = SqliteStore(tmp_path / "kept" / "x.db")
    await store.open()
    return store


def count_reads(store: SqliteStore) -> list[None]:
    """Note each snapshot of the database from now on."""
    readers, counts = store._database.readers, list[None]()
    snapshot = readers.snapshot

    def counted() -> AbstractContextManager[sqlite3.Connection]:
        counts.append(None)
        return snapshot()

    readers.snapshot = counted  # type: ignore[method-assign, assignment]
    return counts


async def test_an_open_reads_what_it_needs_where_it_takes_the_session(tmp_path: Path) -> None:
    quiet = perdure.Shutdown(signals=False)
    store = SqliteStore(tmp_path / "a.db")
    async with perdure.connect(store, shutdown=quiet) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("a"))
            await session.aclose()
        calls = count_reads(store)
        async with sessions.open("ada") as session:
            assert not calls
            await session.history(limit=1)
            assert len(calls) == 1


async def test_a_load_is_one_read(tmp_path: Path) -> None:
    quiet = perdure.Shutdown(signals=False)
    store = SqliteStore(tmp_path / "a.db")
    async with perdure.connect(store, shutdown=quiet) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("a"))
            await session.aclose()
        calls = count_reads(store)
        assert await sessions.load("ada")
        assert await sessions.load("ada", context=False)
        assert len(calls) == 2


async def test_the_newest_page_comes_with_a_load_without_context(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    async with perdure.connect(store, shutdown=perdure.Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            for number in range(60):
                async with session.turn(f"request-{number}"):
                    session.append(Message.user(f"q{number}"), Message.assistant("yes"))
            await session.aclose()
        for _ in range(3):  # what has no messages is passed over
            await (await sessions.open("ada")).aclose()
        whole = await (await sessions.open("ada")).history(limit=1_000)
        calls = count_reads(store)
        view = await sessions.load("ada", context=False)
        assert view is not None
        newest = await view.history()
        assert newest == whole[-50:]
        assert len(calls) == 1
        before = newest[0].seq
        assert await view.history(before=before, limit=50) == whole[-100:-50]
        assert await view.history(before=newest[10].seq, limit=20) == whole[-60:-40]
        assert await view.history(limit=1_000) == whole


@pytest.mark.parametrize("prune", [False, True])
async def test_a_page_that_comes_with_a_load_is_the_log_s(tmp_path: Path, prune: bool) -> None:
    image = f"data:image/png;base64,{base64.b64encode(bytes(range(256)) * 400).decode()}"
    async with perdure.connect(
        f"sqlite:///{tmp_path}/a.db", shutdown=perdure.Shutdown(signals=False)
    ) as sessions:
        async with sessions.open("ada") as session:
            for number in range(8):
                async with session.turn():
                    session.append(Message.user(f"q{number}"), Message("user", image_urls=(image,)))
            await session.aclose()
        if prune:
            await sessions.prune(perdure.Retention(keep_turns=3))
        view = await sessions.load("ada", context=False)
        session = await sessions.open("ada")
        assert view is not None
        page = await view.history()
        assert page == await session.history()
        assert page[-1].value.image_urls == (image,)
        assert len(page) == (6 if prune else 16)


async def test_a_damaged_page_is_told_by_who_reads_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    async with perdure.connect(store, shutdown=perdure.Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("a"))
            await session.save()
            await session.aclose()
        with store._database.engine.transaction() as con:
            con.execute("UPDATE log SET data = x'00' WHERE first = 2")
        view = await sessions.load("ada", context=False)
        assert view is not None
        with pytest.raises(CorruptRecordError):
            await view.history()


async def test_documents_come_with_the_log_after_them(store: SqliteStore) -> None:
    assert await store.read_for_restore(KEY) == RestoreData(
        Documents(), records=(), may_have_items=False
    )
    grant = await take_after(store, KEY, after=0)
    await append_ok(store, grant, 2, *group("a", "b"))
    await store.write_documents(KEY, {"x": b"{}"}, manifest_of(grant, 2, {"x": b"{}"}))
    data = await store.read_for_restore(KEY)
    assert data.documents == await store.read_documents(KEY)
    assert (data.after, data.may_have_items) == (2, False)
    assert data.records == tuple(await read(store, KEY, after=2))
    await store.enqueue(KEY, [PendingItem("a", "message", b"{}", 1.0)])
    assert (await store.read_for_restore(KEY)).may_have_items
    await store.delete(KEY, grant.epoch)
    assert (await store.read_for_restore(KEY)).records == ()
    await store.aclose()


async def test_a_log_that_is_damaged_or_lacks_a_document_is_left_to_who_needs_it(
    store: SqliteStore,
) -> None:
    grant = await take_after(store, KEY, after=0)
    await append_ok(store, grant, 2, *group("a"))
    await store.write_documents(KEY, {"x": b"{}"}, manifest_of(grant, 2, {"x": b"{}"}))
    with store._database.engine.transaction() as con:
        con.execute("UPDATE document SET data = x'00'")
    data = await store.read_for_restore(KEY)
    assert (data.documents.damaged, data.records) == (("x",), None)
    with store._database.engine.transaction() as con:
        con.execute("DELETE FROM manifest")
        con.execute("DELETE FROM document")
        con.execute("UPDATE log SET data = x'00' WHERE first = 2")
    data = await store.read_for_restore(KEY)
    assert (data.documents, data.records) == (Documents(), None)
    with pytest.raises(CorruptRecordError):
        await read(store, KEY)
    await store.aclose()


async def test_what_was_read_with_the_lease_is_not_used_after_an_append(
    store: SqliteStore,
) -> None:
    lineage = followed(store)
    grant = await take_after(lineage, KEY, after=0)
    await append_ok(lineage, grant, 2, *group("a"))
    await lineage.release(KEY, grant.epoch)
    grant = await take_after(lineage, KEY, after=grant.epoch)
    await append_ok(lineage, grant, 4, *group("b"))
    restored = await restore(lineage, KEY, context_bytes=1000)
    assert restored.head == 4
    await lineage.aclose()
