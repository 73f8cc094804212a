"""Incremental backups of all sessions of a store in another store.

A backup stores each session as of one moment. It keeps the source's sequence numbers, so a run
appends only what is new since the previous run. Under the session's own key, the backup's log holds
these entries:

    kept    a record of the source
    anew    earlier entries do not count: the source has pruned or restarted the session
    point   the session is complete up to here; holds its manifest, pending items, dead letters

Its documents are the session's. Only entries before the newest point count, so a killed run leaves
the previous point intact. The source is only read, without a lease. A run holds the lease of the
backup's journal until it ends, so there is one at a time. `backup_view` reads a backup as a store.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Generator
from contextlib import aclosing
from typing import Final, final

import anyio
import msgspec

from perdure import errors
from perdure.lease import LeaseOptions, OwnerWatch, named, while_beating
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, origin_in
from perdure.records.records import EPOCH, Entry, Record
from perdure.session.copier import CopyWriter
from perdure.session.options import require_no_backup
from perdure.session.reach import RESTORE, Reach, ReachedBlob, lost_error
from perdure.session.stored import followed
from perdure.store import DeadLetter, Documents, PendingItem, Store, Taken, first_record
from perdure.transfer import bundle_files
from perdure.transfer.backup_view import (
    ANEW,
    COLLECTED,
    ERASED,
    FORGOTTEN,
    JOURNAL,
    KEPT,
    MADE,
    POINT,
    BackupLine,
    BackupView,
    RunPoint,
    SessionEnd,
    end_of,
    require_backup,
)
from perdure.transfer.bundle_files import ALL, dead_letters_of, leased
from perdure.transfer.migration import MigrationProgress, each_session, keys_of
from perdure.transfer.second_look import look_again

FORMAT: Final = 1


class _OfTenant(msgspec.Struct, frozen=True):
    """Part of a journal's entry: the tenant whose blobs it is about."""

    tenant: str = ""


class Backup(msgspec.Struct, kw_only=True):
    """Result of a backup run."""

    sessions: int = 0
    """Sessions in the source, and those that were only posted to."""
    written: int = 0
    """Sessions that were updated."""
    there: int = 0
    """Sessions unchanged since the previous run."""
    forgotten: int = 0
    """Sessions removed from the backup because the source has deleted them."""
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Bytes of records, documents and blobs that were written."""
    failed: dict[str, str] = {}
    """Reasons why sessions were not backed up, by key; the backup keeps their previous versions."""


async def backup(
    source: Store,
    target: Store,
    *,
    wait: float = 10.0,
    progress: Callable[[MigrationProgress], None] | None = None,
) -> Backup:
    """Bring a backup up to date with a store; the first run creates it.

    Every record that is durable in the source when this begins is in the backup afterwards, each
    session as of one moment. Crash-safe and repeatable; it may run while a program writes to the
    source. What the source has deleted or pruned is removed from the backup, too; a session that
    was renamed is first stored under its new id.

    Args:
        source: An open store; only read, without a lease.
        target: An open store that holds this backup, or is empty.
        wait: Seconds to wait for another run that writes this backup.
        progress: Called after each session.

    Raises:
        ConfigError: The target has sessions of its own, or would hold in plain text what the
            source has encrypted; or the source is a backup itself.
        LeaseHeldError: Another run writes this backup; nothing was changed.

    """
    _require_as_secret(source, target)
    await require_no_backup(source)
    await require_backup(target, make=True)
    run = _Run(source, target, wait)
    await run.alone(lambda: run.follow(progress, is_every=True))
    return run.report


async def follow_deletions(source: Store, target: Store, *, wait: float = 10.0) -> list[SessionKey]:
    """Remove from a backup what its store has deleted, as the next run would.

    Before that, it brings the sessions that the backup does not have yet, and those that were
    renamed: what was deleted may have been renamed to one of them. Where that fails, nothing is
    removed.

    Until this, or the next run, is complete, a backup still has the sessions that were deleted: if
    the store is lost before, a restore brings them back.

    Args:
        source: The store; only read, without a lease.
        target: Its backup.
        wait: Seconds to wait for a run that writes the backup.

    Returns:
        The sessions that were removed.

    Raises:
        ConfigError: The target is not a backup, or the source is one.
        LeaseHeldError: A run writes the backup; nothing was removed.
        StoreError: A session cannot be removed and is still in the backup, or one that others may
            have been renamed to cannot be backed up.

    """
    _require_as_secret(source, target)
    await require_no_backup(source)
    await require_backup(target)
    run = _Run(source, target, wait)
    await run.alone(run.follow)
    if run.report.failed:
        name, reason = next(iter(run.report.failed.items()))
        raise errors.StoreError(
            f"{target.location} has not followed all deletions: {name}: {reason}",
            key=name,
            count=len(run.report.failed),
        )
    return run.removed


def _require_as_secret(source: Store, target: Store) -> None:
    from perdure.stores.wrapped.encrypted import EncryptedStore

    if isinstance(source, EncryptedStore) and not isinstance(target, EncryptedStore):
        raise errors.ConfigError(
            f"{source.location} is encrypted, and its backup in {target.location} would not be: "
            "put encrypted+ before the backup's URL",
            option="target",
        )


async def _resumed(target: Store, key: SessionKey, end: SessionEnd) -> tuple[RunPoint, bool]:
    """Return the newest point with what a killed run appended after it, and whether it did."""
    point = RunPoint() if end.point is None else msgspec.structs.replace(end.point)
    is_resumed = False
    if end.head > end.at:
        async with aclosing(target.read_log(key, after=end.at)) as log:
            async for chunk in log:
                for record in chunk.records:
                    if record.kind == ANEW:
                        point = RunPoint(begin=record.seq)
                    elif record.kind == KEPT:
                        point.take(record.payload)
                    is_resumed = is_resumed or record.kind != EPOCH
    return point, is_resumed


class _Saved(msgspec.Struct, frozen=True):
    """Result for one session."""

    lacks: str = ""
    """Description of what is damaged, and not in the backup."""
    is_written: bool = False
    is_there: bool = False


_running: set[str] = set()
"""Owners of the stores that runs of this process write to."""


@final
class _Run:
    def __init__(self, source: Store, target: Store, wait: float) -> None:
        self.source: Store = source
        self.target: Store = target
        self._wait = wait
        self.report = Backup()
        self.watch = OwnerWatch(LeaseOptions(), anyio.current_time)
        self.removed: list[SessionKey] = []
        """Sessions that were removed."""
        self._deleted: set[SessionKey] = set()
        self._waiting: set[SessionKey] = set()
        self._with_letters: set[SessionKey] = set()
        self.known: dict[str, set[str]] = {}
        """By tenant, the blobs that the backup has, with all that they name."""
        self._erased: set[str] = set()
        """Tenants of which something was removed, by the journal, and blobs not collected since."""
        self._journal: CopyWriter
        self._noting = anyio.Lock()

    async def alone(self, act: Callable[[], Awaitable[object]]) -> None:
        """Act as the only run that writes the backup: as the holder of its journal."""
        await while_beating(self.target, self.watch, lambda: self._alone(act))

    async def _alone(self, act: Callable[[], Awaitable[object]]) -> None:
        owner = self.target.owner
        if owner in _running:  # a lease does not keep its own holder out
            raise self._busy("this process, with the same store object", owner)
        _running.add(owner)
        try:
            async with self._lease(JOURNAL) as grant:
                self._journal = CopyWriter(self.target, grant)
                if not await self._read_journal():
                    await self._note(MADE, {"format": FORMAT})
                await act()
        except errors.LeaseHeldError as error:
            holder = await self.target.holder(JOURNAL)
            if error.facts.get("key") != str(JOURNAL) or holder is None:
                raise
            raise self._busy(named(holder), holder.owner) from error
        finally:
            _running.discard(owner)

    async def _read_journal(self) -> bool:
        """Find the tenants whose blobs a run did not come to; return whether there is a backup."""
        is_made = False
        async with aclosing(self.target.read_log(JOURNAL)) as log:
            async for chunk in log:
                for record in chunk.records:
                    is_made = is_made or record.kind == MADE
                    if record.kind in {FORGOTTEN, ERASED}:
                        self._erased.add(decode(record.payload, _OfTenant).tenant)
                    elif record.kind == COLLECTED:
                        self._erased.discard(decode(record.payload, _OfTenant).tenant)
        return is_made

    def _busy(self, who: str, owner: str) -> errors.LeaseHeldError:
        return errors.LeaseHeldError(
            f"another run writes the backup in {self.target.location}, by {who}: run this again "
            "when it has ended",
            owner=owner,
        )

    async def follow(
        self, progress: Callable[[MigrationProgress], None] | None = None, *, is_every: bool = False
    ) -> None:
        """Follow the source's deletions; with *is_every*, back up all its sessions before."""
        known = {JOURNAL}
        if is_every:
            await self._bring_new(known, progress, is_every=True)
        gone = list[SessionKey]()
        for key in await keys_of(self.target):
            with self._reported(key):
                if key not in known and await self._is_deleted(key):
                    gone.append(key)
        # Second: what a session was renamed to is there before the old one is deleted.
        missing = await self._bring_new({*known, *gone}) if gone else None
        for key in gone:
            with self._reported(key):
                if missing is not None:
                    raise errors.StoreError(
                        f"{missing} is not backed up, and may be what {key} was renamed to",
                        key=str(key),
                        missing=str(missing),
                    )
                await self._delete(key)
        for tenant in sorted(self._erased):
            await self._collect(tenant)

    async def _bring_new(
        self,
        known: set[SessionKey],
        progress: Callable[[MigrationProgress], None] | None = None,
        *,
        is_every: bool = False,
    ) -> SessionKey | None:
        """Back up sessions that are not *known*, and add them; return one that could not be.

        Unless *is_every* is, only those that others may have been renamed to.
        """
        missing = list[SessionKey]()

        async def bring(key: SessionKey) -> None:
            if not is_every and not await self._may_be_renamed(key):
                known.add(key)
            elif not await self._bring(key):
                missing.append(key)
            elif key not in self._deleted:
                known.add(key)

        while True:
            self._deleted.clear()
            listed = await self._listed()
            if is_every:
                self.report.sessions = len(listed)
            keys = [key for key in listed if key not in known]
            await each_session(keys, bring, progress)
            if missing or not self._deleted:  # else that one may have been renamed, too
                return missing[0] if missing else None

    async def _listed(self) -> list[SessionKey]:
        """List what the source has now: sessions, and what was only posted to."""
        keys = await keys_of(self.source)
        self._waiting = set(await self.source.sessions_with_pending_items())
        self._with_letters = set(await self.source.sessions_with_pending_items(dead_letters=True))
        return keys + sorted((self._waiting | self._with_letters).difference(keys))

    async def _bring(self, key: SessionKey) -> bool:
        """Back up a session; return whether the backup has it as it is now, or it is deleted."""
        report = self.report
        report.failed.pop(str(key), None)  # of an earlier attempt
        try:
            saved = await look_again(
                self.source, key, lambda: self._save(key), is_wrong=lambda saved: bool(saved.lacks)
            )
        except errors.PerdureError as error:
            saved = _Saved(str(error))
        if saved.lacks:
            report.failed[str(key)] = saved.lacks
        report.written += saved.is_written
        report.there += saved.is_there
        return saved.is_written or saved.is_there or not saved.lacks

    async def _save(self, key: SessionKey) -> _Saved:
        holder = await self.source.holder(key)
        if holder is not None and holder.deleted and key not in self._waiting:
            self._deleted.add(key)  # since it was listed
            return _Saved()
        end, point, is_resumed = await self._end(key)
        # In this order: what is taken from the inbox is in the log by then.
        epoch = 0 if holder is None else holder.epoch
        posts, letters, damaged = await self._posted(key, epoch)
        manifest = (await self.source.read_documents(key, ())).manifest
        head = await self.source.head(key)
        if end.point is not None and not is_resumed and not point.lacks:
            now = (head, epoch, _plain(manifest), posts, letters)
            if now == (point.head, point.epoch, point.manifest, point.posts, point.letters):
                return _Saved(damaged, is_there=True)
        documents = await self.source.read_documents(key)
        if documents.damaged:
            documents = Documents()  # a restore rebuilds them from the log
        head = await self.source.head(key)
        cut = await self._cut(key)
        goes_on = await self._goes_on(key, point, cut)
        # What a killed run has copied, what was lost, and what a fork begins with, is in none of
        # the new records.
        is_every = point.lacks > 0 or is_resumed or documents.manifest is None
        if not goes_on:
            await self._note_erasure(key.tenant)
        point.epoch, point.posts, point.letters = epoch, posts, letters
        point.manifest = _plain(documents.manifest)
        async with self._lease(key) as grant:
            if grant.head != end.head + 1:  # by a run that was taken for dead, and was not
                raise errors.StoreUnavailableError(
                    f"{key} was written in {self.target.location} by another run: try again",
                    key=str(key),
                )
            if not goes_on:
                point = msgspec.structs.replace(
                    point, head=0, first=0, mark="", sum="", begin=grant.head + 1
                )
            lost = await self._write(grant, point, documents, head, cut, is_every=is_every)
            if not goes_on:
                # Only now that the new point is durable: until then the earlier entries count.
                await self.target.trim(key, grant.epoch, point.begin)
        if lost:
            cure = f"all else of it is in the backup; {RESTORE}, and run this again"
            damaged = damaged or str(lost_error(key, lost, cure))
        return _Saved(damaged, is_written=True)

    async def _end(self, key: SessionKey) -> tuple[SessionEnd, RunPoint, bool]:
        """Find how far the backup reaches; delete a damaged one, to be written again in full."""
        try:
            end = await end_of(self.target, key)
            return end, *await _resumed(self.target, key, end)
        except errors.CorruptRecordError:
            await self._note_erasure(key.tenant)
            async with self._lease(key) as grant:
                await self.target.delete(key, grant.epoch)
            return SessionEnd(), RunPoint(), False

    async def _posted(
        self, key: SessionKey, epoch: int
    ) -> tuple[list[PendingItem], list[DeadLetter], str]:
        """Return a session's pending items, its dead letters, and a message on damaged ones."""
        has_letters = key in self._with_letters
        before = await dead_letters_of(self.source, key) if has_letters else []
        waiting: list[PendingItem] = []
        if key in self._waiting:
            try:
                waiting = await self.source.receive(key, epoch, limit=ALL)
            except errors.LeaseLostError as error:
                raise errors.StoreUnavailableError(
                    f"{key} was opened while it was read: try again", key=str(key)
                ) from error
        # Read again: an item may have moved from the inbox to the dead letters in between.
        after = await dead_letters_of(self.source, key) if has_letters or waiting else []
        by_op_id = {letter.item.op_id: letter for letter in [*before, *after]}
        for item in waiting:
            by_op_id.pop(item.op_id, None)
        letters = sorted(by_op_id.values(), key=lambda letter: (letter.at, letter.item.op_id))
        lost = [item for item in waiting if item.damage]
        lost += [letter.item for letter in letters if letter.item.damage]
        damaged = (
            f"{len(lost)} of the posts and dead letters of {key} are damaged, and not in the "
            f"backup; all else of it is: {lost[0].damage}"
            if lost
            else ""
        )
        readable = [item for item in waiting if not item.damage]
        return readable, [letter for letter in letters if not letter.item.damage], damaged

    async def _cut(self, key: SessionKey) -> int:
        """Return the last record that the source has pruned and may still have, as files do."""
        source = followed(self.source)
        base = await source.base_of(key)
        if base is None or base.at or not await source.has_removed(key, base):
            return 0
        return base.cut

    async def _goes_on(self, key: SessionKey, point: RunPoint, cut: int) -> bool:
        """Say whether the source still has, unpruned, the records that the backup has."""
        if not point.head:
            return True
        # Another first record shows a pruning or a restart, another last one a different history.
        first = await first_record(self.source.read_log(key, after=cut, limit=1))
        last = await first_record(self.source.read_log(key, after=point.head - 1, limit=1))
        if first is None or first.seq != point.first or last is None:
            return False
        return hashlib.sha256(encode(_kept(last))).hexdigest() == point.mark

    async def _write(
        self,
        grant: Taken,
        point: RunPoint,
        documents: Documents,
        head: int,
        cut: int,
        *,
        is_every: bool,
    ) -> list[ReachedBlob]:
        """Append the new records up to *head*, then the point that completes the session.

        Returns the blobs that the source has lost: they are not in the backup.
        """
        source, key, writer = self.source, grant.key, CopyWriter(self.target, grant)
        if point.begin == grant.head + 1:
            await writer.add([Entry(ANEW, b"{}")], 2)
        reach, copied = Reach(source, key, documents), point.head
        after = cut if is_every else copied or cut
        async with aclosing(bundle_files.settled_records(source, key, head, after=after)) as log:
            async for record in log:
                reach.feed(record)
                if record.seq > copied:
                    payload = encode(_kept(record))
                    point.take(payload)
                    await writer.add([Entry(KEPT, payload, record.end)], len(payload))
                    self.report.records += 1
                    self.report.bytes += len(payload)
        await writer.flush()
        if documents.manifest is None:
            reach = await bundle_files.reach(source, key, documents, head)
        lost = await self._put_blobs(reach, key.tenant)  # before the point that counts on them
        point.lacks = len(lost)
        data = encode(point)
        await writer.add([Entry(POINT, data)], len(data))
        await writer.flush()
        self.report.bytes += len(data)
        # After the point, since they are as of its number.
        await self._put_documents(grant, documents, writer.head)
        return lost

    async def _put_documents(self, grant: Taken, documents: Documents, at: int) -> None:
        """Write the documents that have changed, as of the backup's entry *at*."""
        manifest = documents.manifest
        if manifest is None:
            return
        before = (await self.target.read_documents(grant.key, ())).manifest
        listed_before = {} if before is None else before.documents
        changed = {
            name: document.data
            for name, document in documents.found.items()
            if name not in listed_before
            or listed_before[name].sha256 != manifest.documents[name].sha256
        }
        listed = {
            name: msgspec.structs.replace(entry, as_of_seq=at)
            for name, entry in manifest.documents.items()
            if name in documents.found
        }
        rewritten = msgspec.structs.replace(
            manifest,
            epoch=grant.epoch,
            as_of_seq=at,
            documents=listed,
            base=None,
            position=msgspec.Raw(b"null"),
        )
        await self.target.write_documents(grant.key, changed, rewritten)
        self.report.bytes += sum(map(len, changed.values()))

    # blobs

    async def _put_blobs(self, reach: Reach, tenant: str) -> list[ReachedBlob]:
        """Copy what is whole of the blobs of a reach, and return those that are lost."""
        if tenant not in self.known:
            self.known[tenant] = set(await self.target.blob_names(tenant))
        known, lost = self.known[tenant], list[ReachedBlob]()
        reached = reach.blobs(known, other=self.target)
        async with aclosing(reached) as blobs:
            async for blob in blobs:
                if blob.data is None:
                    lost.append(blob)
                elif blob.is_whole and blob.name not in known:
                    await self.target.put_blobs(tenant, {blob.name: blob.data})
                    known.add(blob.name)
                    self.report.blobs += 1
                    self.report.bytes += len(blob.data)
        return lost

    async def _collect(self, tenant: str) -> None:
        """Remove records that do not count any more, and blobs that nothing references any more.

        While the backup of a session is damaged, its references are unknown: that is reported.
        """
        view = await BackupView.of(self.target)
        keys = await keys_of(self.target, [tenant])
        damaged = {str(key): view.damaged[str(key)] for key in keys if str(key) in view.damaged}
        named: set[str] = set()
        for key in [other for other in view.keys if other.tenant == tenant]:
            try:
                reach = await bundle_files.reach(view, key)
                async with aclosing(reach.blobs(named)) as blobs:
                    async for blob in blobs:
                        named.add(blob.name)
                await self._trim(key, view.point(key))
            except errors.CorruptRecordError as error:
                damaged[str(key)] = str(error)
        if damaged:
            of = f" of tenant {tenant}" if tenant else ""
            for name, reason in damaged.items():
                self.report.failed[name] = f"{reason}; until then no blob{of} is removed there"
            return
        unreferenced = set(await self.target.blob_names(tenant)) - named
        if unreferenced:
            await self.target.remove_blobs(tenant, unreferenced)
        await self._note(COLLECTED, _OfTenant(tenant))
        self._erased.discard(tenant)

    async def _trim(self, key: SessionKey, point: RunPoint | None) -> None:
        """Remove what is before a session's records, if a run was cut before it did."""
        if point is None or point.begin <= 1:
            return
        log = self.target.read_log(key, before=point.begin, limit=1)
        if await first_record(log) is not None:
            async with self._lease(key) as grant:
                await self.target.trim(key, grant.epoch, point.begin)

    # erasure

    @contextlib.contextmanager
    def _reported(self, key: SessionKey) -> Generator[None, None, None]:
        """Report what keeps a deletion from being followed."""
        try:
            yield
        except errors.PerdureError as error:
            self.report.failed[str(key)] = f"it is still in the backup: {error}"

    async def _is_deleted(self, key: SessionKey) -> bool:
        """Return whether the source has deleted a session that the backup still has."""
        holder = await self.source.holder(key)
        copy = await self.target.holder(key)
        return holder is not None and holder.deleted and copy is not None and not copy.deleted

    async def _may_be_renamed(self, key: SessionKey) -> bool:
        """Return whether a session may be new to the backup under its name."""
        try:
            holder = await self.source.holder(key)
            if holder is not None and holder.draft is not None and holder.draft.purpose == "rename":
                return True  # the backup may have an earlier session of that name
            return (await end_of(self.target, key)).point is None
        except errors.PerdureError:
            return True  # what is wrong is reported by who brings it

    async def _delete(self, key: SessionKey) -> None:
        await self._note(FORGOTTEN, key)  # first: after a crash here, the next run deletes it
        self._erased.add(key.tenant)
        async with self._lease(key) as grant:
            await self.target.delete(key, grant.epoch)
        self.report.forgotten += 1
        self.removed.append(key)

    def _lease(self, key: SessionKey) -> contextlib.AbstractAsyncContextManager[Taken]:
        return leased(self.target, key, watch=self.watch, wait=self._wait)

    async def _note_erasure(self, tenant: str) -> None:
        """Note it before something is removed: after a crash, the next run collects the blobs."""
        async with self._noting:  # sessions are brought several at once
            if tenant not in self._erased:
                await self._note(ERASED, _OfTenant(tenant))
                self._erased.add(tenant)

    async def _note(self, kind: str, what: object) -> None:
        data = encode(what)
        await self._journal.add([Entry(kind, data)], len(data))
        await self._journal.flush()


def _kept(record: Record) -> BackupLine:
    payload = record.payload
    if record.kind == EPOCH:  # the holder is the source's own matter
        begun = origin_in(record)
        payload = b"{}" if begun is None else encode({"base": begun})
    return BackupLine(record.seq, record.epoch, record.kind, msgspec.Raw(payload), record.end)


def _plain(manifest: Manifest | None) -> Manifest | None:
    null = msgspec.Raw(b"null")
    return None if manifest is None else msgspec.structs.replace(manifest, position=null)
