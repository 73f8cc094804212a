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
    Capabilities,
    DeadLetter,
    Documents,
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
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore

T = TypeVar("T")

_OFFLOAD = 256
"""Sessions with more records than this are converted in a thread."""


@final
class StorageSlot:
    """One session's storage, and the session as last read from it."""

    def __init__(
        self,
        key: SessionKey,
        storage: StateStorage,
        lock: anyio.Lock,
        sessions: dict[SessionKey, StoredSession],
    ) -> None:
        self.key: SessionKey = key
        self.lock: anyio.Lock = lock
        self._storage = storage
        self._sessions = sessions
        self._modified: datetime.datetime | None = None
        self._is_current = False
        self._other_key = ""

    @property
    def session(self) -> StoredSession | None:
        """The session as last read or saved; None if there is none."""
        return self._sessions.get(self.key)

    @session.setter
    def session(self, session: StoredSession | None) -> None:
        self._sessions.pop(self.key, None)
        if session is not None:
            self._sessions[self.key] = session

    def copy(self) -> StoredSession:
        """Return a copy of the session whose changes leave it as it is."""
        session = copy.copy(self.session or StoredSession(self.key))
        session.entries, session.epochs = list(session.entries), list(session.epochs)
        session.epoch_starts = list(session.epoch_starts)
        return session

    async def refresh(self) -> None:
        """Read the storage again if it has changed, under the lock."""
        with self._map_errors("read"):
            modified = await self._storage.get_last_modified()
            if not self._is_current or (modified is not None and modified != self._modified):
                await self._load(modified)

    async def _load(self, modified: datetime.datetime | None) -> None:
        state, previous = await self._storage.load(), self.session
        self._other_key = "" if state is None else _other_key(state, self.key)
        if state is not None and not self._other_key:
            session = await _run_maybe_in_thread(
                len(state.context.core.history), lambda: _read(self.key, state)
            )
            session.updated_at = None if modified is None else modified.timestamp()
            _keep_documents(session, previous)
            self.session = session
        elif previous is not None and previous.is_public:
            self.session = None
        self._modified, self._is_current = modified, True

    async def keep(self, session: StoredSession) -> None:
        """Take a changed session, and replace the stored state, unless it is a draft.

        The session in memory changes only after that has succeeded.
        """
        if session.published:
            self._is_current = False  # until the storage's content is certain
            with self._map_errors("save"):
                state = await _run_maybe_in_thread(
                    len(session.entries), lambda: _write(self.key, session)
                )
                await self._storage.save(state)
                self._modified = await self._storage.get_last_modified()
            self._is_current = True
        self.session = session

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


_CAPABILITIES = Capabilities(
    durability="storage",
    batch_max=16,
    parallelism=4,
    memory_bound=True,
    shared=False,
    blobs=False,
)


@final
class StateStore(DelegatingStore):
    """Keep sessions in storages of whole states, and in memory as they were last read or saved.

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
        backing = MemoryBacking()
        super().__init__(MemoryStore(owner=owner, backing=backing))
        self._storage = storage
        self._sessions = backing.sessions
        self._slots: dict[SessionKey, StorageSlot] = {}
        self._lock = anyio.Lock()  # for the one storage, whichever session is requested

    def __repr__(self) -> str:
        return f"StateStore({self._storage!r})"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def location(self) -> str:
        """The storage's path."""
        if callable(self._storage):
            return f"storages of {getattr(self._storage, '__qualname__', 'a function')}"
        return self._storage.get_path()

    async def aclose(self) -> None:
        """Forget the sessions that were read."""
        self._slots.clear()
        self._sessions.clear()
        await super().aclose()

    @contextlib.asynccontextmanager
    async def _exclusive(self, key: SessionKey) -> AsyncIterator[StorageSlot]:
        """Lock a session's storage, and read it again if it has changed."""
        slot = self._slots.get(key)
        if slot is None:
            if callable(self._storage):
                slot = StorageSlot(key, self._storage(key), anyio.Lock(), self._sessions)
            else:
                slot = StorageSlot(key, self._storage, self._lock, self._sessions)
            self._slots[key] = slot
        async with slot.lock:
            await slot.refresh()
            yield slot

    async def _refresh(self, key: SessionKey) -> None:
        """Read a session's storage again if it has changed."""
        async with self._exclusive(key) as slot:
            pass
        if key not in self._sessions and not slot.lock.locked():
            self._slots.pop(key, None)  # so that requests for missing sessions use no memory

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Save the whole state of each batch's session."""
        return [await self._append(batch) for batch in batches]

    async def _append(self, batch: Batch) -> Outcome:
        try:
            async with self._exclusive(batch.key) as slot:
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
        await self._refresh(key)
        chunks = super().read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def head(self, key: SessionKey) -> int:
        await self._refresh(key)
        return await super().head(key)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove nothing: a state has the whole log."""
        async with self._exclusive(key) as slot:
            slot.copy().require_held(epoch)
        return 0

    # documents, and no blobs

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Return documents that were folded on this object."""
        await self._refresh(key)
        return await super().read_documents(key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Keep documents for the lifetime of this object."""
        async with self._exclusive(key):
            await super().write_documents(key, documents, manifest)

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Raise NotStorableError: a state has no field for blobs."""
        if blobs:
            raise NotStorableError(
                "a storage of whole states keeps no blobs: store large values elsewhere, and a "
                "reference here",
                blobs=len(blobs),
            )

    # leases: that of another owner may always be taken over

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Return who held the session last; another owner's lease may always be taken over."""
        await self._refresh(key)
        return await super().holder(key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """Take a session; a draft is in memory only until it is published."""
        async with self._exclusive(key) as slot:
            slot.require_same_session()
            holder = await super().holder(key)
            if not terms.allows(holder):
                return Held(holder)
            session = slot.copy()
            taken = session.acquire(terms, time.time())
            await slot.keep(session)
            return taken

    async def publish(self, key: SessionKey, epoch: int) -> None:
        """Save the whole state of a draft."""
        async with self._exclusive(key) as slot:
            session = slot.copy()
            is_draft = not session.published
            session.publish(epoch)
            if session.owner != self.owner:  # another program's, saved meanwhile
                raise lease_lost(key, epoch, session.epoch)
            if is_draft:
                await slot.keep(session)

    async def release(self, key: SessionKey, epoch: int) -> None:
        """Mark the session in memory only: no process waits for a release here."""
        await self._refresh(key)
        await super().release(key, epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        """Return nothing: no other process sees this object's heartbeats, or asks it."""
        return HeartbeatRequests()

    # no inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Raise NotStorableError: a state has no inbox."""
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
        await self._refresh(key)
        return await super().receive(key, epoch, limit=limit)

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
        await self._refresh(key)
        await super().ack(key, epoch, op_ids)

    # the directory: sessions that this object has seen

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        """List the sessions that this object has seen, and that exist."""
        for key in [key for key in self._slots if key.tenant == query.tenant]:
            await self._refresh(key)
        return await super().sessions(query)

    async def tenants(self) -> list[str]:
        """List the tenants of the sessions that this object has seen, and that exist."""
        for key in list(self._slots):
            await self._refresh(key)
        return await super().tenants()

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        """Remove the state; this object remembers the epoch. There are no posts to keep."""
        async with self._exclusive(key) as slot:
            session = slot.copy()
            session.delete(epoch)
            await slot.remove()
            slot.session = session
