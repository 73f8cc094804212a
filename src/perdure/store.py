"""The store port: what perdure asks of a place that keeps bytes by session.

Small, batch-first, and the same for every backend; ``perdure.testing.conformance``
is its definition. Everybody above holds a `Store` and never learns which one.

Rules that every backend keeps:

* ``append_many`` is idempotent by (key, seq) under one epoch: sending a record again that
  the log already holds changes nothing. It is fenced: a batch whose epoch is not
  the newest is answered with CONFLICT and changes nothing that can be read.
* OK means durable to ``capabilities.durability``, every record of the batch, in order.
* The log holds a prefix of whole groups, whichever process was killed, at any time.
* Documents are written before the manifest that names them, and the manifest is
  replaced last and atomically; history that a manifest no longer needs stays readable.
* A method that is cancelled may still have its effect; it never has half of it.

Errors of a driver are mapped to `perdure.errors` with the driver's error as the cause.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Final, Literal, Protocol, TypeVar, cast

import msgspec

from perdure.errors import LeaseLostError, SessionNotFoundError
from perdure.records.chunks import require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    About,
    Batch,
    Beginning,
    BlobSweep,
    Capabilities,
    Document,
    Documents,
    Draft,
    DraftInfo,
    FoldedDocument,
    Held,
    LeaseState,
    LogChunk,
    Manifest,
    Origin,
    Outcome,
    RestoreData,
    SessionInfo,
    SessionQuery,
    Status,
    Taken,
    Terms,
    epoch_payload,
    lease_held,
    lease_lost,
    matching_documents,
    new_entries,
    published_already,
    refusal_of,
    session_info,
)
from perdure.records.plain import (
    StoredBlob,
    StoredSession,
    remove_blobs,
    renew_blobs,
    sweep_blobs,
)
from perdure.records.posts import DeadLetter, HeartbeatRequests, InboxLimit, PendingItem
from perdure.records.records import EPOCH, Entry, Record

__all__ = [
    "EPOCH",
    "About",
    "Batch",
    "Beginning",
    "BlobStore",
    "BlobSweep",
    "Capabilities",
    "ConnectionPool",
    "DeadLetter",
    "DirectoryStore",
    "Document",
    "DocumentStore",
    "Documents",
    "Draft",
    "DraftInfo",
    "Entry",
    "FoldedDocument",
    "HeartbeatRequests",
    "Held",
    "InboxLimit",
    "InboxStore",
    "LeaseState",
    "LeaseStore",
    "LogChunk",
    "LogStore",
    "Manifest",
    "Origin",
    "Outcome",
    "PendingItem",
    "Record",
    "RestoreData",
    "SessionInfo",
    "SessionQuery",
    "Status",
    "Store",
    "StoredBlob",
    "StoredSession",
    "SupportsBeginAppend",
    "SupportsConnections",
    "SupportsFolders",
    "SupportsIntegrityCheck",
    "SupportsLocalPath",
    "SupportsOwnBlobs",
    "SupportsReadMany",
    "SupportsReadOnly",
    "SupportsRebuild",
    "SupportsRestore",
    "SupportsSpill",
    "Taken",
    "Terms",
    "capability",
    "epoch_payload",
    "lease_lost",
    "matching_documents",
    "new_entries",
    "open_read_only",
    "past_damage",
    "refusal_of",
    "remove_blobs",
    "renew_blobs",
    "require_named",
    "session_info",
    "shortcut",
    "sweep_blobs",
    "take_after",
    "verified",
]

past_damage: ContextVar[bool] = ContextVar("perdure_past_damage", default=False)
"""Whether the task that reads a damaged log wants what is left of it. A store whose ``read_log``
would refuse all of it for one damaged part then gives each run of records that can be proven, and
raises CorruptRecordError where one ends, with the next readable record as its fact ``next``."""


ALL = SessionQuery()
"""Lists the first sessions of the unnamed tenant, by key."""


class LogStore(Protocol):
    """The log of each session: its only truth."""

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Make each batch durable; answer for each in the order given. Raise nothing.

        A call has at most one batch of each session.
        """
        ...

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records with ``after < seq < before``, oldest first or, reversed, newest first.

        Needs no lease. An unknown session has no records.
        Raises CorruptRecordError for damage before the tail, with what was readable unread.
        """
        ...

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        ...

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove records with ``seq < below``, as the holder, and return the bytes freed.

        It may keep more of them (whole segments, whole commits), never less, and what is left
        is whole up to the head: ``read_log`` begins with it, and all else stays as before.
        Raises LeaseLostError when the epoch is not the newest.
        """
        ...


class DocumentStore(Protocol):
    """Documents that were folded from a log, and their manifest."""

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read the documents of these names (all of them for None) and the manifest.

        Raises UnsupportedVersionError for a manifest of a newer format.
        """
        ...

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Make documents durable, then replace the manifest, fenced by ``manifest.epoch``.

        ``manifest.documents`` lists all documents, those that are unchanged included.
        Raises LeaseLostError when the epoch is not the newest. A store that knows it raises
        AcknowledgedRecordsLostError when the log has not all records that they are as of: it
        went back to an earlier state, and could not be read with them.
        """
        ...


class BlobStore(Protocol):
    """Large values of a tenant, by the hash of their content.

    Where a call is about the blobs of one session, its tenant is ``key.blobs``.
    """

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Make blobs durable under their names: the SHA-256 of their bytes, in hex.

        Names of a wrapper's own begin with ``x`` (`perdure.records.chunks`), and prove nothing.
        Raises NotStorableError for a name that does not fit its bytes.
        """
        ...

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, verified; None when there is none.

        Raises CorruptRecordError when its bytes do not match its name.
        """
        ...

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        """Move unreachable blobs of at least ``older_than`` seconds of age out of the way, and
        remove those that were moved at least as long ago and still are not reachable.

        One that is put or renewed meanwhile stays, even if ``reachable`` lacks it. With ``among``,
        no other blob is looked at: two calls with an age of 0, and a look at who reaches them in
        between, remove what no one does.
        """
        ...

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        """Set the age of blobs to zero, taking them back from where a sweep moved them.

        Returns those that do not exist. A caller renews a blob before it refers to it, unless it
        has just put it.
        """
        ...

    async def blob_names(self, tenant: str) -> list[str]:
        """List the tenant's blobs that can be read, by name."""
        ...

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        """Remove blobs at once, from quarantine too, and return how many bytes were freed.

        The caller knows that nothing reaches them; unknown names have no effect.
        """
        ...


class LeaseStore(Protocol):
    """The right to write a session: one holder at a time, each under an epoch of its own."""

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Return the state of the session's lease; None if it was never acquired."""
        ...

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """Take a session with the next epoch, if ``terms.allows`` it from its newest holder.

        The store decides in one step, or reads the holder, asks the terms, and takes the session
        only if the epoch is still the same; where another owner was faster it answers who. It
        appends the epoch record. What a restore needs may be read in the same step:
        ``Taken.found``.

        Where there is no session, a log begins, as ``terms.beginning`` says: its epoch record has
        the seq ``first``, and in its payload ``base``, the history before it. With ``draft``, the
        session is a draft until `publish`: its holder writes it as any session, but no one reads
        it. ``holder`` calls it deleted, no listing has it, its log and documents are empty. What
        was posted to the id waits. A draft that is acquired loses its content, dead letters
        included, and a log begins: only its own holder continues one.
        """
        ...

    async def publish(self, key: SessionKey, epoch: int) -> None:
        """Make a draft a session, in one step, durably; one that is published stays so.

        Raises LeaseLostError when the epoch is not the newest, or the draft was deleted.
        """
        ...

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        """List a tenant's drafts that are not published, by key."""
        ...

    async def release(self, key: SessionKey, epoch: int) -> None:
        """Say that the epoch's holder writes no more; not the newest epoch: no effect."""
        ...

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and return what others want since the last one."""
        ...

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when the next heartbeat may have news, or after ``timeout`` seconds.

        A store that is notified (LISTEN, a subscription) returns early; any other just sleeps.
        """
        ...

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Ask the holder for the session."""
        ...


class InboxStore(Protocol):
    """Items that wait for a session, left by any process."""

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Leave items for a session, durably, in order; no lease, and it need not exist.

        Returns how many were new: an ``op_id`` that is waiting already is not posted again.
        All of them are posted, or none. The holder, if there is one, hears of it by ``heartbeat``.

        Raises InboxFullError where new items would go over the limit; concurrent callers
        may each go over it by one post, where the store cannot detect the race.
        """
        ...

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        """Return what waits for a session, oldest first, and leave it there until it is settled.

        An item that cannot be read is among them, in its place, with its ``damage``: it hides
        none of those after it. ``epoch`` is ``holder(key).epoch``, or 0 where that is None: who
        only reads knows it, too.
        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        """Remove items whose records are durable in the log; unknown ids have no effect.

        Those that could not be delivered stay, as ``dead`` letters with their attempts: durably,
        with all of their bytes, before they leave what waits; one of the same op id is replaced.
        If this is killed midway, an item may be waiting next to its letter. None is received.

        Without an epoch it is dead letters that are removed: that needs no lease.
        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """Return a session's dead letters in the order of their times.

        Needs no lease. One that is damaged is among them, and its item says so.
        """
        ...

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        """List all tenants' sessions with something waiting, by key; they need not exist.

        With ``dead_letters``, those that have dead letters instead.
        """
        ...


class DirectoryStore(Protocol):
    """Which sessions there are."""

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        """List a page of a tenant's sessions, as the query chooses and orders them.

        What a listing says of a session is part of what makes it: ``acquire`` with
        ``terms.beginning.about``, and each ``append_many``, whose time is the session's last
        activity and whose ``turns`` and ``about`` replace what was known. A manifest says it where
        nothing else has in this life of the session, and where it is as of the log's end.
        """
        ...

    async def tenants(self) -> list[str]:
        """List the tenants that have sessions or blobs.

        Those that have pending items alone are in `sessions_with_pending_items`.
        """
        ...

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        """Remove what the session owns, as its holder, its inbox and its dead letters included;
        its epochs never start again. What was posted to the id of a draft waits on, and with
        ``keep_posts`` that of any session: none is lost, even if posted meanwhile.

        Raises LeaseLostError when the epoch is not the newest.
        """
        ...


class Store(
    LogStore,
    DocumentStore,
    BlobStore,
    LeaseStore,
    InboxStore,
    DirectoryStore,
    Protocol,
):
    """All of the port. Open it with ``open``, close it with ``aclose``."""

    @property
    def capabilities(self) -> Capabilities:
        """The store's properties and limits."""
        ...

    @property
    def owner(self) -> str:
        """The id of this process and store object as a holder of leases; unguessable."""
        ...

    @property
    def location(self) -> str:
        """The place of the sessions, for people; never a password in it."""
        ...

    async def open(self) -> None:
        """Make the store usable in this process and event loop.

        Raises StoreUnavailableError when it cannot be reached or written.
        """
        ...

    async def aclose(self) -> None:
        """Give up what the store holds open; leases that are not released expire.

        A manager cancels it once the deadline of its shutdown is over.
        """
        ...

    async def scrub(self) -> None:
        """Leave nothing of what was removed where it can be found: free pages, old logs.

        As far as the backend can; docs/durability.md says how far that is.
        """
        ...


# Optional protocols besides the port: `capability` finds them.


class SupportsBeginAppend(Protocol):
    """A store that can append without a task of the caller's, as one with threads of its own."""

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        """Start what ``append_many`` does, and have the event loop call ``done`` with its answer.

        However late that is, once. False if something has to be awaited first: nothing was done,
        and ``append_many`` has to do it.
        """
        ...


class SupportsRestore(Protocol):
    """A store that reads all that a restore needs at once."""

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None, *, newest: int = 0
    ) -> RestoreData:
        """Read documents, as ``read_documents`` does, and with them the log after them.

        The log need not be read if it is long, damaged, or if a document is; nor need its
        ``newest`` messages, with what is among them.
        """
        ...


class SupportsReadMany(Protocol):
    """A store that reads several sessions at once."""

    async def read_many_for_restore(
        self, keys: Sequence[SessionKey], names: Collection[str] | None = None
    ) -> list[RestoreData | None]:
        """Return what ``read_for_restore`` does, for each; None where that would raise."""
        ...

    async def read_logs(self, keys: Sequence[SessionKey]) -> list[tuple[Record, ...] | None]:
        """Return the log of each; None where it is long, or damaged."""
        ...


class SupportsReadOnly(Protocol):
    """A store that can be opened to read without a trace."""

    async def open_read_only(self) -> None:
        """Open to read: nothing is created, changed or registered."""
        ...


class SupportsLocalPath(Protocol):
    """A store of this machine's."""

    @property
    def local_path(self) -> str | None:
        """Its file or folder; None for a wrapper of a store without one."""
        ...


class SupportsFolders(Protocol):
    """A store with a folder for each session."""

    def folder_of(self, key: SessionKey) -> str:
        """Return the session's folder, which need not exist."""
        ...


class SupportsSpill(Protocol):
    """A store whose records differ from what was appended: encrypted, or compressed."""

    def transform_spill(
        self, key: SessionKey, epoch: int, base: int, entries: Sequence[Entry]
    ) -> tuple[Entry, ...] | None:
        """Return entries after ``base`` as the store would keep them, without awaiting.

        None if that is not possible now: then they must not be written anywhere.
        """
        ...

    async def restore_session_records(
        self, key: SessionKey, records: Sequence[Record]
    ) -> tuple[Record, ...]:
        """Return the original records of transformed ones."""
        ...


class SupportsOwnBlobs(Protocol):
    """A store that keeps a session's blobs apart from those of its tenant, by ``key.blobs``."""

    async def listed_blobs(self, key: SessionKey, names: Collection[str]) -> dict[str, str]:
        """Return names of a session's blobs by those that ``blob_names`` of the tenant has.

        A blob that was put for the tenant is listed by its own name, which is among them.
        """
        ...


class SupportsRebuild(Protocol):
    """A store that can rebuild its directory from its sessions."""

    async def rebuild_directory(self) -> int:
        """Rebuild it, and return how many sessions it lists."""
        ...


class ConnectionPool(msgspec.Struct, frozen=True, kw_only=True):
    """A store's connections to its server, as they are now."""

    idle: int = 0
    used: int = 0
    waiting: int = 0
    """Calls that wait for one."""
    most: int = 0
    """The largest number allowed."""


ConnectionEvent = Literal["created", "waited", "used", "timed_out"]
"""A connection was made, was waited for, was given back; none was made in time."""
ConnectionHook = Callable[[ConnectionEvent, float], object]
"""Gets what happened, and the seconds that it took."""


class SupportsConnections(Protocol):
    """A store that keeps connections to a server."""

    def connection_pool(self) -> ConnectionPool:
        """Return how many connections there are; called by any thread."""
        ...

    def watch_connections(self, hook: ConnectionHook) -> None:
        """Call a function, in any thread, at each event of a connection; before ``open``."""
        ...


class SupportsIntegrityCheck(Protocol):
    """A store in one database file, which can be checked and repaired."""

    async def integrity_problems(self) -> list[str]:
        """Return what is wrong with the file; nothing if it is sound."""
        ...

    async def readable_keys(self) -> list[SessionKey]:
        """Return the sessions that can be read although a listing is damaged."""
        ...

    async def reindex(self) -> list[str]:
        """Rebuild the indexes of the closed store, and return the problems that remain."""
        ...


C = TypeVar("C")


def capability(store: object, protocol: type[C]) -> C | None:
    """Return the store as one of the protocols above; None if it lacks a member of it."""
    members = [name for name in vars(protocol) if not name.startswith("_")]
    return cast("C", store) if all(hasattr(store, name) for name in members) else None


def shortcut(store: object, protocol: type[C]) -> C | None:
    """Return the store as a protocol that takes the place of calls of the port.

    Only where its class has the members: a wrapper that passes on every name that it does not
    know would be bypassed.
    """
    return None if capability(type(store), protocol) is None else cast("C", store)


async def listed_blobs(store: Store, key: SessionKey, names: Collection[str]) -> dict[str, str]:
    """Return names of a session's blobs, by those under which the tenant's are listed and swept."""
    apart = capability(store, SupportsOwnBlobs)
    return {name: name for name in names} if apart is None else await apart.listed_blobs(key, names)


def blobs_are_apart(store: Store) -> bool:
    """Return whether two sessions of a tenant never share a blob."""
    return capability(store, SupportsOwnBlobs) is not None


async def open_read_only(store: Store) -> None:
    """Open a store to read it, without a trace if it knows how to; else as always."""
    reader = capability(store, SupportsReadOnly)
    await (store.open() if reader is None else reader.open_read_only())


async def is_begun(store: Store, key: SessionKey) -> bool:
    """Return whether a session was begun, and is not deleted."""
    holder = await store.holder(key)
    return holder is not None and not holder.deleted


async def is_begun_since(store: Store, key: SessionKey, epoch: int) -> bool:
    """Return whether a session's log was begun after an epoch: what was there then was deleted.

    Unknown, and False, of a log that was pruned.
    """
    oldest = await first_record(store.read_log(key, limit=1))
    return oldest is not None and oldest.seq == 1 and oldest.epoch > epoch


async def require_same(
    store: Store, key: SessionKey, *, seen: int = 0, held: int | None = None
) -> None:
    """Look again at a session that lacks something, before that is called damage.

    Args:
        store: The session's store.
        key: The session.
        seen: The epoch of a record that was read of it, 0 if that is unknown.
        held: The epoch that it is held under.

    Raises:
        LeaseLostError: It is not held under that epoch any more.
        SessionNotFoundError: It was deleted.

    """
    holder = await store.holder(key)
    is_deleted = holder is not None and holder.deleted
    if held is not None and (holder is None or holder.epoch != held):
        message = f"session {key} was taken over by another process meanwhile"
        message += ", and deleted" if is_deleted else ""
        raise LeaseLostError(message, key=str(key), epoch=held)
    if is_deleted or (seen and await is_begun_since(store, key, seen)):
        raise SessionNotFoundError(f"session {key} was deleted meanwhile", key=str(key))


async def first_record(
    log: AsyncGenerator[LogChunk, None], matches: Callable[[Record], bool] = lambda _: True
) -> Record | None:
    """Return the first record of ``read_log`` that matches, None without one; close the log."""
    async with aclosing(log):
        async for chunk in log:
            for record in chunk.records:
                if matches(record):
                    return record
    return None


async def all_records(log: AsyncGenerator[LogChunk, None]) -> list[Record]:
    """Return the records of ``read_log``, which is closed then."""
    async with aclosing(log):
        return [record async for chunk in log for record in chunk.records]


NEAR: Final = 64
"""Records between two that are wanted, which are read along with them."""


async def records_near(
    store: Store, key: SessionKey, seqs: Iterable[int]
) -> AsyncGenerator[Record, None]:
    """Yield a log's records of these numbers, and those between two that are close together."""
    runs: list[list[int]] = []
    for seq in sorted(seqs):
        if runs and seq - runs[-1][1] <= NEAR:
            runs[-1][1] = seq
        else:
            runs.append([seq, seq])
    for first, last in runs:
        async with aclosing(store.read_log(key, after=first - 1, before=last + 1)) as log:
            async for chunk in log:
                for record in chunk.records:
                    yield record


async def record_at(store: Store, key: SessionKey, seq: int) -> Record | None:
    """Return one record of a log, None if that does not have it."""
    return await first_record(store.read_log(key, after=seq - 1, before=seq + 1))


async def take_after(
    store: Store,
    key: SessionKey,
    *,
    after: int,
    first: int = 1,
    base: Origin | None = None,
    draft: Draft | None = None,
) -> Taken:
    """Take a session from any holder, if its newest epoch is *after*, 0 for none.

    Raises:
        LeaseHeldError: Another owner was faster, or there is a session where a draft is to begin.

    """
    terms = Terms(me=store.owner, after=after, beginning=Beginning(first, base, draft))
    answer = await store.acquire(key, terms)
    if isinstance(answer, Taken):
        return answer
    newest = 0 if answer.holder is None else answer.holder.epoch
    is_race = draft is None or newest != after
    raise lease_held(key, after, newest) if is_race else published_already(key, newest)
