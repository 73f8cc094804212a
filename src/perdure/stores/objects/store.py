"""The object store: the port of `perdure.store` on a bucket, for any number of servers.

Any service that knows conditional writes (If-None-Match, If-Match) will do; ``open`` tries them
out and refuses one that ignores them. A commit is one object. What takes what place, and why a
holder that wakes up late finds its place taken, stands in `perdure.stores.objects.log`; how a
session is taken, in `perdure.stores.objects.leases`.

Use it from the event loop that opened it. Each call is one hop into a thread; cancelling a call
abandons its thread, which goes on to its end and leaves what is stored whole.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import TypeVar, TypeVarTuple

import anyio

from perdure._lib.ids import random_id
from perdure._lib.loop import unopened
from perdure._lib.tasks import all_of
from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import Manifest
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
    past_damage,
)
from perdure.stores.objects import blobs as stored_blobs
from perdure.stores.objects import directory, inbox, leases, reader, tenants
from perdure.stores.objects import documents as folding
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.engine import PARALLELISM, OpenBucket, idle
from perdure.stores.objects.log import MAX_RECORD_BYTES, ObjectLogWriter, lost

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CAPABILITIES = Capabilities(
    durability="object",
    batch_max=1,
    parallelism=PARALLELISM,
    max_record_bytes=MAX_RECORD_BYTES,
    shared=True,
    dead_letters=True,
)


class _Claim:
    """Whether somebody still waits for an acquire; guarded by the store's lock."""

    abandoned = False


class ObjectStore:
    """Keep sessions as objects in a bucket.

    Args:
        make: Makes the bucket, when the store is opened; called in a thread, so it may block.
        location: Where that is, for people: no password in it.
        owner: This store's id as a holder of leases; by default one that nobody can guess.
        capabilities: What the place is: how durable, whether several machines share it, how
            many commits at a time it likes.

    """

    def __init__(
        self,
        make: Callable[[], Bucket],
        *,
        location: str,
        owner: str | None = None,
        capabilities: Capabilities = CAPABILITIES,
    ) -> None:
        self._make = make
        self._location = location
        self._owner = owner or random_id()
        self._capabilities = capabilities
        self._opened: OpenBucket | None = None
        self._writers: dict[SessionKey, ObjectLogWriter] = {}
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """What this store is."""
        return self._capabilities

    @property
    def owner(self) -> str:
        """The id of this store object as a holder of leases."""
        return self._owner

    @property
    def location(self) -> str:
        """Where it keeps what it keeps."""
        return self._location

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.location}>"

    async def open(self) -> None:
        """Try the bucket out, and become known as an owner.

        Raises:
            ConfigError: The service ignores the conditions of conditional writes.
            MissingExtraError: The driver is not installed.
            StoreUnavailableError: The bucket cannot be reached or written.

        """
        if self._opened is None:
            self._opened = await OpenBucket.enter(self._make, self._location, self._owner)

    async def aclose(self) -> None:
        """Leave; sessions that were not released look like a dead owner's."""
        here, self._opened = self._opened, None
        self._writers.clear()
        if here is not None and here.mine:
            await here.leave()

    async def _look(self, key: SessionKey, function: Callable[[Bucket], T]) -> T:
        """Read something of a session; objects do not say whose they are when they are damaged.

        Raises:
            CorruptRecordError: It is damaged.

        """
        try:
            return await self._hop(function)
        except CorruptRecordError as error:
            if "key" in error.facts:
                raise
            message = f"session {key} is damaged: {error}, or {salvage_cure(key)}"
            raise CorruptRecordError(message, **error.facts, key=str(key)) from error

    async def _hop(self, function: Callable[[Bucket, *Ts], T], *args: *Ts) -> T:
        return await self._here.hop(function, *args)

    @property
    def _here(self) -> OpenBucket:
        here = self._opened
        if here is not None and here.mine:
            return here
        raise unopened(self.location, elsewhere=here is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch in a thread of its own."""
        return await all_of(batches, self._append)

    async def _append(self, batch: Batch) -> Outcome:
        writer, here = self._writers.get(batch.key), self._opened
        if writer is None or writer.epoch != batch.epoch or here is None or not here.mine:
            return Outcome(Status.CONFLICT, lost(batch.key, batch.epoch))
        outcome = await here.append(writer, batch)
        if outcome.status is Status.CONFLICT and self._writers.get(batch.key) is writer:
            del self._writers[batch.key]  # an epoch that is over never begins again
        return outcome

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records, several objects at a time."""
        stream = reader.ObjectLogStream(self._here.bucket, key, after, before, reverse=reverse)
        if past_damage.get():
            stream.window = 1  # one damaged object hides no others then
        left = limit
        while left is None or left > 0:
            records = (await self._look(key, lambda _: stream.part()))[:left]
            if not records:
                return
            yield LogChunk(tuple(records))
            left = None if left is None else left - len(records)

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        return await self._look(key, lambda bucket: reader.head_of(bucket, key))

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._look(key, lambda bucket: folding.documents(bucket, key, names))

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Fold: documents first, the head last."""
        writer = self._held(key, manifest.epoch)
        await self._hop(folding.fold, writer, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._hop(stored_blobs.put, tenant, dict(blobs))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, verified; None when there is none."""
        return await self._hop(stored_blobs.get, tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        return await self._hop(stored_blobs.sweep, tenant, frozenset(reachable), older_than)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove records with ``seq < below``, as the holder; the newest commit stays whole."""
        return await self._hop(folding.trim, self._held(key, epoch), below)

    async def blob_names(self, tenant: str) -> list[str]:
        """List the tenant's blobs that can be read, by name."""
        return await self._hop(stored_blobs.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._hop(stored_blobs.remove, tenant, list(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Say who has the session; None when nobody ever had."""
        return await self._hop(leases.holder, key)

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        claim = _Claim()
        try:
            return await self._hop(self._acquire, key, after, claim)
        except BaseException:
            with self._lock:
                claim.abandoned = True
            raise

    def _acquire(self, bucket: Bucket, key: SessionKey, after: int, claim: _Claim) -> HeldLease:
        writer = leases.take(bucket, key, after, self._owner)
        with self._lock:
            before = self._writers.get(key)
            if not claim.abandoned and (before is None or before.epoch < writer.epoch):
                self._writers[key] = writer
        if claim.abandoned:
            leases.release(bucket, writer)  # nobody waits for it: let the next one have it
        return HeldLease(key, writer.epoch, writer.begun, writer.begun == 1)

    async def release(self, key: SessionKey, epoch: int) -> None:
        writer = self._writers.get(key)
        if writer is not None and writer.epoch == epoch:
            await idle(writer)
            self._writers.pop(key, None)
            await self._hop(leases.release, writer)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and return what others want since the last one."""
        return await self._here.heartbeat(self._doubt)

    def _doubt(self) -> None:
        """Have each session look, before its next append, whether its log is still there."""
        for writer in list(self._writers.values()):
            writer.is_doubted = True

    async def news(self, at_most: float) -> None:
        """Sleep: a bucket tells nobody anything."""
        await anyio.sleep(at_most)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Ask the holder for the session."""
        await self._hop(inbox.ask, key, holder.owner)

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self._hop(inbox.post, key, list(items), limit)

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._hop(inbox.take, key, epoch, limit)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        await self._hop(inbox.settle, key, epoch, list(op_ids))

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._hop(inbox.waiting, dead_letters)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        await self._hop(inbox.reject, key, epoch, list(letters))

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._hop(inbox.dead_letters, key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._hop(inbox.drop_dead_letters, key, list(op_ids))

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
        wanted = directory.ObjectListQuery(
            tenant=tenant, owner=owner, tag=tag, prefix=prefix, after=after, limit=limit
        )
        return await self._hop(directory.sessions, wanted)

    async def tenants(self) -> list[str]:
        """List the tenants that have sessions or blobs, by name."""
        return await self._hop(tenants.tenants)

    async def rebuild_directory(self) -> int:
        """Make the listing anew from the sessions themselves; return how many there are.

        A request or more for each session: only for a listing that lacks some.
        """
        return await self._hop(directory.rebuilt)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        writer = self._held(key, epoch)
        await idle(writer)
        self._writers.pop(key, None)
        await self._hop(directory.delete, writer)

    async def scrub(self) -> None:
        """Remove what was left by deletes and folds that were cut off.

        A bucket that keeps versions keeps what was removed: its lifecycle rules say how long.
        """
        await self._hop(directory.scrub)

    def _held(self, key: SessionKey, epoch: int) -> ObjectLogWriter:
        _ = self._here
        writer = self._writers.get(key)
        if writer is None or writer.epoch != epoch:
            raise lost(key, epoch)
        return writer
