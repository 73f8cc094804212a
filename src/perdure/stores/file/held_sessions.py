"""Registry of the sessions that a file store holds, with a `LogWriter` for each.

The functions are blocking operations on one held session, each one thread call: read and write
documents, release, delete. `HeldSessions` belongs to the event loop, except for `acquire`, which
runs in a thread; its lock guards the race with a cancelled caller.
"""

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
from perdure.stores.file.home import Home, wait_idle
from perdure.stores.file.layout import released_name, session_path
from perdure.stores.file.log import LogWriter, lease_lost_error
from perdure.stores.file.owners import FileOwner
from perdure.stores.file.segments import DurablePosition


def read_documents(
    root: Folder,
    key: SessionKey,
    names: Collection[str] | None,
    is_held: bool,  # noqa: FBT001  # passed through a thread, by position
) -> Documents:
    """Read documents; the holder also copies damaged ones to quarantine."""
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
        result = documents.read(folder, key, names, since=lease.since if lease else 0)
        if result.damaged and is_held:
            documents.quarantine_damaged(folder, key, result.damaged)
        return result


def release(writer: LogWriter) -> None:
    """Mark the session as released, if this writer still holds it."""
    with writer.lock:
        folder = writer.folder()
        if writer.fence.is_valid(folder):
            # Empty, so it needs no temporary file, which a successor could clean up.
            os.close(folder.open(released_name(writer.epoch), os.O_WRONLY | os.O_CREAT))
        writer.close_files()


def delete(writer: LogWriter, me: FileOwner) -> None:
    """Delete a session, as its holder."""
    with writer.lock:
        try:
            writer.require_held()
            writer.close_files()  # some systems cannot remove an open file
            folder = writer.folder()
            if not leases.mark_deleted(folder, writer.key, writer.epoch, me):
                raise lease_lost_error(writer.key, writer.epoch)
        finally:
            writer.close_files()


def write_documents(writer: LogWriter, new: dict[str, bytes], manifest: Manifest) -> None:
    """Fold: write documents, and record in the manifest where the log continues."""
    with writer.lock:
        folder = writer.folder()
        at = _vouched_position(writer, folder, manifest)
        position = msgspec.Raw(msgspec.json.encode(at))
        try:
            documents.write(
                folder,
                new,
                msgspec.structs.replace(manifest, position=position),
                writer.require_held,
            )
        except OSError:
            writer.require_held()  # a new holder removes unfinished files of the old one
            raise
        finally:
            writer.mark_used()


def _vouched_position(
    writer: LogWriter, folder: Folder, manifest: Manifest
) -> DurablePosition | None:
    """Return the last durable position that no document is older than."""
    seqs = (document.as_of_seq for document in manifest.documents.values())
    lowest = min([manifest.as_of_seq, *seqs])
    for position in (writer.durable, writer.before):
        if position.at.seq <= lowest:
            return position
    files = documents.read_manifests(folder, writer.key)
    positions = filter(None, (reader.position_of(file.manifest.position) for file in files))
    candidates = [position for position in positions if position.at.seq <= lowest]
    return max(candidates, key=lambda position: position.at.seq, default=None)


class PendingAcquire:
    """Whether the caller of an acquire still waits for it; guarded by `HeldSessions`' lock."""

    abandoned: bool = False


@final
class HeldSessions:
    """The writers of this store, by session."""

    def __init__(self) -> None:
        self._writers: dict[SessionKey, LogWriter] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._writers

    def clear(self) -> None:
        """Forget every session."""
        self._writers.clear()

    def durable_position(self, key: SessionKey) -> DurablePosition | None:
        """Return how far a session's log is durable, if held here with its files intact."""
        writer = self._writers.get(key)
        return writer.durable if writer is not None and writer.is_intact else None

    def writer_of(self, key: SessionKey, epoch: int) -> LogWriter | None:
        """Return the writer of a session in an epoch, None if it is not held here."""
        writer = self._writers.get(key)
        return writer if writer is not None and writer.epoch == epoch else None

    async def idle_writer(self, key: SessionKey, epoch: int) -> LogWriter:
        """Return a session's writer once no abandoned write of it is under way.

        Raises:
            LeaseLostError: The session is not held here in this epoch.

        """
        writer = self.writer_of(key, epoch)
        if writer is None:
            raise lease_lost_error(key, epoch)
        await wait_idle(writer)
        return writer

    def drop(self, writer: LogWriter) -> None:
        """Forget a session, unless a newer writer holds it."""
        if self._writers.get(writer.key) is writer:
            del self._writers[writer.key]

    def acquire(self, home: Home, key: SessionKey, after: int, claim: PendingAcquire) -> HeldLease:
        """Acquire a session with epoch ``after + 1``; release it if the caller was cancelled."""
        acquired = leases.acquire(home.root, key, after, home.owners.me)
        writer = LogWriter(home.root, key, acquired, home.files)
        with self._lock:
            previous = self._writers.get(key)
            if not claim.abandoned and (previous is None or previous.epoch < writer.epoch):
                self._writers[key] = writer
        if claim.abandoned:
            release(writer)  # so that the next caller can have it at once
        elif previous is not None:
            home.files.close(previous)
        return HeldLease(key, writer.epoch, acquired.end.seq, acquired.created)

    def abandon(self, claim: PendingAcquire) -> None:
        """Note that the caller of an acquire was cancelled."""
        with self._lock:
            claim.abandoned = True

    # appending

    async def append(self, home: Home | None, batch: Batch) -> Outcome:
        """Append one batch in its own thread call."""
        writer = self.writer_of(batch.key, batch.epoch)
        if writer is None or home is None or not home.is_in_this_process:
            return Outcome(Status.CONFLICT, lease_lost_error(batch.key, batch.epoch))
        await wait_idle(writer)
        return self._outcome(writer, await home.appends.done(writer.append, batch))

    def begin_append(
        self, home: Home | None, batch: Batch, done: Callable[[Outcome], object]
    ) -> bool:
        """Append one batch without a task; False if it has to wait, or is not held here."""
        writer = self.writer_of(batch.key, batch.epoch)
        if writer is None or home is None or not home.is_in_this_process or writer.lock.locked():
            return False
        home.appends.start(
            writer.append, batch, then=lambda call: done(self._outcome(writer, call))
        )
        return True

    def _outcome(self, writer: LogWriter, call: ThreadCall[Outcome]) -> Outcome:
        outcome = Outcome(Status.IN_DOUBT, call.error) if call.error else call.value
        if outcome.status is Status.CONFLICT:
            self.drop(writer)  # a lost epoch never comes back
        return outcome
