"""The base of encrypted and compressed stores: what goes through it, and by which way."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import pytest

from perdure import Message, Shutdown, connect
from perdure.cli.check import audit, collect, garbage
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.session.stored import followed
from perdure.store import (
    Batch,
    Beginning,
    Documents,
    Manifest,
    Outcome,
    RestoreData,
    Status,
    Store,
    SupportsConnections,
    SupportsFolders,
    SupportsLocalPath,
    SupportsRebuild,
    capability,
    take_after,
)
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.stores.redis import RedisStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from perdure.stores.wrapped.coded import CodedStore
from perdure.testing.conformance._kit import (
    KEY,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from perdure.testing.faulty import FaultyStore

MASTER = "5a" * 32
QUIET = Shutdown(signals=False)
NEVER = 1_000_000

WITHOUT_CONTENT = {
    *("aclose", "delete", "drafts", "head", "heartbeat", "open", "owner", "publish"),
    *("release", "request_handover", "scrub", "sessions_with_pending_items", "tenants", "trim"),
    "wait_for_notification",
}
"""Calls of the port that carry nothing that people or programs wrote, but for ids."""


def test_every_call_of_the_port_is_encoded_or_carries_no_content() -> None:
    """A call that is added to the port has to be put among either."""
    port = {name for name, _ in inspect.getmembers(Store) if not name.startswith("_")}
    encoded = {name for name in port if name in vars(CodedStore)}
    assert encoded.isdisjoint(WITHOUT_CONTENT)
    assert encoded | WITHOUT_CONTENT == port


def test_every_field_of_what_is_written_is_encoded_or_carries_no_content() -> None:
    """As of the calls: what a struct of the port gets has to be encoded, or be put here."""
    fields = {struct.__name__: struct.__struct_fields__ for struct in (Batch, Beginning, Manifest)}
    assert fields == {
        "Batch": ("key", "epoch", "first", "records", "turns", "about"),  # encoded: records, about
        "Beginning": ("first", "base", "draft", "about"),  # encoded: about
        "Manifest": (
            *("format", "key", "epoch", "as_of_seq", "counters"),
            *("documents", "about"),  # encoded
            *("base", "position"),
        ),
    }


@pytest.mark.parametrize("around", [CompressedStore, lambda inner: EncryptedStore(inner, MASTER)])
def test_what_a_backend_has_besides_the_port_is_not_offered_if_content_passes_through_it(
    around: Callable[[Store], CodedStore], tmp_path: Path
) -> None:
    files, server = FileStore(tmp_path / "kept"), RedisStore("redis://127.0.0.1:1")
    assert capability(files, SupportsFolders) is not None
    assert capability(around(files), SupportsFolders) is None
    assert capability(around(server), SupportsRebuild) is None
    local, pooled = capability(around(files), SupportsLocalPath), around(server)
    assert local is not None
    assert local.local_path == files.local_path
    assert capability(pooled, SupportsConnections) is not None


class Watched(SqliteStore):
    """Counts the calls that append, and that read documents."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.calls: Counter[str] = Counter()

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        self.calls["append_many"] += 1
        return await super().append_many(batches)

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        self.calls["begin_append"] += 1
        return super().begin_append(batches, done)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        self.calls["read_documents"] += 1
        return await super().read_documents(key, names)

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> RestoreData:
        self.calls["read_for_restore"] += 1
        return await super().read_for_restore(key, names)


AROUND: dict[str, Callable[[Store], CodedStore]] = {
    "encrypted": lambda inner: EncryptedStore(inner, MASTER),
    "compressed": CompressedStore,
}


@pytest.mark.parametrize("around", AROUND)
async def test_a_save_needs_no_task_from_the_first_one_on(around: str, tmp_path: Path) -> None:
    inner = Watched(tmp_path / "kept" / "store.db")
    for _ in range(2):  # a new session, and one that is opened again
        async with connect(AROUND[around](inner), shutdown=QUIET, autosave=None) as sessions:
            session = await sessions.open("ada")
            inner.calls.clear()
            for text in ("one", "two"):
                session.append(Message.user(text))
                await session.save()
            assert inner.calls == {"begin_append": 2}


@pytest.mark.parametrize("around", AROUND)
async def test_a_load_reads_documents_and_log_in_one_call(around: str, tmp_path: Path) -> None:
    inner = Watched(tmp_path / "kept" / "store.db")
    async with connect(AROUND[around](inner), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("folded"))
    writing = AROUND[around](SqliteStore(tmp_path / "kept" / "store.db"))
    async with (
        connect(writing, shutdown=QUIET, autosave=None) as writers,
        connect(AROUND[around](inner), shutdown=QUIET) as sessions,
    ):
        session = await writers.open("ada")
        session.append(Message.user("behind the fold"))
        await session.save()
        # The keys of the session and the tenant: which it is, and with it.
        for keys in (4, 0) if around == "encrypted" else (0, 0):
            inner.calls.clear()
            view = await sessions.load("ada")
            assert view is not None
            assert [message.text for message in view.context()] == ["folded", "behind the fold"]
            inner.calls["read_documents"] -= keys
            assert +inner.calls == {"read_for_restore": 1}


async def test_what_begin_append_cannot_do_at_once_is_left_to_append_many(tmp_path: Path) -> None:
    inner = Watched(tmp_path / "kept" / "store.db")
    store, outcomes = EncryptedStore(inner, MASTER), list[Outcome]()
    await store.open()
    grant = await take(store)
    await store.release(KEY, grant.epoch)
    batch = Batch(KEY, grant.epoch, 2, group("late"))
    assert not store.begin_append([batch], outcomes.extend)
    (outcome,) = await store.append_many([batch])
    assert outcome.status is Status.CONFLICT
    grant = await take_after(store, KEY, after=1)  # its log was not read: no link is known
    batch = Batch(KEY, grant.epoch, 3, group("a"))
    assert not store.begin_append([batch], outcomes.extend)
    (outcome,) = await store.append_many([batch])
    assert outcome.status is Status.OK
    large = Batch(KEY, grant.epoch, 4, group("a" * 1_000_000))
    refused = Batch(KEY, grant.epoch, 4, (group("a")[0], *group("b" * 20_000_000)))
    for wrong in (large, refused):
        assert not store.begin_append([wrong], outcomes.extend)
    assert (inner.calls["begin_append"], outcomes) == (0, [])
    assert store.begin_append([Batch(KEY, grant.epoch, 4, group("b"))], outcomes.extend)
    await store.aclose()


async def test_a_save_behind_a_log_that_was_read_to_its_end_needs_no_task(tmp_path: Path) -> None:
    inner = Watched(tmp_path / "kept" / "store.db")
    store, outcomes = EncryptedStore(inner, MASTER), list[Outcome]()
    await store.open()
    first = await take(store)
    await append_ok(store, first, 2, *group("a", "b"))
    for after in (0, 2):  # all of it, and what is behind a fold
        grant = await take(store)
        await read(store, after=after)
        batch = Batch(KEY, grant.epoch, grant.head + 1, group("c"))
        assert store.begin_append([batch], outcomes.extend)
    await store.aclose()
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK]


@pytest.mark.parametrize("around", AROUND)
async def test_what_is_asked_of_the_blobs_of_a_tenant_that_has_none_makes_it_no_key(
    around: str,
) -> None:
    inner, name = MemoryStore(), name_of(b"one")
    store = AROUND[around](inner)
    await store.open()
    assert await store.renew("t", [name]) == {name}
    assert await store.get_blob("t", name) is None
    assert await store.blob_names("t") == []
    assert await store.remove_blobs("t", [name]) == 0
    assert (await store.sweep("t", [name], 0.0)).removed == 0
    assert await inner.tenants() == []


async def test_a_batch_is_the_same_by_either_way() -> None:
    """Sent again after a lost answer, it is what the log has already."""
    encoded = list[Sequence[Batch]]()

    class Lost(FaultyStore):
        def begin_append(
            self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
        ) -> bool:
            encoded.append(batches)
            return True

    inner = MemoryStore()
    store = EncryptedStore(Lost(inner, nth=NEVER), MASTER)
    await store.open()
    grant = await take(store)
    for seq, text in enumerate("abc", 2):
        assert store.begin_append([Batch(KEY, grant.epoch, seq, group(text))], lambda _: None)
        await append_ok(store, grant, seq, *group(text))
    stored = [record.payload for record in (await read(inner))[1:]]
    assert [batch.records[0].payload for (batch,) in encoded] == stored
    assert tuple(entries(await read(store))) == group("a") + group("b") + group("c")


class Tailed(MemoryStore):
    """A store that says of each log that its end may be missing."""

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        have = await super().read_documents(key, names)
        return msgspec.structs.replace(have, unproven_tail="its end may be missing")


@pytest.mark.parametrize("around", AROUND)
async def test_what_the_inner_store_says_of_a_logs_end_is_said_too(around: str) -> None:
    store, documents = AROUND[around](Tailed()), {"session.json": b"{}"}
    await store.open()
    grant = await take(store)
    await store.write_documents(KEY, documents, manifest_of(grant, grant.head, documents))
    assert (await store.read_documents(KEY)).unproven_tail == "its end may be missing"


async def test_a_wrapper_that_passes_on_the_port_alone_loses_no_blob() -> None:
    """It does not tell which blobs are a session's: then none of them is garbage."""
    store, key = FaultyStore(EncryptedStore(MemoryStore(), MASTER), nth=NEVER), SessionKey("ada")
    await store.open()
    await take_after(store, key, after=0)
    await store.put_blobs(key.blobs, {name_of(b"b"): b"b"})
    for _ in range(2):
        audits = [await audit(followed(store), key)]
        found, reached = await garbage(store, "", set(await store.blob_names("")), audits)
        assert found.unreachable == 0
        await collect(store, found, reached, 0)
    assert await store.get_blob(key.blobs, name_of(b"b")) == b"b"
