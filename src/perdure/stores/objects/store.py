"""Object store: the port of `perdure.store` on a bucket that several hosts share.

Any service with conditional writes (If-None-Match, If-Match) works; ``open`` probes them and
refuses a service that ignores them. Each commit is one object. `perdure.stores.objects.log`
explains why a holder that wakes up late cannot append; `perdure.stores.objects.leases`, how a
lease is acquired.

Use it from the event loop that opened it. Each call runs in a thread; cancelling a call abandons
its thread, which runs to its end and leaves the stored data consistent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.ids import first_beat, random_id
from perdure._lib.loop import Threads, unopened
from perdure._lib.tasks import all_of
from perdure.errors import (
    CorruptRecordError,
    LeaseHeldError,
    LeaseLostError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import Manifest, SessionQuery, lease_lost
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
    Status,
    Taken,
    Terms,
    past_damage,
)
from perdure.stores.objects import documents as content, inbox, layout, leases, reader
from perdure.stores.objects.bucket import Bucket, require_conditions
from perdure.stores.objects.log import ObjectLogWriter, Said

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_log = logging.getLogger("perdure")

PARALLELISM = 32
"""Concurrent appends. Each waits for one request: tens of milliseconds on a remote service."""
_OTHER_THREADS = 16
_COMPACT = 256
"""Loose commits that are merged even without a fold."""
_BEATS_PER_LISTING = 4
"""Own heartbeats per listing of the others', which is a request: by default one per ttl."""
_POLL_SECONDS = 0.01
_SAID = 1000
"""Sessions of which it is remembered what their saves have said."""

CAPABILITIES = Capabilities(
    durability="object",
    batch_max=1,
    parallelism=PARALLELISM,
    shared=True,
)


class _Claim:
    """Whether a caller still awaits an acquire."""

    abandoned = False


class ObjectStore:
    """Store of sessions as objects in a bucket.

    Args:
        make: Creates the bucket when the store is opened; called in a thread, so it may block.
        location: The bucket's address, for messages; without a password.
        owner: This store's id as a lease holder; by default a random one.
        capabilities: Durability, whether several hosts share the bucket, and how many commits run
            concurrently.

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
        self._said: dict[SessionKey, Said] = {}
        """What saves of this store object have said for listings, also of released sessions."""
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        return self._location

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.location}>"

    async def open(self) -> None:
        """Probe the bucket, and register as an owner.

        Raises:
            ConfigError: The service ignores the conditions of conditional writes.
            MissingExtraError: The driver is not installed.
            StoreUnavailableError: The bucket cannot be reached or written.

        """
        if self._opened is None:
            self._opened = await OpenBucket.open(self._make, self._location, self._owner)

    async def aclose(self) -> None:
        """Close the bucket; leases that were not released look like those of a dead owner."""
        bucket, self._opened = self._opened, None
        with self._lock:
            self._writers.clear()
        if bucket is not None and bucket.is_own_process:
            await bucket.sign_off()

    async def _read(self, key: SessionKey, function: Callable[[Bucket], T]) -> T:
        """Read from a session; name it in errors of damaged objects, which do not.

        Raises:
            CorruptRecordError: It is damaged.

        """
        try:
            return await self._run(function)
        except CorruptRecordError as error:
            if "key" in error.facts:
                raise
            raise CorruptRecordError(
                f"session {key} is damaged: {error}, or {salvage_cure(key)}",
                **error.facts,
                key=str(key),
            ) from error

    async def _run(self, function: Callable[[Bucket, *Ts], T], *args: *Ts) -> T:
        return await self._open_bucket.run_in_thread(function, *args)

    @property
    def _open_bucket(self) -> OpenBucket:
        bucket = self._opened
        if bucket is not None and bucket.is_own_process:
            return bucket
        raise unopened(self.location, elsewhere=bucket is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch in its own thread."""
        return await all_of(batches, self._append)

    async def _append(self, batch: Batch) -> Outcome:
        writer, bucket = self._writers.get(batch.key), self._opened
        if (
            writer is None
            or writer.epoch != batch.epoch
            or bucket is None
            or not bucket.is_own_process
        ):
            return Outcome(Status.CONFLICT, lease_lost(batch.key, batch.epoch))
        outcome = await bucket.append(writer, batch)
        if outcome.status is Status.CONFLICT:
            self._drop(writer)  # a past epoch never becomes current again
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
        stream = reader.ObjectLogStream(
            self._open_bucket.bucket,
            key,
            after,
            before,
            reverse=reverse,
        )
        if past_damage.get():
            stream.window = 1  # one damaged object must not hide others
        remaining = limit
        while remaining is None or remaining > 0:
            records = (await self._read(key, lambda _: stream.part()))[:remaining]
            if not records:
                return
            yield LogChunk(tuple(records))
            remaining = None if remaining is None else remaining - len(records)

    async def head(self, key: SessionKey) -> int:
        return await self._read(key, lambda bucket: reader.last_seq_of(bucket, key))

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._read(key, lambda bucket: content.documents(bucket, key, names))

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Write documents first, the head last."""
        writer = self._writer(key, manifest.epoch)
        await self._run(content.fold, writer, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._run(content.put, tenant, dict(blobs))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._run(content.get, tenant, name)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        looked_at = None if among is None else frozenset(among)
        return await self._run(content.sweep, tenant, frozenset(reachable), older_than, looked_at)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove records with ``seq < below``, as the holder; the newest commit stays whole."""
        writer = self._writer(key, epoch)
        return await self._run(content.trim, writer, below)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return await self._run(content.renew, tenant, frozenset(names))

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._run(content.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._run(content.remove, tenant, list(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._read(
            key, lambda bucket: leases.lease_state(bucket, reader.read_head(bucket, key))
        )

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        claim = _Claim()
        try:
            return await self._read(key, lambda bucket: self._acquire(bucket, key, terms, claim))
        except BaseException:
            claim.abandoned = True
            raise

    def _acquire(
        self, bucket: Bucket, key: SessionKey, terms: Terms, claim: _Claim
    ) -> Held | Taken:
        try:
            acquired = leases.acquire(bucket, key, terms, self._owner)
        except LeaseHeldError:  # another process was faster
            return Held(leases.lease_state(bucket, reader.read_head(bucket, key)))
        if isinstance(acquired, Held):
            return acquired
        writer = acquired.writer
        if acquired.replaced is not None:
            content.end_replaced(bucket, acquired.replaced)
        with self._lock:
            before = self._writers.get(key)
            if before is None or before.epoch < writer.epoch:
                self._writers[key] = writer
                self._said.pop(key, None)
                self._said[key] = writer.said
                while len(self._said) > max(len(self._writers), _SAID):
                    del self._said[next(iter(self._said))]
        found = None
        if not claim.abandoned:
            found = content.found(bucket, acquired, whole=terms.names != frozenset())
        if claim.abandoned:
            self._release(bucket, writer)  # the caller was cancelled
        head, created = writer.epoch_seq, writer.created
        return Taken(key, writer.epoch, head, created, acquired.record, found)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self._run(leases.publish, self._writer(key, epoch))

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self._run(content.drafts, tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        writer = self._writers.get(key)
        if writer is not None and writer.epoch == epoch:
            await wait_idle(writer)
            await self._run(self._release, writer)

    def _release(self, bucket: Bucket, writer: ObjectLogWriter) -> None:
        leases.release(bucket, writer)
        self._drop(writer)  # only now: if that fails, it is held, and may be released again

    def _drop(self, writer: ObjectLogWriter) -> None:
        with self._lock:
            if self._writers.get(writer.key) is writer:
                del self._writers[writer.key]

    async def heartbeat(self) -> HeartbeatRequests:
        return await self._open_bucket.heartbeat(self._doubt)

    def _doubt(self) -> None:
        """Have each session check, before its next append, that its log still exists."""
        for writer in list(self._writers.values()):
            writer.is_doubted = True

    async def wait_for_notification(self, timeout: float) -> None:
        """Sleep: a bucket has no notifications."""
        await anyio.sleep(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._run(inbox.request_handover, key, holder.owner)

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self._run(inbox.enqueue, key, list(items), limit)

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._read(key, lambda bucket: inbox.receive(bucket, key, epoch, limit))

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        await self._run(inbox.ack, key, epoch, list(op_ids), list(dead))

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._run(inbox.sessions_with_pending_items, dead_letters)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._run(inbox.dead_letters, key)

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        with self._lock:
            said = dict(self._said)
        return await self._run(content.sessions, query, said)

    async def tenants(self) -> list[str]:
        return await self._run(leases.tenants)

    async def rebuild_directory(self) -> int:
        """Rebuild the listing from the sessions themselves; return how many there are.

        At least one request per session: only for a listing that lacks sessions.
        """
        return await self._run(content.rebuild)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        writer = self._writer(key, epoch)
        await wait_idle(writer)
        await self._run(self._delete, writer, keep_posts)

    def _delete(self, bucket: Bucket, writer: ObjectLogWriter, keep_posts: bool) -> None:  # noqa: FBT001  # passed on by position
        content.delete(bucket, writer, keep_posts=keep_posts)
        self._drop(writer)

    async def scrub(self) -> None:
        """Remove what killed deletions and folds have left.

        A versioned bucket keeps removed objects; its lifecycle rules decide for how long.
        """
        await self._run(content.scrub)

    def _writer(self, key: SessionKey, epoch: int) -> ObjectLogWriter:
        _ = self._open_bucket
        writer = self._writers.get(key)
        if writer is None or writer.epoch != epoch:
            raise lease_lost(key, epoch)
        return writer


# The resources of an open store


@final
class OpenBucket:
    """A bucket that was probed, and the threads that use it. Created on a running event loop."""

    def __init__(
        self, bucket: Bucket, owner: str, requests: inbox.OwnerRequests, beat: int, tag: str | None
    ) -> None:
        self.bucket = bucket
        self._owner = owner
        self._requests = requests
        self._beat = beat
        self._tag = tag
        """The tag of the heartbeat object after its last write."""
        self._beats = 0
        self._appends = Threads(PARALLELISM, name="perdure append")
        self._others = anyio.CapacityLimiter(_OTHER_THREADS)
        self._merges = ThreadPoolExecutor(1, thread_name_prefix="perdure merge")
        self._pid = os.getpid()

    @classmethod
    async def open(cls, make: Callable[[], Bucket], location: str, owner: str) -> OpenBucket:
        """Create a bucket, probe it, and write the first heartbeat; all in a thread."""
        requests, beat = inbox.OwnerRequests(), first_beat()
        lock, is_abandoned, buckets = threading.Lock(), threading.Event(), list[Bucket]()
        tags = list[str | None]()

        def begin() -> Bucket:
            bucket = make()
            try:
                require_conditions(bucket, location)
                tags.append(inbox.heartbeat(bucket, owner, beat, requests, None)[0])
            except BaseException:
                bucket.close()
                raise
            with lock:
                buckets.append(bucket)
                if is_abandoned.is_set():  # cancelled: the caller cannot close it
                    bucket.close()
            return bucket

        try:
            bucket = await anyio.to_thread.run_sync(begin, abandon_on_cancel=True)
        except BaseException:
            with lock:
                is_abandoned.set()
                for bucket in buckets:
                    bucket.close()
            raise
        return cls(bucket, owner, requests, beat, tags[0])

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that opened it, not a forked child."""
        return self._pid == os.getpid()

    async def sign_off(self) -> None:
        """Remove the heartbeat, and end the threads."""
        self._appends.close()
        self._merges.shutdown(wait=False, cancel_futures=True)
        try:
            await anyio.to_thread.run_sync(
                self.bucket.remove, [layout.owner_name(self._owner)], abandon_on_cancel=True
            )
        except StoreUnavailableError as error:
            _log.debug("the heartbeat could not be removed", extra={"error": str(error)})
        finally:
            self.bucket.close()

    async def run_in_thread(self, function: Callable[[Bucket, *Ts], T], *args: *Ts) -> T:
        """Call a function with the bucket in a thread; cancellation abandons the thread."""
        return await anyio.to_thread.run_sync(
            function, self.bucket, *args, abandon_on_cancel=True, limiter=self._others
        )

    async def heartbeat(self, doubt: Callable[[], object]) -> HeartbeatRequests:
        """Write a heartbeat, and return the requests that were read, also by cancelled heartbeats.

        Calls *doubt* if the bucket may have reverted to an earlier state.
        """
        self._beat += 1
        self._tag, may_be_older = await self.run_in_thread(
            inbox.heartbeat, self._owner, self._beat, self._requests, self._tag
        )
        if may_be_older:
            doubt()
        beats: dict[str, int] | None = None
        if not self._beats % _BEATS_PER_LISTING:
            beats = await self.run_in_thread(leases.beats, self._owner)
        self._beats += 1
        return msgspec.structs.replace(self._requests.drain(), beats=beats)

    async def append(self, writer: ObjectLogWriter, batch: Batch) -> Outcome:
        """Append a batch in a thread; merge the commits once there are many."""
        if writer.log_lock.locked():
            await wait_idle(writer)
        try:
            outcome = await self._appends.run(writer.append, batch)
        except Exception as error:  # noqa: BLE001  # an error of one session must not affect others
            return Outcome(Status.IN_DOUBT, error)
        if writer.loose >= _COMPACT:
            writer.loose = 0
            with contextlib.suppress(RuntimeError):  # closing: the next holder's fold merges
                self._merges.submit(_compact, self.bucket, writer)
        return outcome


async def wait_idle(writer: ObjectLogWriter) -> None:
    """Wait, without a thread, until an abandoned append of a session has ended."""
    while writer.log_lock.locked():  # noqa: ASYNC110  # a thread's lock has no async event
        await anyio.sleep(_POLL_SECONDS)


def _compact(bucket: Bucket, writer: ObjectLogWriter) -> None:
    try:
        content.compact(bucket, writer)
    except LeaseLostError:
        _log.debug("commits are left to the next holder", extra={"session": str(writer.key)})
    except PerdureError as error:
        _log.warning(
            "commits could not be merged", extra={"session": str(writer.key), "error": str(error)}
        )
