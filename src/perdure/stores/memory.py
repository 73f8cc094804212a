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
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import final

import anyio
import anyio.lowlevel

from perdure.records.chunks import require_named, verified
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, lease_lost
from perdure.records.plain import (
    StoredBlob,
    StoredSession,
    remove_blobs,
    renew_blobs,
    sweep_blobs,
)
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
        self.blobs: defaultdict[str, dict[str, StoredBlob]] = defaultdict(dict)
        """Each tenant's blobs, by name."""

    def __repr__(self) -> str:
        return f"<MemoryBacking {len(self.sessions)} sessions>"


_CHUNK = 256
"""Records in one `LogChunk`."""

_CAPABILITIES = Capabilities(durability="memory", batch_max=256, memory_bound=True)


@final
class MemoryStore:
    """Keep everything in memory, on its own backing or on one shared with other stores."""

    def __init__(self, *, owner: str | None = None, backing: MemoryBacking | None = None) -> None:
        self._owner = owner or secrets.token_hex(8)
        self._backing = backing or MemoryBacking()
        self._sessions = self._backing.sessions
        self._owners = self._backing.owners

    def __repr__(self) -> str:
        return f"<MemoryStore of {self._owner}, {len(self._sessions)} sessions>"

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
        session = self._sessions.get(batch.key) or StoredSession(batch.key)
        # In a backing restored from a copy, another owner may have been given the same epoch.
        if session.owner != self._owner:
            return Outcome(Status.CONFLICT, lease_lost(batch.key, batch.epoch, session.epoch))
        return session.append(batch, now)

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
        return (await self._session(key)).trim(epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return (await self._session(key)).read_documents(names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        (await self._session(key)).write_documents(documents, manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        kept = await self._blobs(tenant)
        require_named(blobs)
        now = self._backing.clock()
        kept.update({name: StoredBlob(data, now) for name, data in blobs.items()})

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        blob = (await self._blobs(tenant)).get(name)
        return None if blob is None else verified(name, blob.data)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        blobs = await self._blobs(tenant)
        return sweep_blobs(blobs, reachable, older_than, now=self._backing.clock(), among=among)

    async def blob_names(self, tenant: str) -> list[str]:
        return sorted(await self._blobs(tenant))

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return renew_blobs(await self._blobs(tenant), names, now=self._backing.clock())

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return remove_blobs(await self._blobs(tenant), names)

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return self._lease(await self._session(key))

    def _lease(self, session: StoredSession) -> LeaseState | None:
        owner = self._owners.get(session.owner)
        alive, beat = (owner.alive, owner.beat) if owner else (False, 0)
        return session.lease(alive=alive, beat=beat)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        session = await self._session(key)
        holder = self._lease(session)
        if not terms.allows(holder):
            return Held(holder)
        taken = session.acquire(terms, self._backing.clock())
        self._sessions[key] = session
        return taken

    async def publish(self, key: SessionKey, epoch: int) -> None:
        (await self._session(key)).publish(epoch)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        await anyio.lowlevel.checkpoint()
        return [
            DraftInfo(key, session.epoch, session.draft, session.owner)
            for key, session in sorted(self._sessions.items())
            if key.tenant == tenant and session.draft is not None and not session.published
        ]

    async def release(self, key: SessionKey, epoch: int) -> None:
        (await self._session(key)).release(epoch)

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
        # A later waiter may have an event of its own by now.
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
        session = await self._session(key)
        new = session.enqueue(items, limit)
        self._sessions[key] = session
        if owner := self._owners.get(session.owner):
            owner.mail[key] = None
            owner.notify()
        return new

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return (await self._session(key)).receive(epoch, limit)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        (await self._session(key)).ack(epoch, op_ids, dead)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        await anyio.lowlevel.checkpoint()
        sessions = self._sessions.values()
        return sorted(
            one.key for one in sessions if (one.dead_letters if dead_letters else one.inbox)
        )

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return (await self._session(key)).letters()

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        await anyio.lowlevel.checkpoint()
        sessions = self._sessions.values()
        shown = (one for one in sessions if one.key.tenant == query.tenant and one.is_public)
        return query.page(session.info for session in shown)

    async def tenants(self) -> list[str]:
        await anyio.lowlevel.checkpoint()
        owning = {key.tenant for key, session in self._sessions.items() if session.is_public}
        return sorted(owning | {tenant for tenant, blobs in self._backing.blobs.items() if blobs})

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        """Remove all that the session owns; its epoch stays, marked as deleted."""
        (await self._session(key)).delete(epoch, keep_posts=keep_posts)

    async def scrub(self) -> None:
        """Do nothing: removed data is not kept anywhere."""
        await anyio.lowlevel.checkpoint()

    async def _session(self, key: SessionKey) -> StoredSession:
        """Pass the call's checkpoint; return a session, not kept if no one has begun it."""
        await anyio.lowlevel.checkpoint()
        return self._sessions.get(key) or StoredSession(key)

    async def _blobs(self, tenant: str) -> dict[str, StoredBlob]:
        """Pass the call's checkpoint; return a tenant's blobs by name."""
        await anyio.lowlevel.checkpoint()
        return self._backing.blobs[str(tenant)]
