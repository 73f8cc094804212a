"""Logs that begin anywhere, and drafts: sessions that no one reads until they are published."""
# ruff: noqa: D102

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest

from perdure.errors import LeaseHeldError, LeaseLostError
from perdure.records.keys import SessionKey
from perdure.records.records import BASE, EPOCH, Entry
from perdure.store import (
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
    SESSION,
    OpenStore,
    SessionWriter,
    Suite,
    append_ok,
    appended,
    entries,
    folded,
    group,
    held,
    hold,
    lost,
    read,
    seqs,
    take,
    together,
)
from perdure.testing.conformance.inbox import letter, posted, received, reject, waiting

FIRST = 501
SOURCE = SessionKey("source", "of it", "elsewhere")
DRAFT = Draft(source=SOURCE, generation=3, up_to=640, purpose="fork")


async def begin(
    store: Store,
    *texts: str,
    key: SessionKey = KEY,
    first: int = FIRST,
    base: Origin | None = None,
    draft: Draft | None = DRAFT,
) -> SessionWriter:
    """Acquire a session whose log begins here, and append a group, if there is any."""
    holder = await store.holder(key)
    after = 0 if holder is None else holder.epoch
    grant = await take_after(store, key, after=after, first=first, base=base, draft=draft)
    assert (grant.head, grant.created) == (first, True)
    writer = SessionWriter(store, grant)
    if texts:
        await writer.add(*texts)
    return writer


class BeginningConformance(Suite):
    """A new log begins where its beginning says, and is a log like any other from there on."""

    async def test_a_log_begins_anywhere(self, store: Store, other: Store) -> None:
        writer = await begin(store, draft=None)
        assert writer.epoch == 1
        assert writer.grant.record == (await read(other))[0].payload
        await writer.add("a", "b")
        await writer.add("c")
        for witness in (store, other):
            records = await read(witness)
            assert [record.seq for record in records] == [501, 502, 503, 504]
            assert records[0].kind == EPOCH
            assert entries(records) == [*group("a", "b"), *group("c")]
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
        writer = await begin(store, draft=None)
        for first in (1, 2, 500, 501, 503):
            assert await writer.send(first, "elsewhere") is Status.PERMANENT, first
        for _ in range(2):  # sent again
            assert await writer.send(502, "a") is Status.OK
        assert await seqs(store) == [501, 502]

    async def test_it_is_folded_reopened_and_taken_over(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        writer = await begin(store, "a", "b", draft=None)
        await writer.fold(SESSION)
        await store.aclose()
        again = await open_store("again")
        assert (await folded(again))["session.json"].as_of_seq == writer.head
        (info,) = await again.sessions()
        assert (info.key, info.head) == (KEY, writer.head)
        second = await hold(again)
        assert (second.epoch, second.head, second.grant.created) == (2, writer.head + 1, False)
        await second.add("c")
        third = await hold(other)
        assert (third.epoch, third.head, third.grant.created) == (3, second.head + 1, False)
        assert await second.send(second.head + 1, "late") is Status.CONFLICT
        await third.add("d")
        await third.fold(SESSION)
        records = await read(other)
        assert [record.seq for record in records] == list(range(FIRST, third.head + 1))
        assert entries(records) == [*group("a", "b"), *group("c"), *group("d")]
        assert await read(await open_store("reader"), reverse=True) == records[::-1]

    async def test_where_to_begin_is_of_a_new_log(self, store: Store, other: Store) -> None:
        await begin(store, draft=None)
        grant = await take_after(other, KEY, after=1, first=9, base=Origin(cut=8))
        assert (grant.head, grant.created) == (FIRST + 1, False)
        assert b"base" not in (await read(other))[-1].payload

    async def test_what_was_before_stands_in_its_epoch_record(self, store: Store) -> None:
        base = Origin(cut=500, folded="ab" * 32)
        await begin(store, base=base, draft=None)
        await begin(store, key=SessionKey("plain"), draft=None)
        (record,) = await read(store)
        assert msgspec.json.decode(record.payload, type=_Begun).base == base
        (record,) = await read(store, SessionKey("plain"))
        assert b"base" not in record.payload

    async def test_it_is_trimmed_and_goes_on(self, store: Store, other: Store) -> None:
        await begin(store, "a", draft=None)
        writer = await hold(store)
        await writer.put(Entry(BASE, b"{}", end=True))
        await writer.add("b")
        before = await read(store)
        for below in (1, 501, 502, 504, 505):
            assert await store.trim(KEY, 2, below) >= 0
            remaining = await read(other)
            assert remaining == before[-len(remaining) :]
            assert remaining[0].seq <= max(below, FIRST)
            assert await other.head(KEY) == 505
        writer = await hold(other)
        assert (writer.head, writer.grant.created) == (506, False)
        await writer.add("c")
        assert (await appended(store))[-1:] == group("c")

    @pytest.mark.parametrize("first", [1, 2, 7000])
    async def test_it_is_deleted_and_begins_anew(
        self, store: Store, other: Store, first: int
    ) -> None:
        old = await begin(store, "first life", draft=None)
        await old.delete()
        for witness in (store, other):
            assert await witness.head(KEY) == 0
            assert await read(witness) == []
            assert await witness.sessions() == []
        new = await begin(other, "second life", first=first, draft=None)
        assert new.epoch > old.epoch
        assert await old.send(503, "late") is Status.CONFLICT
        assert await seqs(store) == [first, new.head]
        assert await appended(store) == group("second life")
        assert (await take(store)).head == new.head + 1


class DraftConformance(Suite):
    """A draft is to every reader what a deleted session is, until it is published at once."""

    async def test_nobody_reads_a_draft(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        grant = await _drafted(store)
        witnesses = (store, other, await open_store("late"))
        for witness in witnesses:
            await _is_hidden(witness, grant.epoch)
        await store.publish(KEY, grant.epoch)
        for witness in witnesses:
            await _is_whole(witness, grant.epoch)

    async def test_the_holder_goes_on_after_publishing(self, store: Store, other: Store) -> None:
        writer = await _drafted(store)
        await store.publish(KEY, writer.epoch)
        await writer.add("c")
        assert await seqs(other) == [501, 502, 503, 504]
        await writer.release()
        new = await hold(other)
        assert (new.epoch, new.head, new.grant.created) == (writer.epoch + 1, 505, False)
        await _is_held(store, new.epoch, deleted=False, draft=DRAFT)  # until it is deleted
        await new.delete()
        holder = await held(store)
        assert (holder.deleted, holder.draft) == (True, None)
        assert await store.drafts("") == []

    async def test_publishing_again_changes_nothing(self, store: Store, other: Store) -> None:
        """The answer may have been lost."""
        writer = await _drafted(store)
        for _ in range(3):
            await store.publish(KEY, writer.epoch)
            await _is_whole(other, writer.epoch)
        plain = await take(store, SessionKey("plain"))
        await store.publish(plain.key, plain.epoch)
        assert await store.head(plain.key) == plain.head

    async def test_an_overtaken_holder_publishes_nothing(self, store: Store, other: Store) -> None:
        old, new = await _drafted(store), await hold(other)
        await lost(store.publish(KEY, old.epoch))
        assert (new.epoch, new.head, new.grant.created) == (old.epoch + 1, 1, True)
        await new.add("own")
        for witness in (store, other):
            assert await appended(witness) == group("own")
            assert await witness.read_documents(KEY) == Documents()
            await _is_held(witness, new.epoch, deleted=False, draft=None)
        await lost(store.publish(KEY, new.epoch + 1))
        await lost(store.publish(SessionKey("never was"), 1))

    async def test_an_overtaken_holder_writes_nothing(self, store: Store, other: Store) -> None:
        old, new = await _drafted(store), await begin(other, first=7)
        assert await old.send(504, "late") is Status.CONFLICT
        await lost(old.fold({}))
        await new.add("own")
        await _is_hidden(store, new.epoch)
        await other.publish(KEY, new.epoch)
        assert await seqs(store) == [7, 8]
        assert await store.read_documents(KEY) == Documents()

    async def test_a_published_session_was_taken_over_as_one(
        self, store: Store, other: Store
    ) -> None:
        """Published, and its answer lost: the next holder continues it."""
        writer = await _drafted(store)
        await store.publish(KEY, writer.epoch)
        new = await take(other)
        assert (new.head, new.created) == (504, False)
        await lost(store.publish(KEY, writer.epoch))
        assert await appended(store) == group("a", "b")

    async def test_a_draft_takes_the_place_of_no_session(self, store: Store, other: Store) -> None:
        writer = await hold(store, "kept")
        await writer.release()
        for witness in (store, other):
            with pytest.raises(LeaseHeldError):
                await take_after(witness, KEY, after=writer.epoch, draft=DRAFT)
        assert await appended(other) == group("kept")
        assert await store.drafts("") == []

    @pytest.mark.parametrize("round_", range(6))
    async def test_either_it_is_published_or_taken_over(
        self, store: Store, other: Store, round_: int
    ) -> None:
        writer = await begin(store, "copied")
        published: list[bool] = []
        taken: list[Taken] = []

        async def publish() -> None:
            with suppress(LeaseLostError):
                await store.publish(KEY, writer.epoch)
                published.append(True)

        async def take_over() -> None:
            taken.append(await take_after(other, KEY, after=1))

        await together(*([publish, take_over] if round_ % 2 else [take_over, publish]))
        (new,) = taken
        if published:  # else it may be published all the same, and whole
            assert not new.created
        assert await seqs(store) == ([1] if new.created else [501, 502, 503])
        assert new.head == await store.head(KEY)

    async def test_a_lost_acquire_is_begun_again(self, store: Store) -> None:
        """Its answer did not come: the epoch that it was given belongs to no one."""
        await begin(store)
        with pytest.raises(LeaseHeldError):
            await take_after(store, KEY, after=0, first=FIRST, draft=DRAFT)
        again = await begin(store, "a")
        assert again.epoch == 2
        assert [info.epoch for info in await store.drafts("")] == [2]
        await store.publish(KEY, again.epoch)
        assert await seqs(store) == [501, 502]

    async def test_the_holder_of_a_draft_is_waited_for(self, store: Store, other: Store) -> None:
        writer = await _drafted(store)
        assert not Terms(me=other.owner).allows(await held(other))
        await store.heartbeat()
        await writer.release()
        assert Terms(me=other.owner).allows(await held(other))
        await _is_held(other, writer.epoch, deleted=True, draft=DRAFT)

    async def test_what_the_dead_leave_is_removed(
        self, store: Store, open_store: OpenStore
    ) -> None:
        await _drafted(store)
        await store.aclose()
        other = await open_store("other")
        await _is_hidden(other, 1)
        for epoch, draft, first in ((2, DRAFT, 501), (3, None, 1)):
            assert (await begin(other, first=first, draft=draft)).epoch == epoch
            assert (await other.read_documents(KEY)).manifest is None
            assert await folded(other) == {}
        assert await seqs(other) == [1]
        assert await other.drafts("") == []
        await append_ok(other, Taken(KEY, 3, 1, created=True), 2, *group("own"))

    async def test_drafts_are_listed_by_tenant(self, store: Store, other: Store) -> None:
        drafts = {name: msgspec.structs.replace(DRAFT, purpose=name) for name in ("fork", "rename")}
        for name, draft in drafts.items():
            await begin(store, key=SessionKey("CON", name, "Tenant .."), draft=draft)
        await take(other, SessionKey("plain", tenant="Tenant .."))
        await begin(other, first=1)
        got = await other.drafts("Tenant ..")
        assert got == [
            DraftInfo(SessionKey("CON", name, "Tenant .."), 1, draft, got[0].owner)
            for name, draft in drafts.items()
        ]
        (mine,) = await store.drafts("")
        assert (mine.key, mine.owner, mine.draft) == (KEY, (await held(other)).owner, DRAFT)
        assert await store.drafts("nobody's") == []
        infos = await other.sessions(SessionQuery(tenant="Tenant .."))
        assert [info.key.agent for info in infos] == ["plain"]
        assert await other.tenants() == ["Tenant .."]

    async def test_a_deleted_draft_is_gone(self, store: Store, other: Store) -> None:
        writer = await _drafted(store)
        await writer.delete()
        holder = await held(other)
        assert (holder.deleted, holder.draft) == (True, None)
        assert await other.drafts("") == []
        await lost(store.publish(KEY, writer.epoch))
        new = await take(other)
        assert (new.head, new.created) == (1, True)
        assert len(await read(store)) == 1

    async def test_a_copy_is_deleted_and_another_one_begins(self, store: Store) -> None:
        writer = await _drafted(store)
        await store.publish(KEY, writer.epoch)
        await writer.delete()
        new = await begin(store, first=3)
        assert await store.head(KEY) == 0
        await store.publish(KEY, new.epoch)
        assert await seqs(store) == [3]


class DraftInboxConformance(Suite):
    """Posts are to an id, with or without a session; dead letters are a session's own."""

    async def test_posts_wait_while_there_is_a_draft(self, store: Store, other: Store) -> None:
        await other.enqueue(KEY, posted("before"))
        writer = await _drafted(store)
        await other.enqueue(KEY, posted("during"))
        await store.publish(KEY, writer.epoch)
        assert await received(writer) == ["before", "during"]
        await store.ack(KEY, writer.epoch, ["before"])
        assert await waiting(other, writer.epoch) == ["during"]

    @pytest.mark.parametrize("how", ["taken over", "deleted", "deleted, keeping posts"])
    async def test_posts_outlive_a_draft(self, store: Store, other: Store, how: str) -> None:
        await other.enqueue(KEY, posted("before"))
        writer = await _drafted(store)
        await other.enqueue(KEY, posted("during"))
        if how != "taken over":
            await store.delete(KEY, writer.epoch, keep_posts=how != "deleted")
            await store.scrub()
        new = await hold(other)
        assert await received(new) == ["before", "during"]
        await new.delete()
        assert await other.sessions_with_pending_items() == []

    @pytest.mark.parametrize("how", ["published", "taken over", "deleted"])
    async def test_dead_letters_are_the_draft_s(self, store: Store, other: Store, how: str) -> None:
        writer = await _drafted(store)
        await reject(writer, "dead")
        if how == "published":
            await store.publish(KEY, writer.epoch)
            assert await other.dead_letters(KEY) == [letter(item) for item in posted("dead")]
            return
        if how == "deleted":
            await writer.delete()
        await take(other)
        assert await other.dead_letters(KEY) == []
        assert await other.sessions_with_pending_items(dead_letters=True) == []


class _Begun(msgspec.Struct):
    base: Origin | None = None


async def _drafted(store: Store) -> SessionWriter:
    """Write a draft with two records and a document."""
    writer = await begin(store, "a", "b")
    await writer.fold(SESSION)
    return writer


async def _is_held(witness: Store, epoch: int, *, deleted: bool, draft: Draft | None) -> None:
    holder = await held(witness)
    assert (holder.epoch, holder.deleted, holder.draft) == (epoch, deleted, draft)


async def _is_hidden(witness: Store, epoch: int) -> None:
    await _is_held(witness, epoch, deleted=True, draft=DRAFT)
    assert await witness.head(KEY) == 0
    assert await read(witness) == []
    assert await read(witness, reverse=True, limit=1) == []
    assert await witness.read_documents(KEY) == Documents()
    if (restoring := capability(witness, SupportsRestore)) is not None:
        data = await restoring.read_for_restore(KEY)
        assert (data.documents, data.records or ()) == (Documents(), ())
    assert await witness.sessions() == []
    assert await witness.tenants() == []
    assert [(info.key, info.epoch) for info in await witness.drafts("")] == [(KEY, epoch)]


async def _is_whole(witness: Store, epoch: int) -> None:
    await _is_held(witness, epoch, deleted=False, draft=DRAFT)
    assert await witness.head(KEY) == 503
    assert await seqs(witness) == [501, 502, 503]
    assert (await folded(witness))["session.json"].as_of_seq == 503
    assert [info.key for info in await witness.sessions()] == [KEY]
    assert await witness.tenants() == [""]
    assert await witness.drafts("") == []
