"""The log: append, idempotence, fencing, head, reading a part of it; and cancellation.

A cancelled call has its complete effect, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import anyio
import anyio.lowlevel
import msgspec
import pytest

from perdure.errors import LeaseHeldError, TooLargeError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, MESSAGE, Entry, Record
from perdure.store import (
    Batch,
    Document,
    Outcome,
    Status,
    Store,
    SupportsBeginAppend,
    Taken,
    capability,
    take_after,
)
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    SessionWriter,
    Suite,
    append,
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
    texts_of,
)

# ruff: noqa: D102


class LogConformance(Suite):
    """Appended records are there, once, in order, whole, or refused with a reason."""

    async def test_a_new_log_begins_with_its_epoch_record(self, store: Store) -> None:
        grant = await take_after(store, KEY, after=0)
        assert (grant.key, grant.epoch, grant.head, grant.created) == (KEY, 1, 1, True)
        (record,) = await read(store)
        assert (record.seq, record.epoch, record.kind, record.end) == (1, 1, EPOCH, True)

    async def test_records_come_back_byte_for_byte(self, store: Store) -> None:
        sent = (
            Entry("message", '{"text": "grüß Gott 你好 \\u2028 \\n"}'.encode(), end=False),
            Entry("x:a-kind-nobody-knows", b'{"b":1.0,"a":[1e2,"}"]}', end=False),
            Entry("state", b"null"),
            Entry("event", b'""'),
        )
        await (await hold(store)).put(*sent)
        assert await appended(store) == sent

    async def test_seqs_go_on_without_a_gap(self, store: Store) -> None:
        writer = await hold(store)
        for size in (1, 3, 2, 40):
            await writer.add(*"x" * size)
        assert await seqs(store) == list(range(1, writer.head + 1))
        assert await store.head(KEY) == writer.head == 47

    async def test_sending_again_changes_nothing(self, store: Store) -> None:
        writer = await hold(store)
        for _ in range(3):
            assert await writer.send(2, "a", "b") is Status.OK
        assert await appended(store) == group("a", "b")

    async def test_sending_again_with_more_appends_the_rest(self, store: Store) -> None:
        grant = (await hold(store, "a", "b")).grant
        first, more = group("a", "b"), group("c", "d")
        for start, records in ((2, first + more), (4, more)):
            assert (await append(store, grant, start, *records)).status is Status.OK
        assert await appended(store) == first + more
        assert await store.head(KEY) == 5

    @pytest.mark.parametrize(
        ("first", "record"),
        [(2, group("b")[0]), (4, group("a")[0]), (3, Entry(MESSAGE, b"1", end=False))],
        ids=["other bytes under a known seq", "behind a gap", "half a group"],
    )
    async def test_what_does_not_fit_the_log_is_refused(
        self, store: Store, first: int, record: Entry
    ) -> None:
        writer = await hold(store, "a")
        outcome = await append(store, writer.grant, first, record)
        assert outcome.status is Status.PERMANENT
        assert outcome.error is not None
        assert await appended(store) == group("a")
        assert await store.head(KEY) == 2

    async def test_too_large_a_record_is_refused_and_nothing_else(self, store: Store) -> None:
        writer = await hold(store)
        size = store.capabilities.max_record_bytes + 1
        outcome = await append(store, writer.grant, 2, Entry(MESSAGE, b'"' + b"x" * size + b'"'))
        assert outcome.status is Status.PERMANENT
        assert isinstance(outcome.error, TooLargeError)
        await writer.add("a")
        assert await appended(store) == group("a")

    async def test_a_large_record_is_whole(self, store: Store) -> None:
        writer = await hold(store)
        size = min(store.capabilities.max_record_bytes // 2, 3_000_000)
        large = Entry(MESSAGE, b'"' + b"x" * size + b'"')
        await writer.put(large, *group("a"))
        assert await appended(store) == (large, *group("a"))
        assert await appended(store, after=2) == group("a")

    async def test_each_session_has_its_own_result(self, store: Store) -> None:
        wanted = {
            "a": (0, 2, Status.OK),
            "b": (1, 2, Status.CONFLICT),
            "c": (0, 9, Status.PERMANENT),
            "d": (0, 2, Status.OK),
        }
        batches: list[Batch] = []
        for name, (later, first, _) in wanted.items():
            grant = await take(store, SessionKey(name))
            batches.append(Batch(grant.key, grant.epoch + later, first, group(name)))
        outcomes = await store.append_many(batches)
        assert [outcome.status for outcome in outcomes] == [one[2] for one in wanted.values()]
        assert [await store.head(batch.key) for batch in batches] == [2, 1, 1, 2]

    async def test_what_is_begun_is_answered_as_any_append_is(self, store: Store) -> None:
        begins = capability(store, SupportsBeginAppend)
        if begins is None:
            return
        grant = await take(store)
        for epoch, status in [(grant.epoch, Status.OK), (grant.epoch + 1, Status.CONFLICT)]:
            answers: list[Outcome] = []
            answered = anyio.Event()

            def done(
                outcomes: Sequence[Outcome],
                answers: list[Outcome] = answers,
                answered: anyio.Event = answered,
            ) -> None:
                answers.extend(outcomes)
                answered.set()

            batch = Batch(KEY, epoch, 2, group("a"))
            if not begins.begin_append([batch], done):
                done(await store.append_many([batch]))
            with anyio.fail_after(60):
                await answered.wait()
            assert [outcome.status for outcome in answers] == [status]
        assert await appended(store) == group("a")

    async def test_as_many_sessions_at_once_as_it_says(self, store: Store) -> None:
        keys = [SessionKey(f"s{n}") for n in range(min(store.capabilities.batch_max, 64))]
        grants = [await take(store, key) for key in keys]
        batches = [Batch(grant.key, grant.epoch, 2, group(grant.key.agent)) for grant in grants]
        outcomes = await store.append_many(batches)
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        for key in keys:
            assert await appended(store, key) == group(key.agent)

    async def test_nothing_to_append_is_fine(self, store: Store) -> None:
        assert await store.append_many([]) == []
        writer = await hold(store)
        assert await writer.send(2) is Status.OK
        assert await store.head(KEY) == 1
        await writer.add("a")
        assert await appended(store) == group("a")

    async def test_without_a_lease_nothing_is_written(self, store: Store) -> None:
        assert await read(store) == []
        for epoch in (0, 1):
            (outcome,) = await store.append_many([Batch(KEY, epoch, 1, group("a"))])
            assert outcome.status is Status.CONFLICT
        assert await store.head(KEY) == 0

    async def test_an_old_epoch_writes_nothing(self, open_store: OpenStore) -> None:
        old = await hold(await open_store("old"), "a")
        new = await hold(await open_store("new"))
        for first in (3, new.head + 1):
            assert await old.send(first, "lost") is Status.CONFLICT
        await new.add("b")
        for writer in (old, new):
            assert await appended(writer.store) == group("a") + group("b")

    async def test_the_log_goes_on_over_epochs(self, open_store: OpenStore) -> None:
        for round_ in range(4):
            writer = await hold(await open_store(f"owner-{round_}"))
            assert (writer.epoch, writer.grant.created) == (round_ + 1, round_ == 0)
            assert writer.head == await writer.store.head(KEY)
            await writer.add(f"text {round_}")
        records = await read(await open_store("reader"))
        assert entries(records) == [entry for n in range(4) for entry in group(f"text {n}")]
        assert [record.seq for record in records] == list(range(1, 9))
        assert [record.epoch for record in records] == [1, 1, 2, 2, 3, 3, 4, 4]

    async def test_the_log_outlives_its_store(self, store: Store, open_store: OpenStore) -> None:
        await hold(store, "a", "b", "c")
        await store.aclose()
        again = await open_store("two")
        assert await again.head(KEY) == 4
        assert await appended(again) == group("a", "b", "c")

    async def test_any_part_of_the_log_can_be_read(self, open_store: OpenStore) -> None:
        store = await open_store("reader")
        for owner in ("one", "two", "three"):
            writer = await hold(await open_store(owner), "a", "b")
            await writer.add("c")
        records_all = await read(store)
        assert len(records_all) == 12
        bounds = [None, 1, 4, 5, 12, 13, 20]
        for after, before, limit in itertools.product(bounds, bounds, (None, 0, 3, 99)):
            low, high = after or 0, 99 if before is None else before
            wanted = [record for record in records_all if low < record.seq < high]
            got = await read(store, after=low, before=before, limit=limit)
            assert got == wanted[:limit], (after, before, limit)
            got = await read(store, after=low, before=before, limit=limit, reverse=True)
            assert got == wanted[::-1][:limit], (after, before, limit)

    async def test_a_slice_beyond_the_end_may_be_read_while_the_log_grows(
        self, store: Store
    ) -> None:
        writer = await hold(store, "a", "b")
        seqs: list[int] = []
        async with aclosing(store.read_log(KEY, before=20)) as log:
            async for chunk in log:
                if not seqs:
                    await writer.add("c")
                seqs += [record.seq for record in chunk.records]
        assert seqs in ([1, 2, 3], [1, 2, 3, 4])


# Trimming: the oldest records go when their holder says so, and nothing else changes


class TrimConformance(Suite):
    """More may be kept than was asked for, never less; what is kept has no gap."""

    async def test_what_is_kept_is_whole(self, store: Store, other: Store) -> None:
        before = await several_epochs(store)
        for below in (1, 2, 7, 8, len(before) // 2, len(before)):
            assert await store.trim(KEY, 6, below) >= 0
            for witness in (store, other):
                remaining = await read(witness)
                assert remaining == before[-len(remaining) :]
                assert remaining[0].seq <= below
                assert await witness.head(KEY) == len(before)
                assert await read(witness, reverse=True) == remaining[::-1]
                assert await read(witness, after=remaining[-1].seq - 1) == remaining[-1:]
                assert await read(witness, before=below) == [r for r in remaining if r.seq < below]

    async def test_the_log_goes_on_behind_a_trim(self, store: Store, other: Store) -> None:
        head = len(await several_epochs(store))
        await store.trim(KEY, 6, head)
        await hold(store, "after", "it")
        writer = await hold(other)
        assert (writer.head, writer.grant.created) == (head + 4, False)
        assert await other.trim(KEY, writer.epoch, head + 2) >= 0
        await writer.add("further")
        assert (await appended(other))[-3:] == group("after", "it") + group("further")

    async def test_a_resend_behind_a_trim_is_known(self, store: Store) -> None:
        writer = await hold(store, "old")
        await writer.add("new")
        await store.trim(KEY, writer.epoch, 3)
        assert await writer.send(3, "new") is Status.OK
        assert await writer.send(3, "another") is Status.PERMANENT
        assert (await appended(store))[-1:] == group("new")

    async def test_trimming_beyond_the_head_keeps_the_head(
        self, store: Store, other: Store
    ) -> None:
        writer = await hold(store, "a", "b")
        await store.trim(KEY, writer.epoch, 99)
        assert await store.head(KEY) == 3
        await writer.add("c")
        assert await other.head(KEY) == 4
        assert (await appended(other))[-1:] == group("c")
        assert (await take(other)).head == 5

    async def test_only_the_holder_trims(self, store: Store, other: Store) -> None:
        old = await hold(store, "kept")
        await take(other)
        await lost(store.trim(KEY, old.epoch, 3))
        await lost(store.trim(SessionKey("never was"), 1, 3))
        assert await appended(other) == group("kept")

    async def test_a_trimmed_session_is_deleted_and_begins_anew(self, store: Store) -> None:
        head = len(await several_epochs(store))
        await store.trim(KEY, 6, head)
        await store.delete(KEY, 6)
        assert await read(store) == []
        writer = await hold(store)
        assert (writer.head, writer.grant.created) == (1, True)
        await writer.add("new life")
        assert await appended(store) == group("new life")


async def several_epochs(store: Store) -> list[Record]:
    """Write a log under six epochs, the last of them ours; return it."""
    for _ in range(6):
        writer = await hold(store, "a", "b")
        await writer.add("c")
    return await read(store)


# Readers: they hold no lease, never wait, and see a prefix of whole groups


_ROUNDS = 24
_GROUP = 3


class ReaderConformance(Suite):
    """A reader's view while other processes write, fold and take over."""

    async def test_a_reader_needs_no_lease(self, open_store: OpenStore) -> None:
        writer = await hold(await open_store("writer"), "a")
        reader = await open_store("reader")
        assert await appended(reader) == group("a")
        assert (await held(reader)).epoch == writer.epoch
        await writer.add("b")
        assert await appended(reader) == group("a") + group("b")

    async def test_a_reader_that_leaves_early_leaves_nothing_open(self, store: Store) -> None:
        writer = await hold(store)
        await writer.put(*[entry for n in range(500) for entry in group(str(n))])
        async with aclosing(store.read_log(KEY)) as chunks:
            first = await anext(chunks)
        assert first.records[0].kind == EPOCH
        assert await store.head(KEY) == 501

    async def test_readers_beside_a_folding_writer_see_whole_prefixes(
        self, open_store: OpenStore
    ) -> None:
        readers = [await open_store("reader-1"), await open_store("reader-2")]
        writers = [await open_store("writer-1"), await open_store("writer-2")]
        done = anyio.Event()

        async def watch(reader: Store) -> None:
            versions = 0
            while not done.is_set():
                documents = await folded(reader)
                head = await reader.head(KEY)
                records = await read_settled(reader)
                versions = check_view(records, versions)
                assert len(records) >= head
                for document in documents.values():
                    texts = msgspec.json.decode(document.data)
                    assert texts == texts_of(records[: document.as_of_seq])

        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(watch, reader)
            for writer in writers:
                await write_and_fold(writer)
            done.set()
        assert len(texts_of(await read(readers[0]))) == 2 * _ROUNDS * _GROUP


async def write_and_fold(store: Store) -> None:
    """Take the session over, then append groups and fold after every fourth."""
    writer = await hold(store)
    for round_ in range(_ROUNDS):
        await writer.add(*(f"{writer.epoch}.{round_}.{place}" for place in range(_GROUP)))
        if round_ % 4 == 0:
            texts = texts_of(await read(store))
            await writer.fold({"session.json": msgspec.json.encode(texts)})


async def read_settled(reader: Store) -> list[Record]:
    """Read until no takeover is under way; a store says so instead of lying."""
    while True:
        chunks = [chunk async for chunk in reader.read_log(KEY)]
        if all(chunk.settled for chunk in chunks):
            return [record for chunk in chunks for record in chunk.records]


def check_view(records: list[Record], seen: int) -> int:
    """Check one reader's view: no gap, whole groups, nothing gone that was seen before."""
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= seen
    assert all(record.end for record in records[-1:])
    texts = texts_of(records)
    assert len(texts) % _GROUP == 0
    wanted = [
        f"{epoch}.{round_}.{place}"
        for epoch in (1, 2)
        for round_ in range(_ROUNDS)
        for place in range(_GROUP)
    ]
    assert texts == wanted[: len(texts)]
    return len(records)


# Cancellation: a cancelled call has its complete effect, or none


_STEPS = pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 40])


class CancellationConformance(Suite):
    """Each call is cancelled after a number of scheduler steps, then the store is used on."""

    @_STEPS
    async def test_a_cancelled_append_is_whole_or_nothing(self, store: Store, steps: int) -> None:
        writer = await hold(store, "before")
        sent = group("a", "b", "c")
        await cancelled_after(steps, lambda: append(store, writer.grant, 3, *sent))
        assert len(await read(store)) in (2, 5)
        # The sender cannot know: it sends again, and that is safe.
        await writer.put(*sent)
        await writer.add("after")
        assert await appended(store) == group("before") + sent + group("after")

    @_STEPS
    async def test_a_cancelled_acquire_leaves_a_session_to_acquire(
        self, store: Store, steps: int
    ) -> None:
        await hold(store, "before")
        await cancelled_after(steps, lambda: take(store))
        writer = SessionWriter(store, await take_in_the_end(store))
        assert writer.epoch in (2, 3)
        await writer.add("after")
        assert await appended(store) == group("before") + group("after")
        assert await seqs(store) == list(range(1, writer.head + 1))

    @_STEPS
    async def test_a_cancelled_fold_leaves_the_old_or_the_new(
        self, store: Store, steps: int
    ) -> None:
        writer = await hold(store)
        await writer.fold({"session.json": b"old", "memory.json": b"old"})
        await writer.add("a")
        new = {"session.json": b"new", "memory.json": b"new"}
        await cancelled_after(steps, lambda: writer.fold(new))
        for document in (await folded(store)).values():
            assert document in (Document(b"old", 1), Document(b"new", 2))
        await writer.fold(new)
        assert await folded(store) == {name: Document(b"new", 2) for name in new}

    @_STEPS
    async def test_a_cancelled_put_is_whole_or_nothing(self, store: Store, steps: int) -> None:
        blobs = {name_of(data): data for data in (b"a" * 9999, b"b")}
        await cancelled_after(steps, lambda: store.put_blobs("", blobs))
        for name, data in blobs.items():
            assert await store.get_blob("", name) in (None, data)
        await store.put_blobs("", blobs)
        for name, data in blobs.items():
            assert await store.get_blob("", name) == data

    @_STEPS
    async def test_a_cancelled_read_leaves_nothing_behind(self, store: Store, steps: int) -> None:
        writer = await hold(store)
        await writer.put(*[entry for n in range(400) for entry in group(str(n))])
        await cancelled_after(steps, lambda: read(store))
        assert len(await read(store)) == 401


async def cancelled_after(steps: int, call: Callable[[], Awaitable[object]]) -> None:
    """Run a call, and cancel it after some steps of the scheduler if it still runs then."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await call()

        tasks.start_soon(run)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def take_in_the_end(store: Store) -> Taken:
    """Acquire a session whose abandoned acquire may win against ours, once."""
    try:
        return await take(store)
    except LeaseHeldError:
        return await take(store)
