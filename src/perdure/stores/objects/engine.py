"""What an object store has while it is open: a bucket, threads, and its place among the owners."""

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
from perdure._lib.threads import Threads
from perdure.errors import LeaseLostError, PerdureError, StoreUnavailableError
from perdure.store import Batch, HeartbeatRequests, Outcome, Status
from perdure.stores.objects import bucket as probing
from perdure.stores.objects import documents, inbox, layout, leases
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.log import ObjectLogWriter

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_log = logging.getLogger("perdure")

PARALLELISM = 32
"""Appends at a time. Each waits for its own request, tens of milliseconds on a far service."""
_OTHERS = 16
_COMPACT = 256
"""Commits after which they are merged even if no fold comes."""
_LOOK = 4
"""Own heartbeats for one look at those of others, which is a request: by default one a ttl."""
_POLL = 0.01
_LEAVE = 2.0
"""Seconds that closing waits for the service."""


@final
class OpenBucket:
    """A bucket that was tried out, and the threads that use it. Made on a running event loop."""

    def __init__(
        self, bucket: Bucket, owner: str, wishes: inbox.OwnerRequests, beat: int, tag: str | None
    ) -> None:
        self.bucket = bucket
        self._owner = owner
        self._wishes = wishes
        self._beat = beat
        self._tag = tag
        """The heartbeat's, as it was written last."""
        self._beats = 0
        self._appends = Threads(PARALLELISM, name="perdure append")
        self._others = anyio.CapacityLimiter(_OTHERS)
        self._merges = ThreadPoolExecutor(1, thread_name_prefix="perdure merge")
        self._pid = os.getpid()

    @classmethod
    async def enter(cls, make: Callable[[], Bucket], location: str, owner: str) -> OpenBucket:
        """Make a bucket, try it out, and become known as an owner; all of it in a thread."""
        wishes, beat = inbox.OwnerRequests(), first_beat()
        lock, left, made = threading.Lock(), threading.Event(), list[Bucket]()
        tags = list[str | None]()

        def begin() -> Bucket:
            bucket = make()
            try:
                probing.require_conditions(bucket, location)
                tags.append(inbox.heartbeat(bucket, owner, beat, wishes, None)[0])
            except BaseException:
                bucket.close()
                raise
            with lock:
                made.append(bucket)
                if left.is_set():  # cancelled: nobody else will
                    bucket.close()
            return bucket

        try:
            bucket = await anyio.to_thread.run_sync(begin, abandon_on_cancel=True)
        except BaseException:
            with lock:
                left.set()
                for bucket in made:
                    bucket.close()
            raise
        return cls(bucket, owner, wishes, beat, tags[0])

    @property
    def mine(self) -> bool:
        """Whether this is the process that opened it, and no child that was forked later."""
        return self._pid == os.getpid()

    async def leave(self) -> None:
        """Sign off as an owner, and let the threads end."""
        self._appends.close()
        self._merges.shutdown(wait=False, cancel_futures=True)
        try:
            with anyio.move_on_after(_LEAVE, shield=True):
                await anyio.to_thread.run_sync(
                    self.bucket.remove, [layout.owner_name(self._owner)], abandon_on_cancel=True
                )
        except StoreUnavailableError as error:
            _log.debug("an owner could not sign off", extra={"error": str(error)})
        finally:
            self.bucket.close()

    async def hop(self, function: Callable[[Bucket, *Ts], T], *args: *Ts) -> T:
        """Call a function with the bucket in a thread; cancelling leaves it to its end."""
        return await anyio.to_thread.run_sync(
            function, self.bucket, *args, abandon_on_cancel=True, limiter=self._others
        )

    async def heartbeat(self, doubt: Callable[[], object]) -> HeartbeatRequests:
        """Beat once more; what a cancelled beat collected, the next one tells.

        Calls *doubt* if the bucket may have gone back to an earlier state.
        """
        self._beat += 1
        self._tag, may_be_older = await self.hop(
            inbox.heartbeat, self._owner, self._beat, self._wishes, self._tag
        )
        if may_be_older:
            doubt()
        beats: dict[str, int] | None = None
        if not self._beats % _LOOK:
            beats = await self.hop(leases.beats, self._owner)
        self._beats += 1
        return msgspec.structs.replace(self._wishes.told(), beats=beats)

    async def append(self, writer: ObjectLogWriter, batch: Batch) -> Outcome:
        """Append a batch in a thread; merge the commits when there are many."""
        if writer.lock.locked():
            await idle(writer)

        try:
            outcome = await self._appends.run(writer.append, batch)
        except Exception as error:  # noqa: BLE001  # one session's trouble must not be another's
            return Outcome(Status.IN_DOUBT, error)
        if writer.loose >= _COMPACT:
            writer.loose = 0
            with contextlib.suppress(RuntimeError):  # it closes: the next holder's fold does it
                self._merges.submit(_compact, self.bucket, writer)
        return outcome


async def idle(writer: ObjectLogWriter) -> None:
    """Wait, without a thread, until an abandoned append of a session has ended."""
    while writer.lock.locked():  # noqa: ASYNC110  # a thread's lock: nothing to be woken by
        await anyio.sleep(_POLL)


def _compact(bucket: Bucket, writer: ObjectLogWriter) -> None:
    try:
        documents.compact(bucket, writer)
    except LeaseLostError:
        _log.debug("commits are the next holder's to merge", extra={"session": str(writer.key)})
    except PerdureError as error:
        _log.warning(
            "commits could not be merged", extra={"session": str(writer.key), "error": str(error)}
        )
