"""Copies of sessions: one program for all that writes a session's content under another key.

A copy is written as a draft, which no reader sees before it is published: records in slices, then
blobs are renewed, or put where the target lacks them, then documents. Before it is published, the
source must be what it was when the copying began: else it is made again, or refused.

It refers to nothing of its source, so nothing that happens to the source changes a copy.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Final, TypeAlias, TypeVar, final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from perdure.errors import (
    CorruptRecordError,
    HistoryPrunedError,
    LeaseHeldError,
    LeaseLostError,
    SessionError,
    SessionNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from perdure.lease import OwnerWatch, acquire_lease
from perdure.memory.documents import InboxTakenPayload
from perdure.memory.ledger import LEDGER
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin, origin_in
from perdure.records.records import ENDING, EPOCH, GAP, HOLDER_KINDS, TAKEN, TURN, Entry, Record
from perdure.restore.ladder import require_plain
from perdure.session.copied import (
    OWN_KINDS,
    Progress,
    as_copied,
    copied_manifest,
    renamed,
    without_history,
)
from perdure.session.lifecycle import MAX_WAITING, append_durably, groups_of
from perdure.session.media import put_blobs
from perdure.session.options import Limits
from perdure.session.point_in_time import HistoricalFold, folded_at
from perdure.session.reach import Reach, ReachedBlob
from perdure.session.stored import SessionStore, kept_documents
from perdure.store import (
    Batch,
    Beginning,
    Document,
    Documents,
    Draft,
    DraftInfo,
    Store,
    Taken,
    Terms,
    first_record,
    record_at,
    take_after,
)

TRIES: Final = 3
"""Attempts at a copy of a session that changes meanwhile."""
PAUSE: Final = 0.05
"""Seconds before the next one."""
BATCH_BYTES: Final = 512 * 1024
"""Bytes of records, or of blobs, in one call of the store: SQLite reads as many at a time later."""
BATCH_RECORDS: Final = 2000
SLICE_BYTES: Final = 128 * 1024
"""Bytes of records that are looked at in the event loop at a time; more is, in a thread."""
NAMES: Final = 500
"""Blobs that are renewed in one call of the store."""

LEAVING: Final = 5.0
"""Seconds that a store has to release a draft, or to remove it."""

FORK: Final = "fork"
"""Purpose of a draft: a fork, in which everything that is in progress has ended."""
FORK_CONTEXT: Final = "fork context"
"""The same, where records are left out: the copy begins with what they fold to."""

BRANCHES: Final = frozenset({FORK, FORK_CONTEXT, "copy"})
"""Purposes of copies that coexist with their source."""

MOVES: Final = frozenset({"migrate", "restore"})
"""Purposes of what is the session itself, in another place: with its documents, and its posts."""

OnEpoch: TypeAlias = Callable[[int], Awaitable[None]]

T = TypeVar("T")


class CopiedSession(msgspec.Struct, kw_only=True):
    """Result of a copy."""

    epoch: int = 0
    """The one that it was written under."""
    head: int = 0
    """Its last record."""
    records: int = 0
    bytes: int = 0
    """Bytes of records, documents and blobs that were written."""
    blobs: int = 0
    """Blobs that the target did not have."""
    lost: list[ReachedBlob] = []
    """Blobs that the source itself has lost."""


async def copy_session(
    source: Store,
    key: SessionKey,
    target: Store,
    new: SessionKey,
    *,
    draft: Draft,
    watch: OwnerWatch,
    limits: Limits,
    more: Sequence[Entry] = (),
    wait: float = 0.0,
    on_epoch: OnEpoch | None = None,
) -> CopiedSession:
    """Write a session's content up to a record into another log, and publish that.

    Posts and dead letters stay with the source; a caller that moves a session copies them.

    Args:
        source: Where the session is; it needs no lease.
        key: The session.
        target: Where the copy goes; the caller renews this owner's heartbeat there.
        new: The copy's key, of which there is no session.
        draft: What is copied, and why; a fork ends what is in progress.
        watch: Knows which owners of the target are silent.
        limits: How much of the working context the documents hold.
        more: Whole groups that follow the source's records.
        wait: Seconds to wait for another copy under this key whose process may be dead.
        on_epoch: Called with the epoch that was acquired, before any write under it.

    Raises:
        CorruptRecordError: The source is damaged.
        HistoryPrunedError: The record was pruned, or the source was again and again.
        LeaseHeldError: Another process is making a session of the new key.
        SessionNotFoundError: The source was deleted meanwhile.
        StoreError: A store cannot be reached, or the target refuses something.

    """
    for left in reversed(range(TRIES)):
        copier = _Copier(source, key, target, new, draft, limits)
        try:
            # 1. Begin a draft, which no reader sees: a kill leaves nothing else.
            epoch = await copier.begin(watch, wait)
            if on_epoch is not None:
                await on_epoch(epoch)
            # 2. Write records, blobs and documents.
            await copier.write(more)
            # 3. Require the source as it was: what was read may be a mixture of before and after.
            await copier.prove()
        except BaseException as error:
            await copier.withdraw()
            if not isinstance(error, CorruptRecordError | HistoryPrunedError | LeaseLostError):
                raise
            is_same = await copier.is_same()  # raises where the source is gone, which explains all
            is_damaged = is_same and isinstance(error, CorruptRecordError)
            if not left or is_damaged or isinstance(error, LeaseLostError):
                raise
            await anyio.sleep(PAUSE)
        else:
            # 4. One fenced act makes it a session.
            return await copier.publish()
    raise AssertionError("unreachable")


async def continue_copy(
    source: Store, key: SessionKey, target: Store, grant: Taken, *, draft: Draft, limits: Limits
) -> CopiedSession:
    """Append what a copy lacks of its source, after the epoch record of a lease, which stays.

    Errors as of `copy_session`, and StoreUnavailableError where that record has the number of one
    that is to be copied.
    """
    copier = _Copier(source, key, target, grant.key, draft, limits)
    await copier.go_on(grant)
    await copier.write(())
    await copier.prove()
    return copier.done


async def is_made(target: Store, new: SessionKey, draft: Draft) -> bool | None:
    """Return whether this very copy was made before; the answer may have been lost.

    None for a session that is no copy, and was only opened.

    Raises:
        SessionError: Another session has the key, or the copy was written since.

    """
    holder = await target.holder(new)
    if holder is None or holder.deleted:
        return False
    log = target.read_log(new, reverse=True)
    newest = await first_record(log, lambda record: record.kind not in HOLDER_KINDS)
    if holder.draft is None and newest is None:
        return None
    if holder.draft != draft or await has_own(target, new, draft):
        raise exists(new)
    return True


async def has_own(store: Store, key: SessionKey, draft: Draft) -> bool:
    """Return whether a copy was written since it was made, which took but one epoch."""
    first = await first_record(store.read_log(key, limit=1))
    log = store.read_log(key, reverse=True)
    newest = await first_record(log, lambda record: record.kind not in HOLDER_KINDS)
    if first is None or newest is None:
        return False
    # What a copy began with may have been pruned since. Only its first epoch names an origin.
    is_its = first.seq <= draft.up_to or (first.kind == EPOCH and origin_in(first) is not None)
    return not is_its or newest.epoch != first.epoch


async def remove_drafts(
    store: Store, tenant: str, watch: OwnerWatch, sources: Collection[SessionKey] = ()
) -> list[DraftInfo]:
    """Remove copies that a process was killed in the middle of, and all that are made of *sources*.

    One that was published meanwhile is a session, and stays. *watch* knows which owners are silent,
    where no one sees whether a process lives.
    """
    removed: list[DraftInfo] = []
    for found in await store.drafts(tenant):
        looked_at = watch.counted()
        holder = await store.holder(found.key)
        if holder is None or holder.epoch != found.epoch:
            continue
        is_silent = watch.note_beat(holder.owner, holder.beat, looked_at)
        is_left = holder.released or holder.alive is False or (holder.alive is None and is_silent)
        if not is_left and found.draft.source not in sources:
            continue
        with suppress(LeaseHeldError):  # another process has begun again, or it was published
            # As a draft again, which posts to its id outlive.
            grant = await take_after(store, found.key, after=found.epoch, draft=found.draft)
            await store.delete(found.key, grant.epoch)
            removed.append(found)
    return removed


def exists(key: SessionKey) -> SessionError:
    """Return the error for an id that is taken."""
    return SessionError(
        f"session {key} exists: choose another id, or delete it first", key=str(key)
    )


@final
class CopyWriter:
    """The end of a log that is copied to: what is added becomes durable in whole groups."""

    def __init__(self, store: Store, grant: Taken) -> None:
        self.grant = grant
        self.head: int = grant.head
        """The last durable record."""
        self._store = store
        self._entries: list[Entry] = []
        self._size = 0

    async def add(self, entries: Sequence[Entry], size: int) -> None:
        """Add entries of so many bytes, and append once there is much."""
        self._entries += entries
        self._size += size
        if self._size >= BATCH_BYTES or len(self._entries) >= BATCH_RECORDS:
            await self.flush()

    async def flush(self) -> None:
        """Append all groups that have ended."""
        # A group is never cut: what has no end yet waits for the next flush.
        ends = (at for at in range(len(self._entries), 0, -1) if self._entries[at - 1].end)
        whole = next(ends, 0)
        if whole:
            batch = Batch(
                self.grant.key, self.grant.epoch, self.head + 1, tuple(self._entries[:whole])
            )
            await append_durably(self._store, batch)
            del self._entries[:whole]
            self._size = sum(len(entry.payload) for entry in self._entries)
            self.head += whole

    async def add_own(self, entries: Sequence[Entry]) -> None:
        """Append groups that were never saved: their media go into blobs, as in each save."""
        store, self._store = self._store, SessionStore(self._store)
        for group in groups_of(entries):
            await self.add(group, sum(len(entry.payload) for entry in group))
        await self.flush()
        self._store = store


@final
class _Copier:
    """One attempt at a copy."""

    def __init__(
        self,
        source: Store,
        key: SessionKey,
        target: Store,
        new: SessionKey,
        draft: Draft,
        limits: Limits,
    ) -> None:
        self._source = SessionStore(source.inner if isinstance(source, SessionStore) else source)
        self._target = target.inner if isinstance(target, SessionStore) else target
        self._key = key
        self._new = new
        self._draft = draft
        self._limits = limits
        self._was: HistoricalFold | None = None
        self._kept: dict[str, bytes] = {}
        """Blobs of the documents that a fork without history begins with. No session names them
        yet, so they are put once the draft exists: a sweep looks for drafts."""
        self._base: Origin
        """Beginning of the source."""
        self._begun: Origin
        """Beginning of the copy."""
        self._writer: CopyWriter
        self._next = 0
        """The record that is copied next."""
        self._turn: bytes | None = None
        """The newest record of a turn."""
        self._taken: set[str] = set()
        """Op ids of posts that moved into the log."""
        self.done = CopiedSession()

    async def origin(self) -> Origin:
        """Return where the source begins now, if it still has the record to copy up to."""
        key, up_to = self._key, self._draft.up_to
        base = await self._found_base()
        point = newest = await first_record(self._source.read_log(key, reverse=True, limit=1))
        if newest is None or newest.seq != up_to:
            point = await record_at(self._source, key, up_to)
        # It is being forgotten, and some of its blobs may be gone already.
        is_ending = newest is not None and newest.kind == ENDING
        if point is not None and point.epoch == self._draft.generation and not is_ending:
            return base
        holder = await self._source.holder(key)
        if holder is None or holder.deleted or (point is not None and not is_ending):
            raise SessionNotFoundError(
                f"session {key} was deleted while {self._new} was made of it", key=str(key)
            )
        if is_ending:
            raise StoreUnavailableError(
                f"session {key} is just being forgotten: try again in a moment; if that was cut "
                "off, forget it again (if it is opened instead, it may have lost its media)",
                key=str(key),
            )
        if up_to <= base.cut:
            raise HistoryPrunedError(
                f"session {key} was pruned up to record {base.cut}, and has no record {up_to}",
                key=str(key),
                seq=up_to,
                cut=base.cut,
            )
        raise StoreUnavailableError(
            f"session {key} is just being taken over: try again in a moment", key=str(key)
        )

    async def _found_base(self) -> Origin:
        """Look again for what is before the source's log."""
        key, inner = self._key, self._source.inner
        self._source = SessionStore(inner)  # it may remember what is not so any more
        manifest = (await inner.read_documents(key, ())).manifest
        require_plain(manifest, key)
        if manifest is not None and manifest.base is None:
            self._source.assume_plain(key)
            return Origin()
        base = await self._source.beginning_of(key)
        return Origin(cut=base.cut, folded=base.folded)

    async def go_on(self, grant: Taken) -> None:
        """Continue a copy that is published.

        Raises:
            StoreUnavailableError: The source has a record to copy at the lease's number.

        """
        self._base = self._begun = await self.origin()
        at = grant.head
        there = await record_at(self._source, self._key, at)
        if there is not None and as_copied(there).kind != GAP:
            raise StoreUnavailableError(
                f"session {self._key} went on meanwhile: try again", key=str(self._key), seq=at
            )
        self._was = await self._as_of_then()
        self._writer = CopyWriter(self._target, grant)
        self.done.epoch = grant.epoch

    async def _as_of_then(self) -> HistoricalFold | None:
        """Return the documents of the copy; where it moves, those that the source has, if any."""
        key, up_to = self._key, self._draft.up_to
        if self._draft.purpose in MOVES:
            have = await self._source.documents_upto(key, up_to)
            if have.manifest is not None and not have.damaged:
                return HistoricalFold(dict(have.found), have.manifest, {})
            if (await self._source.read_documents(key, ())).manifest is None:
                return None
        return await folded_at(self._source, key, up_to, self._limits)

    async def begin(self, watch: OwnerWatch, wait: float) -> int:
        """Begin the draft; return the epoch."""
        self._base = begun = await self.origin()
        up_to = self._draft.up_to
        # Where the source has no record to copy: that of its first epoch, or what was pruned last.
        first = begun.cut or 1
        self._was = was = await self._as_of_then()
        if was is not None and self._draft.purpose == FORK_CONTEXT:
            found = {
                name: Document(data, was.found[name].as_of_seq)
                for name, data in without_history(was.data).items()
            }
            self._was = msgspec.structs.replace(was, found=found)
            folded, self._kept = kept_documents(Documents(was.manifest, found))
            begun, first = Origin(cut=up_to, folded=folded), up_to + 1
        grant = await acquire_lease(
            self._target,
            self._new,
            Terms(
                me=self._target.owner,
                beginning=Beginning(first, begun if begun.cut else None, self._draft),
            ),
            watch=watch,
            on_held="steal",
            wait=wait,
        )
        self._begun = begun
        self._writer = CopyWriter(self._target, grant)
        self.done.epoch = grant.epoch
        return grant.epoch

    async def write(self, more: Sequence[Entry]) -> None:
        """Write records, blobs and documents; no reader sees them."""
        was, found = self._was, Documents()
        if was is not None:
            manifest = msgspec.structs.replace(was.manifest, base=self._begun)
            found = Documents(manifest, was.found)
        reach = Reach(self._source, self._key, found)
        # Records come first: they say which blobs the copy reaches.
        await self._write_records(reach)
        if was is not None and self._draft.purpose.startswith(FORK):
            progress = Progress(was.data.get(LEDGER), self._turn)
            for entry in more:
                progress.feed(entry)
            more = (*more, *progress.endings(time.time()))
        await self._writer.add_own(more)
        # Blobs come before the documents that name them.
        if self._target.capabilities.blobs:
            if was is not None:
                await put_blobs(self._target, self._new.blobs, {**was.blobs, **self._kept})
            await self._renew(reach)
        if was is not None:
            await self._write_documents(was)
        if self._taken:  # a post that the source has taken into its log may wait at the new place
            key, epoch = self._new, self._writer.grant.epoch
            waiting = await self._target.receive(key, epoch, limit=MAX_WAITING)
            settled = [item.op_id for item in waiting if item.op_id in self._taken]
            if settled:
                await self._target.ack(key, epoch, settled)
        self.done.head = self._writer.head

    async def _write_records(self, reach: Reach) -> None:
        """Copy the log, a few records at a time; the event loop is left to others in between."""
        first, up_to = self._writer.head, self._draft.up_to
        self._next = first + 1
        folded = up_to if self._was is None else self._was.manifest.as_of_seq
        # An encrypted store proves documents by the end of a batch.
        for end in sorted({folded, up_to}):
            if end < self._next:
                continue
            log = self._source.read_log(self._key, after=self._next - 1, before=end + 1)
            async with aclosing(log) as chunks:
                async for chunk in chunks:
                    for run, size in _runs(chunk.records):
                        entries = await _beside(partial(self._copied, run, reach), size)
                        self.done.bytes += size
                        await self._writer.add(entries, size)
            await self._writer.flush()
        if self._writer.head < up_to:
            raise self._went(self._next)
        self.done.records = max(up_to - first, 0)

    def _copied(self, run: Sequence[Record], reach: Reach) -> list[Entry]:
        """Return the stand-in for a run of records, and note what it names."""
        # A hole in the numbers: records went while they were read.
        if run[0].seq != self._next or run[-1].seq - run[0].seq != len(run) - 1:
            raise self._went(self._next)
        self._next += len(run)
        kinds = {record.kind for record in run}
        if TAKEN in kinds and self._draft.purpose in MOVES:
            for record in run:
                if record.kind == TAKEN:
                    self._taken.update(decode(record.payload, InboxTakenPayload).ops)
        if TURN in kinds:
            self._turn = [record.payload for record in run if record.kind == TURN][-1]
        if kinds.isdisjoint(OWN_KINDS):  # most runs: there may be a million records
            reach.feed_run(run)
            return [Entry(record.kind, record.payload, record.end) for record in run]
        reach.feed_run([record for record in run if record.kind not in OWN_KINDS])
        return list(map(as_copied, run))

    def _went(self, seq: int) -> HistoryPrunedError:
        return HistoryPrunedError(
            f"session {self._key}: record {seq} went while {self._new} was made of it: do it again",
            key=str(self._key),
            seq=seq,
        )

    async def _renew(self, reach: Reach) -> None:
        """Have the target keep all blobs that the copy reaches, and put those that it lacks."""
        whose, missing = self._new.blobs, list[ReachedBlob]()
        # What was just put is young, and names what the documents do.
        async with aclosing(reach.blobs(self._kept, leaves=False)) as blobs:
            reached = {blob.name: msgspec.structs.replace(blob, data=None) async for blob in blobs}
        names = list(reached)
        for at in range(0, len(names), NAMES):
            some = await self._target.renew(whose, names[at : at + NAMES])
            missing += (reached[name] for name in sorted(some))
        found, size = dict[str, bytes](), 0
        for blob in missing:
            data = None
            with suppress(CorruptRecordError):
                data = await self._source.get_blob(self._key.blobs, blob.name)
            if data is None:
                self.done.lost.append(blob)
                continue
            self.done.blobs += 1
            self.done.bytes += len(data)
            found[blob.name] = data
            size += len(data)
            if size >= BATCH_BYTES:
                await self._target.put_blobs(whose, found)
                found, size = {}, 0
        if found:
            await self._target.put_blobs(whose, found)

    async def _write_documents(self, was: HistoricalFold) -> None:
        size = sum(map(len, was.data.values()))

        def work() -> dict[str, bytes]:
            return {name: renamed(name, data, self._new) for name, data in was.data.items()}

        documents = await _beside(work, size)
        epoch = self._writer.grant.epoch
        manifest = copied_manifest(was.manifest, documents, self._new, epoch, self._begun)
        await self._target.write_documents(self._new, documents, manifest)
        self.done.bytes += size

    async def is_same(self) -> bool:
        """Return whether the source still begins where it did."""
        return await self.origin() == self._base

    async def prove(self) -> None:
        """Require that the source is what it was when the copying began."""
        if not await self.is_same():
            raise self._went(self._draft.up_to)

    async def publish(self) -> CopiedSession:
        """Make the draft a session, and release it."""
        writer = self._writer
        try:
            for left in reversed(range(TRIES)):
                try:
                    await self._target.publish(self._new, writer.grant.epoch)
                    break
                except LeaseLostError:
                    await self.origin()  # a forget removes the drafts of its session, too
                    raise
                except StoreUnavailableError:  # it may have been done
                    if not left:
                        raise
                    await anyio.sleep(PAUSE)
        finally:
            await self._leave(self._target.release)
        return self.done

    async def withdraw(self) -> None:
        """Remove the draft, if it was begun; where that fails, the next holder of the id does."""
        if self.done.epoch:
            await self._leave(self._target.delete)
            await self._leave(self._target.release)

    async def _leave(self, act: Callable[[SessionKey, int], Awaitable[None]]) -> None:
        # A process that took the draft over has removed it.
        gone = suppress(StoreError, LeaseLostError)
        with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVING), gone:
            await act(self._new, self.done.epoch)


def _runs(records: Sequence[Record]) -> Iterator[tuple[Sequence[Record], int]]:
    """Cut records into runs that take little time each, with the bytes of each."""
    begin = size = 0
    for at, record in enumerate(records, 1):
        size += len(record.payload)
        if size >= SLICE_BYTES or at == len(records):
            yield records[begin:at], size
            begin, size = at, 0


async def _beside(work: Callable[[], T], size: int) -> T:
    """Run work on so many bytes: in a thread if they are many, and let others run in any case."""
    if size > SLICE_BYTES:
        return await anyio.to_thread.run_sync(work)
    await anyio.lowlevel.checkpoint()
    return work()
