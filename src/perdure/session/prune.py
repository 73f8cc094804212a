"""Pruning: remove history that a retention no longer keeps, below a record that says so.

First the documents as of the cut are kept as blobs, then a ``base`` record names them, then the
session is folded, and only then the store removes records. So a failure or a kill at any step
leaves a session that opens as before, and pruning again completes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from functools import partial
from math import inf

import msgspec
from msgspec import UNSET

from perdure._lib.logs import log_facts
from perdure.checkpoints.chain import CHAIN_KINDS, CheckpointChain
from perdure.errors import (
    CorruptRecordError,
    FormatError,
    LeaseHeldError,
    LeaseLostError,
    PerdureError,
    SessionError,
    SessionNotFoundError,
    StoreUnavailableError,
)
from perdure.lineage import require_plain, require_unread
from perdure.memory.documents import TurnPayload
from perdure.memory.index import MEMORY, MemoryIndex
from perdure.memory.working_memory import SessionValues
from perdure.records.checkpoints import CHECKPOINTS
from perdure.records.json import decode, encode
from perdure.records.keys import DEFAULT_SESSION, SCOPES, SessionKey
from perdure.records.manifest import Manifest, Origin
from perdure.records.records import BASE, TURN, Entry, Record
from perdure.session.delete import forget as forget_sessions, tenant_sessions
from perdure.session.lifecycle import ExclusiveAccess, HandoverTerms
from perdure.session.media import put_blobs
from perdure.session.point_in_time import folded_at
from perdure.session.retention import (
    CheckpointHold,
    Pruned,
    PruneRefusal,
    PruneReport,
    Retention,
    TurnEndAt,
    cut_after,
    is_expired,
)
from perdure.session.stored import kept_documents
from perdure.store import Document, Documents, first_record, require_same

log: logging.Logger = logging.getLogger("perdure")

_IF_FREE = HandoverTerms(on_held="raise", wait=0)
_AT_ONCE = 200
"""Expired sessions that are held at a time."""


class _Cut(msgspec.Struct):
    after: int
    epoch: int
    """Of the last record that goes: a session that was created again has another or none."""
    turns: int
    kept_for: tuple[CheckpointHold, ...] = ()
    """Checkpoints that hold it back."""


class _Progress(msgspec.Struct):
    """A report that is being filled."""

    is_alone: bool
    """True if one session alone is pruned."""
    pruned: list[Pruned] = []
    expired: list[SessionKey] = []
    held: list[SessionKey] = []
    damaged: list[SessionKey] = []
    refused: list[PruneRefusal] = []
    kept_for: list[CheckpointHold] = []

    @contextmanager
    def unless_refused(self, key: SessionKey) -> Iterator[None]:
        """Continue with the others if one is held, deleted meanwhile, or cannot be read."""
        try:
            yield
        except (LeaseHeldError, LeaseLostError):
            self.held.append(key)
        except SessionNotFoundError:
            pass
        except SessionError as error:
            if self.is_alone:
                raise
            self.refused.append(PruneRefusal(key, str(error)))
        except FormatError as error:
            log_facts(log, logging.WARNING, "not pruned", error, session=str(key))
            self.damaged.append(key)

    def report(self, *, dry_run: bool) -> PruneReport:
        found = {name: tuple(getattr(self, name)) for name in self.__struct_fields__[1:]}
        return PruneReport(**found, dry_run=dry_run)


class _TurnEnds:
    """The ends of a log's turns, fed record by record; a turn without one ends at the next."""

    __slots__ = ("_begun_after", "_group_end", "_is_open", "bound", "found")

    def __init__(self) -> None:
        self.found: list[TurnEndAt] = []
        self.bound: float = inf
        """The last record that may go because of the newest turn: one that has an id, and no end,
        may be tried again, and that reads its newest attempt from the begin on."""
        self._begun_after: float = inf
        self._is_open = False
        self._group_end = 0

    def feed(self, record: Record) -> None:
        """Take the next record in."""
        if record.kind == TURN:
            turned = decode(record.payload, TurnPayload)
            begins = turned.phase == "begin"
            if not begins:
                self.found.append(TurnEndAt(record.seq, turned.at))
            elif self._is_open and not turned.resumed and self._group_end == record.seq - 1:
                # else it is in a group
                self.found.append(TurnEndAt(record.seq - 1, turned.at))
            self._is_open = begins
            if begins and not turned.resumed:
                self._begun_after = self._group_end
            self.bound = self._begun_after if turned.given and turned.phase != "end" else inf
        if record.end:
            self._group_end = record.seq


async def prune(
    access: ExclusiveAccess,
    retention: Retention,
    keys: list[SessionKey] | None,
    tenant: str,
    terms: HandoverTerms,
    *,
    dry_run: bool,
    scrub: bool,
) -> PruneReport:
    """Prune sessions of a tenant; those of *keys*, or all of them.

    With *scrub*, the store then removes what it keeps of removed data.

    Raises:
        SessionError: There is but one of *keys*, and it may not be pruned.

    """
    now, store = time.time(), access.store
    progress = _Progress(keys is not None and len(keys) == 1)
    expired = await _expired(access, retention, keys, tenant, now)
    for at in range(0, len(expired), _AT_ONCE):
        some = expired[at : at + _AT_ONCE]
        if dry_run:
            progress.expired += some
        else:
            await _expire(access, some, tenant, terms, progress)
    if keys is None and retention.cuts:
        async with aclosing(tenant_sessions(store, tenant)) as listed:
            keys = [info.key async for info in listed]
    for key in keys or () if retention.cuts else ():
        if key not in expired:
            with progress.unless_refused(key):
                cut = await _cut(access, key, retention, now)
                progress.kept_for += cut.kept_for
                progress.pruned += await _prune(access, key, cut, terms, dry_run=dry_run)
    if scrub and not dry_run and (progress.pruned or progress.expired):
        await store.scrub()
    return progress.report(dry_run=dry_run)


async def _expire(
    access: ExclusiveAccess,
    keys: list[SessionKey],
    tenant: str,
    terms: HandoverTerms,
    progress: _Progress,
) -> None:
    """Forget sessions together: each search for what others reach reads all of them.

    Where one of them is refused, nothing was removed: then each half is tried by itself.
    """
    forget = partial(forget_sessions, access, dry_run=False, look_for_carriers=False, scrub=False)
    if len(keys) == 1:
        with progress.unless_refused(keys[0]):
            await forget(keys, tenant, terms)
            progress.expired += keys
        return
    try:
        # One that is held elsewhere is in use by others: no handover is asked for.
        await forget(keys, tenant, HandoverTerms("raise", terms.wait))
        progress.expired += keys
    except (FormatError, LeaseHeldError, LeaseLostError, SessionError):
        half = len(keys) // 2
        for some in (keys[:half], keys[half:]):
            await _expire(access, some, tenant, terms, progress)


async def drop(access: ExclusiveAccess, key: SessionKey, cut: int, terms: HandoverTerms) -> None:
    """Remove a session's records up to one, where no checkpoint of it needs them."""
    needed = (await _chain(access, key)).needed
    if needed is not None and needed.event_seq < cut:
        return
    last = await access.record(key, cut)
    epoch = 0 if last is None else last.epoch
    if await _prune(access, key, _Cut(cut, epoch, 0), terms, dry_run=False):
        await access.store.scrub()


async def _expired(
    access: ExclusiveAccess,
    retention: Retention,
    keys: list[SessionKey] | None,
    tenant: str,
    now: float,
) -> list[SessionKey]:
    """Return expired sessions; a default session, which holds what all share, expires last."""
    if retention.expire_days is None:
        return []
    expired, open_here = list[SessionKey](), access.sessions
    used = {key.agent for key in open_here if key.tenant == tenant}
    async with aclosing(tenant_sessions(access.store, tenant)) as listed:
        async for info in listed:
            # Only changes of a scope are noted, and others may read it every day.
            if info.key.agent == SCOPES:
                continue
            if not is_expired(info, retention, now):
                used.add(info.key.agent)
            elif info.key not in open_here and (keys is None or info.key in keys):
                expired.append(info.key)
    return [key for key in expired if key.session != DEFAULT_SESSION or key.agent not in used]


async def _prune(
    access: ExclusiveAccess, key: SessionKey, cut: _Cut, terms: HandoverTerms, *, dry_run: bool
) -> list[Pruned]:
    before = await access.store.base_of(key)
    require_plain(key, before)
    # Cut before. A pruning that was killed may have left records below.
    if cut.after <= (before.cut if before else 0):
        return [] if before is None or dry_run else await _finish(access, key, before)
    if dry_run:
        return [Pruned(key, cut.after, cut.turns)]
    await require_unread(access.store, access.store.inner, key)
    freed = await _rebase(access, key, cut, terms)
    return [] if freed is None else [Pruned(key, cut.after, cut.turns, freed)]


async def _finish(access: ExclusiveAccess, key: SessionKey, base: Origin) -> list[Pruned]:
    """Remove what a pruning that failed, or was killed, has left in the store below its cut."""
    store, before, freed = access.store, await _first(access, key), 0
    if not await store.has_removed(key, base):
        return []
    with suppress(LeaseHeldError, LeaseLostError, SessionNotFoundError):
        async with access.exclusive(key):
            session = access.sessions.get(key)
            manifest, holder = await _manifest(access, key), await store.holder(key)
            # It was pruned further, or is gone.
            if manifest.base != base or holder is None:
                pass
            elif session is not None:
                freed = await store.trim(key, session.epoch, base.cut + 1)
            elif holder.epoch == manifest.epoch:  # else it was held, and looked after, since
                async with access.held(key, _IF_FREE) as hold:
                    freed = await store.trim(key, hold.epoch, base.cut + 1)
    return [Pruned(key, base.cut, 0, freed)] if await _first(access, key) > before else []


async def _first(access: ExclusiveAccess, key: SessionKey) -> int:
    """Return the first record that the store has of a session's own log, 0 for none."""
    first = await first_record(access.store.inner.read_log(key, limit=1))
    return 0 if first is None else first.seq


async def _cut(access: ExclusiveAccess, key: SessionKey, retention: Retention, now: float) -> _Cut:
    ends, epochs = _TurnEnds(), [(0, 0)]
    async with aclosing(access.store.read_log(key)) as log:
        async for chunk in log:
            for record in chunk.records:
                ends.feed(record)
                if record.epoch != epochs[-1][1]:
                    epochs.append((record.seq, record.epoch))
    turns, kept_for = ends.found, tuple[CheckpointHold, ...]()
    after = cut_after(turns, retention, now)
    needed, bound = (await _chain(access, key)).needed, ends.bound
    if needed is not None and needed.event_seq < min(after, bound):
        bound = needed.event_seq
        kept_for = (CheckpointHold(key, needed.id),)
    if bound < after:
        turns = [turn for turn in turns if turn.seq <= bound]
        after = turns[-1].seq if turns else 0
    # Proves later that the record at the cut is still this log's.
    _, epoch = max(begun for begun in epochs if begun[0] <= after)
    return _Cut(after, epoch, sum(turn.seq <= after for turn in turns), kept_for)


async def _chain(access: ExclusiveAccess, key: SessionKey) -> CheckpointChain:
    """Return the chain of a session's checkpoints, whichever process holds it."""
    have = await access.store.read_documents(key, {CHECKPOINTS})
    document = have.found.get(CHECKPOINTS)
    data, since = (None, 0) if document is None else (document.data, document.as_of_seq)
    async with aclosing(access.store.read_log(key, after=since)) as log:
        records = (record async for chunk in log for record in chunk.records)
        return CheckpointChain.of(data, [one async for one in records if one.kind in CHAIN_KINDS])


async def _base(
    access: ExclusiveAccess, key: SessionKey, wanted: _Cut, epoch: int
) -> Origin | None:
    """Keep the session's state at the cut, as its holder.

    None if another pruning has cut as much since: a cut never goes back.

    Raises:
        SessionNotFoundError: The session was deleted, and maybe made again, since then.

    """
    store, cut = access.store, wanted.after
    before = await store.base_of(key) or Origin()
    if cut <= before.cut:
        return None
    if not await store.has(key, cut, wanted.epoch):
        raise SessionNotFoundError(f"session {key} was deleted meanwhile", key=str(key))
    try:
        was = await folded_at(store, key, cut, access.runtime.limits)
    except CorruptRecordError:
        # No damage if it was deleted, or taken over, while it was read.
        await require_same(store, key, held=epoch)
        raise
    await put_blobs(store, key.blobs, was.blobs)
    await _keep_values(access, key, was.data)
    documents = {name: Document(data, cut) for name, data in was.data.items()}
    folded, blobs = kept_documents(Documents(was.manifest, documents))
    if blobs:
        await store.put_blobs(key.blobs, blobs)
    return Origin(cut=cut, folded=folded, moved=before.moved)


async def _keep_values(access: ExclusiveAccess, key: SessionKey, data: Mapping[str, bytes]) -> None:
    """Restore lost blobs, as long as the log still has their values."""
    entries = MemoryIndex.of_document(data.get(MEMORY)).entries.values()
    large = [entry for entry in entries if entry.sha256 is not UNSET]
    present = set(await access.store.blob_names(key.blobs)) if large else set()
    for entry in large:
        if entry.sha256 is not UNSET and entry.sha256 not in present:
            with suppress(CorruptRecordError):  # the log has lost it, too
                value = await SessionValues(access.store, key).read(entry)
                await access.store.put_blobs(key.blobs, {entry.sha256: value})


async def _rebase(
    access: ExclusiveAccess, key: SessionKey, cut: _Cut, terms: HandoverTerms
) -> int | None:
    """Remove history, open here or not; return the bytes freed, None if it is gone already."""
    store = access.store
    async with access.exclusive(key), AsyncExitStack() as stack:
        session = access.sessions.get(key)
        append: Callable[[Entry], Awaitable[None]]
        if session is not None:
            epoch, append = session.epoch, partial(access.append_open, session)
            fold_open = partial(access.lifecycle.fold, session)
            fold = partial(access.runtime.saver.exclusive, session._tracked, fold_open)
        else:
            hold = await stack.enter_async_context(access.held(key, terms))
            epoch, append, fold = hold.epoch, hold.append, partial(access.fold, hold)
        # 1. Keep the documents as of the cut, in blobs.
        base = await _base(access, key, cut, epoch)
        if base is None:
            return None
        # 2. Fold beyond the cut: from then on the documents need nothing below it.
        await fold()
        if (await _manifest(access, key)).as_of_seq < base.cut:
            raise await _not_folded(access, key, epoch)
        # 3. Name the base in the log.
        await append(Entry(BASE, encode(base)))
        # 4. Name it in the manifest, which an open reads first.
        with store.rebased(key, epoch, base):
            await fold()
            if (await _manifest(access, key)).base != base:
                raise await _not_folded(access, key, epoch)
        # 5. Only now remove records.
        return await store.trim(key, epoch, base.cut + 1)


async def _manifest(access: ExclusiveAccess, key: SessionKey) -> Manifest:
    """Return the manifest of a session's own documents, an empty one if there are none."""
    manifest = (await access.store.inner.read_documents(key, ())).manifest
    return manifest or Manifest(key=key, epoch=0, as_of_seq=0)


async def _not_folded(access: ExclusiveAccess, key: SessionKey, epoch: int) -> PerdureError:
    """Return why documents do not hold yet what is about to be removed, or raise it."""
    await require_same(access.store, key, held=epoch)
    return StoreUnavailableError(
        f"session {key} could not be folded, so it was not pruned: try again", key=str(key)
    )
