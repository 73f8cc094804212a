"""Bundles that somebody made on purpose: their checksums hold, and nothing of them lands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import perdure
from perdure.errors import CorruptRecordError, InvalidArgumentError, StoreError, TooLargeError
from perdure.records.json import encode
from perdure.records.keys import BACKUP_JOURNAL, SCOPES, SessionKey, keyring_of
from perdure.records.manifest import Manifest, Origin
from perdure.records.records import BASE, EPOCH, GAP, MESSAGE, TAKEN, Record
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance._kit import append_ok, group, take
from perdure.transfer import backup, migrate, read_bundle, restore_backup, write_bundle
from perdure.transfer.bundle import (
    FREE_MISSING,
    MOST_LINE,
    MOST_MISSING,
    BundleBlob,
    BundleFooter,
    BundleHeader,
    BundleWriter,
    Item,
)

KEY = SessionKey("agent", tenant="theirs")


def bundle(path: Path, *items: Item, key: SessionKey = KEY) -> Path:
    writer = BundleWriter()
    path.write_bytes(b"".join(map(writer.line, (BundleHeader(key), *items, BundleFooter()))))
    return path


def said(seq: int, kind: str = MESSAGE) -> Record:
    return Record(seq, 0, kind, b'{"text":"x"}', end=True)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([said(2), said(4), said(3)], "order"),
        ([said(2), said(2)], "order"),
        ([said(1)], "order"),
        ([said(-5)], "order"),
        ([said(2), said(3 + MOST_MISSING)], "missing"),
        ([said(10**18)], "missing"),
        ([said(2), said(3, EPOCH)], "epoch"),
        ([said(2), said(3, GAP)], "gap"),
        ([said(3 + FREE_MISSING + 10_000)], "may leave out"),
        ([said(2), said(5000), said(50_000)], "may leave out"),
        ([said(2), Manifest(key=KEY, epoch=0, as_of_seq=100_000)], "may leave out"),
        ([Record(2, 0, MESSAGE, b"{}", end=False), said(4)], "within a group"),
        ([Record(2, 0, MESSAGE, b"{}", end=False)], "ends within a group"),
        ([Record(2, 0, BASE, b'{"at":"x"}', end=True)], "at"),
        ([Record(2, 0, TAKEN, b"7", end=True)], "object"),
    ],
    ids=[
        *["swapped", "twice", "first", "negative", "far", "farther", "epoch", "gap"],
        *["pruned", "gaps", "manifest", "group", "end", "base", "taken"],
    ],
)
async def test_records_that_no_log_has_land_nothing(
    records: Sequence[Item], why: str, tmp_path: Path
) -> None:
    store = MemoryStore()
    await store.open()
    with pytest.raises(CorruptRecordError, match=why):
        await read_bundle(store, bundle(tmp_path / "one.jsonl", *records))
    assert await store.holder(KEY) is None


async def test_a_bundle_does_not_go_on_behind_another_tenants_session(tmp_path: Path) -> None:
    """Else whoever may import for one tenant could read what every other one said."""
    store = MemoryStore()
    await store.open()
    grant = await take(store, SessionKey("secret", tenant="others"))
    await append_ok(store, grant, 2, *group("not for them"))
    base = Origin(at=2, parent=grant.key, epoch=grant.epoch)
    path = bundle(tmp_path / "one.jsonl", Record(2, 0, BASE, encode(base), end=True), said(3))
    with pytest.raises(StoreError, match="tenant"):
        await read_bundle(store, path)
    assert await store.head(KEY) == 0


@pytest.mark.parametrize(
    "key",
    [keyring_of(""), keyring_of("acme"), BACKUP_JOURNAL, SessionKey("perdure:later")],
    ids=str,
)
async def test_what_a_store_is_never_comes_in_by_a_bundle(key: SessionKey, tmp_path: Path) -> None:
    """Else one file locks a store: it looks encrypted, or like a backup."""
    store = MemoryStore()
    await store.open()
    with pytest.raises(CorruptRecordError, match="perdure's own"):
        await read_bundle(store, bundle(tmp_path / "one.jsonl", said(2), key=key))
    with pytest.raises(InvalidArgumentError, match="perdure's own"):
        await read_bundle(store, bundle(tmp_path / "two.jsonl", said(2)), key=key)
    assert await store.holder(key) is None


async def test_a_scope_goes_out_and_in_by_a_bundle(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "one") as sessions:
        await sessions.scope("user:bob").set("likes", "tea")
    source, target = perdure.store_for(tmp_path / "one"), perdure.store_for(tmp_path / "two")
    for store in (source, target):
        await store.open()
    path = tmp_path / "scope.jsonl"
    await write_bundle(source, SessionKey(SCOPES, "user:bob"), path)
    await read_bundle(target, path)
    for store in (source, target):
        await store.aclose()
    async with perdure.connect(tmp_path / "two") as sessions:
        assert await sessions.scope("user:bob").values() == {"likes": "tea"}


@pytest.mark.parametrize("field", ["parent", "moved"])
async def test_no_bundle_begins_with_what_others_share(field: str, tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    shared = await take(store, SessionKey(SCOPES, "user:bob", KEY.tenant))
    await append_ok(store, shared, 2, *group("not for them"))
    base = Origin(at=2, epoch=shared.epoch, **{field: shared.key})  # type: ignore[arg-type]
    path = bundle(tmp_path / "one.jsonl", Record(2, 0, BASE, encode(base), end=True), said(3))
    with pytest.raises(CorruptRecordError, match="perdure's own"):
        await read_bundle(store, path)
    assert await store.holder(KEY) is None


async def test_gaps_cost_no_more_than_their_numbers(tmp_path: Path) -> None:
    """A gap of seventeen was seventeen leases, each with its own writes."""
    store = MemoryStore()
    await store.open()
    records = [said(2 + 17 * n) for n in range(2000)]
    done = await read_bundle(store, bundle(tmp_path / "one.jsonl", *records))
    assert (done.records, done.epoch) == (2000, 1)
    assert await store.head(KEY) == records[-1].seq


async def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = bundle(tmp_path / "one.jsonl", said(2))
    with path.open("r+b") as file:
        file.truncate(len(file.readline()))
        file.truncate(2**40)  # a hole takes no room
    store = MemoryStore()
    await store.open()
    with pytest.raises(CorruptRecordError, match=f"longer than {MOST_LINE} bytes"):
        await read_bundle(store, path)


def test_nothing_is_exported_that_no_import_takes() -> None:
    with pytest.raises(TooLargeError, match="perdure migrate"):
        BundleWriter().line(BundleBlob("name", bytes(MOST_LINE)))


async def test_no_copy_brings_a_stores_keys(tmp_path: Path) -> None:
    """Neither a backup that somebody made nor a store that was locked passes them on."""
    source, kept, restored, moved = (MemoryStore() for _ in range(4))
    for store in (source, kept, restored, moved):
        await store.open()
    for key in (keyring_of(""), SessionKey("ada")):
        lease = await take(source, key)
        await append_ok(source, lease, 2, *group("said"))
        await source.release(key, lease.epoch)
    assert not (await backup(source, kept)).failed
    for done, target in (
        (await restore_backup(kept, restored), restored),
        (await migrate(source, moved), moved),
    ):
        assert list(done.failed) == [str(keyring_of(""))]
        assert await target.holder(keyring_of("")) is None
        assert await target.head(SessionKey("ada")) == 2
