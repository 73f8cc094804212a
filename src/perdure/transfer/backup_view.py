"""A backup as it is stored, a read-only view of it as a store, its verification and its restore."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import Final, final

import msgspec

from perdure.errors import ConfigError, CorruptRecordError, PerdureError
from perdure.records.json import decode
from perdure.records.keys import BACKUP_JOURNAL, SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import HOLDER_KINDS, Record
from perdure.session.reach import Reach, ReachedBlob, lost_error
from perdure.store import (
    ALL,
    DeadLetter,
    Document,
    Documents,
    LeaseState,
    PendingItem,
    SessionInfo,
    SessionQuery,
    Store,
    first_record,
    take_after,
)
from perdure.transfer import bundle_files
from perdure.transfer.migration import Migration, MigrationProgress, keys_of, migrate
from perdure.transfer.receipts import Receipts
from perdure.transfer.second_look import undisturbed
from perdure.transfer.views import SessionsView

KEPT, ANEW, POINT = "kept", "anew", "point"
MADE, FORGOTTEN, ERASED, COLLECTED = "made", "forgotten", "erased", "collected"
JOURNAL: Final = BACKUP_JOURNAL
"""Key of the log about the backup itself. Readers skip kinds that they do not know:

    made         its format
    forgotten    a session that is about to be deleted, as the source has
    erased       other records of a tenant are about to be removed
    collected    the tenant's blobs that nothing references since have been removed
"""
_CURE = "it stays as it is: to have both, restore the backup into an empty store"


class BackupLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record of the source, as stored in the backup."""

    n: int
    e: int
    k: str
    r: msgspec.Raw
    end: bool = False

    def record(self) -> Record:
        """Return the source's record."""
        return Record(self.n, self.e, self.k, bytes(self.r), self.end)


class RunPoint(msgspec.Struct, kw_only=True):
    """State of a session at the end of a run, and of what a run has written so far."""

    head: int = 0
    """The source's last record."""
    epoch: int = 0
    """The source's newest epoch."""
    begin: int = 0
    """The backup's entry after which the session's records begin."""
    first: int = 0
    """Sequence number of its first record."""
    mark: str = ""
    """Hash of its last record, to check that the source still has it."""
    sum: str = ""
    """Checksum of all of its records: a hash chain."""
    manifest: Manifest | None = None
    posts: list[PendingItem] = []
    letters: list[DeadLetter] = []
    lacks: int = 0
    """Number of blobs that the source had lost: the next run looks for them again."""

    def take(self, payload: bytes) -> Record:
        """Take in the next `BackupLine`, and return its record."""
        record = decode(payload, BackupLine).record()
        self.first = self.first or record.seq
        self.head = record.seq
        self.mark = hashlib.sha256(payload).hexdigest()
        self.sum = hashlib.sha256(self.sum.encode() + payload).hexdigest()
        return record


class SessionEnd(msgspec.Struct):
    """End of a session's backup."""

    head: int = 0
    """The last entry of the backup's log."""
    at: int = 0
    """The newest point's."""
    point: RunPoint | None = None


async def end_of(target: Store, key: SessionKey) -> SessionEnd:
    """Find the newest point."""
    end = SessionEnd()

    def is_point(record: Record) -> bool:
        end.head = end.head or record.seq
        return record.kind == POINT

    found = await first_record(target.read_log(key, reverse=True), is_point)
    if found is not None:
        end.at, end.point = found.seq, decode(found.payload, RunPoint)
    return end


async def require_backup(target: Store, *, make: bool = False) -> None:
    """Raise ConfigError unless a store is a backup or, with *make*, empty."""
    if await target.head(JOURNAL):
        return
    keys = await keys_of(target)
    if keys and await target.head(JOURNAL):  # the first run has just begun
        return
    if keys or not make:
        what = "has sessions of its own" if keys else "holds nothing"
        raise ConfigError(
            f"{target.location} is no backup: it {what}; name the place of a backup",
            option="target",
        )


class RestoreSummary(msgspec.Struct, kw_only=True):
    """Result of a restore."""

    sessions: int = 0
    """Sessions in the backup."""
    written: int = 0
    there: int = 0
    """Sessions that the target already had, equal in every record."""
    records: int = 0
    blobs: int = 0
    posted: int = 0
    dead_letters: int = 0
    forgotten: list[str] = []
    """Sessions that the store has deleted since the backup; they stay deleted."""
    failed: dict[str, str] = {}
    """Reasons why sessions were not restored, by key: newer than the backup, or different ones."""


class VerifyReport(msgspec.Struct, kw_only=True):
    """Result of reading all of a backup."""

    sessions: int = 0
    records: int = 0
    problems: dict[str, str] = {}
    """Defects, by session key."""


@final
class BackupView(SessionsView):
    """Read-only view of a backup's sessions, each as of its newest point."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._points: dict[SessionKey, tuple[int, RunPoint]] = {}
        self.hidden: set[SessionKey] = set()
        """Sessions that the view leaves out."""
        self.damaged: dict[str, str] = {}
        """Reasons why sessions cannot be read, by key."""

    @classmethod
    async def of(cls, store: Store) -> BackupView:
        """Return a view of a backup as it is now.

        Raises:
            ConfigError: The store is not a backup.

        """
        await require_backup(store)
        view = cls(store)
        for key in await keys_of(store):
            if key == JOURNAL:
                continue
            try:
                end = await end_of(store, key)
            except CorruptRecordError as error:
                view.damaged[str(key)] = str(view._damage(key, error))
                continue
            if end.point is not None:
                view._points[key] = (end.at, end.point)
        return view

    @property
    def keys(self) -> list[SessionKey]:
        """Keys of the visible sessions, sorted."""
        return sorted(set(self._points) - self.hidden)

    def point(self, key: SessionKey) -> RunPoint | None:
        """Return a session's newest point, or None."""
        return None if key in self.hidden or key not in self._points else self._points[key][1]

    async def forgotten(self) -> list[SessionKey]:
        """Return the sessions that were deleted and have not been backed up again since."""
        keys: set[SessionKey] = set()
        async with contextlib.aclosing(self.inner.read_log(JOURNAL)) as log:
            async for chunk in log:
                keys |= {
                    decode(record.payload, SessionKey)
                    for record in chunk.records
                    if record.kind == FORGOTTEN
                }
        return sorted(keys.difference(self._points))

    async def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        head = await self.head(key)
        step, at = (-1, head + 1) if reverse else (1, 0)
        async with contextlib.aclosing(self.entries(key, reverse=reverse)) as entries:
            async for entry in entries:
                record = decode(entry.payload, BackupLine).record()
                if at and record.seq != at + step:
                    raise self._incomplete(key, at)
                at = record.seq
                if after < at < before:
                    yield record
        if at < head and not reverse:
            raise self._incomplete(key, at)

    def _incomplete(self, key: SessionKey, last: int) -> CorruptRecordError:
        return CorruptRecordError(
            f"the backup of {key} in {self.location} is damaged after record {last}: restore the "
            "session from another one",
            key=str(key),
            seq=last,
        )

    async def entries(
        self, key: SessionKey, *, reverse: bool = False
    ) -> AsyncGenerator[Record, None]:
        """Yield the backup's entries of a session's records up to its newest point."""
        if key in self.hidden or key not in self._points:
            return
        at, point = self._points[key]
        log = self.inner.read_log(key, after=point.begin, before=at, reverse=reverse)
        try:
            async with contextlib.aclosing(log) as chunks:
                async for chunk in chunks:
                    for record in chunk.records:
                        if record.kind == KEPT:
                            yield record
        except CorruptRecordError as error:
            raise self._damage(key, error) from error

    def _damage(self, key: SessionKey, error: CorruptRecordError) -> CorruptRecordError:
        """Return a store's error with the cure for a backup: nothing is exported from one."""
        path, offset = error.facts.get("path"), error.facts.get("offset")
        where = f": {path}" if path else ""
        if path and offset:
            where += f" at byte {offset}"
        return CorruptRecordError(
            f"the backup of {key} in {self.location} is damaged{where}; put that back from a copy, "
            "or back up into a new place",
            key=str(key),
        )

    async def head(self, key: SessionKey) -> int:
        """Return the last record of the newest point."""
        point = self.point(key)
        return 0 if point is None else point.head

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read the documents as of the newest point."""
        point = self.point(key)
        if point is None or point.manifest is None:
            return Documents()
        if names is not None and not names:
            return Documents(point.manifest)
        stored = await self.inner.read_documents(key, names)
        if stored.manifest is None or stored.manifest.as_of_seq != self._points[key][0]:
            return Documents()  # of another point: they are rebuilt from the log
        listed = point.manifest.documents
        documents = {
            name: Document(document.data, listed[name].as_of_seq)
            for name, document in stored.found.items()
            if name in listed
        }
        return Documents(point.manifest, documents, stored.damaged)

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Return a released lease: no process holds a session of a backup."""
        point = self.point(key)
        return None if point is None else LeaseState(point.epoch, "", released=True)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        """List the sessions that had pending items, or dead letters, at their newest points."""
        points = [(key, self._points[key][1]) for key in self.keys]
        return [key for key, point in points if (point.letters if dead_letters else point.posts)]

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        """Return the items that were pending for a session."""
        point = self.point(key)
        return [] if point is None else point.posts[:limit]

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """Return a session's dead letters as of its newest point."""
        point = self.point(key)
        return [] if point is None else point.letters

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        return query.page(SessionInfo(key=key) for key in self.keys if key.tenant == query.tenant)


async def verify_backup(
    target: Store, *, progress: Callable[[MigrationProgress], None] | None = None
) -> VerifyReport:
    """Read all of a backup and check its records' checksums and its blobs' names.

    While a run writes the backup, what seems wrong is looked at again.

    Raises:
        ConfigError: The store is not a backup.

    """

    async def moment() -> object:
        """Return the journal's epoch at rest; while a run writes, nothing is as it was."""
        holder = await target.holder(JOURNAL)
        is_held = holder is not None and not holder.released and holder.alive is not False
        return object() if is_held else holder and holder.epoch

    look = partial(_verified, target, progress)
    return await undisturbed(moment, look, lambda report: bool(report.problems))


async def _verified(
    target: Store, progress: Callable[[MigrationProgress], None] | None
) -> VerifyReport:
    view = await BackupView.of(target)
    report = VerifyReport(sessions=len(view.damaged), problems=dict(view.damaged))
    sound: dict[str, set[str]] = {}
    for key in view.keys:
        try:
            report.records += await _verify(view, key, sound.setdefault(key.tenant, set()))
        except PerdureError as error:
            report.problems[str(key)] = str(error)
        report.sessions += 1
        if progress is not None:
            progress(MigrationProgress(report.sessions, len(view.keys) + len(view.damaged), key))
    return report


async def _verify(view: BackupView, key: SessionKey, sound: set[str]) -> int:
    """Check a session, passing over *sound* blobs, and return how many records it has."""
    point = view.point(key)
    assert point is not None  # as it was listed
    found, count = RunPoint(), 0
    documents = await view.read_documents(key)
    reach = Reach(view, key, documents)
    async with contextlib.aclosing(view.entries(key)) as entries:
        async for entry in entries:
            reach.feed(found.take(entry.payload))
            count += 1
    if found.sum != point.sum:
        raise CorruptRecordError(
            f"the records of {key} in {view.location} are not those that were written", key=str(key)
        )
    damaged = documents.damaged or (await view.inner.read_documents(key)).damaged
    if damaged:
        raise CorruptRecordError(
            f"documents of {key} are damaged: {', '.join(damaged)}", key=str(key)
        )
    if documents.manifest is None:
        reach = await bundle_files.reach(view, key, documents, point.head)
    async with contextlib.aclosing(reach.blobs(sound)) as blobs:
        wrong: list[ReachedBlob] = []
        async for blob in blobs:
            if blob.why:
                wrong.append(blob)
            elif blob.is_whole:
                sound.add(blob.name)
    if wrong:
        cure = f"put it back into {view.location} from a copy, or back up into a new place"
        raise lost_error(key, wrong, cure)
    return count


async def restore_backup(
    source: Store,
    target: Store,
    *,
    wait: float = 10.0,
    progress: Callable[[MigrationProgress], None] | None = None,
) -> RestoreSummary:
    """Restore the sessions of a backup into a store that has lost them, and verify each.

    A session that the target already has is replaced only if it is a prefix of the backup's. One
    that the target has deleted stays deleted. Crash-safe: a killed restore can be repeated.

    Args:
        source: An open backup; only read.
        target: An open store.
        wait: Seconds to wait for a process that holds a session in the target.
        progress: Called after each session.

    Raises:
        ConfigError: The source is not a backup.

    """
    view = await BackupView.of(source)
    summary = RestoreSummary(sessions=len(view.keys) + len(view.damaged), failed=dict(view.damaged))
    await _leave_alone(view, target, summary)
    done: Migration = await migrate(view, target, wait=wait, progress=progress)
    for name, reason in done.failed.items():
        cause, suggests_both, _ = reason.partition("; keep both by")
        summary.failed[name] = f"{cause}; {_CURE}" if suggests_both else reason
    for key in await view.forgotten():
        if await target.holder(key) is None:  # so that an older backup does not bring it back
            grant = await take_after(target, key, after=0)
            await target.delete(key, grant.epoch)
    summary.written = done.copied + done.continued
    summary.there, summary.posted = done.there, done.posted
    summary.dead_letters = done.dead_letters
    summary.records, summary.blobs = done.records, done.blobs
    return summary


async def _leave_alone(view: BackupView, target: Store, summary: RestoreSummary) -> None:
    """Hide the sessions that were deleted, or that have newer records, since the backup."""
    for key in view.keys:
        holder = await target.holder(key)
        if holder is None or (holder.deleted and holder.draft is not None):
            continue  # it was never there, or a run was killed in the middle of it
        if holder.deleted:
            if not await Receipts(view, target).has("written", key, holder.epoch):
                summary.forgotten.append(str(key))
                view.hidden.add(key)
            continue
        log = target.read_log(key, after=await view.head(key))
        if await first_record(log, lambda record: record.kind not in HOLDER_KINDS):
            summary.failed[str(key)] = f"{target.location} has {key} newer than the backup; {_CURE}"
            view.hidden.add(key)
