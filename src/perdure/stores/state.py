"""State store: adapter from a user's storage of whole states, with six methods, to the port.

Each save writes a `FullAgentState` that other programs can read, with the log in it. So its
guarantees are weaker than other stores':

* A save costs as much as the session is large, and the whole session is in memory.
* A save is as durable as the storage's ``save`` makes it.
* One writer is assumed. A second one takes the session over at once; the first notices before its
  next save, by ``get_last_modified``, and loses its lease. Two saves at the same moment are not
  detected: the later one counts.
* Folded documents last as long as this object: the state holds the same facts.
* No blobs, no handover, no inbox. The directory has the sessions that this object has seen. A
  deleted session's epochs start again with a new object.

A state that another program has written, or changed, is read like an import. The storage reports
a damaged state; a state of a newer release is refused, and left unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TypeVar, final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from perdure.errors import (
    ConfigError,
    FormatError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.formats.records import log_in, state_of, unfold, with_log
from perdure.formats.state import FullAgentState, StateStorage
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, lease_lost
from perdure.records.plain import StoredSession
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import (
    ALL,
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Documents,
    DraftInfo,
    HeartbeatRequests,
    Held,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    SessionQuery,
    Status,
    Taken,
    Terms,
)

T = TypeVar("T")

_OFFLOAD = 256
"""Sessions with more records than this are converted in a thread."""


@final
class StorageSlot:
    """One session's storage, and the session as last read from it."""

    def __init__(self, key: SessionKey, storage: StateStorage, lock: anyio.Lock) -> None:
        self.key: SessionKey = key
        self._storage = storage
        self._lock = lock
        self._modified: datetime.datetime | None = None
        self._is_current = False
        self._other_key = ""
        self.session: StoredSession | None = None
        """The session as last read or saved; None if there is none."""

    @property
    def is_idle(self) -> bool:
        """Whether no task uses the storage or waits for it."""
        statistics = self._lock.statistics()
        return not statistics.locked and not statistics.tasks_waiting

    @property
    def current(self) -> StoredSession:
        """The session, or what it is before anybody has begun it."""
        return self.session or StoredSession(self.key)

    def copy(self) -> StoredSession:
        """Return a copy of the session whose changes leave it as it is."""
        session = copy.copy(self.current)
        session.entries, session.epochs = list(session.entries), list(session.epochs)
        session.epoch_starts = list(session.epoch_starts)
        return session

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[StorageSlot]:
        """Lock the slot, and read the storage again if it has changed."""
        async with self._lock:
            with self._map_errors("read"):
                modified = await self._storage.get_last_modified()
                if not self._is_current or (modified is not None and modified != self._modified):
                    await self._load(modified)
            yield self

    async def _load(self, modified: datetime.datetime | None) -> None:
        state = await self._storage.load()
        is_kept = self.session is not None and not self.session.is_public
        kept_here = self.session if is_kept else None
        previous = self.session
        self._other_key = "" if state is None else _other_key(state, self.key)
        if state is None or self._other_key:
            self.session = kept_here
        else:
            self.session = await _run_maybe_in_thread(
                len(state.context.core.history), lambda: _read(self.key, state)
            )
            self.session.updated_at = None if modified is None else modified.timestamp()
            _keep_documents(self.session, previous)
        self._modified, self._is_current = modified, True

    async def keep(self, session: StoredSession) -> None:
        """Take a changed session; saves its state unless it is a draft."""
        if session.published:
            await self.save(session)
        else:
            self.session = session

    async def save(self, session: StoredSession) -> None:
        """Replace the stored state; *session* changes only after that has succeeded."""
        self._is_current = False  # until the storage's content is certain
        with self._map_errors("save"):
            state = await _run_maybe_in_thread(
                len(session.entries), lambda: _write(self.key, session)
            )
            await self._storage.save(state)
            self._modified = await self._storage.get_last_modified()
        self.session, self._is_current = session, True

    async def remove(self) -> None:
        """Remove the stored state."""
        self._is_current = False
        with self._map_errors("delete"):
            await self._storage.delete()
        self._modified, self._is_current = None, True

    def require_same_session(self) -> None:
        """Raise ConfigError if the stored state belongs to another session."""
        if not self._other_key:
            return
        path = self._storage.get_path()
        raise ConfigError(
            f"{path} holds the state of {self._other_key}, not of {self.key}: give each session a "
            "storage of its own, StateStore(lambda key: …)",
            key=str(self.key),
            path=path,
        )

    @contextlib.contextmanager
    def _map_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except PerdureError:
            raise
        except Exception as error:
            path = self._storage.get_path()
            raise StoreUnavailableError(
                f"the storage at {path} failed to {what}: {type(error).__name__}: {error}",
                path=path,
                key=str(self.key),
            ) from error


def _other_key(state: FullAgentState, key: SessionKey) -> str:
    """Return the key of the session that a state belongs to, "" if it is this one."""
    log = log_in(state)
    session, tenant = ("default", "") if log is None else (log.session, log.tenant)
    agent = state.agent_id or key.agent
    if (agent, session, tenant) == (key.agent, key.session, key.tenant):
        return ""
    return str(SessionKey(agent, session, tenant))


def _read(key: SessionKey, state: FullAgentState) -> StoredSession:
    """Return the session of a state, from the log in it or else made from its content."""
    log = log_in(state)
    session = StoredSession(key)
    if log is not None and log.agrees and log.records:
        records: Sequence[Record] = log.records
    else:
        first = Record(1, log.epoch if log else 1, EPOCH, b'{"owner":""}', end=True)
        entries = unfold(state, now=time.time()).entries
        records = [
            first,
            *(
                Record(seq, first.epoch, entry.kind, entry.payload, entry.end)
                for seq, entry in enumerate(entries, 2)
            ),
        ]
    session.first = records[0].seq
    for record in records:
        session.entries.append(Entry(record.kind, record.payload, record.end))
        if record.epoch != session.epoch:
            session.epoch = record.epoch
            session.epoch_starts.append(record.seq)
            session.epochs.append(record.epoch)
        if record.kind == EPOCH:
            session.owner = decoder_of(_EpochPayload).decode(record.payload).owner
    return session


class _EpochPayload(msgspec.Struct):
    owner: str = ""


def _write(key: SessionKey, session: StoredSession) -> FullAgentState:
    records = list(session.records())
    try:
        return with_log(state_of(key, records), key, records)
    except FormatError as error:
        raise NotStorableError(
            f"the records of {key} cannot be converted to a state: {error}", key=str(key)
        ) from error


def _keep_documents(session: StoredSession, before: StoredSession | None) -> None:
    """Reuse documents that were folded from records that are unchanged."""
    manifest = None if before is None else before.manifest
    if before is None or manifest is None or manifest.as_of_seq > session.head:
        return
    folded = manifest.as_of_seq + 1 - session.first
    if before.entries[:folded] == session.entries[:folded]:
        session.documents, session.manifest = before.documents, manifest


async def _run_maybe_in_thread(size: int, act: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(act) if size > _OFFLOAD else act()


_CHUNK = 256
"""Records in one `LogChunk`."""

_CAPABILITIES = Capabilities(
    durability="storage",
    batch_max=16,
    parallelism=4,
    memory_bound=True,
    shared=False,
    blobs=False,
)


@final
class StateStore:
    """Keep sessions in storages of whole states.

    Args:
        storage: A storage, for one session; or a function that returns a session's storage,
            the same one each time.
        owner: This store's id as a holder of leases.

    """

    def __init__(
        self,
        storage: StateStorage | Callable[[SessionKey], StateStorage],
        *,
        owner: str | None = None,
    ) -> None:
        self._storage = storage
        self._owner = owner or secrets.token_hex(8)
        self._slots: dict[SessionKey, StorageSlot] = {}
        self._lock = anyio.Lock()  # for the one storage, whichever session is requested

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        """The storage's path."""
        if callable(self._storage):
            return f"storages of {getattr(self._storage, '__qualname__', 'a function')}"
        return self._storage.get_path()

    async def open(self) -> None:
        """Do nothing: a storage is read when its session is requested."""
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Forget the sessions that were read."""
        self._slots.clear()
        await anyio.lowlevel.checkpoint()

    def _slot(self, key: SessionKey) -> StorageSlot:
        slot = self._slots.get(key)
        if slot is None:
            if callable(self._storage):
                slot = StorageSlot(key, self._storage(key), anyio.Lock())
            else:
                slot = StorageSlot(key, self._storage, self._lock)
            self._slots[key] = slot
        return slot

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Save the whole state of each batch's session."""
        return [await self._append(batch) for batch in batches]

    async def _append(self, batch: Batch) -> Outcome:
        try:
            async with self._slot(batch.key).exclusive() as slot:
                session = slot.copy()
                head = session.head
                outcome = session.append(batch, time.time())
                if session.head > head:
                    await slot.keep(session)
                return outcome
        except NotStorableError as error:
            return Outcome(Status.PERMANENT, error)
        except PerdureError as error:
            return Outcome(Status.IN_DOUBT, error)

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
        session = await self._session(key)
        records = session.read_log(after=after, before=before, limit=limit, reverse=reverse)
        while chunk := tuple(itertools.islice(records, _CHUNK)):
            yield LogChunk(chunk)
            await anyio.lowlevel.checkpoint()

    async def head(self, key: SessionKey) -> int:
        session = await self._session(key)
        return session.head if session.is_public else 0

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove nothing: a state has the whole log."""
        async with self._slot(key).exclusive() as slot:
            slot.current.require_held(epoch)
        return 0

    async def _session(self, key: SessionKey) -> StoredSession:
        async with self._slot(key).exclusive() as slot:
            session = slot.session
        if session is None and slot.is_idle:
            self._slots.pop(key, None)  # so that requests for missing sessions use no memory
        return session or StoredSession(key)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Return documents that were folded on this object."""
        return (await self._session(key)).read_documents(names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Keep documents for the lifetime of this object."""
        async with self._slot(key).exclusive() as slot:
            slot.current.write_documents(documents, manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Raise NotStorableError: a state has no field for blobs."""
        await anyio.lowlevel.checkpoint()
        if blobs:
            raise NotStorableError(
                "a storage of whole states keeps no blobs: store large values elsewhere, and a "
                "reference here",
                blobs=len(blobs),
            )

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return None: there are none."""
        await anyio.lowlevel.checkpoint()
        return None

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        """Do nothing: there are none."""
        await anyio.lowlevel.checkpoint()
        return BlobSweep()

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        """Return all: there are none."""
        await anyio.lowlevel.checkpoint()
        return set(names)

    async def blob_names(self, tenant: str) -> list[str]:
        """Return nothing: there are none."""
        await anyio.lowlevel.checkpoint()
        return []

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        """Do nothing: there are none."""
        await anyio.lowlevel.checkpoint()
        return 0

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Return who held the session last; another owner's lease may always be taken over."""
        return self._holder(await self._session(key))

    def _holder(self, session: StoredSession) -> LeaseState | None:
        return session.lease(alive=session.owner == self._owner)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """Take a session; a draft is in memory only until it is published."""
        async with self._slot(key).exclusive() as slot:
            slot.require_same_session()
            holder = self._holder(slot.current)
            if not terms.allows(holder):
                return Held(holder)
            session = slot.copy()
            taken = session.acquire(terms, time.time())
            await slot.keep(session)
            return taken

    async def publish(self, key: SessionKey, epoch: int) -> None:
        """Save the whole state of a draft."""
        async with self._slot(key).exclusive() as slot:
            session = slot.copy()
            session.publish(epoch)
            if session.owner != self._owner:  # another program's, saved meanwhile
                raise lease_lost(key, epoch, session.epoch)
            if not slot.current.published:
                await slot.keep(session)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        """List the drafts of this object: nobody else can see one."""
        await anyio.lowlevel.checkpoint()
        return [
            DraftInfo(key, session.epoch, session.draft, session.owner)
            for key, slot in sorted(self._slots.items())
            if key.tenant == tenant and (session := slot.current).draft is not None
            if not session.published
        ]

    async def release(self, key: SessionKey, epoch: int) -> None:
        """Mark the session in memory only: no process waits for a release here."""
        (await self._session(key)).release(epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        """Return nothing: there are no handover requests."""
        await anyio.lowlevel.checkpoint()
        return HeartbeatRequests()

    async def wait_for_notification(self, timeout: float) -> None:
        """Sleep: there are no notifications."""
        await anyio.sleep(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Do nothing: there are no handover requests."""
        await anyio.lowlevel.checkpoint()

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Raise NotStorableError: a state has no inbox."""
        await anyio.lowlevel.checkpoint()
        if items:
            raise NotStorableError(
                f"a storage of whole states has no inbox to post to for {key}: open the session "
                "and append, or connect to another store",
                key=str(key),
                items=len(items),
            )
        return 0

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        """Return nothing: there is no inbox."""
        async with self._slot(key).exclusive() as slot:
            slot.current.require_held(epoch)
            return []

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        """Check the epoch: there is no inbox.

        Raises:
            NotStorableError: There are dead letters.

        """
        if dead:
            raise NotStorableError(
                f"{self.location} keeps no dead letters: use another store for posts", key=str(key)
            )
        async with self._slot(key).exclusive() as slot:
            if epoch is not None:
                slot.current.require_held(epoch)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        """Return nothing: there is no inbox."""
        await anyio.lowlevel.checkpoint()
        return []

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """Return nothing: there is no inbox."""
        await anyio.lowlevel.checkpoint()
        return []

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        """List the sessions that this object has seen, and that exist."""
        infos: list[SessionInfo] = []
        for key in [key for key in self._slots if key.tenant == query.tenant]:
            session = await self._session(key)
            if session.is_public:
                infos.append(session.info)
        return query.page(infos)

    async def tenants(self) -> list[str]:
        """List the tenants of the sessions that this object has seen, and that exist."""
        names: set[str] = set()
        for key in list(self._slots):
            if (await self._session(key)).is_public:
                names.add(key.tenant)
        return sorted(names)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        """Remove the state; this object remembers the epoch. There are no posts to keep."""
        async with self._slot(key).exclusive() as slot:
            session = slot.copy()
            session.delete(epoch)
            await slot.remove()
            slot.session = session

    async def scrub(self) -> None:
        """Do nothing: cleaning up is up to the storage."""
        await anyio.lowlevel.checkpoint()
