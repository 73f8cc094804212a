"""Open state of a file store: root folder, owner, threads, and the sessions that it holds.

Use it from the event loop of the process that opened it. A forked child has to open its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar, TypeVarTuple, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import Folder, open_private as open_root, store_errors
from perdure._lib.loop import ThreadCall, Threads
from perdure._lib.platform import network_file_system, open_files_limit
from perdure.errors import ConfigError, SessionError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import Batch, Documents, HeartbeatRequests, HeldLease, Outcome, Status
from perdure.stores.file import documents, leases, reader
from perdure.stores.file.layout import released_name, session_path
from perdure.stores.file.leases import FileOwner, Owners
from perdure.stores.file.log import LogWriter, OpenFiles, lease_lost_error
from perdure.stores.file.reader import ReadPlan
from perdure.stores.file.segments import DurablePosition

_log = logging.getLogger("perdure")

HOME_VARIABLE = "PERDURE_HOME"

_warned: set[str] = set()


def resolve_root(root: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Return the absolute path of the store, and whether its parents may be created too.

    The path is the argument, else ``PERDURE_HOME``, else the per-user data folder.
    """
    named = root if root is not None else os.environ.get(HOME_VARIABLE) or None
    if named is None:
        from platformdirs import user_data_dir

        return user_data_dir("perdure", appauthor=False), True
    path = os.path.expanduser(os.fspath(named))
    if not path or path.startswith("~"):
        raise ConfigError(
            f"root={os.fspath(named)!r} names no folder: give a path, or leave it out for the "
            "per-user data folder",
            root=os.fspath(named),
        )
    return os.path.abspath(path), False


def is_local(path: str) -> bool:
    """Return whether a folder is on a local disk; warn once if it is not."""
    kind = network_file_system(path)
    if kind is not None and path not in _warned:
        _warned.add(path)
        _log.warning(
            "the store is on a network file system, where locks and syncs may not hold: "
            "keep it on a local disk, or use a server store",
            extra={"path": path, "type": kind},
        )
    return kind is None


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREADS = 16
"""Appends at a time. A sync waits for the disk, not for the CPU, and concurrent syncs share the
file system's own commits."""
QUEUE_DEPTH = 5 * THREADS
"""More appends begun: a thread takes its next one without waiting for the event loop."""

_MAX_OPEN = 256
"""Sessions whose log and folder are kept open: two files each."""

_CLOSE_TIMEOUT = 5.0
"""Seconds for which the closing waits for the disk."""


@final
class Home:
    """An open root folder, and this store's entry among its owners."""

    def __init__(self, root: Folder, owners: Owners, *, read_only: bool) -> None:
        self.root: Folder = root
        self._read_only = read_only
        self.owners: Owners = owners
        self.files: OpenFiles = OpenFiles(min(_MAX_OPEN, open_files_limit() // 4))
        self.appends: Threads = Threads(THREADS, name="perdure append")
        self._heartbeats: Threads = Threads(1, name="perdure heartbeat")
        self._others: Threads = Threads(THREADS, name="perdure file")
        self._pid = os.getpid()

    @property
    def is_in_this_process(self) -> bool:
        """Whether this is the process that opened it, not a forked child."""
        return self._pid == os.getpid()

    async def run_in_thread(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a blocking function in a thread; after a cancellation it still runs to its end.

        Raises:
            SessionError: It would write, and the store was opened read-only.

        """
        if self._read_only and doing != "read":
            raise SessionError(
                f"cannot {doing} {self.root.path}: it was opened read-only", path=self.root.path
            )
        return await self._run_limited(self._others, doing, function, *args)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew the heartbeat, queued after nothing else: a late owner loses its leases."""
        return await self._run_limited(self._heartbeats, "write", self.owners.heartbeat)

    async def _run_limited(
        self, threads: Threads, doing: str, function: Callable[[*Ts], T], *args: *Ts
    ) -> T:
        with store_errors(doing, self.root.path):
            return await threads.run(function, *args)

    async def aclose(self) -> None:
        """Close every file; if the disk hangs, only begin to. None may be in use."""
        self.appends.close()
        self.owners.wake_waiter()
        closing = Threads(1, name="perdure close")  # abandoned calls may hold all other threads
        with anyio.move_on_after(_CLOSE_TIMEOUT, shield=True) as scope:
            try:
                await closing.run(self._close_files)
            except StoreUnavailableError:  # there is no thread for it
                self._close_files()
        if scope.cancelled_caught:
            _log.warning(
                "the disk did not answer while the store was closed: its files stay open until it "
                "does",
                extra={"path": self.root.path},
            )
        for threads in (closing, self._others, self._heartbeats):
            threads.close()

    def _close_files(self) -> None:
        self.files.close_all()
        self.owners.close()
        self.root.close()


async def open_home(
    root_argument: str | os.PathLike[str] | None, owner: str, *, read_only: bool = False
) -> Home:
    """Open the folder, create it if only it is missing, and register as an owner.

    Opened read-only, it is neither created nor written to.

    Raises:
        ConfigError: It is not a folder, or other users can write to it.
        StoreUnavailableError: It cannot be created, read or written.

    """
    path, parents = resolve_root(root_argument)
    is_cancelled = False
    handed_over: list[tuple[Folder, Owners]] = []

    def open_in_thread() -> tuple[Folder, Owners]:
        opened = _open(path, owner, parents=parents, read_only=read_only)
        handed_over.append(opened)
        if is_cancelled:
            _discard(handed_over)
        return opened

    try:
        with store_errors("open", path):
            root, owners = await anyio.to_thread.run_sync(open_in_thread)
    except BaseException:  # a native cancellation passes every shield
        is_cancelled = True
        _discard(handed_over)
        raise
    return Home(root, owners, read_only=read_only)


def _discard(handed_over: list[tuple[Folder, Owners]]) -> None:
    with contextlib.suppress(IndexError):  # loop and thread race for it
        root, owners = handed_over.pop()
        owners.close()
        root.close()


def _open(path: str, owner: str, *, parents: bool, read_only: bool) -> tuple[Folder, Owners]:
    root = open_root(path, parents=parents, make=not read_only)
    try:
        return root, Owners(root, owner, local=is_local(path), read_only=read_only)
    except BaseException:
        root.close()
        raise


# Waiting without holding a thread

_POLL = 0.01
_SETTLE = 1.0
"""How many seconds a reader waits for a takeover to end."""


async def wait_idle(writer: LogWriter) -> None:
    """Wait until an abandoned write of a session has ended."""
    while writer.lock.locked():  # noqa: ASYNC110  # a thread's lock has no event
        await anyio.sleep(_POLL)


async def wait_settled(make_plan: Callable[[], Awaitable[ReadPlan]]) -> ReadPlan:
    """Plan a read again and again until no takeover is under way, for at most one second."""
    deadline = anyio.current_time() + _SETTLE
    pause = _POLL
    while True:
        plan = await make_plan()
        if plan.settled or anyio.current_time() >= deadline:
            return plan
        await anyio.sleep(pause)
        pause *= 2


# Registry of the sessions that a file store holds, with a `LogWriter` for each


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
        try:
            call = await home.appends.done(writer.append, batch)
        except StoreUnavailableError as error:  # there is no thread for it
            return Outcome(Status.TRANSIENT, error)
        return self._outcome(writer, call)

    def begin_append(
        self, home: Home | None, batch: Batch, done: Callable[[Outcome], object]
    ) -> bool:
        """Append one batch without a task; False if it has to wait, or is not held here."""
        writer = self.writer_of(batch.key, batch.epoch)
        if writer is None or home is None or not home.is_in_this_process or writer.lock.locked():
            return False
        try:
            home.appends.start(
                writer.append, batch, then=lambda call: done(self._outcome(writer, call))
            )
        except StoreUnavailableError:
            return False
        return True

    def _outcome(self, writer: LogWriter, call: ThreadCall[Outcome]) -> Outcome:
        outcome = Outcome(Status.IN_DOUBT, call.error) if call.error else call.value
        if outcome.status is Status.CONFLICT:
            self.drop(writer)  # a lost epoch never comes back
        return outcome
