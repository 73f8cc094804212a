"""Damage: every flipped bit, cut and missing object is detected and named; nothing is made up."""

from __future__ import annotations

import random
from typing import Any

import obstore
import pytest

from perdure import Message, Shutdown, connect
from perdure.errors import CorruptRecordError, FormatError, PerdureError, UnsupportedVersionError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry, Record
from perdure.store import Batch, PendingItem, SessionQuery, Status, Taken, take_after
from perdure.stores.objects import layout
from perdure.stores.s3 import S3Store
from perdure.testing.conformance._kit import manifest_of, take
from tests.stores.s3.conftest import OpenS3

KEY = SessionKey("agent")
FOLDER = layout.folder_of(KEY)
HEAD = f"{FOLDER}/head"

pytestmark = pytest.mark.anyio


async def write(store: S3Store, *, fold: bool) -> Taken:
    """Write twelve commits of two records; fold merges all but the last two."""
    grant = await take_after(store, KEY, after=0)
    for number in range(12):
        if fold and number == 11:
            documents = {"session.json": b"{}"}
            await store.write_documents(KEY, documents, manifest_of(grant, 23, documents))
        records = (
            Entry(MESSAGE, b'{"text":"%d"}' % number, end=False),
            Entry(MESSAGE, b'{"text":"more"}'),
        )
        batch = Batch(KEY, grant.epoch, 2 + 2 * number, records)
        assert (await store.append_many([batch]))[0].status is Status.OK
    return grant


def names(raw: Any) -> list[str]:
    return sorted(one["path"] for one in obstore.list(raw, FOLDER).collect())


async def read(store: S3Store) -> list[Record]:
    return [r async for chunk in store.read_log(KEY) for r in chunk.records]


async def test_a_flipped_bit_anywhere_is_detected_and_named(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    await write(store, fold=True)
    whole = await read(store)
    assert len(whole) == 25
    chance = random.Random(7)
    for name in names(raw):
        if "/doc/" in name:
            continue
        data = bytes(obstore.get(raw, name).bytes())
        for _ in range(12):
            place = chance.randrange(len(data))
            flipped = bytearray(data)
            flipped[place] ^= 1 << chance.randrange(8)
            obstore.put(raw, name, bytes(flipped))
            if not await unread_places(store, name, whole):
                with pytest.raises(FormatError) as caught:
                    await read(store)
                assert name in str(caught.value) or "/log/" in str(caught.value), caught.value
        obstore.put(raw, name, data)
    assert await read(store) == whole


async def unread_places(store: S3Store, name: str, whole: list[Record]) -> bool:
    """An epoch record's first place is kept, but its record is read from the segment."""
    return layout.first_of(name) == 1 and await read(store) == whole


async def test_a_cut_anywhere_is_detected_and_named(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    await write(store, fold=True)
    whole = await read(store)
    for name in names(raw):
        if "/doc/" in name or layout.first_of(name) == 1:
            continue
        data = bytes(obstore.get(raw, name).bytes())
        ends = [at + 1 for at in range(len(data)) if data[at : at + 1] == b"\n"][:-1]
        for end in {0, 1, len(data) // 2, len(data) - 1, *ends}:
            obstore.put(raw, name, data[:end])
            with pytest.raises(CorruptRecordError, match=name):
                await read(store)
        obstore.put(raw, name, data)
    assert await read(store) == whole


async def test_a_commit_that_is_missing_is_detected_and_named(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    await write(store, fold=False)
    whole = await read(store)
    for name in names(raw):
        first = layout.first_of(name)
        if first < 0:
            continue
        data = bytes(obstore.get(raw, name).bytes())
        obstore.delete(raw, name)
        if first == 24:  # the newest: what is left is a whole log, to anybody who looks
            assert await read(store) == whole[:-2]
        else:
            with pytest.raises(CorruptRecordError, match="log/"):
                await read(store)
        obstore.put(raw, name, data)
    assert await read(store) == whole


async def test_exchanged_and_foreign_commits_are_detected(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    await write(store, fold=False)
    other = SessionKey("other")
    grant = await take_after(store, other, after=0)
    entry = Entry(MESSAGE, b'{"text":"0"}', end=False), Entry(MESSAGE, b'{"text":"more"}')
    await store.append_many([Batch(other, grant.epoch, 2, entry)])
    name = layout.log_name(FOLDER, 1, 2)
    foreign = layout.log_name(layout.folder_of(other), 1, 2)
    obstore.put(raw, name, bytes(obstore.get(raw, foreign).bytes()))
    with pytest.raises(CorruptRecordError, match=name):
        await read(store)


async def test_a_lost_segment_and_a_lost_document_are_named(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    grant = await write(store, fold=True)
    (document,) = [name for name in names(raw) if "/doc/" in name]
    obstore.delete(raw, document)
    assert (await store.read_documents(KEY)).damaged == ("session.json",)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 23, documents))
    assert (await store.read_documents(KEY)).damaged == ()
    (segment,) = [name for name in names(raw) if "/seg/" in name]
    obstore.delete(raw, segment)
    with pytest.raises(CorruptRecordError, match=segment):
        await read(store)


async def test_a_newest_commit_that_is_gone_is_missed_by_what_was_made_of_it(
    open_store: OpenS3, raw: Any
) -> None:
    store = await open_store()
    grant = await write(store, fold=True)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 25, documents))
    obstore.delete(raw, layout.log_name(FOLDER, 1, 24))
    for look in (lambda: store.head(KEY), lambda: take_after(store, KEY, after=1)):
        with pytest.raises(CorruptRecordError, match="0000024"):
            await look()


async def test_a_damaged_head_is_never_an_empty_session(open_store: OpenS3, raw: Any) -> None:
    store = await open_store()
    await write(store, fold=True)
    data = bytes(obstore.get(raw, HEAD).bytes())
    obstore.put(raw, HEAD, data[:-20])
    for look in (
        lambda: store.head(KEY),
        lambda: store.holder(KEY),
        lambda: store.read_documents(KEY),
        lambda: take_after(store, KEY, after=1),
        lambda: read(store),
    ):
        with pytest.raises(CorruptRecordError, match=HEAD):
            await look()


async def test_a_damaged_head_hides_no_other_session(open_store: OpenS3, raw: Any) -> None:
    """What is listed, and made anew, is every session; what is damaged is so by itself."""
    store = await open_store()
    await write(store, fold=True)
    other = await take(store, SessionKey("other"))
    gone = await take(store, SessionKey("gone"))
    await store.delete(gone.key, gone.epoch)
    obstore.put(raw, HEAD, bytes(obstore.get(raw, HEAD).bytes())[:-20])
    found = await store.sessions()
    assert [(one.key, one.epoch) for one in found] == [(KEY, 0), (other.key, other.epoch)]
    assert [one.key for one in await store.sessions(SessionQuery(limit=1))] == [KEY]
    assert await store.sessions(SessionQuery(owner="somebody")) == []
    assert await store.rebuild_directory() == 1
    assert await store.sessions() == found
    await store.scrub()
    assert await store.head(other.key) == other.head


async def test_a_head_that_is_gone_is_not_an_empty_session_to_its_next_holder(
    open_store: OpenS3, raw: Any
) -> None:
    store = await open_store()
    await write(store, fold=False)
    obstore.delete(raw, HEAD)
    with pytest.raises(PerdureError):
        await take_after(store, KEY, after=0)  # its log is there: it is at epoch 1
    assert (await take_after(store, KEY, after=1)).head == 26
    assert len(await read(store)) == 26


async def test_newer_formats_are_refused_and_left(open_store: OpenS3, raw: Any) -> None:
    from perdure.records.records import open_sealed, seal

    store = await open_store()
    await write(store, fold=False)
    name = layout.log_name(FOLDER, 1, 2)
    for place, old, new in (
        (name, b'"perdure":1', b'"perdure":2'),
        (HEAD, b'{"format":1,', b'{"format":2,'),
    ):
        data = bytes(obstore.get(raw, place).bytes())
        end = data.index(b"\n") + 1
        body = open_sealed(data[:end])
        assert body is not None
        if place == HEAD:
            body = body.replace(b'{"key"', b'{"format":2,"key"')
        newer = seal(body.replace(old, new)) + data[end:]
        obstore.put(raw, place, newer)
        with pytest.raises(UnsupportedVersionError, match="newer release"):
            await read(store)
        assert bytes(obstore.get(raw, place).bytes()) == newer
        obstore.put(raw, place, data)


async def test_a_deleted_session_leaves_nothing_of_what_it_said(
    open_store: OpenS3, raw: Any
) -> None:
    store = await open_store()
    grant = await write(store, fold=True)
    await store.enqueue(KEY, [PendingItem("op", MESSAGE, b'"posted"', 0.0)])
    await store.delete(KEY, grant.epoch)
    everything = [one["path"] for one in obstore.list(raw).collect()]
    for name in everything:
        data = bytes(obstore.get(raw, name).bytes())
        assert b"text" not in data, name
        assert b"posted" not in data, name
    places = [name for name in everything if "/log/" in name]
    assert places
    for name in places:
        assert bytes(obstore.get(raw, name).bytes()) == layout.GONE


async def test_a_scrub_ends_what_a_killed_delete_began(open_store: OpenS3, raw: Any) -> None:
    from perdure.stores.objects import documents

    store = await open_store()
    await write(store, fold=True)
    before = names(raw)
    head = layout.decode(HEAD, bytes(obstore.get(raw, HEAD).bytes()), KEY)
    obstore.put(raw, HEAD, layout.with_checksum(documents.deleted_head(head)))  # and no further
    assert await read(store) == []
    assert names(raw) == before
    await store.scrub()
    left = [name for name in names(raw) if name != HEAD]
    assert {bytes(obstore.get(raw, name).bytes()) for name in left} == {layout.GONE}


@pytest.mark.parametrize("keep_posts", [True, False])
@pytest.mark.parametrize("ended_by", ["a scrub", "the next life"])
async def test_a_killed_delete_takes_its_own_posts_and_no_others(
    open_store: OpenS3, raw: Any, ended_by: str, keep_posts: bool
) -> None:
    item = PendingItem("first", MESSAGE, b'{"text":"a"}', 1000.0)
    later = PendingItem("later", MESSAGE, b'{"text":"b"}', 1000.0)
    store, whole = await open_store(), await open_store()
    grant = await write(store, fold=True)
    await store.enqueue(KEY, [item])
    before = {one["path"]: bytes(obstore.get(raw, one["path"]).bytes()) for one in everything(raw)}
    await store.delete(KEY, grant.epoch, keep_posts=keep_posts)
    for name in before.keys() - {HEAD}:  # as if it had been killed behind the head
        obstore.put(raw, name, before[name])
    await whole.enqueue(KEY, [later])
    if ended_by == "a scrub":
        await whole.scrub()
    new = await take(whole)
    wanted = [item, later] if keep_posts else [later]
    assert await whole.receive(KEY, new.epoch) == wanted


def everything(raw: Any) -> list[Any]:
    return [one for one in obstore.list(raw).collect() if not one["path"].startswith("owners/")]


async def test_a_scrub_removes_what_killed_folds_left_of_epochs_that_are_over(
    open_store: OpenS3, raw: Any
) -> None:
    store = await open_store()
    await write(store, fold=True)
    whole = await read(store)
    old, new = f"{FOLDER}/seg/0000000001-0-left", f"{FOLDER}/doc/0000000002-coming"
    for name in (old, new):
        obstore.put(raw, name, b"x")
    await take_after(store, KEY, after=1)
    await store.scrub()
    assert old not in names(raw)
    assert new in names(raw)  # the holder may be about to name it
    assert (await read(store))[:-1] == whole
    assert (await store.read_documents(KEY)).damaged == ()


@pytest.mark.parametrize("act", ["delete", "forget"])
async def test_a_session_is_deleted_whatever_is_damaged_before_the_end_of_its_log(
    open_store: OpenS3, raw: Any, act: str
) -> None:
    quiet = Shutdown(signals=False)
    async with connect(await open_store(), shutdown=quiet) as sessions:
        async with sessions.open("agent") as session:
            for text in ("one", "two"):
                session.append(Message.user(text))
                await session.save()
            objects = [name for name in names(raw) if "/log/" in name][:-1]
    assert objects
    for name in objects:
        data = bytes(obstore.get(raw, name).bytes())
        obstore.put(raw, name, data[: len(data) // 2])
    async with connect(await open_store(), shutdown=quiet) as sessions:
        assert await getattr(sessions, act)("agent")
        assert await sessions.list() == []
