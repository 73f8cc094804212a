"""Memory store: the whole port on dictionaries, for tests and benchmarks.

Nothing is durable: the data ends with its `MemoryBacking`. Everything else is as on a disk.
Several stores on one backing behave like processes on one disk, so epochs, fencing, takeovers and
handovers can run in one event loop.

Every call is one checkpoint followed by one synchronous step: a cancelled call did nothing, and no
reader sees part of a step. No threads and no sleeps, so virtual clocks work. A backing belongs to
one thread.
"""

from __future__ import annotations

import itertools
import secrets
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, final

import anyio
import anyio.lowlevel

from perdure.errors import LeaseLostError, NotStorableError
from perdure.records.chunks import require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    FORMAT,
    About,
    Manifest,
    epoch_payload,
    lease_lost,
    matched,
    new_entries,
    newer_format,
    refusal_of,
    require_logged,
    session_info,
)
from perdure.records.posts import acked_ids, oldest_first
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import (
    ALL,
    Batch,
    Beginning,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Documents,
    Draft,
    DraftInfo,
    HeartbeatRequests,
    Held,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    RestoreData,
    SessionInfo,
    SessionQuery,
    Status,
    Taken,
    Terms,
)

# The shared backing: sessions, owners and blobs as plain values
#
# Nothing here waits. `MemoryStore` and `StateStore` add the epochs, the time and the checkpoints.


class StoredSession:
    """One session: its lease, its log and its documents."""

    __slots__ = (
        "about",
        "created_at",
        "deleted",
        "documents",
        "draft",
        "entries",
        "epoch",
        "epoch_starts",
        "epochs",
        "first",
        "manifest",
        "owner",
        "published",
        "released",
        "turns",
        "updated_at",
    )

    def __init__(self) -> None:
        self.epoch: int = 0
        self.owner: str = ""
        self.released: bool = False
        self.deleted: bool = False
        self.clear()

    def clear(self) -> None:
        """Drop the session's log and documents."""
        # New containers: a concurrent reader keeps the old ones, unchanged.
        self.entries: list[Entry] = []
        self.first: int = 1  # the seq of entries[0]
        self.draft: Draft | None = None
        self.published: bool = True
        self.epoch_starts: list[int] = []
        self.epochs: list[int] = []
        self.documents: dict[str, bytes] = {}
        self.manifest: Manifest | None = None
        self.created_at: float | None = None
        self.updated_at: float | None = None
        # What saves have said for the directory.
        self.turns: int | None = None
        self.about: About | None = None

    @property
    def head(self) -> int:
        """The seq of the last record, 0 before the first."""
        return self.first - 1 + len(self.entries) if self.epochs else 0

    def seqs(self, after: int, before: int | None, *, reverse: bool) -> range:
        """Return the requested seqs, in reading order."""
        end = self.head + 1
        seqs = range(max(after + 1, self.first), end if before is None else min(before, end))
        return seqs[::-1] if reverse else seqs

    def begin_epoch(self, epoch: int, owner: str, at: float, new: Beginning) -> bool:
        """Begin an epoch by appending its record, and return whether a log begins with it.

        What an unpublished draft has is removed.
        """
        if not self.published:
            self.clear()
        created = not self.epochs
        if created:
            self.first, self.draft, self.published = new.first, new.draft, new.draft is None
            self.created_at = self.updated_at = at
            if new.about is not None:
                self.turns, self.about = 0, new.about
        self.epoch, self.owner = epoch, owner
        self.released = self.deleted = False
        payload = epoch_payload(owner, new.base if created else None, at=at)
        self.entries.append(Entry(EPOCH, payload))
        self.epochs.append(epoch)
        self.epoch_starts.append(self.head)
        return created

    def note_saved(self, batch: Batch, at: float) -> None:
        """Note for the directory what a save says of the session."""
        self.updated_at = at
        self.turns = self.turns if batch.turns is None else batch.turns
        self.about = batch.about or self.about

    @property
    def is_public(self) -> bool:
        """Whether there is a session for readers: not deleted, and no draft."""
        return self.published and not self.deleted

    def fold(self, documents: Mapping[str, bytes], manifest: Manifest) -> None:
        """Replace the documents and the manifest."""
        require_logged(manifest, self.head)
        merged = {**self.documents, **documents}
        self.documents = {name: merged[name] for name in manifest.documents if name in merged}
        self.manifest = manifest
        if manifest.as_of_seq >= self.head:
            self.turns = self.about = None  # the manifest knows as much

    def trim(self, below: int) -> int:
        """Remove the records below a seq, and return how many bytes they had."""
        count = min(max(below - self.first, 0), len(self.entries))
        freed = sum(len(entry.payload) for entry in self.entries[:count])
        # A new list: a concurrent reader keeps the old one, unchanged.
        self.entries = self.entries[count:]
        self.first += count
        return freed

    def records(self, seqs: range) -> Iterator[Record]:
        """Yield the records at these seqs; an epoch is found by the starts of the epochs."""
        entries, first, starts, epochs = self.entries, self.first, self.epoch_starts, self.epochs
        for seq in seqs:
            kind, payload, end = entries[seq - first]
            epoch = epochs[bisect_right(starts, seq) - 1]
            yield Record(seq, epoch, kind, payload, end)


class OwnerState:
    """One store's state as an owner, shared with the other stores."""

    __slots__ = ("alive", "beat", "handovers", "mail", "notified")

    def __init__(self) -> None:
        self.alive: bool = True
        self.beat: int = 0
        self.handovers: dict[SessionKey, None] = {}
        self.mail: dict[SessionKey, None] = {}
        self.notified: anyio.Event | None = None
        """Set when a request arrives; None unless a task waits for one."""

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Leave out the waiting task: a copy of the backing is what another process would find."""
        names = (name for name in self.__slots__ if name != "notified")
        return None, {"notified": None, **{name: getattr(self, name) for name in names}}

    def notify(self) -> None:
        """Wake the waiting task."""
        if self.notified is not None:
            self.notified.set()


class StoredBlob:
    """A blob, when it was last put, and when it was quarantined."""

    __slots__ = ("data", "quarantined_at", "renewed_at")

    def __init__(self, data: bytes, now: float) -> None:
        self.data: bytes = data
        self.renewed_at: float = now
        self.quarantined_at: float | None = None


@final
class MemoryBacking:
    """Data that several memory stores share, as processes share a disk.

    Example:
        >>> from perdure.stores.memory import MemoryBacking, MemoryStore
        >>> disk = MemoryBacking()
        >>> one, other = MemoryStore(owner="one", backing=disk), MemoryStore(backing=disk)
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        """Seconds since 1970, for the ages of blobs and the directory's times."""
        self.sessions: dict[SessionKey, StoredSession] = {}
        self.owners: dict[str, OwnerState] = {}
        self.blobs: dict[tuple[str, str], StoredBlob] = {}
        self.inboxes: dict[SessionKey, dict[str, PendingItem]] = {}
        """Each session's pending items, by op id, oldest first."""
        self.dead_letters: dict[SessionKey, dict[str, DeadLetter]] = {}
        """Each session's dead letters, by op id."""


def held_session(key: SessionKey, epoch: int, session: StoredSession | None) -> StoredSession:
    """Return a session, for the holder of this epoch.

    Raises:
        LeaseLostError: The epoch is not the newest, or the session was deleted.

    """
    if session is None or session.epoch != epoch or session.deleted:
        raise lease_lost_error(key, epoch, session)
    return session


def lease_lost_error(key: SessionKey, epoch: int, session: StoredSession | None) -> LeaseLostError:
    """Return the error for a write under an epoch that is not the newest."""
    deleted = session is not None and session.deleted
    return lease_lost(key, epoch, session.epoch if session else 0, deleted=deleted)


def appended_entries(session: StoredSession, batch: Batch) -> tuple[Entry, ...] | NotStorableError:
    """Return the entries that the log does not have yet, or why it will never accept the batch."""
    refusal = refusal_of(batch)
    if refusal is not None:
        return refusal
    at = batch.first - session.first
    logged = session.entries[at:] if at >= 0 else ()
    return new_entries(batch, session.head, session.epoch_starts[-1], logged)


def documents_of(
    key: SessionKey, session: StoredSession, names: Collection[str] | None
) -> Documents:
    """Return a session's documents, each checked against the manifest's hash.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    manifest = session.manifest
    if manifest is None:
        return Documents()
    if manifest.format > FORMAT:
        raise newer_format(f"the manifest of {key}", manifest.format, key=str(key))
    return matched(manifest, session.documents, names)


def restore_data(
    session: StoredSession, documents: Documents, *, may_have_items: bool
) -> RestoreData:
    """Return documents with the log after them, unless that is long."""
    after, records = documents.log_after, None
    if after is not None and session.head - after <= _TAIL:
        records = tuple(session.records(session.seqs(after, None, reverse=False)))
    return RestoreData(documents, after or 0, records, may_have_items).with_low(session.first)


def list_sessions(backing: MemoryBacking, query: SessionQuery) -> list[SessionInfo]:
    """Return the page that a query asks for."""
    sessions = backing.sessions.items()
    shown = ((key, one) for key, one in sessions if key.tenant == query.tenant and one.is_public)
    return query.page(info_of(key, session) for key, session in shown)


def info_of(key: SessionKey, session: StoredSession) -> SessionInfo:
    """Return a session's entry in a listing."""
    return session_info(
        key,
        session.manifest,
        epoch=session.epoch,
        head=session.head,
        created_at=session.created_at,
        updated_at=session.updated_at,
        turns=session.turns,
        about=session.about,
    )


_CHUNK = 256
"""Records in one `LogChunk`."""
_TAIL = 1024
"""Records that are read together with documents; a longer log is read by chunks."""

_CAPABILITIES = Capabilities(durability="memory", batch_max=256, memory_bound=True)


@final
class MemoryStore:
    """Keep everything in memory, on its own backing or on one shared with other stores."""

    def __init__(self, *, owner: str | None = None, backing: MemoryBacking | None = None) -> None:
        self._owner = owner or secrets.token_hex(8)
        self._backing = backing or MemoryBacking()
        self._sessions = self._backing.sessions
        self._owners = self._backing.owners
        self._blobs = self._backing.blobs

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        return "memory:"

    async def open(self) -> None:
        """Register the owner on the backing."""
        await anyio.lowlevel.checkpoint()
        owner = self._owners.setdefault(self._owner, OwnerState())
        owner.alive = True
        owner.beat += 1  # not the counter at which others saw it end

    async def aclose(self) -> None:
        """Close as a process that ends: leases not released look like those of a dead owner."""
        # The step comes first here: a cancelled close closes all the same.
        if owner := self._owners.get(self._owner):
            owner.alive = False
        await anyio.lowlevel.checkpoint()

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        await anyio.lowlevel.checkpoint()
        now = self._backing.clock()
        return [self._append(batch, now) for batch in batches]

    def _append(self, batch: Batch, now: float) -> Outcome:
        session = self._sessions.get(batch.key)
        # In a backing restored from a copy, another owner may have been given the same epoch.
        is_other_owner = session is not None and session.owner != self._owner
        if session is None or session.epoch != batch.epoch or session.deleted or is_other_owner:
            return Outcome(Status.CONFLICT, lease_lost_error(batch.key, batch.epoch, session))
        new = appended_entries(session, batch)
        if isinstance(new, Exception):
            return Outcome(Status.PERMANENT, new)
        session.entries.extend(new)
        session.note_saved(batch, now)
        return Outcome(Status.OK, written=sum([len(entry.payload) for entry in new]))

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records as of now, without those that are appended meanwhile."""
        await anyio.lowlevel.checkpoint()
        session = self._visible(key)
        if session is None:
            return
        records = session.records(session.seqs(after, before, reverse=reverse)[:limit])
        while chunk := tuple(itertools.islice(records, _CHUNK)):
            yield LogChunk(chunk)
            await anyio.lowlevel.checkpoint()

    async def head(self, key: SessionKey) -> int:
        await anyio.lowlevel.checkpoint()
        session = self._visible(key)
        return session.head if session else 0

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        await anyio.lowlevel.checkpoint()
        return self._held_session(key, epoch).trim(below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        await anyio.lowlevel.checkpoint()
        session = self._visible(key)
        return Documents() if session is None else documents_of(key, session, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        await anyio.lowlevel.checkpoint()
        self._held_session(key, manifest.epoch).fold(documents, manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await anyio.lowlevel.checkpoint()
        require_named(blobs)
        now = self._backing.clock()
        for name, data in blobs.items():
            self._blobs[str(tenant), name] = StoredBlob(data, now)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        await anyio.lowlevel.checkpoint()
        blob = self._blobs.get((tenant, name))
        return None if blob is None else verified(name, blob.data)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        await anyio.lowlevel.checkpoint()
        now = self._backing.clock()
        quarantined = removed = freed = 0
        for blob_id, blob in list(self._blobs.items()):
            if blob_id[0] != tenant or (among is not None and blob_id[1] not in among):
                continue
            if blob_id[1] in reachable:
                blob.quarantined_at = None
            elif blob.quarantined_at is None:
                if now - blob.renewed_at >= older_than:
                    blob.quarantined_at = now
                    quarantined += 1
            elif now - blob.quarantined_at >= older_than:
                del self._blobs[blob_id]
                removed += 1
                freed += len(blob.data)
        return BlobSweep(quarantined, removed, freed)

    async def blob_names(self, tenant: str) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return sorted(name for blob_tenant, name in self._blobs if blob_tenant == tenant)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        await anyio.lowlevel.checkpoint()
        now, missing = self._backing.clock(), set[str]()
        for name in names:
            if (blob := self._blobs.get((tenant, name))) is None:
                missing.add(name)
            else:
                blob.renewed_at, blob.quarantined_at = now, None
        return missing

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        await anyio.lowlevel.checkpoint()
        removed = [self._blobs.pop((tenant, name), None) for name in set(names)]
        return sum(len(blob.data) for blob in removed if blob is not None)

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        await anyio.lowlevel.checkpoint()
        return self._holder(key)

    def _holder(self, key: SessionKey) -> LeaseState | None:
        session = self._sessions.get(key)
        if session is None:
            return None
        owner = self._owners.get(session.owner)
        return LeaseState(
            epoch=session.epoch,
            owner=session.owner,
            released=session.released,
            alive=owner.alive if owner else False,
            beat=owner.beat if owner else 0,
            deleted=not session.is_public,
            draft=session.draft,
        )

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        await anyio.lowlevel.checkpoint()
        holder = self._holder(key)
        if not terms.allows(holder):
            return Held(holder)
        session = self._sessions.get(key) or StoredSession()
        documents = documents_of(key, session, terms.names) if session.is_public else Documents()
        self._sessions[key] = session
        if not session.published:
            self._backing.dead_letters.pop(key, None)
        now = self._backing.clock()
        created = session.begin_epoch(session.epoch + 1, self._owner, now, terms.beginning)
        may_have_items = bool(self._backing.inboxes.get(key))
        record = session.entries[-1].payload
        found = restore_data(session, documents, may_have_items=may_have_items)
        return Taken(key, session.epoch, session.head, created, record, found)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await anyio.lowlevel.checkpoint()
        self._held_session(key, epoch).published = True

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        await anyio.lowlevel.checkpoint()
        return [
            DraftInfo(key, session.epoch, session.draft, session.owner)
            for key, session in sorted(self._sessions.items())
            if key.tenant == tenant and session.draft is not None and not session.published
        ]

    async def release(self, key: SessionKey, epoch: int) -> None:
        await anyio.lowlevel.checkpoint()
        session = self._sessions.get(key)
        if session and session.epoch == epoch:
            session.released = True

    async def heartbeat(self) -> HeartbeatRequests:
        await anyio.lowlevel.checkpoint()
        owner = self._owners.setdefault(self._owner, OwnerState())
        owner.beat += 1
        requests, owner.handovers = owner.handovers, {}
        mail, owner.mail = owner.mail, {}
        others = self._owners.items()
        alive = [(name, other) for name, other in others if other is not owner and other.alive]
        beats = {name: other.beat for name, other in alive[-1000:]}
        return HeartbeatRequests(tuple(requests), tuple(mail), beats)

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another store left a request, or after ``timeout`` seconds."""
        await anyio.lowlevel.checkpoint()
        owner = self._owners.setdefault(self._owner, OwnerState())
        if owner.handovers or owner.mail:
            return
        notified = owner.notified = owner.notified or anyio.Event()
        with anyio.move_on_after(timeout):
            await notified.wait()
        if owner.notified is notified:
            owner.notified = None

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await anyio.lowlevel.checkpoint()
        if owner := self._owners.get(holder.owner):
            owner.handovers[key] = None
            owner.notify()

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        await anyio.lowlevel.checkpoint()
        inbox = self._backing.inboxes.setdefault(key, {})
        before = len(inbox)
        if limit is not None:
            new = {item.op_id: len(item.payload) for item in items if item.op_id not in inbox}
            size = sum(len(item.payload) for item in inbox.values())
            limit.require_room(
                key, waiting=before, size=size, new=len(new), added=sum(new.values())
            )
        for item in items:
            inbox.setdefault(item.op_id, item)
        session = self._sessions.get(key)
        if session is not None and (owner := self._owners.get(session.owner)):
            owner.mail[key] = None
            owner.notify()
        return len(inbox) - before

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        await anyio.lowlevel.checkpoint()
        session = self._sessions.get(key)
        if (session.epoch if session else 0) != epoch:
            raise lease_lost_error(key, epoch, session)
        return list(self._backing.inboxes.get(key, {}).values())[:limit]

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        await anyio.lowlevel.checkpoint()
        letters = self._backing.dead_letters.setdefault(key, {})
        items: dict[str, Any] = letters
        if epoch is not None:
            self._held_session(key, epoch)
            items = self._backing.inboxes.get(key, {})
        letters.update({letter.item.op_id: letter for letter in dead})
        for op_id in acked_ids(op_ids, dead):
            items.pop(op_id, None)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        await anyio.lowlevel.checkpoint()
        backing = self._backing
        pending = backing.dead_letters if dead_letters else backing.inboxes
        return sorted(key for key, items in pending.items() if items)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        await anyio.lowlevel.checkpoint()
        return oldest_first(list(self._backing.dead_letters.get(key, {}).values()))

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        await anyio.lowlevel.checkpoint()
        return list_sessions(self._backing, query)

    async def tenants(self) -> list[str]:
        await anyio.lowlevel.checkpoint()
        owning = {key.tenant for key, session in self._sessions.items() if session.is_public}
        return sorted(owning | {tenant for tenant, _ in self._blobs})

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        """Remove all that the session owns; its epoch stays, marked as deleted."""
        await anyio.lowlevel.checkpoint()
        session = self._held_session(key, epoch)
        if session.published and not keep_posts:
            self._backing.inboxes.pop(key, None)
        session.clear()
        session.deleted = session.released = True
        self._backing.dead_letters.pop(key, None)

    async def scrub(self) -> None:
        """Do nothing: removed data is not kept anywhere."""
        await anyio.lowlevel.checkpoint()

    def _visible(self, key: SessionKey) -> StoredSession | None:
        """Return a session that is one for readers."""
        session = self._sessions.get(key)
        return session if session is not None and session.is_public else None

    def _held_session(self, key: SessionKey, epoch: int) -> StoredSession:
        return held_session(key, epoch, self._sessions.get(key))
