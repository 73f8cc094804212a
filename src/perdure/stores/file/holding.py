"""The sessions that a store holds: a writer for each, from its acquire to its end.

Used from the event loop, but for `take`, which runs in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from perdure._lib.threads import Call
from perdure.model.keys import SessionKey
from perdure.store import Batch, Grant, Outcome, Status
from perdure.stores.file import acts, leases
from perdure.stores.file.chain import Known
from perdure.stores.file.home import Home
from perdure.stores.file.patience import idle
from perdure.stores.file.writing import Writer, lost

__all__ = ["Claim", "Holding"]


class Claim:
    """Whether somebody still waits for an acquire; guarded by the lock of the holding."""

    abandoned: bool = False


@final
class Holding:
    """Who writes what in this store."""

    def __init__(self) -> None:
        self._writers: dict[SessionKey, Writer] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._writers

    def clear(self) -> None:
        """Hold nothing any more."""
        self._writers.clear()

    def durable(self, key: SessionKey) -> Known | None:
        """Return how far a session's log lasts, if it is held here."""
        writer = self._writers.get(key)
        return writer and writer.durable

    def of(self, key: SessionKey, epoch: int) -> Writer | None:
        """Return the writer of a session in an epoch, None if that is not held here."""
        writer = self._writers.get(key)
        return writer if writer is not None and writer.epoch == epoch else None

    async def idle(self, key: SessionKey, epoch: int) -> Writer:
        """Return a session's writer when no abandoned write of it is under way.

        Raises:
            LeaseLostError: The session is not held here in this epoch.

        """
        writer = self.of(key, epoch)
        if writer is None:
            raise lost(key, epoch)
        await idle(writer)
        return writer

    def drop(self, writer: Writer) -> None:
        """Hold a session no more."""
        if self._writers.get(writer.key) is writer:
            del self._writers[writer.key]

    # taking

    def take(self, here: Home, key: SessionKey, after: int, claim: Claim) -> Grant:
        """Take a session with epoch ``after + 1``, and let go of it if nobody waits for it."""
        taken = leases.take(here.root, key, after, here.owners.me)
        writer = Writer(here.root, key, taken, here.files)
        with self._lock:
            before = self._writers.get(key)
            if not claim.abandoned and (before is None or before.epoch < writer.epoch):
                self._writers[key] = writer
        if claim.abandoned:
            acts.release(writer)  # let the next one have it at once
        elif before is not None:
            here.files.close(before)
        return Grant(key, writer.epoch, taken.end.seq, taken.created)

    def abandon(self, claim: Claim) -> None:
        """Note that nobody waits for an acquire any more."""
        with self._lock:
            claim.abandoned = True

    # appending

    async def append(self, here: Home | None, batch: Batch) -> Outcome:
        """Append one batch in a thread of its own."""
        writer = self.of(batch.key, batch.epoch)
        if writer is None or here is None or not here.mine:
            return Outcome(Status.CONFLICT, lost(batch.key, batch.epoch))
        await idle(writer)
        return self._told(writer, await here.appends.done(writer.append, batch))

    def begin_append(
        self, here: Home | None, batch: Batch, done: Callable[[Outcome], object]
    ) -> bool:
        """Append one batch without a task; False if it has to wait, or may not be."""
        writer = self.of(batch.key, batch.epoch)
        if writer is None or here is None or not here.mine or writer.lock.locked():
            return False
        here.appends.start(writer.append, batch, then=lambda call: done(self._told(writer, call)))
        return True

    def _told(self, writer: Writer, call: Call[Outcome]) -> Outcome:
        outcome = Outcome(Status.IN_DOUBT, call.error) if call.error else call.value
        if outcome.status is Status.CONFLICT:
            self.drop(writer)  # an epoch that is over never begins again
        return outcome
