"""Logs that begin anywhere, and drafts: sessions that nobody reads until they are published."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pytest

from perdure.errors import LeaseHeldError, LeaseLostError
from perdure.records.keys import SessionKey
from perdure.records.posts import DeadLetter, PendingItem
from perdure.records.records import BASE, EPOCH, MESSAGE, Entry
from perdure.store import (
    Batch,
    Documents,
    Draft,
    DraftInfo,
    Origin,
    SessionQuery,
    Status,
    Store,
    SupportsRestore,
    Taken,
    Terms,
    capability,
    take_after,
)
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    Suite,
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)

FIRST = 501
SOURCE = SessionKey("source", "of it", "elsewhere")
DRAFT = Draft(source=SOURCE, generation=3, up_to=640, purpose="fork")


async def begin(
    store: Store,
    key: SessionKey = KEY,
    *,
    first: int = FIRST,
    base: Origin | None = None,
    draft: Draft | None = DRAFT,
) -> Taken:
    """Acquire a session whose log begins here."""
    holder = await store.holder(key)
    after = 0 if holder is None else holder.epoch
    return await take_after(store, key, after=after, first=first, base=base, draft=draft)


class BeginningConformance(Suite):
    """A new log begins where it is told to, and is a log like any other from there on."""

    async def test_a_log_begins_anywhere(self, store: Store, other: Store) -> None:
        grant = await begin(store, draft=None)
        assert (grant.epoch, grant.head, grant.created) == (1, FIRST, True)
        assert grant.record == (await read(other))[0].payload
        head = await append_ok(store, grant, FIRST + 1, *group("a", "b"))
        await append_ok(store, grant, head + 1, *group("c"))
        for witness in (store, other):
            records = await read(witness)
            assert [record.seq for record in records] == [501, 502, 503, 504]
            assert records[0].kind == EPOCH
            assert tuple(entries(records)) == group("a", "b") + group("c")
            assert await read(witness, reverse=True) == records[::-1]
            assert await read(witness, after=502, before=504) == records[2:3]
            assert await read(witness, after=7, limit=2) == records[:2]
            assert await read(witness, after=7, limit=2, reverse=True) == records[:1:-1]
            assert await read(witness, before=501) == []
            assert await witness.head(KEY) == 504
            (info,) = await witness.sessions()
            assert (info.key, info.epoch) == (KEY, 1)
            assert await witness.tenants() == [""]

    async def test_a_batch_goes_nowhere_else(self, store: Store) -> None:
        grant = await begin(store, draft=None)
        for first in (1, 2, 500, 501, 503):
            outcome = await append(store, grant, first, *group("elsewhere"))
            assert outcome.status is Status.PERMANENT, first
        await append_ok(store, grant, 502, *group("a"))
        await append_ok(store, grant, 502, *group("a"))  # sent again
        assert [record.seq for record in await read(store)] == [501, 502]

    async def test_it_is_folded_reopened_and_taken_over(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        grant = await begin(store, draft=None)
        head = await append_ok(store, grant, FIRST + 1, *group("a", "b"))
        documents = {"session.json": b"{}"}
        await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
        await store.aclose()
        again = await open_store("again")
        got = await again.read_documents(KEY)
        assert got.found["session.json"].as_of_seq == head
        (info,) = await again.sessions()
        assert (info.key, info.head) == (KEY, head)
        second = await take(again)
        assert (second.epoch, second.head, second.created) == (2, head + 1, False)
        head = await append_ok(again, second, second.head + 1, *group("c"))
        third = await take(other)
        assert (third.epoch, third.head, third.created) == (3, head + 1, False)
        assert (await append(again, second, head + 1, *group("late"))).status is Status.CONFLICT
        head = await append_ok(other, third, third.head + 1, *group("d"))
        await other.write_documents(KEY, documents, manifest_of(third, head, documents))
        records = await read(other)
        assert [record.seq for record in records] == list(range(FIRST, head + 1))
        assert tuple(entries(records)) == group("a", "b") + group("c") + group("d")
        assert await read(await open_store("reader"), reverse=True) == records[::-1]

    async def test_where_to_begin_is_of_a_new_log(self, store: Store, other: Store) -> None:
        await begin(store, draft=None)
        grant = await take_after(other, KEY, after=1, first=9, base=Origin(cut=8))
        assert (grant.head, grant.created) == (FIRST + 1, False)
        assert b"base" not in (await read(other))[-1].payload

    async def test_what_was_before_stands_in_its_epoch_record(self, store: Store) -> None:
        base = Origin(cut=500, folded="ab" * 32)
        await begin(store, base=base, draft=None)
        await begin(store, SessionKey("plain"), draft=None)
        (record,) = await read(store)
        assert msgspec.json.decode(record.payload, type=_Begun).base == base
        (record,) = await read(store, SessionKey("plain"))
        assert b"base" not in record.payload

    async def test_it_is_trimmed_and_goes_on(self, store: Store, other: Store) -> None:
        grant = await begin(store, draft=None)
        await append_ok(store, grant, 502, *group("a"))
        grant = await take(store)
        await append_ok(store, grant, 504, Entry(BASE, b"{}", end=True))
        await append_ok(store, grant, 505, *group("b"))
        before = await read(store)
        for below in (1, 501, 502, 504, 505):
            assert await store.trim(KEY, 2, below) >= 0
            remaining = await read(other)
            assert remaining == before[-len(remaining) :]
            assert remaining[0].seq <= max(below, FIRST)
            assert await other.head(KEY) == 505
        grant = await take(other)
        assert (grant.head, grant.created) == (506, False)
        await append_ok(other, grant, 507, *group("c"))
        assert tuple(entries(await read(store)))[-1:] == group("c")

    @pytest.mark.parametrize("first", [1, 2, 7000])
    async def test_it_is_deleted_and_begins_anew(
        self, store: Store, other: Store, first: int
    ) -> None:
        grant = await begin(store, draft=None)
        await append_ok(store, grant, 502, *group("first life"))
        await store.delete(KEY, grant.epoch)
        for witness in (store, other):
            assert await witness.head(KEY) == 0
            assert await read(witness) == []
            assert await witness.sessions() == []
        new = await begin(other, first=first, draft=None)
        assert new.epoch > grant.epoch
        assert (new.head, new.created) == (first, True)
        head = await append_ok(other, new, first + 1, *group("second life"))
        assert (await append(store, grant, 503, *group("late"))).status is Status.CONFLICT
        records = await read(store)
        assert [record.seq for record in records] == [first, head]
        assert tuple(entries(records)) == group("second life")
        assert (await take(store)).head == head + 1


class DraftConformance(Suite):
    """A draft is to every reader what a deleted session is, until it is published at once."""

    async def test_nobody_reads_a_draft(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        grant = await _drafted(store)
        late = await open_store("late")
        for witness in (store, other, late):
            await _is_hidden(witness, grant)
        await store.publish(KEY, grant.epoch)
        for witness in (store, other, late):
            await _is_whole(witness, grant)

    async def test_the_holder_goes_on_after_publishing(self, store: Store, other: Store) -> None:
        grant = await _drafted(store)
        await store.publish(KEY, grant.epoch)
        await append_ok(store, grant, 504, *group("c"))
        assert [record.seq for record in await read(other)] == [501, 502, 503, 504]
        await store.release(KEY, grant.epoch)
        new = await take(other)
        assert (new.epoch, new.head, new.created) == (grant.epoch + 1, 505, False)
        holder = await store.holder(KEY)
        assert holder is not None
        assert (holder.deleted, holder.draft) == (False, DRAFT)  # until it is deleted
        await other.delete(KEY, new.epoch)
        holder = await store.holder(KEY)
        assert holder is not None
        assert (holder.deleted, holder.draft) == (True, None)
        assert await store.drafts("") == []

    async def test_publishing_again_changes_nothing(self, store: Store, other: Store) -> None:
        """The answer may have been lost."""
        grant = await _drafted(store)
        for _ in range(2):
            await store.publish(KEY, grant.epoch)
            await _is_whole(other, grant)
        await store.publish(KEY, grant.epoch)
        plain = await take(store, SessionKey("plain"))
        await store.publish(plain.key, plain.epoch)
        assert await store.head(plain.key) == plain.head

    async def test_an_overtaken_holder_publishes_nothing(self, store: Store, other: Store) -> None:
        old = await _drafted(store)
        new = await take(other)
        with pytest.raises(LeaseLostError):
            await store.publish(KEY, old.epoch)
        assert (new.epoch, new.head, new.created) == (old.epoch + 1, 1, True)
        await append_ok(other, new, 2, *group("own"))
        for witness in (store, other):
            assert tuple(entries(await read(witness))) == group("own")
            assert await witness.read_documents(KEY) == Documents()
            holder = await witness.holder(KEY)
            assert holder is not None
            assert (holder.epoch, holder.deleted, holder.draft) == (new.epoch, False, None)
        with pytest.raises(LeaseLostError):
            await store.publish(KEY, new.epoch + 1)
        with pytest.raises(LeaseLostError):
            await store.publish(SessionKey("never was"), 1)

    async def test_an_overtaken_holder_writes_nothing(self, store: Store, other: Store) -> None:
        old = await _drafted(store)
        new = await begin(other, first=7)
        assert (await append(store, old, 504, *group("late"))).status is Status.CONFLICT
        with pytest.raises(LeaseLostError):
            await store.write_documents(KEY, {}, manifest_of(old, 503, {}))
        await append_ok(other, new, 8, *group("own"))
        await _is_hidden(store, new)
        await other.publish(KEY, new.epoch)
        assert [record.seq for record in await read(store)] == [7, 8]
        assert await store.read_documents(KEY) == Documents()

    async def test_a_published_session_was_taken_over_as_one(
        self, store: Store, other: Store
    ) -> None:
        """Published, and its answer lost: the next holder continues it."""
        grant = await _drafted(store)
        await store.publish(KEY, grant.epoch)
        new = await take(other)
        assert (new.head, new.created) == (504, False)
        with pytest.raises(LeaseLostError):
            await store.publish(KEY, grant.epoch)
        assert tuple(entries(await read(store))) == group("a", "b")

    async def test_a_draft_takes_the_place_of_no_session(self, store: Store, other: Store) -> None:
        grant = await take(store)
        await append_ok(store, grant, 2, *group("kept"))
        await store.release(KEY, grant.epoch)
        for witness in (store, other):
            with pytest.raises(LeaseHeldError):
                await take_after(witness, KEY, after=grant.epoch, draft=DRAFT)
        assert tuple(entries(await read(other))) == group("kept")
        assert await store.drafts("") == []

    @pytest.mark.parametrize("rounds", [6])
    async def test_either_it_is_published_or_taken_over(
        self, store: Store, other: Store, rounds: int
    ) -> None:
        for round_ in range(rounds):
            key = SessionKey("agent", str(round_))
            grant = await begin(store, key)
            await append_ok(store, grant, 502, *group("copied"))
            told: list[bool] = []
            taken: list[Taken] = []

            async def publish(grant: Taken, told: list[bool]) -> None:
                try:
                    await store.publish(grant.key, grant.epoch)
                except LeaseLostError:
                    told.append(False)
                else:
                    told.append(True)

            async def take_over(key: SessionKey, taken: list[Taken]) -> None:
                taken.append(await take_after(other, key, after=1))

            async with anyio.create_task_group() as tasks:
                if round_ % 2:
                    tasks.start_soon(publish, grant, told)
                tasks.start_soon(take_over, key, taken)
                if not round_ % 2:
                    tasks.start_soon(publish, grant, told)
            (new,) = taken
            if told == [True]:  # else it may be published all the same, and whole
                assert not new.created
            seqs = [record.seq for record in await read(store, key)]
            assert seqs == ([1] if new.created else [501, 502, 503])
            assert new.head == seqs[-1]

    async def test_a_lost_acquire_is_begun_again(self, store: Store) -> None:
        """Its answer did not come: the epoch that it was given belongs to nobody."""
        await begin(store)
        with pytest.raises(LeaseHeldError):
            await take_after(store, KEY, after=0, first=FIRST, draft=DRAFT)
        again = await begin(store)
        assert (again.epoch, again.head, again.created) == (2, FIRST, True)
        await append_ok(store, again, 502, *group("a"))
        assert [info.epoch for info in await store.drafts("")] == [2]
        await store.publish(KEY, again.epoch)
        assert [record.seq for record in await read(store)] == [501, 502]

    async def test_the_holder_of_a_draft_is_waited_for(self, store: Store, other: Store) -> None:
        grant = await _drafted(store)
        holder = await other.holder(KEY)
        assert holder is not None
        assert not Terms(me=other.owner).allows(holder)
        await store.heartbeat()
        await store.release(KEY, grant.epoch)
        holder = await other.holder(KEY)
        assert holder is not None
        assert Terms(me=other.owner).allows(holder)
        assert (holder.deleted, holder.draft) == (True, DRAFT)

    async def test_what_the_dead_leave_is_removed(
        self, store: Store, open_store: OpenStore
    ) -> None:
        await _drafted(store)
        await store.aclose()
        other = await open_store("other")
        await _is_hidden(other, Taken(KEY, 1, 501, created=True))
        for epoch, draft, first in ((2, DRAFT, 501), (3, None, 1)):
            grant = await begin(other, first=first, draft=draft)
            assert (grant.epoch, grant.head, grant.created) == (epoch, first, True)
            documents = await other.read_documents(KEY)
            assert (documents.found, documents.manifest) == ({}, None)
        grant = Taken(KEY, 3, 1, created=True)
        assert len(await read(other)) == 1
        assert await other.drafts("") == []
        assert (await append_ok(other, grant, 2, *group("own"))) == 2

    async def test_drafts_are_listed_by_tenant(self, store: Store, other: Store) -> None:
        drafts = {name: msgspec.structs.replace(DRAFT, purpose=name) for name in ("fork", "rename")}
        for name, draft in drafts.items():
            await begin(store, SessionKey("CON", name, "Tenant .."), draft=draft)
        await take(other, SessionKey("plain", tenant="Tenant .."))
        await begin(other, first=1)
        got = await other.drafts("Tenant ..")
        assert got == [
            DraftInfo(SessionKey("CON", name, "Tenant .."), 1, draft, got[0].owner)
            for name, draft in drafts.items()
        ]
        ((holder, mine),) = [
            (await other.holder(info.key), info) for info in await store.drafts("")
        ]
        assert holder is not None
        assert (mine.key, mine.owner, mine.draft) == (KEY, holder.owner, DRAFT)
        assert await store.drafts("nobody's") == []
        assert [
            info.key.agent for info in await other.sessions(SessionQuery(tenant="Tenant .."))
        ] == ["plain"]
        assert await other.tenants() == ["Tenant .."]

    async def test_a_deleted_draft_is_gone(self, store: Store, other: Store) -> None:
        grant = await _drafted(store)
        await store.delete(KEY, grant.epoch)
        holder = await other.holder(KEY)
        assert holder is not None
        assert (holder.deleted, holder.draft) == (True, None)
        assert await other.drafts("") == []
        with pytest.raises(LeaseLostError):
            await store.publish(KEY, grant.epoch)
        new = await take(other)
        assert (new.head, new.created) == (1, True)
        assert len(await read(store)) == 1

    async def test_a_copy_is_deleted_and_another_one_begins(self, store: Store) -> None:
        grant = await _drafted(store)
        await store.publish(KEY, grant.epoch)
        await store.delete(KEY, grant.epoch)
        new = await begin(store, first=3)
        assert (new.head, new.created) == (3, True)
        assert await store.head(KEY) == 0
        await store.publish(KEY, new.epoch)
        assert [record.seq for record in await read(store)] == [3]


class DraftInboxConformance(Suite):
    """Posts are to an id, whatever is there; dead letters are a session's own."""

    async def test_posts_wait_while_there_is_a_draft(self, store: Store, other: Store) -> None:
        await other.enqueue(KEY, [_item("before")])
        grant = await _drafted(store)
        await other.enqueue(KEY, [_item("during")])
        await store.publish(KEY, grant.epoch)
        assert _ids(await store.receive(KEY, grant.epoch)) == ["before", "during"]
        await store.ack(KEY, grant.epoch, ["before"])
        assert _ids(await other.receive(KEY, grant.epoch)) == ["during"]

    @pytest.mark.parametrize("how", ["taken over", "deleted", "deleted, keeping posts"])
    async def test_posts_outlive_a_draft(self, store: Store, other: Store, how: str) -> None:
        await other.enqueue(KEY, [_item("before")])
        grant = await _drafted(store)
        await other.enqueue(KEY, [_item("during")])
        if how != "taken over":
            await store.delete(KEY, grant.epoch, keep_posts=how != "deleted")
            await store.scrub()
        new = await take(other)
        assert _ids(await other.receive(KEY, new.epoch)) == ["before", "during"]
        await other.delete(KEY, new.epoch)
        assert await other.sessions_with_pending_items() == []

    @pytest.mark.parametrize("how", ["published", "taken over", "deleted"])
    async def test_dead_letters_are_the_draft_s(self, store: Store, other: Store, how: str) -> None:
        grant = await _drafted(store)
        letter = DeadLetter(_item("dead"), "why", 3, 1000.5)
        await store.ack(KEY, grant.epoch, dead=[letter])
        if how == "published":
            await store.publish(KEY, grant.epoch)
            assert await other.dead_letters(KEY) == [letter]
            return
        if how == "deleted":
            await store.delete(KEY, grant.epoch)
        await take(other)
        assert await other.dead_letters(KEY) == []
        assert await other.sessions_with_pending_items(dead_letters=True) == []


class _Begun(msgspec.Struct):
    base: Origin | None = None


def _item(op_id: str) -> PendingItem:
    return PendingItem(op_id, MESSAGE, b'{"text":"hello"}', 1000.0)


def _ids(items: Sequence[PendingItem]) -> list[str]:
    return [item.op_id for item in items]


async def _drafted(store: Store) -> Taken:
    """Write a draft with two records and a document."""
    grant = await begin(store)
    (outcome,) = await store.append_many([Batch(KEY, grant.epoch, 502, group("a", "b"))])
    assert outcome.status is Status.OK
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 503, documents))
    return grant


async def _is_hidden(witness: Store, grant: Taken) -> None:
    holder = await witness.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.deleted, holder.draft) == (grant.epoch, True, DRAFT)
    assert await witness.head(KEY) == 0
    assert await read(witness) == []
    assert await read(witness, reverse=True, limit=1) == []
    assert await witness.read_documents(KEY) == Documents()
    if (restoring := capability(witness, SupportsRestore)) is not None:
        data = await restoring.read_for_restore(KEY)
        assert (data.documents, data.records or ()) == (Documents(), ())
    assert await witness.sessions() == []
    assert await witness.tenants() == []
    assert [(info.key, info.epoch) for info in await witness.drafts("")] == [(KEY, grant.epoch)]


async def _is_whole(witness: Store, grant: Taken) -> None:
    holder = await witness.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.deleted, holder.draft) == (grant.epoch, False, DRAFT)
    assert await witness.head(KEY) == 503
    assert [record.seq for record in await read(witness)] == [501, 502, 503]
    assert (await witness.read_documents(KEY)).found["session.json"].as_of_seq == 503
    assert [info.key for info in await witness.sessions()] == [KEY]
    assert await witness.tenants() == [""]
    assert await witness.drafts("") == []
