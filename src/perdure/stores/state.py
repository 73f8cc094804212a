"""A store over a person's own storage, which keeps whole states: six methods, no log.

What is stored is a `FullAgentState` that others can read, with the log in it: each save
writes all of it. So its capabilities are weaker than other stores', and these are they:

* A save costs as much as the session is large, and all of it lies in memory.
* Durable means what the storage's ``save`` means by returning.
* One writer is assumed. Whoever comes second takes the session over at once; the first
  notices before its next save, by ``get_last_modified``, and loses its lease. Nothing keeps two
  saves at the same moment apart: the later one counts.
* Folded documents last as long as this object: the state is what they would be folded to.
* No blobs, no handover, no inbox. The directory knows the sessions that this object has seen. A
  deleted session's epochs begin anew once this object is gone.

A state that somebody else has written, or changed, is taken over as an import would be. One
that is damaged is the storage's to report; one of a newer release is refused, and left.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from bisect import bisect_right
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
from perdure.formats.from_records import state_of
from perdure.formats.native_log import log_in, with_log
from perdure.formats.state import FullAgentState, StateStorage
from perdure.formats.to_records import unfold
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import (
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Documents,
    HeartbeatRequests,
    HeldLease,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    Status,
)
from perdure.stores.memory import (
    StoredSession,
    documents_of,
    fits,
    fresh,
    held,
    info_of,
    lost,
    too_late,
)

# One session's storage, as `perdure.stores.state` works on it: read when it was changed,


T = TypeVar("T")

_OFFLOAD = 256
"""More records than this are made a state of in a thread."""


@final
class StorageSlot:
    """One session's storage, and what was read from it last."""

    def __init__(self, key: SessionKey, storage: StateStorage, lock: anyio.Lock) -> None:
        self.key: SessionKey = key
        self._storage = storage
        self._lock = lock
        self._modified: datetime.datetime | None = None
        self._known = False
        self._other = ""
        self.session: StoredSession | None = None
        """As it was read or saved last; None where there is none."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody is at it, or waits to be."""
        at = self._lock.statistics()
        return not at.locked and not at.tasks_waiting

    @contextlib.asynccontextmanager
    async def looked(self) -> AsyncIterator[StorageSlot]:
        """Have the place alone, and up to date."""
        async with self._lock:
            with self._trouble("read"):
                modified = await self._storage.get_last_modified()
                if not self._known or (modified is not None and modified != self._modified):
                    await self._load(modified)
            yield self

    async def _load(self, modified: datetime.datetime | None) -> None:
        state = await self._storage.load()
        deleted = self.session if self.session is not None and self.session.deleted else None
        documents = self.session
        self._other = "" if state is None else _stranger(state, self.key)
        if state is None or self._other:
            self.session = deleted
        else:
            self.session = await _in_thread(len(state.context.core.history), lambda: _read(state))
            _keep_documents(self.session, documents)
        self._modified, self._known = modified, True

    async def save(self, session: StoredSession) -> None:
        """Replace the stored state; what is known here changes only if that was done."""
        self._known = False  # until it is sure what the storage holds
        with self._trouble("save"):
            state = await _in_thread(len(session.entries), lambda: _write(self.key, session))
            await self._storage.save(state)
            self._modified = await self._storage.get_last_modified()
        self.session, self._known = session, True

    async def remove(self) -> None:
        """Remove the stored state."""
        self._known = False
        with self._trouble("delete"):
            await self._storage.delete()
        self._modified, self._known = None, True

    def require_mine(self) -> None:
        """Refuse to write over what belongs to another session."""
        if not self._other:
            return
        where = self._storage.get_path()
        message = (
            f"{where} holds the state of {self._other}, not of {self.key}: give each session a "
            "storage of its own, StateStore(lambda key: …)"
        )
        raise ConfigError(message, key=str(self.key), path=where)

    @contextlib.contextmanager
    def _trouble(self, what: str) -> Iterator[None]:
        try:
            yield
        except PerdureError:
            raise
        except Exception as error:
            where = self._storage.get_path()
            message = f"the storage at {where} failed to {what}: {type(error).__name__}: {error}"
            raise StoreUnavailableError(message, path=where, key=str(self.key)) from error


def _stranger(state: FullAgentState, key: SessionKey) -> str:
    """Return whose state it is, if it is not this session's."""
    log = log_in(state)
    session, tenant = ("default", "") if log is None else (log.session, log.tenant)
    agent = state.agent_id or key.agent
    if (agent, session, tenant) == (key.agent, key.session, key.tenant):
        return ""
    return str(SessionKey(agent, session, tenant))


def _read(state: FullAgentState) -> StoredSession:
    """Return the session of a state: its log, or one that is made of it."""
    log = log_in(state)
    session = StoredSession()
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
    for record in records:
        session.entries.append(Entry(record.kind, record.payload, record.end))
        if record.epoch != session.epoch:
            session.epoch = record.epoch
            session.epoch_starts.append(record.seq)
            session.epochs.append(record.epoch)
        if record.kind == EPOCH:
            session.owner = decoder_of(_Begun).decode(record.payload).owner
    return session


class _Begun(msgspec.Struct):
    owner: str = ""


def _write(key: SessionKey, session: StoredSession) -> FullAgentState:
    records = list(session.records(range(1, len(session.entries) + 1)))
    try:
        return with_log(state_of(key, records), key, records)
    except FormatError as error:
        message = f"the records of {key} make no state: {error}"
        raise NotStorableError(message, key=str(key)) from error


def copied(session: StoredSession) -> StoredSession:
    """Return a session that may be changed without changing this one."""
    copy = StoredSession()
    for name in StoredSession.__slots__:
        value = getattr(session, name)
        setattr(copy, name, list(value) if isinstance(value, list) else value)
    return copy


def _keep_documents(session: StoredSession, before: StoredSession | None) -> None:
    """Go on with documents that were folded from what is still there."""
    manifest = None if before is None else before.manifest
    if before is None or manifest is None or manifest.as_of_seq > len(session.entries):
        return
    folded = manifest.as_of_seq
    if before.entries[:folded] == session.entries[:folded]:
        session.documents, session.manifest = before.documents, manifest


async def _in_thread(size: int, act: Callable[[], T]) -> T:
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
        storage: The one storage, for one session; or a function that returns the storage of
            a session, the same one each time.
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
        self._places: dict[SessionKey, StorageSlot] = {}
        self._lock = anyio.Lock()  # of the one storage, whichever sessions it is asked for

    @property
    def capabilities(self) -> Capabilities:
        """What this store is."""
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        """This store's id as a holder of leases."""
        return self._owner

    @property
    def location(self) -> str:
        """Where the storage keeps things, as it says."""
        if callable(self._storage):
            return f"storages of {getattr(self._storage, '__qualname__', 'a function')}"
        return self._storage.get_path()

    async def open(self) -> None:
        """Do nothing: a storage is asked when a session is."""
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Forget what was read."""
        self._places.clear()
        await anyio.lowlevel.checkpoint()

    def _place(self, key: SessionKey) -> StorageSlot:
        place = self._places.get(key)
        if place is None:
            if callable(self._storage):
                place = StorageSlot(key, self._storage(key), anyio.Lock())
            else:
                place = StorageSlot(key, self._storage, self._lock)
            self._places[key] = place
        return place

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Save the whole state of each batch's session."""
        return [await self._append(batch) for batch in batches]

    async def _append(self, batch: Batch) -> Outcome:
        try:
            async with self._place(batch.key).looked() as place:
                session = place.session
                if session is None or session.epoch != batch.epoch or session.deleted:
                    return Outcome(Status.CONFLICT, lost(batch.key, batch.epoch, session))
                new = fresh(session, batch, _CAPABILITIES.max_record_bytes)
                if isinstance(new, Exception):
                    return Outcome(Status.PERMANENT, new)
                if new:
                    await place.save(_longer(session, new))
                return Outcome(Status.OK, written=sum([len(entry.payload) for entry in new]))
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
        """Read records as they are now; what is appended meanwhile is not among them."""
        session = await self._session(key)
        if session is None:
            return
        wanted = session.seqs(after, before, reverse=reverse)[:limit]
        for at in range(0, len(wanted), _CHUNK):
            yield LogChunk(tuple(session.records(wanted[at : at + _CHUNK])))
            await anyio.lowlevel.checkpoint()

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        session = await self._session(key)
        return len(session.entries) if session else 0

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Keep everything: a state is whole, or none."""
        async with self._place(key).looked() as place:
            held(key, epoch, place.session)
        return 0

    async def _session(self, key: SessionKey) -> StoredSession | None:
        async with self._place(key).looked() as place:
            session = place.session
        if session is None and place.is_idle:
            self._places.pop(key, None)  # whoever asks for many that are not there fills nothing
        return session

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Return documents that this object was given."""
        session = await self._session(key)
        return Documents() if session is None else documents_of(key, session, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Keep documents as long as this object is there."""
        async with self._place(key).looked() as place:
            held(key, manifest.epoch, place.session).fold(documents, manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Refuse: a state has no place for them."""
        await anyio.lowlevel.checkpoint()
        if blobs:
            message = (
                "a storage of whole states keeps no blobs: store large values elsewhere, and a "
                "reference here"
            )
            raise NotStorableError(message, blobs=len(blobs))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return None: there are none."""
        await anyio.lowlevel.checkpoint()
        return None

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        """Do nothing: there are none."""
        await anyio.lowlevel.checkpoint()
        return BlobSweep()

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
        """Say who had the session last; somebody else's lease may always be taken."""
        session = await self._session(key)
        if session is None:
            return None
        return LeaseState(
            epoch=session.epoch,
            owner=session.owner,
            released=session.released,
            alive=session.owner == self._owner,
            deleted=session.deleted,
        )

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        """Take the session with epoch ``after + 1``, if the newest epoch is ``after``."""
        async with self._place(key).looked() as place:
            place.require_mine()
            session = place.session or StoredSession()
            if session.epoch != after:
                raise too_late(key, after, session.epoch)
            taken = copied(session)
            head = taken.begin(after + 1, self._owner, time.time())
            await place.save(taken)
            return HeldLease(key, taken.epoch, head, not session.entries)

    async def release(self, key: SessionKey, epoch: int) -> None:
        """Note it; nobody waits for a release here, so it is not worth a save."""
        session = await self._session(key)
        if session is not None and session.epoch == epoch:
            session.released = True

    async def heartbeat(self) -> HeartbeatRequests:
        """Return nothing: nobody can ask for a session here."""
        await anyio.lowlevel.checkpoint()
        return HeartbeatRequests()

    async def news(self, at_most: float) -> None:
        """Sleep: nobody else can leave anything here."""
        await anyio.sleep(at_most)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Do nothing: there is nobody to ask."""
        await anyio.lowlevel.checkpoint()

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Refuse: a state has no place for what nobody has taken yet."""
        await anyio.lowlevel.checkpoint()
        if items:
            message = (
                f"a storage of whole states has no inbox to post to for {key}: open the session "
                "and append, or connect to another store"
            )
            raise NotStorableError(message, key=str(key), items=len(items))
        return 0

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        """Return nothing: nobody can have posted."""
        async with self._place(key).looked() as place:
            held(key, epoch, place.session)
            return []

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        """Do nothing: there is nothing to remove."""
        async with self._place(key).looked() as place:
            held(key, epoch, place.session)

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        """Return nothing: nobody can have posted."""
        await anyio.lowlevel.checkpoint()
        return []

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        """Do nothing but look who has it: there is nothing to set aside.

        Raises:
            NotStorableError: There are letters.

        """
        if letters:
            message = f"{self.location} keeps no dead letters: use another store for posts"
            raise NotStorableError(message, key=str(key))
        async with self._place(key).looked() as place:
            held(key, epoch, place.session)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """Return nothing: nobody can have posted."""
        await anyio.lowlevel.checkpoint()
        return []

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        """Do nothing: there is nothing to remove."""
        await anyio.lowlevel.checkpoint()
        return 0

    # directory

    async def sessions(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionKey | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        """List the sessions that this object has seen, and that are there."""
        known = sorted(
            key for key in self._places if key.tenant == tenant and key.agent.startswith(prefix)
        )
        found: list[SessionInfo] = []
        for key in known[bisect_right(known, after) if after else 0 :]:
            if len(found) == limit:
                break
            session = await self._session(key)
            if session is not None and not session.deleted:
                info = info_of(key, session)
                if fits(info, owner, tag):
                    found.append(info)
        return found

    async def tenants(self) -> list[str]:
        """List the tenants of the sessions that this object has seen, and that are there."""
        found: set[str] = set()
        for key in list(self._places):
            session = await self._session(key)
            if session is not None and not session.deleted:
                found.add(key.tenant)
        return sorted(found)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        """Remove the state; this object remembers the epoch."""
        async with self._place(key).looked() as place:
            session = held(key, epoch, place.session)
            await place.remove()
            gone = StoredSession()
            gone.epoch, gone.owner = epoch, session.owner
            gone.deleted = gone.released = True
            place.session = gone

    async def scrub(self) -> None:
        """Do nothing: what a storage leaves behind is its own."""
        await anyio.lowlevel.checkpoint()


def _longer(session: StoredSession, new: Sequence[Entry]) -> StoredSession:
    longer = copied(session)
    longer.entries.extend(new)
    longer.updated_at = time.time()
    return longer
