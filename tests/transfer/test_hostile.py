"""Bundles that somebody made on purpose: their checksums hold, and nothing of them lands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

import perdure
from perdure._lib.files import MAX_BYTES
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    InvalidArgumentError,
    StoreError,
    TooLargeError,
)
from perdure.records.chunks import name_of
from perdure.records.json import encode
from perdure.records.keys import BACKUP_JOURNAL, SCOPES, SessionKey, keyring_of
from perdure.records.manifest import FoldedDocument, Manifest, Origin
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, CONTEXT, EPOCH, GAP, MESSAGE, TAKEN, Record
from perdure.store import Document, PendingItem
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance._kit import append_ok, group, take
from perdure.transfer import backup, migrate, read_bundle, restore_backup, write_bundle
from perdure.transfer.bundle import (
    FREE_MISSING,
    MOST_ITEMS,
    MOST_LINE,
    MOST_MISSING,
    BundleWriter,
    Line,
    blob_line,
    document_line,
    header_line,
    manifest_line,
    record_line,
)
from tests.pausing import PausingStore
from tests.transfer.hostile import ran

KEY = SessionKey("agent", tenant="theirs")


Item = Line | Record | Manifest | DeadLetter


def bundle(path: Path, *items: Item, key: SessionKey = KEY) -> Path:
    writer = BundleWriter()
    lines = [header_line(key)]
    for item in items:
        match item:
            case Record():
                lines.append(record_line(item))
            case Manifest():
                lines.append(manifest_line(item))
            case DeadLetter():
                lines.append(Line(dead_letter=item))
            case Line():
                lines.append(item)
    path.write_bytes(b"".join(map(writer.line, lines)) + writer.end())
    return path


def said(seq: int, kind: str = MESSAGE) -> Record:
    return Record(seq, 0, kind, b'{"text":"x"}', end=True)


def begun(base: Origin, seq: int = 2) -> Record:
    return Record(seq, 0, BASE, encode(base), end=True)


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
        ([begun(Origin(at=10**15)), said(3)], "after record"),
        ([begun(Origin(cut=10**15)), said(3)], "after record"),
        ([begun(Origin(at=-1)), said(3)], "after record"),
        ([begun(Origin(cut=-1)), said(3)], "after record"),
        ([begun(Origin(at=10**18, cut=10**18)), said(3)], "after record"),
        ([begun(Origin()), begun(Origin(at=1, cut=1), 3)], "after record"),
        ([said(2), Manifest(key=KEY, epoch=0, as_of_seq=2, base=Origin(cut=9))], "after record"),
        ([begun(Origin(kept="0" * 64)), said(3)], "not in it"),
        ([begun(Origin(folded="../x")), said(3)], "not in it"),
        ([Record(2, 0, TAKEN, b"7", end=True)], "object"),
    ],
    ids=[
        *["swapped", "twice", "first", "negative", "far", "farther", "epoch", "gap"],
        *["pruned", "gaps", "manifest", "group", "end", "base"],
        *["nothing before", "cut later", "before 0", "cut before 0", "no number"],
        *["two beginnings", "folded beginning", "no history", "no documents", "taken"],
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
@pytest.mark.parametrize("in_manifest", [False, True], ids=["log", "manifest"])
@pytest.mark.parametrize(
    "key",
    [KEY, SessionKey("secret", tenant="others"), SessionKey(SCOPES, "user:bob", KEY.tenant)],
    ids=["itself", "another tenant's", "a scope"],
)
async def test_no_bundle_begins_with_records_of_a_session_in_the_store(
    field: str, in_manifest: bool, key: SessionKey, tmp_path: Path
) -> None:
    """Else whoever may import for one tenant could read what every other one said."""
    store = MemoryStore()
    await store.open()
    grant = await take(store, key)
    await append_ok(store, grant, 2, *group("not for them"))
    base = Origin(at=2, epoch=grant.epoch, **{field: key})  # type: ignore[arg-type]
    items: list[Item] = [said(2), said(3)] if in_manifest else [begun(base), said(3)]
    if in_manifest:
        items.append(Manifest(key=KEY, epoch=0, as_of_seq=3, base=base))
    path = bundle(tmp_path / "one.jsonl", *items)
    new = SessionKey("new", tenant=KEY.tenant)
    refused = ConfigError if field == "parent" else CorruptRecordError
    with pytest.raises(refused, match="parent=" if field == "parent" else "does not begin"):
        await read_bundle(store, path, key=new)
    assert await store.holder(new) is None


def referring(times: int, size: int, name: str, kind: str = MESSAGE) -> Record:
    reference = f'"\\u0070erdure:media:url:image/png:{size}:1x1:{name}"'
    parts = ",".join([f'{{"type":"image_url","image_url":{{"url":{reference}}}}}'] * times)
    return Record(2, 0, kind, f'{{"role":"user","content":[{parts}]}}'.encode(), end=True)


async def test_a_record_names_no_more_media_than_it_could_hold(tmp_path: Path) -> None:
    """A megabyte that is named four hundred times was half a gigabyte for whoever read it."""
    store = MemoryStore()
    await store.open()
    data = bytes(1024 * 1024)
    blob = blob_line(name_of(data), data)
    for times, size, why in ((400, len(data), "in place"), (2, 1, "is a blob of")):
        path = bundle(tmp_path / f"{times}.jsonl", blob, referring(times, size, blob.blob or ""))
        with pytest.raises(CorruptRecordError, match=why):
            await read_bundle(store, path)
        assert await store.holder(KEY) is None
    path = bundle(tmp_path / "sound.jsonl", blob, referring(11, len(data), blob.blob or ""))
    await read_bundle(store, path)
    assert await store.head(KEY) == 2


async def test_a_context_may_refer_to_more_than_a_record_holds(tmp_path: Path) -> None:
    """It refers to what many messages have shown, of which few are in memory."""
    store = MemoryStore()
    await store.open()
    data = bytes(1024 * 1024)
    blob = blob_line(name_of(data), data)
    context = referring(400, len(data), blob.blob or "", kind=CONTEXT)
    await read_bundle(store, bundle(tmp_path / "one.jsonl", blob, context))
    assert await store.head(KEY) == 2


def letter(number: int) -> DeadLetter:
    return DeadLetter(PendingItem(f"op-{number}/0", "item", b"{}", 0.0), "why", 1, 1.0)


async def test_what_an_import_writes_at_once_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    await store.open()
    documents = [document_line(f"{n}.json", Document(b"{}", 2)) for n in range(MOST_ITEMS + 1)]
    path = bundle(tmp_path / "documents.jsonl", said(2), *documents)
    with pytest.raises(CorruptRecordError, match=f"more than {MOST_ITEMS} documents"):
        await read_bundle(store, path)
    path = bundle(tmp_path / "letters.jsonl", *map(letter, range(MOST_ITEMS + 1)), said(2))
    with pytest.raises(CorruptRecordError, match=f"more than {MOST_ITEMS} dead letters"):
        await read_bundle(store, path)
    monkeypatch.setattr(perdure.transfer.bundle, "MOST_KEPT", 10_000)
    large = [document_line(f"{n}.json", Document(b"x" * 4000, 2)) for n in range(3)]
    with pytest.raises(CorruptRecordError, match="more than 10000 bytes of documents"):
        await read_bundle(store, bundle(tmp_path / "large.jsonl", said(2), *large))
    assert await store.holder(KEY) is None


async def test_no_export_has_more_than_an_import_writes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    await store.open()
    lease = await take(store, KEY)
    await append_ok(store, lease, 2, *group("said"))
    for number in range(3):
        await store.ack(KEY, lease.epoch, dead=[letter(number)])
    monkeypatch.setattr(perdure.transfer.bundle, "MOST_ITEMS", 2)
    with pytest.raises(TooLargeError, match="more than 2 dead letters"):
        await write_bundle(store, KEY, tmp_path / "one.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["own", "other id", "changed", "lost", "other's media"])
async def test_only_whole_documents_of_the_session_itself_are_taken(
    how: str, tmp_path: Path
) -> None:
    store = MemoryStore()
    await store.open()
    folded = referring(1, 7, "0" * 64).payload if how == "other's media" else b"{}"
    data = b"x" if how == "changed" else folded
    listed = {"x.json": FoldedDocument.of(2, folded)}
    manifest = Manifest(key=KEY, epoch=0, as_of_seq=4, documents=listed)
    documents = [] if how == "lost" else [document_line("x.json", Document(data, 2))]
    key = SessionKey("other", tenant="theirs") if how == "other id" else KEY
    await read_bundle(store, bundle(tmp_path / "one", said(2), *documents, manifest), key=key)
    found = await store.read_documents(key)
    assert (found.manifest is not None, *found.found) == (
        (True, "x.json") if how == "own" else (False,)
    )
    assert await store.head(key) == 4  # the last number is the manifest's


async def test_documents_without_a_manifest_are_not_taken(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    document = document_line("x.json", Document(b"x" * 100_000, 2))
    done = await read_bundle(store, bundle(tmp_path / "one.jsonl", said(2), document))
    assert done.bytes < 100


@pytest.mark.parametrize("name", ["pipe", "device"])
def test_what_is_no_file_is_not_imported(name: str, tmp_path: Path) -> None:
    """A pipe has no end, and a device that gives zeros none either."""
    path = tmp_path / "pipe" if name == "pipe" else Path("/dev/zero")
    if name == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="pipe or a device"):
        ran("import", path, "--store", "memory:")
    with pytest.raises(ConfigError, match="pipe or a device"):
        ran("import", "openai-agents", path, "--store", "memory:")


def test_a_file_that_is_read_as_a_whole_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"{")
    os.truncate(path, MAX_BYTES + 1)  # a hole takes no room
    with pytest.raises(CorruptRecordError, match=f"the limit is {MAX_BYTES}"):
        ran("import", path, "--store", "memory:")


async def test_gaps_cost_no_more_than_their_numbers(tmp_path: Path) -> None:
    """A gap of seventeen was seventeen leases, each with its own writes."""
    store = MemoryStore()
    await store.open()
    records = [said(2 + 17 * n) for n in range(2000)]
    done = await read_bundle(store, bundle(tmp_path / "one.jsonl", *records))
    assert (done.records, done.epoch) == (2000, 1)
    assert await store.head(KEY) == records[-1].seq


@pytest.mark.parametrize("what", ["record", "blob"])
async def test_a_bundle_that_is_changed_while_it_is_imported_lands_nothing(
    what: str, tmp_path: Path
) -> None:
    """What was judged is what is written: not what somebody put in its place meanwhile."""
    store = PausingStore(MemoryStore())
    await store.open()
    data = b"the picture" * 100
    blob = blob_line(name_of(data), data)
    path = bundle(tmp_path / "one.jsonl", blob, referring(1, len(data), blob.blob or ""), said(3))
    lines = path.read_bytes().splitlines(keepends=True)
    place = 1 if what == "blob" else 3
    lines[place] = lines[place].replace(b"dGhl", b"dGhm").replace(b'"x"', b'"y"')

    async def act() -> None:
        with pytest.raises(StoreError, match="changed while it was read"):
            await read_bundle(store, path)

    pause = store.pause("acquire")
    async with anyio.create_task_group() as group:
        group.start_soon(act)
        await pause.reached.wait()
        path.write_bytes(b"".join(lines))
        pause.go()
    assert await store.head(KEY) == 0


async def test_blobs_that_nothing_names_are_not_written(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    done = await read_bundle(
        store, bundle(tmp_path / "one.jsonl", blob_line(name_of(b"x"), b"x"), said(2))
    )
    assert (done.records, done.blobs) == (1, 0)
    assert await store.blob_names(KEY.tenant) == []


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
        BundleWriter().line(blob_line("name", bytes(MOST_LINE)))


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
