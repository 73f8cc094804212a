"""Migration of all sessions of a store to another one: verified, crash-safe, repeatable.

A session is read without a lease, even while a program writes it. It is written under a lease in
the target, then read back and compared. Each further run copies what is new: it compares the
target's records with the source's, one by one, and continues after them. The source is unchanged,
pending inbox items included.

Sequence numbers decide how. A lease in the target takes the number after its last record. If the
source has an epoch record there, the copy continues. If a program has held the session throughout,
the source has another record at that number, so the target's copy is deleted and written again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, final

import anyio
import msgspec

from perdure import errors
from perdure._lib.tasks import each
from perdure.lease import LeaseOptions, OnHeld, OwnerWatch, while_beating
from perdure.lineage import require_unread
from perdure.memory.documents import InboxTakenPayload
from perdure.records.json import decode
from perdure.records.keys import SessionKey, require_filters, stored_key
from perdure.records.manifest import Origin
from perdure.records.records import FORK, GAP, TAKEN, Record
from perdure.session.copied import OWN_KINDS
from perdure.session.copier import CopiedSession, OnEpoch, continue_copy, copy_session
from perdure.session.options import Limits, require_no_backup
from perdure.session.reach import ReachedBlob, lost_error
from perdure.session.stored import SessionStore, followed
from perdure.store import DeadLetter, Document, Draft, HeldLease, PendingItem, Store, first_record
from perdure.transfer import bundle_files, receipts
from perdure.transfer.bundle import neutral
from perdure.transfer.bundle_files import ChangedError, dead_letters_of
from perdure.transfer.receipts import ReceiptState
from perdure.transfer.second_look import look_again

AT_ONCE: Final = 8
PAGE: Final = 500
TRIES: Final = 3
PAUSE: Final = 0.2
"""Seconds before the next attempt at a session that changed while it was read."""
POSTS: Final = 100


class MigrationProgress(msgspec.Struct, frozen=True):
    """Progress of a migration."""

    done: int
    total: int
    key: SessionKey
    """The session that was just processed."""


class Migration(msgspec.Struct, kw_only=True):
    """Result of a migration."""

    sessions: int = 0
    """Sessions in the source."""
    copied: int = 0
    """Sessions that were written in full."""
    continued: int = 0
    """Sessions of which the target had the beginning; the rest was appended."""
    there: int = 0
    """Sessions that the target already had, equal in every record."""
    deleted: int = 0
    """Sessions that an earlier run had copied and the source has deleted since."""
    open: int = 0
    """Sessions open in the source: run again when their program has ended."""
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Bytes of records, documents and blobs that were copied."""
    empty: int = 0
    """Sessions without any record or document: there is nothing to copy."""
    posted: int = 0
    """Pending inbox items that this run copied to the target."""
    dead_letters: int = 0
    """Dead letters that this run copied to the target."""
    failed: dict[str, str] = {}
    """Why a session was not copied, by key."""


async def migrate(
    source: Store,
    target: Store,
    *,
    tenants: Sequence[str] | None = None,
    on_held: OnHeld = "handover",
    wait: float = 10.0,
    progress: Callable[[MigrationProgress], None] | None = None,
) -> Migration:
    """Copy every session of an open store into another open store, and verify each.

    Crash-safe and repeatable; it may run while a program writes to the source. Each run copies what
    is new since the previous one. Run one at a time into a target: a second one beside it may name
    as failed what the first is just writing, and the next run copies that.

    A session that the target already has is replaced only if it is a prefix of the source's.
    Pending items, also those of sessions that were never opened, and dead letters are copied, too.
    The source is unchanged.

    Args:
        source: The store to copy from; only read, without a lease, so it may be open read-only.
        target: The store to copy to.
        tenants: The tenants whose sessions to copy; None for all.
        on_held: What to do about a session that another process holds in the target.
        wait: Seconds to wait for a holder.
        progress: Called after each session.

    Raises:
        ConfigError: The source or the target is a backup.

    """
    report = Migration()
    mover = _Mover(source, target, report, on_held=on_held, wait=wait)
    act = partial(_move_all, mover, source, tenants, progress)
    await while_beating((target,), act, watches=mover.watches)
    return report


async def _move_all(
    mover: _Mover,
    source: Store,
    tenants: Sequence[str] | None,
    progress: Callable[[MigrationProgress], None] | None,
) -> None:
    for store in (source, mover.target):
        await require_no_backup(store)
    names = await source.tenants() if tenants is None else tenants
    keys = [key for tenant in names for key in await keys_of(source, tenant)]
    report, done = mover.report, 0
    report.sessions = len(keys)

    def wanted(keys: Sequence[SessionKey]) -> set[SessionKey]:
        return {key for key in keys if tenants is None or key.tenant in tenants}

    mover.waiting = wanted(await source.sessions_with_pending_items())
    mover.with_letters = wanted(await with_dead_letters(source))
    mover.target_letters = wanted(await with_dead_letters(mover.target))
    no_sessions = sorted((mover.waiting | mover.with_letters).difference(keys))

    async def move(key: SessionKey) -> None:
        nonlocal done
        try:
            await mover.move(key)
        except errors.PerdureError as error:
            report.failed[str(key)] = str(error)
        done += 1
        if progress is not None:
            progress(MigrationProgress(done, len(keys) + len(no_sessions), key))

    await each(keys, move, at_once=AT_ONCE)
    await mover.follow_deletions(keys, tenants)
    await each(no_sessions, move, at_once=AT_ONCE)
    await mover.tidy()


async def with_dead_letters(store: Store) -> list[SessionKey]:
    """List the sessions that have dead letters, none where the store keeps none."""
    return (
        await store.sessions_with_pending_items(dead_letters=True)
        if store.capabilities.dead_letters
        else []
    )


async def keys_of(store: Store, tenant: str) -> list[SessionKey]:
    """List all sessions of a tenant."""
    keys: list[SessionKey] = []
    require_filters(tenant=tenant)
    while True:
        after = keys[-1] if keys else None
        page = await store.sessions(tenant=tenant, after=after, limit=PAGE)
        keys += [info.key for info in page]
        if len(page) < PAGE:
            return keys


class _Compared(msgspec.Struct, frozen=True):
    """Comparison of the target's copy of a session with the source."""

    head: int = 0
    """The target's last record."""
    epoch: int = 0
    """The target's newest epoch, from before its log was read."""
    next: int = 0
    """The source's first record that the target does not have; 0 for none."""
    pruned: bool = False
    """Whether the target has history that the source has pruned."""
    proven: bool = True
    """Whether records of both were compared, unless one of them has none."""
    differs: int = 0
    """The first record that the source lacks, or that differs from the source's; 0 for none."""
    op_ids: frozenset[str] = frozenset()
    """Op ids of inbox items that are in the source's log."""


def _changed_there(target: Store, key: SessionKey) -> ChangedError:
    return ChangedError(f"{key} changed in {target.location} meanwhile: try again", key=str(key))


@final
class _Mover:
    def __init__(
        self, source: Store, target: Store, report: Migration, *, on_held: OnHeld, wait: float
    ) -> None:
        self._source = source
        self.target: Store = target
        self.report = report
        self.waiting: set[SessionKey] = set()
        """Sessions with pending items in the source."""
        self.with_letters: set[SessionKey] = set()
        """Sessions with dead letters in the source."""
        self.target_letters: set[SessionKey] = set()
        """Sessions with dead letters in the target."""
        self._on_held: OnHeld = on_held
        self._wait = wait
        self._blobs: dict[str, set[str]] = {}
        """Names of the blobs that the target has, by tenant."""
        self._sound: dict[str, set[str]] = {}
        """Names of those that were read back, with all that they name."""
        self._deleted: set[SessionKey] = set()
        self._open: set[SessionKey] = set()
        self._receipts: dict[SessionKey, set[str]] = {}
        """Names of the receipts of a session that this run knows."""
        self._stale: dict[str, set[str]] = {}
        """Names of the receipts that were replaced, by tenant."""
        self.watches = {target.owner: OwnerWatch(LeaseOptions(), anyio.current_time)}

    async def move(self, key: SessionKey) -> None:
        """Copy what the target lacks of a session: records, pending items and dead letters."""
        stored_key(key.agent)  # a source may be anybody's: it brings no keys, and no journal
        await look_again(self._source, key, lambda: self._move(key))
        self.report.open = len(self._open)

    async def _move(self, key: SessionKey) -> None:
        holder = await self._source.holder(key)
        if holder is not None and holder.deleted and key not in self.waiting:
            self._deleted.add(key)  # since it was listed
            return
        if holder is not None and not holder.released and holder.alive is not False:
            self._open.add(key)
        if await self._known(key) is not None and not await self._is_of_before(key):
            self.report.there += 1
        elif await self._is_empty(key):
            self.report.empty += 1
            await self._empty_it(key)
        else:
            await self._bring(key)
        try:
            if key in self.waiting:
                await self._post(key)
        finally:
            if key in self.with_letters | self.target_letters:
                await self._bring_letters(key)

    async def _is_empty(self, key: SessionKey) -> bool:
        """Say whether a session has no record and no document; it may never have been opened."""
        if (await self._source.read_documents(key, ())).manifest is not None:
            return False
        head = await followed(self._source).head(key)
        async with contextlib.aclosing(_content(followed(self._source), key, head)) as records:
            return await anext(records, None) is None

    async def _empty_it(self, key: SessionKey) -> None:
        """Delete the target's copy if the source has deleted the original, opened again or not."""
        before = await receipts.state_of(self._source, key)
        compared = await self._compare(key)
        now = await self._source.holder(key)
        if now is not None and now.deleted:  # also if a run that was cut has left an empty copy
            await self._follow_deletion(key)
        elif not compared.differs:
            return
        elif now is None:  # it was only posted to
            self._require_beginning(key, compared)
        elif await self._is_another_life(key, compared, before):
            await self._remove(key, compared)

    async def _bring(self, key: SessionKey) -> None:
        for remaining in reversed(range(TRIES)):
            try:
                await self._catch_up(key)
            except (errors.LeaseHeldError, errors.ConfigError, errors.StoreUnavailableError):
                # It changed on either side: a write of a killed run may arrive after its end.
                if not remaining:
                    raise
            else:
                return
            await anyio.sleep(PAUSE)

    async def _catch_up(self, key: SessionKey) -> None:
        before = await receipts.state_of(self._source, key)
        lives = await self._generations(key)
        note = partial(self._note, key, lives)
        compared = await self._compare(key)
        self._supersede(key, receipts.untouched(self._source, key, compared.epoch))
        starts_over = compared.head > 0 and (
            await self._is_another_life(key, compared, before)
            # The target's log cannot be continued under the source's numbers.
            or compared.pruned
            or await self._is_of_before(key)
            or 0 < compared.next <= compared.head + 1
        )
        if starts_over:
            await self._remove(key, compared)
        if starts_over or not compared.head:
            written = await self._copied(key, partial(self._fresh_copy, key, note))
            self.report.copied += 1
        elif not compared.next and (
            await _documents(self._source, key) == await _documents(self.target, key)
        ):
            await self._read_blobs_back(key)
            self.report.there += 1
            await self._acknowledge(key, compared.epoch, before, lives)
            return
        else:
            async with self._lease(key) as grant:
                self._require_unchanged(compared, grant)
                await note(grant.epoch)
                written = await self._copied(key, partial(self._continued, grant))
            self.report.continued += 1
        self.report.records += written.records
        self.report.blobs += written.blobs
        self.report.bytes += written.bytes
        await self._acknowledge(key, written.epoch, before, lives)

    async def _copied(
        self, key: SessionKey, copy: Callable[[Draft], Awaitable[CopiedSession]]
    ) -> CopiedSession:
        """Have the copier write a session to the target, and compare what is there then."""
        lineage = followed(self._source)
        bundle_files.require_whole(key, await lineage.read_documents(key))
        newest = await first_record(lineage.read_log(key, reverse=True, limit=1))
        if newest is None:
            raise ChangedError(f"{key} was deleted while it was read: try again", key=str(key))
        draft = Draft(source=key, generation=newest.epoch, up_to=newest.seq, purpose="migrate")
        before = await receipts.state_of(self._source, key)
        try:
            written = await copy(draft)
        except (errors.HistoryPrunedError, errors.SessionNotFoundError) as error:
            raise ChangedError(str(error), key=str(key)) from error
        is_lost = bool((await self.target.read_documents(key)).damaged)
        try:
            compared = await self._compare(key)
            is_lost = is_lost or compared.differs > 0 or 0 < compared.next <= newest.seq
        except ChangedError:
            if before != await receipts.state_of(self._source, key):
                raise
            is_lost = True  # the target's log has not all that it was given
        if is_lost:
            raise errors.StoreError(
                f"session {key} is not the same in {self.target.location} after it was "
                "written: another program writes there, or the store is not sound",
                key=str(key),
            )
        await self._read_blobs_back(key)
        return written

    async def _fresh_copy(self, key: SessionKey, note: OnEpoch, draft: Draft) -> CopiedSession:
        watch, limits = self.watches[self.target.owner], Limits()
        move = partial(copy_session, self._source, key, self.target, key, draft=draft)
        return await move(watch=watch, limits=limits, on_epoch=note)

    async def _continued(self, grant: HeldLease, draft: Draft) -> CopiedSession:
        move = partial(continue_copy, self._source, grant.key, self.target, grant)
        return await move(draft=draft, limits=Limits())

    async def _is_another_life(
        self, key: SessionKey, compared: _Compared, before: ReceiptState | None
    ) -> bool:
        """Say whether the source has deleted the session that the target has, and restarted it.

        Raises:
            StoreError: The target has other records, which did not come from this source.

        """
        if not compared.differs and compared.proven:
            return False
        untouched = await self._is_untouched(key, compared.epoch)
        if untouched and not compared.differs:
            return True  # the source has pruned all records that the target has
        # The first record alone tells where it is known: a rename keeps the time of creation.
        lives = (await self._generations(key))[:1]
        if untouched and lives and not await self._has(key, lives[0]):
            return True
        now = await receipts.state_of(self._source, key)
        if before is None or now is None or now.epoch != before.epoch:
            raise ChangedError(f"{key} was deleted while it was read: try again", key=str(key))
        self._require_beginning(key, compared)
        raise errors.StoreError(
            f"{self.target.location} has a session {key} with other history than what was "
            f"left of it in {self._source.location} after pruning: {_way_out(key)}",
            key=str(key),
            seq=compared.head,
        )

    async def _read_blobs_back(self, key: SessionKey) -> None:
        """Read all blobs that the target's copy reaches, and copy again those that it lacks.

        Raises:
            CorruptRecordError: The source has lost some, too; all else of the session is there.

        """
        tenant = key.tenant
        sound = self._sound.setdefault(tenant, set())
        lost: list[ReachedBlob] = []
        reached = (await bundle_files.reach(self.target, key)).blobs(sound, other=self._source)
        async with contextlib.aclosing(reached) as blobs:
            async for blob in blobs:
                if blob.data is None:
                    lost.append(blob)
                elif blob.why:
                    await self.target.put_blobs(tenant, {blob.name: blob.data})
                if blob.is_whole:
                    sound.add(blob.name)
        if lost:
            raise lost_error(
                key,
                lost,
                f"all else of it is in {self.target.location}; put the blob back into "
                f"{self._source.location} from a copy, and run this again",
            )

    # comparing

    async def _compare(self, key: SessionKey) -> _Compared:
        """Compare the target's records with the source's, one by one."""
        holder = await self.target.holder(key)
        head = 0 if holder is None or holder.deleted else await followed(self.target).head(key)
        if holder is None or not head:
            return _Compared()
        op_ids: set[str] = set()
        cut = (await followed(self._source).beginning_of(key)).cut
        shared, pruned, has_any, differs = 0, False, False, 0
        theirs = _content(followed(self.target), key, head)
        ours = _content(followed(self._source), key, await followed(self._source).head(key))
        async with contextlib.aclosing(theirs), contextlib.aclosing(ours):
            our = await anext(ours, None)
            async for record in theirs:
                has_any = True
                is_before = record.seq <= cut or (our is not None and record.seq < our.seq)
                if is_before and not shared:
                    pruned = True
                    continue
                if record != our:
                    differs = record.seq
                    break
                shared += 1
                if record.kind == TAKEN:
                    op_ids.update(decode(record.payload, InboxTakenPayload).ops)
                our = await anext(ours, None)
            following = 0 if our is None else our.seq
            while our is not None:
                if our.kind == TAKEN:
                    op_ids.update(decode(our.payload, InboxTakenPayload).ops)
                our = await anext(ours, None)
        if differs:
            return _Compared(head, holder.epoch, differs=differs, op_ids=frozenset(op_ids))
        proven = bool(shared) or not has_any
        return _Compared(
            head, holder.epoch, following, pruned, proven=proven, op_ids=frozenset(op_ids)
        )

    def _require_beginning(self, key: SessionKey, compared: _Compared) -> None:
        """Raise unless the target's records may come from an earlier run."""
        if not compared.differs:
            return
        raise errors.StoreError(
            f"{self.target.location} has another session {key}: its record {compared.differs} is "
            f"not in {self._source.location}, or another one there; {_way_out(key)}",
            key=str(key),
            seq=compared.differs,
        )

    def _require_unchanged(self, compared: _Compared, grant: HeldLease) -> None:
        if (grant.epoch, grant.head) != (compared.epoch + 1, compared.head + 1):
            raise _changed_there(self.target, grant.key)

    async def _is_of_before(self, key: SessionKey) -> bool:
        """Say whether the target's copy is numbered after a base, and cannot be written."""
        base = await followed(self.target).base_of(key)
        return base is not None and base.at > 0

    # receipts of earlier runs

    async def _acknowledge(
        self, key: SessionKey, epoch: int, before: ReceiptState | None, lives: Sequence[bytes]
    ) -> None:
        """Write receipts that the target's copy, under this epoch, is a migration's alone.

        Args:
            key: The session.
            epoch: The target's epoch when both were found equal.
            before: The source's state when the comparison began.
            lives: Receipts of the session's generation.

        """
        copied = await receipts.state_of(self.target, key)
        if copied is None or copied.epoch != epoch:
            return  # a program has opened it in the target
        written = [receipts.untouched(self._source, key, epoch)]
        if before is not None and before == await receipts.state_of(self._source, key):
            written.append(receipts.equal(self._source, key, before, copied))
        await self._leave(key, [*written, *lives])
        valid = set(map(receipts.name, written))
        self._stale.setdefault(key.tenant, set()).update(self._receipts.get(key, set()) - valid)
        self._receipts[key] = valid

    async def _leave(self, key: SessionKey, written: Sequence[bytes]) -> None:
        await self.target.put_blobs(
            key.tenant, {receipts.name(receipt): receipt for receipt in written}
        )

    def _supersede(self, key: SessionKey, *written: bytes) -> None:
        """Mark receipts for removal once the session has new ones."""
        self._receipts.setdefault(key, set()).update(map(receipts.name, written))

    async def tidy(self) -> None:
        """Remove the receipts that newer ones have replaced."""
        for tenant, names in self._stale.items():
            if names:
                await self.target.remove_blobs(tenant, names)

    async def _note(self, key: SessionKey, lives: Sequence[bytes], epoch: int) -> None:
        """Write the receipt that a target's epoch is a migration's, before writes under it."""
        own = receipts.untouched(self._source, key, epoch)
        self._supersede(key, own)
        await self._leave(key, [own, *lives])

    async def _is_untouched(self, key: SessionKey, epoch: int) -> bool:
        return await receipts.is_untouched(self._source, self.target, key, epoch)

    async def _has(self, key: SessionKey, receipt: bytes) -> bool:
        return await self.target.get_blob(key.tenant, receipts.name(receipt)) is not None

    async def _known(self, key: SessionKey) -> ReceiptState | None:
        """Return the source's state if both were found equal, and neither has changed since."""
        copied = await receipts.state_of(self.target, key)
        original = None if copied is None else await receipts.state_of(self._source, key)
        if original is None or copied is None:
            return None
        receipt = receipts.equal(self._source, key, original, copied)
        if not await self._has(key, receipt):
            return None
        self._supersede(key, receipt)
        return original

    async def _generations(self, key: SessionKey) -> list[bytes]:
        """Return receipts that tell a session from an earlier, deleted one of the same key."""
        marks: list[object] = []
        async with contextlib.aclosing(self._source.read_log(key, limit=1)) as log:
            async for chunk in log:
                marks += [record.epoch for record in chunk.records if record.seq == 1]
        manifest = (await self._source.read_documents(key, ())).manifest
        if manifest is not None and manifest.about.created_at is not None:
            marks.append(f"of {manifest.about.created_at}")
        return [receipts.life(self._source, key, mark) for mark in marks]

    async def _remove(self, key: SessionKey, compared: _Compared) -> None:
        """Delete the target's copy, so that it can be written again in full."""
        await require_unread(followed(self.target), self.target, key)
        async with self._lease(key) as grant:
            self._require_unchanged(compared, grant)
            waiting = await self.target.receive(key, grant.epoch, limit=bundle_files.ALL)
            known = {*compared.op_ids, *(item.op_id for item in await self._posted(key))}
            own = [item for item in waiting if item.op_id not in known]
            own = [item for item in own if item.kind != FORK]
            if own:  # posted in the target: copied back after the session is
                await self._source.enqueue(key, own)
                self.waiting.add(key)
            await self._require_no_own_letters(key)
            # First: a later run must see that a migration deleted it, not a user.
            note = receipts.removed(self._source, key, grant.epoch)
            self._supersede(key, note)
            await self._leave(key, [note])
            await self.target.delete(key, grant.epoch)

    async def _require_no_own_letters(self, key: SessionKey) -> None:
        """Raise if the target has dead letters of its own."""
        known = {letter.item.op_id for letter in await dead_letters_of(self._source, key)}
        own = [
            letter
            for letter in await dead_letters_of(self.target, key)
            if letter.item.op_id not in known and not await self._is_copy(key, letter)
        ]
        if own:
            tenant = f" --tenant {key.tenant}" if key.tenant else ""
            raise errors.StoreError(
                f"{self.target.location} has {len(own)} dead letters of {key}, which would be "
                f"lost if it were deleted or written again there: `perdure inbox {key.agent} "
                f"--session {key.session}{tenant} --store TARGET --retry --all` lets them wait "
                "again, or --drop removes them; then migrate again",
                key=str(key),
                count=len(own),
            )

    async def follow_deletions(
        self, keys: Sequence[SessionKey], tenants: Sequence[str] | None
    ) -> None:
        """Delete what the source has deleted since it was copied."""
        present = set(keys).difference(self._deleted)
        names = await self.target.tenants() if tenants is None else tenants
        remaining = [key for name in names for key in await keys_of(self.target, name)]
        remaining = [key for key in remaining if key not in present]
        for key in remaining:
            try:
                await self._follow_deletion(key)
            except errors.PerdureError as error:
                self.report.failed[str(key)] = str(error)

    async def _follow_deletion(self, key: SessionKey) -> None:
        original, copy = await self._source.holder(key), await self.target.holder(key)
        if original is None or not original.deleted or copy is None or copy.deleted:
            return  # never one of the source's, or gone from both
        if not await self._is_untouched(key, copy.epoch):
            raise errors.StoreError(
                f"{self._source.location} has deleted {key}, and {self.target.location} has it: "
                f"it was written there since, or never came from here; {_way_out(key)}",
                key=str(key),
            )
        await require_unread(followed(self.target), self.target, key)
        async with self._lease(key) as grant:
            # Whoever held it may have written before it let go.
            if grant.epoch != copy.epoch + 1 or not await self._is_untouched(key, copy.epoch):
                raise _changed_there(self.target, key)
            await self._require_no_own_letters(key)
            await self.target.delete(key, grant.epoch)
            self.report.deleted += 1

    # pending items

    async def _posted(self, key: SessionKey) -> list[PendingItem]:
        """Return the source's pending items, without taking the lease."""
        if key not in self.waiting:
            return []
        for remaining in reversed(range(TRIES)):
            holder = await self._source.holder(key)
            epoch = 0 if holder is None else holder.epoch
            try:
                return await self._source.receive(key, epoch, limit=bundle_files.ALL)
            except errors.LeaseLostError:  # a program has just opened it
                if not remaining:
                    raise
            await anyio.sleep(PAUSE)
        raise AssertionError("unreachable")

    async def _post(self, key: SessionKey) -> None:
        """Post the source's pending items to the target; the op id makes a repeat a no-op.

        Raises:
            NotStorableError: The target refused some items; the others were posted.

        """
        posted = await self._posted(key)
        refused = {
            item.op_id: errors.NotStorableError(item.damage, key=str(key))
            for item in posted
            if item.damage
        }
        posted = [item for item in posted if not item.damage]
        for at in range(0, len(posted), POSTS):
            refused |= await self._passed_on(key, posted[at : at + POSTS])
        if refused:
            first = next(iter(refused.values()))
            raise errors.NotStorableError(
                f"{len(refused)} of its posts cannot be stored there: {first}",
                key=str(key),
                count=len(refused),
            ) from first

    async def _passed_on(
        self, key: SessionKey, waiting: Sequence[PendingItem]
    ) -> dict[str, errors.NotStorableError]:
        """Post items to the target; return the errors of refused ones by op id."""
        try:
            new = await self.target.enqueue(key, waiting)
        except errors.NotStorableError as error:
            if len(waiting) == 1:
                return {waiting[0].op_id: error}
        else:
            self.report.posted += new
            return {}
        middle = len(waiting) // 2
        head = await self._passed_on(key, waiting[:middle])
        return head | await self._passed_on(key, waiting[middle:])

    # dead letters

    async def _is_copy(self, key: SessionKey, letter: DeadLetter) -> bool:
        return await self._has(key, receipts.copied_letter(self._source, key, letter))

    async def _bring_letters(self, key: SessionKey) -> None:
        """Copy the dead letters that the target lacks, and drop those that the source dropped.

        Raises:
            StoreError: The target does not support dead letters.
            NotStorableError: Some are damaged; the others were copied.

        """
        ours = await dead_letters_of(self._source, key)
        theirs = {letter.item.op_id: letter for letter in await dead_letters_of(self.target, key)}
        op_ids = {letter.item.op_id for letter in ours}
        dropped = [letter for op_id, letter in theirs.items() if op_id not in op_ids]
        dropped = [letter for letter in dropped if await self._is_copy(key, letter)]
        if dropped:
            await self.target.drop_dead_letters(key, [letter.item.op_id for letter in dropped])
            copies = [receipts.copied_letter(self._source, key, letter) for letter in dropped]
            self._stale.setdefault(key.tenant, set()).update(map(receipts.name, copies))
        readable = [letter for letter in ours if not letter.item.damage]
        new = [letter for letter in readable if theirs.get(letter.item.op_id) != letter]
        if new:
            await self._set_aside(key, new)
        if len(readable) < len(ours):
            raise errors.NotStorableError(
                f"{len(ours) - len(readable)} of its dead letters are damaged: `perdure inbox "
                f"{key.agent}` shows them, and --drop removes them",
                key=str(key),
                count=len(ours) - len(readable),
            )

    async def _set_aside(self, key: SessionKey, letters: Sequence[DeadLetter]) -> None:
        if not self.target.capabilities.dead_letters:
            raise errors.StoreError(
                f"{self.target.location} keeps no dead letters, and {len(letters)} of {key} stay "
                "behind: `perdure inbox` in the source lists them; retry or drop them",
                key=str(key),
                count=len(letters),
            )
        known, lives = await self._known(key), await self._generations(key)
        async with self._lease(key) as grant:
            self._supersede(key, receipts.untouched(self._source, key, grant.epoch - 1))
            await self._note(key, lives, grant.epoch)
            copies = [receipts.copied_letter(self._source, key, letter) for letter in letters]
            await self._leave(key, copies)
            await self.target.reject(key, grant.epoch, letters)
        self.report.dead_letters += len(letters)
        if known is not None:
            await self._acknowledge(key, grant.epoch, known, lives)

    def _lease(self, key: SessionKey) -> AbstractAsyncContextManager[HeldLease]:
        return bundle_files.leased(
            self.target, key, watches=self.watches, on_held=self._on_held, wait=self._wait
        )


def _way_out(key: SessionKey) -> str:
    tenant = f" --tenant {key.tenant}" if key.tenant else ""
    return (
        f"keep both by `perdure rename {key.agent} NEW-ID --session {key.session}{tenant} --store "
        f"TARGET`, or give that one up by `perdure forget {key.agent} --session {key.session}"
        f"{tenant} --store TARGET`, and migrate again"
    )


async def _content(store: SessionStore, key: SessionKey, head: int) -> AsyncGenerator[Record, None]:
    """Yield the records up to *head* that a copy has as they are."""
    async with contextlib.aclosing(bundle_files.settled_records(store, key, head)) as log:
        async for record in log:
            if record.kind not in OWN_KINDS and record.kind != GAP:
                yield Record(record.seq, 0, record.kind, record.payload, record.end)


async def _documents(store: Store, key: SessionKey) -> tuple[object, dict[str, Document]]:
    """Return a session's documents, without store-specific fields of the manifest."""
    lineage = followed(store)
    documents, base = await lineage.read_documents(key), await lineage.beginning_of(key)
    manifest = documents.manifest
    if manifest is not None:
        begun = Origin(cut=base.cut, folded=base.folded)
        manifest = msgspec.structs.replace(manifest, base=begun)
    return (None, {}) if manifest is None else (neutral(manifest), documents.found)
