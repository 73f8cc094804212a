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
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from perdure._lib.ids import first_beat, random_id
from perdure._lib.logs import log_facts
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
        self._bucket: Bucket | None = None
        """The bucket while the store is open, in the process ``_pid``."""
        self._beat = first_beat()
        self._beats = 0
        """Heartbeats since the store was made."""
        self._tag: str | None = None
        """The tag of the heartbeat object after its last write; None if it is not known."""
        self._requests: deque[inbox.Request] = deque()
        """Requests that were read, also by cancelled heartbeats, and that none has returned."""
        self._writers: dict[SessionKey, ObjectLogWriter] = {}
        self._said: dict[SessionKey, Said] = {}
        """Facts for listings of the sessions that were saved here, also of released ones."""
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
        if self._bucket is not None:
            return
        self._beat += 1
        is_abandoned = threading.Event()
        made: list[Bucket] = []

        def begin() -> tuple[Bucket, str | None]:
            bucket = self._make()
            try:
                require_conditions(bucket, self._location)
                tag, _ = inbox.heartbeat(bucket, self._owner, self._beat, self._requests, None)
            except BaseException:
                bucket.close()
                raise
            made.append(bucket)
            if is_abandoned.is_set():
                close()
            return bucket, tag

        def close() -> None:
            # By this thread or by the caller, who is cancelled: the last one to see it.
            with contextlib.suppress(IndexError):
                made.pop().close()

        try:
            bucket, tag = await anyio.to_thread.run_sync(begin, abandon_on_cancel=True)
        except BaseException:
            is_abandoned.set()
            close()
            raise
        self._bucket, self._tag = bucket, tag
        self._appends = Threads(PARALLELISM, name="perdure:append")
        self._others = anyio.CapacityLimiter(_OTHER_THREADS)
        self._merges = ThreadPoolExecutor(1, thread_name_prefix="perdure:merge")
        self._pid = os.getpid()

    async def aclose(self) -> None:
        """Close the bucket; leases that were not released look like those of a dead owner."""
        bucket, self._bucket = self._bucket, None
        with self._lock:
            self._writers.clear()
        if bucket is None or self._pid != os.getpid():
            return
        self._appends.close()
        self._merges.shutdown(wait=False, cancel_futures=True)
        name = layout.owner_name(self._owner)
        try:
            await anyio.to_thread.run_sync(bucket.remove, [name], abandon_on_cancel=True)
        except StoreUnavailableError as error:
            log_facts(_log, logging.DEBUG, "the heartbeat could not be removed", error)
        finally:
            bucket.close()

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
        """Call a function with the bucket in a thread; cancellation abandons the thread."""
        bucket = self._open_bucket
        return await anyio.to_thread.run_sync(
            function, bucket, *args, abandon_on_cancel=True, limiter=self._others
        )

    @property
    def _open_bucket(self) -> Bucket:
        bucket = self._bucket
        if bucket is not None and self._pid == os.getpid():
            return bucket
        raise unopened(self.location, elsewhere=bucket is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch in its own thread."""
        return await all_of(batches, self._append)

    async def _append(self, batch: Batch) -> Outcome:
        writer, bucket = self._writers.get(batch.key), self._bucket
        is_open = bucket is not None and self._pid == os.getpid()
        if writer is None or bucket is None or writer.epoch != batch.epoch or not is_open:
            return Outcome(Status.CONFLICT, lease_lost(batch.key, batch.epoch))
        if writer.log_lock.locked():
            await wait_idle(writer)
        try:
            outcome = await self._appends.run(writer.append, batch)
        except Exception as error:  # noqa: BLE001  # an error of one session must not affect others
            return Outcome(Status.IN_DOUBT, error)
        if outcome.status is Status.CONFLICT:
            self._drop(writer)  # a past epoch never becomes current again
        if writer.loose >= _COMPACT:
            writer.loose = 0
            with contextlib.suppress(RuntimeError):  # closing: the next holder's fold merges
                self._merges.submit(_compact, bucket, writer)
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
        # One damaged object must not hide others.
        window = 1 if past_damage.get() else reader.WINDOW
        parts = reader.stream(self._open_bucket, key, after, before, reverse=reverse, window=window)
        remaining = limit
        while remaining is None or remaining > 0:
            records = (await self._read(key, lambda _: next(parts, [])))[:remaining]
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
        is_abandoned = threading.Event()
        try:
            return await self._read(
                key, lambda bucket: self._acquire(bucket, key, terms, is_abandoned)
            )
        except BaseException:
            is_abandoned.set()
            raise

    def _acquire(
        self, bucket: Bucket, key: SessionKey, terms: Terms, is_abandoned: threading.Event
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
            # Two takeovers of this process may end in either order: the newer epoch remains.
            if before is None or before.epoch < writer.epoch:
                self._writers[key] = writer
                self._said.pop(key, None)
                self._said[key] = writer.said
                while len(self._said) > max(len(self._writers), _SAID):
                    del self._said[next(iter(self._said))]
        found = None
        if not is_abandoned.is_set():
            found = content.found(bucket, acquired, whole=terms.names != frozenset())
        if is_abandoned.is_set():
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
        self._beat += 1
        self._tag, may_be_older = await self._run(
            inbox.heartbeat, self._owner, self._beat, self._requests, self._tag
        )
        if may_be_older:
            # Each session checks, before its next append, that its log still exists.
            for writer in list(self._writers.values()):
                writer.is_doubted = True
        beats: dict[str, int] | None = None
        if not self._beats % _BEATS_PER_LISTING:
            beats = await self._run(leases.beats, self._owner)
        self._beats += 1
        asked: dict[str, dict[SessionKey, None]] = {inbox.HANDOVER: {}, inbox.MAIL: {}}
        while self._requests:
            what, key = self._requests.popleft()
            asked.setdefault(what, {})[key] = None
        return HeartbeatRequests(tuple(asked[inbox.HANDOVER]), tuple(asked[inbox.MAIL]), beats)

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


async def wait_idle(writer: ObjectLogWriter) -> None:
    """Wait, without a thread, until an abandoned append of a session has ended."""
    while writer.log_lock.locked():  # noqa: ASYNC110  # a thread's lock has no async event
        await anyio.sleep(_POLL_SECONDS)


def _compact(bucket: Bucket, writer: ObjectLogWriter) -> None:
    try:
        content.compact(bucket, writer)
    except LeaseLostError:
        message = "commits are left to the next holder"
        log_facts(_log, logging.DEBUG, message, session=str(writer.key))
    except PerdureError as error:
        message = "commits could not be merged: %(reason)s"
        log_facts(_log, logging.WARNING, message, session=str(writer.key), reason=error)
