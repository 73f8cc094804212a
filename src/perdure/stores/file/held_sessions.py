"""The sessions that a store holds: a writer for each, and what is done to it in one hop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import final

import msgspec

from perdure._lib.files import Folder
from perdure._lib.threads import ThreadCall
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import Batch, Documents, HeldLease, Outcome, Status
from perdure.stores.file import documents, leases, reader
from perdure.stores.file.home import Home, idle
from perdure.stores.file.layout import released_name, session_path
from perdure.stores.file.log import LogWriter, lost
from perdure.stores.file.owners import FileOwner
from perdure.stores.file.segments import DurablePosition

# Operations on one held session, one hop each: read and write documents, release, delete


def read_documents(
    root: Folder,
    key: SessionKey,
    names: Collection[str] | None,
    held: bool,  # noqa: FBT001  # passed through a thread, by position
) -> Documents:
    """Read documents; who holds the session also keeps the evidence of damage."""
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return Documents()
    with folder:
        lease = leases.read_lease(folder, leases.newest_epoch(folder))
        if lease is not None:
            leases.require_key(folder, key, lease)
            if lease.deleted:
                return Documents()
        found = documents.read(folder, key, names, since=lease.since if lease else 0)
        if found.damaged and held:
            documents.keep_evidence(folder, key, found.damaged)
        return found


def release(writer: LogWriter) -> None:
    """Say that the holder writes no more, if it still is the holder."""
    with writer.lock:
        folder = writer.folder()
        if writer.fence.holds(folder):
            # Empty, so it needs no temporary file that a successor could tidy away from us.
            os.close(folder.open(released_name(writer.epoch), os.O_WRONLY | os.O_CREAT))
        writer.close_files()


def delete(writer: LogWriter, me: FileOwner) -> None:
    """End a session's life, as its holder."""
    with writer.lock:
        try:
            writer.require_mine()
            writer.close_files()  # not everywhere can a file that is open be removed
            folder = writer.folder()
            if not leases.mark_deleted(folder, writer.key, writer.epoch, me):
                raise lost(writer.key, writer.epoch)
        finally:
            writer.close_files()


def write_documents(writer: LogWriter, new: dict[str, bytes], manifest: Manifest) -> None:
    """Fold, and note in the manifest where the log goes on."""
    with writer.lock:
        folder = writer.folder()
        at = _vouched(writer, folder, manifest)
        position = msgspec.Raw(msgspec.json.encode(at))
        try:
            documents.write(
                folder,
                new,
                msgspec.structs.replace(manifest, position=position),
                writer.require_mine,
            )
        except OSError:
            writer.require_mine()  # a new holder tidies up what an old one left
            raise
        finally:
            writer.rest()


def _vouched(writer: LogWriter, folder: Folder, manifest: Manifest) -> DurablePosition | None:
    """Return the last known position that all documents are at or behind."""
    lowest = min([manifest.as_of_seq, *(one.as_of_seq for one in manifest.documents.values())])
    for known in (writer.durable, writer.before):
        if known.at.seq <= lowest:
            return known
    before = documents.read_manifests(folder, writer.key)
    positions = filter(None, (reader.position_of(one.manifest.position) for one in before))
    near = [known for known in positions if known.at.seq <= lowest]
    return max(near, key=lambda known: known.at.seq, default=None)


# The sessions that a store holds: a writer for each, from its acquire to its end


class PendingAcquire:
    """Whether somebody still waits for an acquire; guarded by the lock of the holding."""

    abandoned: bool = False


@final
class HeldSessions:
    """Who writes what in this store."""

    def __init__(self) -> None:
        self._writers: dict[SessionKey, LogWriter] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._writers

    def clear(self) -> None:
        """Hold nothing any more."""
        self._writers.clear()

    def durable(self, key: SessionKey) -> DurablePosition | None:
        """Return how far a session's log lasts, if it is held here and its files are as written."""
        writer = self._writers.get(key)
        return writer.durable if writer is not None and writer.is_intact else None

    def of(self, key: SessionKey, epoch: int) -> LogWriter | None:
        """Return the writer of a session in an epoch, None if that is not held here."""
        writer = self._writers.get(key)
        return writer if writer is not None and writer.epoch == epoch else None

    async def idle(self, key: SessionKey, epoch: int) -> LogWriter:
        """Return a session's writer when no abandoned write of it is under way.

        Raises:
            LeaseLostError: The session is not held here in this epoch.

        """
        writer = self.of(key, epoch)
        if writer is None:
            raise lost(key, epoch)
        await idle(writer)
        return writer

    def drop(self, writer: LogWriter) -> None:
        """Hold a session no more."""
        if self._writers.get(writer.key) is writer:
            del self._writers[writer.key]

    # taking

    def take(self, here: Home, key: SessionKey, after: int, claim: PendingAcquire) -> HeldLease:
        """Take a session with epoch ``after + 1``, and let go of it if nobody waits for it."""
        taken = leases.take(here.root, key, after, here.owners.me)
        writer = LogWriter(here.root, key, taken, here.files)
        with self._lock:
            before = self._writers.get(key)
            if not claim.abandoned and (before is None or before.epoch < writer.epoch):
                self._writers[key] = writer
        if claim.abandoned:
            release(writer)  # let the next one have it at once
        elif before is not None:
            here.files.close(before)
        return HeldLease(key, writer.epoch, taken.end.seq, taken.created)

    def abandon(self, claim: PendingAcquire) -> None:
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

    def _told(self, writer: LogWriter, call: ThreadCall[Outcome]) -> Outcome:
        outcome = Outcome(Status.IN_DOUBT, call.error) if call.error else call.value
        if outcome.status is Status.CONFLICT:
            self.drop(writer)  # an epoch that is over never begins again
        return outcome
