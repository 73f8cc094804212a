"""Drafts in encrypted stores: the chain and the manifest's proof hold for a log that begins at 501."""

from __future__ import annotations

import msgspec
import pytest

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry
from perdure.store import Batch, Draft, Status, Store, Taken, take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.wrapped import EncryptedStore
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

MASTER = "ab" * 32
DRAFT = Draft(source=SessionKey("source"), generation=1, up_to=640, purpose="fork")


@pytest.fixture
def backing() -> MemoryBacking:
    return MemoryBacking()


async def opened(backing: MemoryBacking, owner: str) -> Store:
    store = EncryptedStore(MemoryStore(owner=owner, backing=backing), MASTER)
    await store.open()
    return store


async def copied(store: Store, records: int = 3, *, as_of: int = 0) -> Taken:
    """Write a copy of one record a batch, and its documents as of one of them."""
    grant = await take_after(store, KEY, after=0, first=501, draft=DRAFT)
    for seq in range(502, 502 + records):
        await append_ok(store, grant, seq, *group(str(seq)))
    documents = {"session.json": b"{}"}
    manifest = manifest_of(grant, as_of or 501 + records, documents)
    await store.write_documents(KEY, documents, manifest)
    await store.publish(KEY, grant.epoch)
    return grant


async def test_a_copy_is_read_folded_and_continued_by_others(backing: MemoryBacking) -> None:
    store = await opened(backing, "one")
    await copied(store)
    other = await opened(backing, "other")
    assert [record.seq for record in await read(other)] == [501, 502, 503, 504]
    assert [record.seq for record in await read(other, reverse=True)] == [504, 503, 502, 501]
    grant = await take(other)
    head = await append_ok(other, grant, grant.head + 1, *group("own"))
    documents = {"session.json": b"[]"}
    await other.write_documents(KEY, documents, manifest_of(grant, head, documents))
    third = await opened(backing, "third")
    assert tuple(entries(await read(third)))[-1:] == group("own")
    assert (await third.read_documents(KEY)).found["session.json"].data == b"[]"


@pytest.mark.parametrize("as_of", [501, 503, 600])
async def test_documents_may_be_as_of_any_batch_of_a_copy(
    backing: MemoryBacking, as_of: int
) -> None:
    """They are proven by the link there, which nobody can read from the log of a draft."""
    await copied(await opened(backing, "one"), 200, as_of=as_of)
    other = await opened(backing, "other")
    documents = await other.read_documents(KEY)
    assert documents.found["session.json"].as_of_seq == as_of
    assert [record.seq for record in await read(other, after=as_of)] == [*range(as_of + 1, 702)]


@pytest.mark.parametrize("lost", [0, 1, 2], ids=["the first", "one amid", "the last"])
async def test_a_record_that_is_missing_is_noticed(backing: MemoryBacking, lost: int) -> None:
    await copied(await opened(backing, "one"))
    session = backing.sessions[KEY]
    if lost == 0:
        session.first, session.entries = 502, session.entries[1:]
    elif lost == 1:
        session.entries[2] = session.entries[1]
    else:
        session.entries = session.entries[:-1]
    with pytest.raises(CorruptRecordError):
        await read(await opened(backing, "other"))


async def test_a_base_that_was_changed_is_noticed(backing: MemoryBacking) -> None:
    await copied(await opened(backing, "one"))
    session = backing.sessions[KEY]
    begun = msgspec.json.decode(session.entries[0].payload)
    changed = msgspec.json.encode({**begun, "base": {"cut": 7}})
    session.entries[0] = Entry(EPOCH, changed)
    with pytest.raises(CorruptRecordError):
        await read(await opened(backing, "other"))


async def test_a_lost_answer_of_an_append_to_a_draft_is_sent_again(backing: MemoryBacking) -> None:
    store = await opened(backing, "one")
    grant = await take_after(store, KEY, after=0, first=501, draft=DRAFT)
    for _ in range(2):
        for seq in (502, 503):
            batch = Batch(KEY, grant.epoch, seq, group(str(seq)))
            (outcome,) = await store.append_many([batch])
            assert outcome.status is Status.OK
    await store.publish(KEY, grant.epoch)
    assert [record.seq for record in await read(await opened(backing, "other"))] == [501, 502, 503]


async def test_a_batch_that_is_refused_leaves_no_link(backing: MemoryBacking) -> None:
    store = await opened(backing, "one")
    grant = await take(store)
    await append_ok(store, grant, 2, *group("kept"))
    assert (await append(store, grant, 2, *group("other"))).status is Status.PERMANENT
    await append_ok(store, grant, 3, *group("further"))
    assert tuple(entries(await read(store))) == group("kept") + group("further")


async def test_a_batch_that_is_refused_leaves_the_links_before_it(backing: MemoryBacking) -> None:
    """Of a draft, whose log cannot be read, they are nowhere else."""
    store = await opened(backing, "one")
    grant = await take_after(store, KEY, after=0, first=501, draft=DRAFT)
    for seq in (502, 503):
        await append_ok(store, grant, seq, *group(str(seq)))
    assert (await append(store, grant, 503, *group("other"))).status is Status.PERMANENT
    for seq in (503, 504):
        await append_ok(store, grant, seq, *group(str(seq)))
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 504, documents))
    await store.publish(KEY, grant.epoch)
    whole = group("502") + group("503") + group("504")
    assert tuple(entries(await read(await opened(backing, "other")))) == whole
