"""Resources of an open object store: its bucket, its threads, and its heartbeat."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.ids import first_beat
from perdure._lib.loop import Threads
from perdure.errors import LeaseLostError, PerdureError, StoreUnavailableError
from perdure.store import Batch, HeartbeatRequests, Outcome, Status
from perdure.stores.objects import documents, inbox, layout, leases
from perdure.stores.objects.bucket import Bucket, require_conditions
from perdure.stores.objects.log import ObjectLogWriter

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
_SIGN_OFF_SECONDS = 2.0
"""Seconds that closing waits for the service."""


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
            with anyio.move_on_after(_SIGN_OFF_SECONDS, shield=True):
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
        documents.compact(bucket, writer)
    except LeaseLostError:
        _log.debug("commits are left to the next holder", extra={"session": str(writer.key)})
    except PerdureError as error:
        _log.warning(
            "commits could not be merged", extra={"session": str(writer.key), "error": str(error)}
        )
