"""Logs that continue other history: forks, copies and pruned sessions, read as one log each.

A store around the store. A fork's log has its own records only, numbered from 1 by the store;
here they follow the parent's, from ``at + 1`` on, and reading continues into the parent's log or
into the blobs that hold its history. So every caller sees one log, one set of documents and one
numbering, whether a session has a parent or not. A session without one passes through unchanged.

Documents that are not folded yet are the parent's, if they are as of a shared record. The first
fold writes all of them again.

A refused batch is checked against the log: the store may have gone back to an earlier state and
lost records that it had acknowledged.

Large media of a batch are put into blobs before their records, which then refer to them; the log is
read as it is stored. `Filled` reads it with the media in place.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.tasks import each
from perdure.autosave.core import REFUSALS, complete, outcome_of
from perdure.errors import (
    AcknowledgedRecordsLostError,
    CorruptRecordError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.lineage import history
from perdure.memory.context import SNAPSHOT, WorkingContext
from perdure.memory.documents import SESSION
from perdure.memory.media import HELD_BYTES, MediaBudget
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, Origin, origin_in
from perdure.records.media import (
    LIFTED_KINDS,
    MOST,
    Medium,
    filled,
    lifted_entries,
    may_lift,
    referred,
)
from perdure.records.records import BASE, CONTEXT, EPOCH, HOLDER_KINDS, Entry, Record
from perdure.restore.ladder import validated
from perdure.store import (
    Batch,
    Documents,
    Draft,
    HeldLease,
    InboxLimit,
    LogChunk,
    Outcome,
    PendingItem,
    RestoreData,
    Status,
    Store,
    SupportsBeginAppend,
    SupportsRestore,
    first_record,
    shortcut,
)
from perdure.stores.delegate import DelegatingStore


class _Begun(msgspec.Struct):
    owner: str = ""


async def explain_refusal(store: Store, batch: Batch, outcome: Outcome, begun: int) -> Outcome:
    """Return the meaning of a store's refusal of a batch, after comparing it with the log.

    The store may have gone back to an earlier state, and lost acknowledged records.

    Args:
        store: The store.
        batch: The batch; everything before it was acknowledged.
        outcome: The refusal.
        begun: The seq of the sender's epoch record.

    """
    durable = batch.first - 1
    try:
        last_kept = await _last_kept(
            store, batch.key, epoch=batch.epoch, begun=begun, durable=durable
        )
    except StoreUnavailableError as error:
        return Outcome(Status.IN_DOUBT, error)  # sent again, and checked then
    except PerdureError:
        last_kept = None
    if last_kept is None and isinstance(outcome.error, PerdureError):
        # Records that a bucket accepted after it had gone back are after a gap.
        first_lost = outcome.error.facts.get("gone")
        last_kept = min(first_lost - 1, durable) if isinstance(first_lost, int) else None
    if last_kept is None:
        return outcome
    lost = records_lost(batch.key, durable=durable, kept=last_kept)
    lost.__cause__ = outcome.error
    return Outcome(Status.CONFLICT, lost)


def records_lost(key: SessionKey, *, durable: int, kept: int) -> AcknowledgedRecordsLostError:
    """Return the error for a session of which the store has lost acknowledged records."""
    has = f"has only the first {kept}" if kept else "has none of them"
    message = (
        f"session {key}: the store had acknowledged {durable} records and {has}: it went back to "
        "an earlier state (a failover, a restart without its data, an older backup). Nothing more "
        "is written here. fork_unsaved(new_id) begins a session with the rest and what this "
        "process still holds in memory, discard_unsaved() gives that up; opening the session again "
        "continues with what the store has"
    )
    return AcknowledgedRecordsLostError(message, key=str(key), durable=durable, kept=kept)


async def _last_kept(
    store: Store, key: SessionKey, *, epoch: int, begun: int, durable: int
) -> int | None:
    """Return the last acknowledged record that a store still has; None if it has them all."""
    holder = await store.holder(key)
    if holder is None:
        return 0
    if holder.deleted:
        return None
    head = await store.head(key)
    first = await _record(store, key, begun) if head >= begun else None
    pruned = first is None and head >= begun and holder.epoch > epoch
    is_own = pruned or (first is not None and _is_ours(first, epoch, store.owner))
    if is_own and head >= durable and holder.epoch >= epoch:
        return None
    if holder.epoch < epoch:
        return min(head, durable)  # no other process has taken it since
    last = epoch if is_own else epoch - 1
    log = store.read_log(key, before=min(head, durable) + 1, reverse=True)
    newest = await first_record(log, lambda record: record.epoch <= last)
    return 0 if newest is None else newest.seq


async def _record(store: Store, key: SessionKey, seq: int) -> Record | None:
    return await first_record(store.read_log(key, after=seq - 1, before=seq + 1))


async def is_begun_by(store: Store, key: SessionKey, *, begun: int, epoch: int, owner: str) -> bool:
    """Return whether an epoch was begun in this store, and not in another one of the same name.

    True if that is unknown: the record is not known, or was pruned.
    """
    if not begun:
        return True
    record = await first_record(store.read_log(key, after=begun - 1, limit=1))
    return record is None or record.seq > begun or _is_ours(record, epoch, owner)


def _is_ours(record: Record, epoch: int, owner: str) -> bool:
    """Return whether a record begins this epoch of this owner."""
    if record.kind != EPOCH or record.epoch != epoch:
        return False
    try:
        named = msgspec.json.decode(record.payload, type=_Begun).owner
    except msgspec.DecodeError:
        return True  # only the store can read it
    return named in ("", owner)


_RESTORED = frozenset({SESSION, SNAPSHOT})
"""The documents that a restore reads."""


class _HeldSession:
    """A session that is held here and has an origin."""

    __slots__ = ("base", "epoch", "folded", "inherited")

    def __init__(self, epoch: int, base: Origin) -> None:
        self.epoch = epoch
        self.base = base
        # Whether all documents are known to be the session's own.
        self.folded = False
        # The documents that it began with, until then: their owner continues to fold.
        self.inherited: Documents | None = None


class _ClosingInbox:
    """An inbox whose session is about to go: what was posted is in it, then posts wait."""

    def __init__(self) -> None:
        self.posted = anyio.Event()
        self.over = anyio.Event()


def followed(store: Store) -> Lineage:
    """Return a store that follows lineage; unchanged if it already does."""
    store = store.inner if isinstance(store, Filled) else store
    return store if isinstance(store, Lineage) else Lineage(store)


OFFLOAD: Final = 512 * 1024
"""Media of more bytes than this are taken out of their records in a thread."""
AT_A_TIME: Final = 4 * 1024 * 1024
"""Bytes of media in one call of the store."""


async def media_of(
    store: Store, tenant: str, wanted: Iterable[Medium], *, most: int = MOST
) -> dict[str, bytes]:
    """Read media out of their blobs, so many bytes of them.

    What is lost, damaged or of another size is not among them.

    Raises:
        StoreError: The store cannot be read.

    """
    media: dict[str, bytes] = {}
    read_next: dict[str, int] = {}
    size = 0
    for medium in wanted:
        size += medium.bytes
        if size > most:
            break
        read_next[medium.name] = medium.bytes

    async def read(name: str) -> None:
        with contextlib.suppress(CorruptRecordError):
            data = await store.get_blob(tenant, name)
            if data is not None and len(data) == read_next[name]:
                media[name] = data

    await each(list(read_next), read)
    return media


async def hold_media(
    store: Store, key: SessionKey, context: WorkingContext, budget: MediaBudget
) -> None:
    """Load the media that a restored working context may show, and hold those of later messages."""
    context.budget = budget
    context.lifts = store.capabilities.blobs
    wanted = [medium for medium in context.wanted() if medium.name not in context.media]
    if wanted:
        context.media |= await media_of(store, key.tenant, wanted, most=HELD_BYTES)


@final
class Filled(DelegatingStore):
    """Reads logs with the media of their messages in place, for all who read messages.

    Whoever follows references, folds or compares reads the store below it. Contexts keep their
    references: one may hold as many images as were ever shown.
    """

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records; media whose blob is lost stay a reference."""
        log = self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        async with contextlib.aclosing(log):
            async for chunk in log:
                begin = size = 0
                for at, record in enumerate(chunk.records):
                    size += sum(medium.bytes for medium in referred_in(record))
                    if size >= AT_A_TIME:  # a reader that has enough does not wait for the rest
                        yield await self._part(key, chunk, begin, at + 1)
                        begin, size = at + 1, 0
                if begin < len(chunk.records) or not chunk.records:
                    yield await self._part(key, chunk, begin, len(chunk.records))

    async def _part(self, key: SessionKey, chunk: LogChunk, begin: int, end: int) -> LogChunk:
        if not any(map(referred_in, chunk.records[begin:end])):
            return (
                chunk
                if end - begin == len(chunk.records)
                else LogChunk(chunk.records[begin:end], chunk.settled)
            )
        return LogChunk(await with_media(self.inner, key, chunk.records[begin:end]), chunk.settled)


async def _lifted(batch: Batch) -> tuple[tuple[Entry, ...], dict[str, bytes]]:
    """Return a batch's records with references to their media, and these."""
    if sum(len(entry.payload) for entry in batch.records) <= OFFLOAD:
        return lifted_entries(batch.records)
    lift = partial(lifted_entries, batch.records)
    return await anyio.to_thread.run_sync(lift, abandon_on_cancel=True)


def referred_in(record: Record) -> list[Medium]:
    """Return the media in blobs that a record refers to."""
    is_one = record.kind in LIFTED_KINDS and record.kind != CONTEXT
    return referred(record.payload) if is_one else []


async def with_media(
    store: Store, key: SessionKey, records: Sequence[Record]
) -> tuple[Record, ...]:
    """Return records with their media in place, read one record after the other."""
    whole: list[Record] = []
    for record in records:
        media_referred = referred_in(record)
        if media_referred:
            media = await media_of(store, key.tenant, media_referred)
            payload = filled(record.payload, media)
            whole.append(msgspec.structs.replace(record, payload=payload))
        else:
            whole.append(record)
    return tuple(whole)


@final
class Lineage(DelegatingStore):
    """Presents sessions with the history that they began with; see the module."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._direct = shortcut(store, SupportsBeginAppend)
        self._restoring = shortcut(store, SupportsRestore)
        self._held: dict[SessionKey, _HeldSession] = {}
        self._plain: dict[SessionKey, int] = {}  # held without a base, under this epoch
        self._begun: dict[SessionKey, tuple[int, int]] = {}  # epoch, and its first record
        # What was read with the origin, each for the restore that follows.
        self._opening: dict[SessionKey, RestoreData] = {}
        self._posting: Counter[SessionKey] = Counter()  # posts on their way
        self._closing: dict[SessionKey, _ClosingInbox] = {}

    async def aclose(self) -> None:
        self._held.clear()
        self._plain.clear()
        self._begun.clear()
        self._opening.clear()
        await self.inner.aclose()

    # The history that a session began with.

    async def base_of(self, key: SessionKey) -> Origin | None:
        """Return what comes before a session's own log; None for most sessions.

        Raises:
            CorruptRecordError: The session's log is damaged, or names no base that it needs.

        """
        if key in self._plain:
            return None
        session = self._held.get(key)
        if session is not None:
            return session.base
        have = await self.inner.read_documents(key, ())
        return await self._origin_of(key, have)

    def assume_plain(self, key: SessionKey) -> None:
        """Take it as known that nothing comes before a session's own log."""
        self._plain[key] = 2**62

    async def _origin_of(self, key: SessionKey, have: Documents) -> Origin | None:
        if have.manifest is not None:
            return have.manifest.base
        async with contextlib.aclosing(self.inner.read_log(key, limit=64)) as log:
            async for chunk in log:
                for record in chunk.records:
                    if record.seq > 1 and chunk.records[0].seq > 1:
                        return await self.newest_base(key)  # it was pruned, maybe more than once
                    if record.kind == BASE:
                        return decode(record.payload, Origin)
                    if record.kind not in HOLDER_KINDS:
                        return None
        return None

    async def beginning_of(self, key: SessionKey) -> Origin:
        """Return the origin that a session's history begins with: a fork's may be an ancestor's.

        Its ``cut`` is the last record that was removed, 0 for a whole history.
        """
        base = await self.base_of(key)
        while base is not None and not base.cut:
            base = await self._current_origin(key, base)
            if base.cut or base.kept or base.parent is None:
                break
            key = base.parent
            base = await self.base_of(key)
        return base or Origin()

    async def newest_base(self, key: SessionKey) -> Origin | None:
        """Return the newest origin in a session's own log."""
        log = self.inner.read_log(key, reverse=True)
        record = await first_record(log, lambda record: origin_in(record) is not None)
        return None if record is None else origin_in(record)

    async def has_removed(self, key: SessionKey, base: Origin) -> bool:
        """Return whether a session's own log has records that a pruning was to remove.

        The first epoch of a copy of what was pruned names what comes before it, and stays.
        """
        first = await first_record(self.inner.read_log(key, limit=1))
        return first is not None and first.seq <= base.cut - base.at and origin_in(first) != base

    def rebased(self, key: SessionKey, epoch: int, base: Origin) -> None:
        """Note that a session held here has a new origin in its log."""
        before = self._held.get(key)
        self._plain.pop(key, None)
        session = self._held[key] = _HeldSession(epoch, base)
        if before is not None:
            session.folded, session.inherited = before.folded, before.inherited

    @contextlib.contextmanager
    def undo_rebased(self, key: SessionKey, epoch: int) -> Iterator[None]:
        """Give a session held here its origin back if the block fails, whatever it noted."""
        before = self._held.get(key)
        try:
            yield
        except BaseException:
            if self._epoch_of(key) == epoch:  # else it was lost meanwhile
                if before is None:
                    self._held.pop(key, None)
                    self._plain[key] = epoch
                else:
                    self._held[key] = before
            raise

    # The log.

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        if self._opening:
            for batch in batches:
                self._opening.pop(batch.key, None)
        if self.capabilities.blobs and any(may_lift(batch.records) for batch in batches):
            return await self._append_with_media(batches)
        return await self._append(batches)

    async def _append_with_media(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Put the media of batches into blobs, and append the batches of which that was done."""
        outcomes: list[Outcome | None] = []
        ready: list[Batch] = []
        for batch in batches:
            try:
                records, media = await _lifted(batch)
                await self._put(batch.key.tenant, media)
            except Exception as error:  # noqa: BLE001  # becomes the outcome
                outcome = outcome_of(error)
                if outcome.status is Status.IN_DOUBT:  # no record was sent
                    outcome = Outcome(Status.TRANSIENT, error)
                outcomes.append(outcome)
            else:
                outcomes.append(None)
                ready.append(msgspec.structs.replace(batch, records=records))
        answers = iter(complete(await self._append(ready), len(ready)) if ready else [])
        return [next(answers) if outcome is None else outcome for outcome in outcomes]

    async def _put(self, tenant: str, media: Mapping[str, bytes]) -> None:
        some: dict[str, bytes] = {}
        for name, data in media.items():
            some[name] = data
            if sum(map(len, some.values())) >= AT_A_TIME:
                await self.inner.put_blobs(tenant, some)
                some = {}
        if some:
            await self.inner.put_blobs(tenant, some)

    async def _append(self, batches: Sequence[Batch]) -> list[Outcome]:
        lowered = [self._to_local_batch(batch) for batch in batches] if self._held else batches
        outcomes = await self.inner.append_many(lowered)
        for place, (batch, outcome) in enumerate(zip(batches, outcomes, strict=False)):
            if outcome.status in REFUSALS:
                outcomes[place] = await self._refused(batch, outcome)
        return outcomes

    async def _refused(self, batch: Batch, outcome: Outcome) -> Outcome:
        """Distinguish a takeover, or an invalid batch, from a store that has lost records."""
        epoch, begun = self._begun.get(batch.key, (0, 0))
        if outcome.status is Status.CONFLICT:
            self.forget(batch.key)
        if epoch == batch.epoch:
            outcome = await explain_refusal(self, batch, outcome, begun)
            if outcome.status is Status.IN_DOUBT:  # not known yet
                self._begun[batch.key] = epoch, begun
        return outcome

    def begun_at(self, key: SessionKey, epoch: int) -> int:
        """Return the seq of the epoch record under which this store holds a session; 0: unknown."""
        known, begun = self._begun.get(key, (0, 0))
        return begun if known == epoch else 0

    def begin_append(self, batch: Batch, done: Callable[[Outcome], object]) -> bool:
        """Append one batch without a task, where the inner store can; see the file store."""
        direct = self._direct
        if direct is None or batch.key in self._held:
            return False
        if self.capabilities.blobs and may_lift(batch.records):
            return False
        return direct.begin_append(batch, done)

    def _to_local_batch(self, batch: Batch) -> Batch:
        session = self._held.get(batch.key)
        if session is None or session.epoch != batch.epoch:
            return batch
        return Batch(batch.key, batch.epoch, batch.first - session.base.at, batch.records)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records, including those before the session's own log."""
        base = await self.base_of(key)
        if base is None:
            own = self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
            parts = [own]
        else:
            after = max(after, base.cut)
            parts = [self._own(key, base, after, before, reverse=reverse)]
            if after < base.at:
                parts.append(self._earlier(key, base, after, before, reverse=reverse))
            parts = parts if reverse else parts[::-1]
        remaining = limit
        for part in parts:
            async with contextlib.aclosing(part) as chunks:
                async for chunk in chunks:
                    if base is None or remaining is None or len(chunk.records) <= remaining:
                        yield chunk
                    else:
                        yield LogChunk(chunk.records[:remaining], chunk.settled)
                    if base is not None and remaining is not None:
                        remaining -= len(chunk.records)
                        if remaining <= 0:
                            return

    async def _own(
        self, key: SessionKey, base: Origin, after: int, before: int | None, *, reverse: bool
    ) -> AsyncGenerator[LogChunk, None]:
        """Read the session's own log, numbered after the history before it."""
        at = base.at
        if before is not None and before <= at + 1:
            return
        upto = None if before is None else before - at
        log = self.inner.read_log(key, after=max(after - at, 0), before=upto, reverse=reverse)
        async with contextlib.aclosing(log):
            async for chunk in log:
                yield (
                    chunk
                    if not at
                    else LogChunk(_with_global_seqs(chunk.records, at), chunk.settled)
                )

    async def _earlier(
        self, key: SessionKey, base: Origin, after: int, before: int | None, *, reverse: bool
    ) -> AsyncGenerator[LogChunk, None]:
        """Read the history before the session's own log, wherever it is now."""
        upto = base.at + 1 if before is None else min(before, base.at + 1)
        base = await self._current_origin(key, base)
        if base.kept:
            log = history.read(self.inner, key, base, after, upto, reverse=reverse)
        elif base.parent is not None:
            log = self.read_log(base.parent, after=after, before=upto, reverse=reverse)
        else:
            return
        async with contextlib.aclosing(log):
            async for chunk in log:
                yield chunk

    async def has(self, key: SessionKey, seq: int, epoch: int) -> bool:
        """Return whether a session has a record with this number and epoch."""
        record = await _record(self, key, seq)
        return record is not None and record.epoch == epoch

    async def is_sound(self, base: Origin, above: Origin | None) -> bool:
        """Return whether a fork continues what its parent has written, or keeps, itself.

        All do, so that no two sessions follow each other, as those of a stranger's store may.
        *above* is the parent's own origin.
        """
        if base.parent is None:
            return True
        if above is None or above.parent is None or above.at < base.at:
            return True
        newest = await self.newest_base(base.parent)  # it may have got its own history since
        return newest is not None and newest.parent is None

    async def _current_origin(self, key: SessionKey, base: Origin) -> Origin:
        """Return the current origin: a newer one, if the parent's history is not whole."""
        if base.parent is None:
            return base
        above = await self.base_of(base.parent)
        head = await self.is_sound(base, above)
        head = head and await self.has(base.parent, base.at, base.epoch)
        if head and (above is None or above.cut <= base.cut):
            return base
        newer = await self.newest_base(key)
        if head and (newer is None or newer.parent == base.parent):
            return base  # the fork was made of the rest
        if newer is None or newer.parent == base.parent:
            message = (
                f"session {key} continues record {base.at} of {base.parent}, which does not "
                "exist, or not any more: restore that session from a copy, or remove this one "
                f"with `perdure forget {key.agent}`"
            )
            raise CorruptRecordError(message, key=str(key), parent=str(base.parent), at=base.at)
        session = self._held.get(key)
        if session is not None:
            session.base = newer
        return newer

    async def head(self, key: SessionKey) -> int:
        own = await self.inner.head(key)
        base = await self.base_of(key) if own else None
        return own + (base.at if base else 0)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Trim the session's own log; earlier history is not touched."""
        base = await self.base_of(key)
        return await self.inner.trim(key, epoch, max(below - (base.at if base else 0), 1))

    # Documents.

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read documents: the session's own, else those that it began with."""
        have = await self.inner.read_documents(key, names)
        return await self._with_inherited(key, names, have)

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> RestoreData:
        """Read documents as above, and if the inner store can, the log after them."""
        data = self._opening.pop(key, None)
        if data is None or names is None or frozenset(names) != _RESTORED:
            data = await self._read_inner(key, names)
        have = await self._with_inherited(key, names, data.documents)
        if have is data.documents and (have.manifest is None or have.manifest.base is None):
            return data
        return RestoreData(have, may_have_items=data.may_have_items)

    async def _read_inner(self, key: SessionKey, names: Collection[str] | None) -> RestoreData:
        if self._restoring is not None:
            return await self._restoring.read_for_restore(key, names)
        return RestoreData(await self.inner.read_documents(key, names))

    async def _with_inherited(
        self, key: SessionKey, names: Collection[str] | None, have: Documents
    ) -> Documents:
        if have.manifest is not None:
            if have.manifest.epoch > self._epoch_of(key):
                self.forget(key)  # another process has it, and maybe another generation
            if have.manifest.base is None:
                return have
        if have.manifest is None and key in self._plain:
            return have
        session = self._held.get(key)
        base = session.base if session is not None else await self._origin_of(key, have)
        if base is None:
            return have
        if have.manifest is None:
            old = await self._inherited(key, base, names)
            return msgspec.structs.replace(
                old, damaged=have.damaged, remains=have.remains, cut=have.cut
            )
        have = history.to_global_seq(have, base.at)
        return await self._with_older(key, base, have) if base.cut else have

    async def _with_older(self, key: SessionKey, base: Origin, have: Documents) -> Documents:
        """Replace damaged documents of a pruned session by older ones: its log cannot rebuild
        them."""
        have = validated(have, key)
        if not have.damaged:
            return have
        old = await history.folded(self.inner, key, base, have.damaged)
        return msgspec.structs.replace(have, found={**old.found, **have.found})

    async def _inherited(
        self, key: SessionKey, base: Origin, names: Collection[str] | None
    ) -> Documents:
        session = self._held.get(key)
        if session is not None and session.inherited is not None:
            return _only(session.inherited, names)
        base = await self._current_origin(key, base)
        return await self._documents_at(key, base, names, base.at)

    async def _documents_at(
        self, key: SessionKey, base: Origin, names: Collection[str] | None, seq: int
    ) -> Documents:
        """Return the documents that a session with this origin begins with, as of up to *seq*."""
        if base.folded:
            return await history.folded(self.inner, key, base, names)
        if base.parent is None:
            return Documents()
        documents = await self.documents_upto(base.parent, min(seq, base.at), names)
        return history.inherit(documents, key, base)

    async def documents_upto(
        self, key: SessionKey, seq: int, names: Collection[str] | None = None
    ) -> Documents:
        """Return the documents of a session that are as of a record up to *seq*, if any are."""
        base = await self.base_of(key)
        have = history.up_to(validated(await self.read_documents(key, names), key), seq)
        if have.manifest is not None:
            return (
                await self._with_older(key, base, have) if base is not None and base.cut else have
            )
        if base is None:
            return Documents()
        base = await self._current_origin(key, base)
        return history.up_to(await self._documents_at(key, base, names, seq), seq)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Fold; the first fold of a session with inherited documents writes them as its own."""
        self._opening.pop(key, None)
        session = self._held.get(key)
        if session is None and key not in self._plain:
            base = await self.base_of(key)  # held through another Lineage
            session = None if base is None else _HeldSession(manifest.epoch, base)
        if session is None or session.epoch != manifest.epoch:
            await self.inner.write_documents(key, documents, manifest)
            return
        if not session.folded:
            own = (await self.inner.read_documents(key, ())).manifest
            listed = set() if own is None else set(own.documents)
            missing = manifest.documents.keys() - documents.keys() - listed
            if missing:
                theirs = await self._inherited(key, session.base, missing)
                documents = {
                    **{name: document.data for name, document in theirs.found.items()},
                    **documents,
                }
        lowered = history.to_local_seq(manifest, session.base)
        await self.inner.write_documents(key, documents, lowered)
        session.folded, session.inherited = True, None

    # Leases.

    async def acquire(
        self,
        key: SessionKey,
        *,
        after: int,
        first: int = 1,
        base: Origin | None = None,
        draft: Draft | None = None,
    ) -> HeldLease:
        grant = await self.inner.acquire(key, after=after, first=first, base=base, draft=draft)
        grant = await self._entered(key, grant)
        self._begun[key] = grant.epoch, grant.head
        return grant

    async def _entered(self, key: SessionKey, grant: HeldLease) -> HeldLease:
        self._held.pop(key, None)
        if grant.created:
            self._plain[key] = grant.epoch
            return grant
        self._plain.pop(key, None)
        try:
            session = await self._hold(key, grant.epoch)
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await self.inner.release(key, grant.epoch)
            raise
        if session is None:
            self._plain[key] = grant.epoch
            return grant
        self._held[key] = session
        return msgspec.structs.replace(grant, head=grant.head + session.base.at)

    async def _hold(self, key: SessionKey, epoch: int) -> _HeldSession | None:
        data = self._opening[key] = await self._read_inner(key, _RESTORED)
        have = data.documents
        base = await self._origin_of(key, have)
        if base is None:
            return None
        session = _HeldSession(epoch, base)
        if have.manifest is None:
            with contextlib.suppress(CorruptRecordError):  # to delete it, nothing of it is read
                session.inherited = await self._inherited(key, base, None)
        if base.cut > base.at and await self.has_removed(key, base):  # a pruning was killed
            await self.inner.trim(key, epoch, base.cut - base.at + 1)
        return session

    def _epoch_of(self, key: SessionKey) -> int:
        session = self._held.get(key)
        return self._plain.get(key, 0) if session is None else session.epoch

    def forget(self, key: SessionKey) -> None:
        """Forget a session: it is not held here any more."""
        self._held.pop(key, None)
        self._plain.pop(key, None)
        self._begun.pop(key, None)
        self._opening.pop(key, None)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self.inner.release(key, epoch)
        self.forget(key)

    # The inbox.

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        while (closing := self._closing.get(key)) is not None:
            await closing.over.wait()
        self._posting[key] += 1
        try:
            return await self.inner.enqueue(key, items, limit=limit)
        finally:
            self._posting[key] -= 1
            if not self._posting[key]:
                del self._posting[key]
                if (closing := self._closing.get(key)) is not None:
                    closing.posted.set()

    @contextlib.asynccontextmanager
    async def without_posts(self, key: SessionKey) -> AsyncGenerator[None, None]:
        """Have the posts of this process to a session wait, after those that are on their way.

        For whoever moves what waits for a session that is then deleted.
        """
        closing = self._closing[key] = _ClosingInbox()
        try:
            if self._posting[key]:
                await closing.posted.wait()
            yield
        finally:
            del self._closing[key]
            closing.over.set()

    async def delete(self, key: SessionKey, epoch: int) -> None:
        """Delete a session; the caller checks for forks."""
        await self.inner.delete(key, epoch)
        self.forget(key)


def _only(have: Documents, names: Collection[str] | None) -> Documents:
    if names is None:
        return have
    documents = {name: document for name, document in have.found.items() if name in names}
    return Documents(
        have.manifest, documents, tuple(document for document in have.damaged if document in names)
    )


def _with_global_seqs(records: tuple[Record, ...], at: int) -> tuple[Record, ...]:
    return tuple(
        Record(record.seq + at, record.epoch, record.kind, record.payload, record.end)
        for record in records
    )
