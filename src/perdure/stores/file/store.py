"""File store: the port of `perdure.store` on a folder of readable files.

Use it from the event loop that opened it. Each method does its blocking work in one call into
a thread of the store's own limiters. A session's writes also wait for an abandoned write of
that session, without holding a thread. Cancelling a method abandons its thread, which runs to
its end and leaves the session's state consistent. A forked child has to open its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar, TypeVarTuple, final

import anyio
import msgspec

from perdure._lib.files import Folder, open_private as open_root, store_errors
from perdure._lib.ids import random_id
from perdure._lib.logs import LogOnce, log_facts
from perdure._lib.loop import ThreadCall, Threads, unopened
from perdure._lib.platform import descriptor_limit, network_file_system, synced_by
from perdure._lib.tasks import all_of
from perdure.errors import ConfigError, SessionError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery
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
from perdure.stores.file import acquire, directory, documents, inbox, leases, log, reader
from perdure.stores.file.documents import blob_names, get, put, remove_blobs, renew, sweep
from perdure.stores.file.layout import (
    DROPPED,
    PUBLISHED,
    RELEASED,
    session_path,
)
from perdure.stores.file.leases import Owners
from perdure.stores.file.log import LogWriter, OpenFiles, lease_lost_error
from perdure.stores.file.reader import contiguous_run, salvaged_log
from perdure.stores.file.segments import DurablePosition

_log = logging.getLogger("perdure")

HOME_VARIABLE = "PERDURE_HOME"

_warned = LogOnce()


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
    if kind is not None and _warned.first(path):
        log_facts(
            _log,
            logging.WARNING,
            "the store is on a network file system, where locks and syncs may not hold: "
            "keep it on a local disk, or use a server store",
            path=path,
            type=kind,
        )
    return kind is None


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREADS = 16
"""Appends at a time. A sync waits for the disk, not for the CPU, and concurrent syncs share the
file system's own commits."""

_MAX_OPEN = 256
"""Sessions whose log and folder are kept open: two files each."""

_POLL = 0.01
_SETTLE = 1.0
"""Seconds that a reader waits for a takeover to end."""


@final
class Home:
    """An open root folder, this store's entry among its owners, and its writers by session.

    A session has a writer until its lease is released, or lost. Threads acquire, release and
    delete, since they continue when their callers are cancelled.
    """

    def __init__(self, root: Folder, owners: Owners, *, read_only: bool) -> None:
        self.root: Folder = root
        self._read_only = read_only
        self.owners: Owners = owners
        descriptors = descriptor_limit()
        most = _MAX_OPEN if descriptors is None else min(_MAX_OPEN, descriptors // 4)
        self.files: OpenFiles = OpenFiles(most)
        self.writers: dict[SessionKey, LogWriter] = {}
        self._lock = threading.Lock()
        # More than the engine uses at a time: those whose disk does not answer leave some free.
        self._appends = Threads(4 * THREADS, name="perdure:append")
        self._heartbeats = Threads(1, name="perdure:heartbeat")
        self._others = Threads(THREADS, name="perdure:file")
        self._pid = os.getpid()

    @property
    def is_in_this_process(self) -> bool:
        """True in the process that opened it, False in a forked child."""
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
        with store_errors(doing, self.root.path):
            return await self._others.run(function, *args)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew the heartbeat, queued after nothing else: a late owner loses its leases."""
        with store_errors("write", self.root.path):
            return await self._heartbeats.run(self.owners.heartbeat)

    async def aclose(self) -> None:
        """Close every file; if the caller's time ends, only begin to. None may be in use."""
        with self._lock:
            self.writers.clear()
        self._appends.close()
        self.owners.wake_waiter()
        closing = Threads(1, name="perdure:close")  # abandoned calls may hold all other threads
        try:
            await closing.run(self._close_files)
        except StoreUnavailableError:  # there is no thread for it
            self._close_files()
        except anyio.get_cancelled_exc_class():
            log_facts(
                _log,
                logging.WARNING,
                "the disk did not answer while the store was closed: its files stay open until it "
                "does",
                path=self.root.path,
            )
            raise
        finally:
            for threads in (closing, self._others, self._heartbeats):
                threads.close()

    def _close_files(self) -> None:
        self.files.close_all()
        self.owners.close()
        self.root.close()

    # the writers

    def durable_position(self, key: SessionKey) -> DurablePosition | None:
        """Return how far a session's log is durable, if held here with its files intact.

        Threads that read ask, too.
        """
        writer = self.writers.get(key)
        return writer.durable if writer is not None and writer.is_intact else None

    def writer_of(self, key: SessionKey, epoch: int) -> LogWriter | None:
        """Return the writer of a session in an epoch, None if it is not held here."""
        writer = self.writers.get(key)
        return writer if writer is not None and writer.epoch == epoch else None

    async def run_with_writer(
        self,
        doing: str,
        key: SessionKey,
        epoch: int,
        function: Callable[[LogWriter, *Ts], T],
        *args: *Ts,
    ) -> T:
        """Run a blocking function in a thread, once no abandoned write of the session is running.

        Raises:
            LeaseLostError: The session is not held here in this epoch.

        """
        writer = self.writer_of(key, epoch)
        if writer is None:
            raise lease_lost_error(key, epoch)
        await _wait_idle(writer)
        return await self.run_in_thread(doing, function, writer, *args)

    def acquire(self, key: SessionKey, terms: Terms, abandoned: threading.Event) -> Held | Taken:
        """Take a session on these terms; release it if the caller was cancelled."""
        acquired = acquire.acquire(self.root, key, terms, self.owners)
        if isinstance(acquired, Held):
            return acquired
        taken, fence, end = acquired
        writer = LogWriter(self.root, key, fence, end, self.files)
        with self._lock:
            # Threads may end in another order: only a newer epoch replaces a writer.
            previous = self.writers.get(key)
            if previous is None or previous.epoch < writer.epoch:
                self.writers[key] = writer
        if previous is not None:
            self.files.close(previous)
        if abandoned.is_set():
            self.release(writer)  # so that the next caller can have it at once
        return taken

    def release(self, writer: LogWriter) -> None:
        """Release a session; if that fails it stays held, and may be released again."""
        with writer.lock:
            if writer.is_held():
                leases.create_mark(writer.folder(), RELEASED.name(writer.epoch))
            writer.close_files()
        self._drop(writer)

    def delete(self, writer: LogWriter, keep_posts: bool) -> None:  # noqa: FBT001  # passed on by position
        """Delete a session, as its holder; if that fails it stays held."""
        with writer.lock:
            try:
                writer.require_held()
                writer.close_files()  # some systems cannot remove an open file
                folder, key, epoch = writer.folder(), writer.key, writer.epoch
                me = self.owners.me
                if not leases.mark_deleted(folder, key, epoch, me, keep_posts=keep_posts):
                    raise lease_lost_error(key, epoch)
            finally:
                writer.close_files()
        self._drop(writer)

    def _drop(self, writer: LogWriter) -> None:
        """Forget a session, unless a newer writer holds it."""
        with self._lock:
            if self.writers.get(writer.key) is writer:
                del self.writers[writer.key]

    # appending

    async def append(self, batch: Batch) -> Outcome:
        """Append one batch in its own thread call."""
        writer = self.writer_of(batch.key, batch.epoch)
        if writer is None:
            return _not_held(batch)
        await _wait_idle(writer)
        try:
            call = await self._appends.done(writer.append, batch)
        except StoreUnavailableError as error:  # there is no thread for it
            return Outcome(Status.TRANSIENT, error)
        return self._outcome_of(writer, call)

    def begin_append(self, batch: Batch, done: Callable[[Sequence[Outcome]], object]) -> bool:
        """Append one batch without a task; False if it has to wait, or is not held here."""
        writer = self.writer_of(batch.key, batch.epoch)
        # An abandoned write still runs: only a task can wait for it.
        if writer is None or writer.lock.locked():
            return False
        try:
            self._appends.start(
                writer.append, batch, then=lambda call: done([self._outcome_of(writer, call)])
            )
        except StoreUnavailableError:  # there is no thread for it
            return False
        return True

    def _outcome_of(self, writer: LogWriter, call: ThreadCall[Outcome]) -> Outcome:
        outcome = Outcome(Status.IN_DOUBT, call.error) if call.error else call.value
        if outcome.status is Status.CONFLICT:
            self._drop(writer)  # a lost epoch never comes back
        return outcome


async def _wait_idle(writer: LogWriter) -> None:
    """Wait until an abandoned write of a session has ended, without holding a thread."""
    while writer.lock.locked():  # noqa: ASYNC110  # a thread's lock has no event
        await anyio.sleep(_POLL)


def _not_held(batch: Batch) -> Outcome:
    return Outcome(Status.CONFLICT, lease_lost_error(batch.key, batch.epoch))


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
    opening = Threads(1, name="perdure:open")
    opened: list[tuple[Folder, Owners]] = []

    def open_in_thread() -> None:
        opened.append(_open(path, owner, parents=parents, read_only=read_only))

    try:
        with store_errors("open", path):
            await opening.run(open_in_thread)
    except BaseException:  # after a cancellation the thread is still opening it
        opening.start(_discard, opened, then=bool)  # after that, in the same thread
        raise
    finally:
        opening.close()
    ((root, owners),) = opened
    return Home(root, owners, read_only=read_only)


def _discard(opened: list[tuple[Folder, Owners]]) -> None:
    for root, owners in opened:
        owners.close()
        root.close()


def _open(path: str, owner: str, *, parents: bool, read_only: bool) -> tuple[Folder, Owners]:
    root = open_root(path, parents=parents, make=not read_only)
    try:
        return root, Owners(root, owner, local=is_local(path), read_only=read_only)
    except BaseException:
        root.close()
        raise


# One session's folder


def read_documents(
    root: Folder,
    key: SessionKey,
    names: Collection[str] | None,
    is_held: bool,  # noqa: FBT001  # passed through a thread, by position
) -> Documents:
    """Read documents; the holder also copies damaged ones to quarantine."""
    with suppress(FileNotFoundError), root.enter(*session_path(key)) as folder:
        newest = leases.newest_lease(folder, key)
        while not newest.deleted:
            since = newest.since
            result = documents.read(folder, key, names, since=since)
            if result.damaged:  # maybe by a deletion, which removes one document after the other
                newest = leases.newest_lease(folder, key)
            if newest.deleted or newest.since != since:
                continue
            if result.damaged and is_held:
                documents.quarantine_damaged(folder, key, result.damaged)
            tails = reader.kept_tails(folder)
            return msgspec.structs.replace(result, cut=tuple(map(str, tails))) if tails else result
    return Documents()


def publish(writer: LogWriter) -> None:
    """Publish a draft, as its holder."""
    with writer.held() as folder:
        epoch = writer.epoch
        lease = leases.read_lease(folder, epoch, folder.names())
        if lease is not None and lease.draft is not None and not lease.published:
            # Its own mark, then a look for the taker's, who does it the other way around: one sees
            # the other.
            leases.create_mark(folder, PUBLISHED.name(epoch))
            folder.sync()
            if folder.has(DROPPED.name(epoch)):  # another process is about to take it over
                raise lease_lost_error(writer.key, epoch)
        writer.require_held()  # in any case: a taker may have removed the lease before it was read


def write_documents(writer: LogWriter, new: dict[str, bytes], manifest: Manifest) -> None:
    """Fold: write documents, and record in the manifest where the log continues."""
    with writer.held() as folder:
        writer.require_present()
        at = _vouched_position(writer, folder, manifest)
        manifest = msgspec.structs.replace(manifest, position=msgspec.Raw(msgspec.json.encode(at)))
        try:
            documents.write(folder, new, manifest, writer.require_held)
        except OSError:
            writer.require_held()  # a new holder removes unfinished files of the old one
            raise


def _vouched_position(
    writer: LogWriter, folder: Folder, manifest: Manifest
) -> DurablePosition | None:
    """Return the last durable position that no document is older than."""
    seqs = (document.as_of_seq for document in manifest.documents.values())
    lowest = min([manifest.as_of_seq, *seqs])
    for position in (writer.durable, writer.before):
        if position.at.seq <= lowest:
            return position
    files = documents.read_manifests(folder, writer.key).files
    positions = filter(None, (documents.position_of(file.manifest) for file in files))
    candidates = [position for position in positions if position.at.seq <= lowest]
    return max(candidates, key=lambda position: position.at.seq, default=None)


# The store


_CAPABILITIES = Capabilities(
    durability="fsync" if synced_by()[1] else "fsync of files, not of folders",
    batch_max=1,
    parallelism=THREADS,
)

_AFTER_EVERY_RECORD = 2**62
"""A seq higher than any log's head."""


@final
class FileStore:
    """Keep sessions in a folder: readable, private, durable to the disk.

    Args:
        root: The folder; by default ``PERDURE_HOME``, else the per-user data folder. Looked
            up when the store is opened. Its parent must exist, and no other user may be able
            to write to it.
        owner: This store's id as a holder of leases; by default an unguessable one.

    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, owner: str | None = None
    ) -> None:
        self._root_argument = root
        self._owner = owner or random_id()
        self._opened: Home | None = None

    def __repr__(self) -> str:
        path = self._opened.root.path if self._opened else self._root_argument
        return f"FileStore({str(path)!r})" if path is not None else "FileStore()"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        """The folder."""
        return self._opened.root.path if self._opened else resolve_root(self._root_argument)[0]

    @property
    def local_path(self) -> str:
        """The folder, which may not exist yet."""
        return self.location

    def folder_of(self, key: SessionKey) -> str:
        """Return the folder of a session's agent, which may not exist."""
        return os.path.join(self.location, *session_path(SessionKey(key.agent, tenant=key.tenant)))

    async def open(self) -> None:
        """Open the folder, create it if only it is missing, and register as an owner.

        Raises:
            ConfigError: It is not a folder, or other users can write to it.
            StoreUnavailableError: It cannot be created, read or written.

        """
        if not self._opened:
            self._opened = await open_home(self._root_argument, self._owner)

    async def open_read_only(self) -> None:
        """Open an existing folder for reading; nothing is written, no owner is registered.

        Raises:
            ConfigError: It is not a folder, or other users can write to it.
            StoreUnavailableError: It does not exist, or cannot be read.

        """
        if not self._opened:
            self._opened = await open_home(self._root_argument, self._owner, read_only=True)

    async def aclose(self) -> None:
        """Close every file; leases that were not released look like those of a dead owner."""
        home, self._opened = self._opened, None
        if home is not None and home.is_in_this_process:
            await home.aclose()

    async def _run_in_thread(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await self._home.run_in_thread(doing, function, *args)

    @property
    def _home(self) -> Home:
        home = self._opened
        if home is not None and home.is_in_this_process:
            return home
        raise unopened(self.location, elsewhere=home is not None)

    @property
    def _root(self) -> Folder:
        return self._home.root

    @property
    def _owners(self) -> Owners:
        return self._home.owners

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch in its own thread call."""
        home = self._opened
        if home is None or not home.is_in_this_process:
            return list(map(_not_held, batches))
        return await all_of(batches, home.append)

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        """Append one batch without a task; False if it has to wait, or is not held here."""
        home = self._opened
        if len(batches) != 1 or home is None or not home.is_in_this_process:
            return False
        return home.begin_append(batches[0], done)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records from the files, at most 256 KiB of a file at a time."""
        if past_damage.get() and not reverse:
            salvaged = await self._run_in_thread("read", salvaged_log, self._root, key)
            for record in itertools.islice(contiguous_run(key, salvaged, after, before), limit):
                yield LogChunk((record,))
            return
        plan = await self._plan(key, after, before, reverse=reverse, limit=limit)
        last = before if before is not None else plan.head + 1
        remaining, is_settled_reported = (plan.head if limit is None else limit), plan.settled
        async with aclosing(reader.stream(self._root, key, plan, reverse=reverse)) as parts:
            async for records in parts:
                wanted = [record for record in records if after < record.seq < last][:remaining]
                if wanted:
                    remaining -= len(wanted)
                    is_settled_reported = True
                    yield LogChunk(tuple(wanted), plan.settled)
                end = records[-1].seq if records else None
                is_past = end is not None and (end <= after + 1 if reverse else end >= last - 1)
                if is_past or remaining <= 0:
                    break  # nothing that was requested follows
        if not is_settled_reported:
            yield LogChunk((), settled=False)

    async def head(self, key: SessionKey) -> int:
        if past_damage.get():
            salvaged = await self._run_in_thread("read", salvaged_log, self._root, key)
            return salvaged.records[-1].seq if salvaged.records else 0
        return (await self._plan(key, _AFTER_EVERY_RECORD, None)).head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove the log files whose records are all below ``below``."""
        return await self._home.run_with_writer("trim", key, epoch, log.trim, below)

    async def _plan(
        self,
        key: SessionKey,
        after: int,
        before: int | None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> reader.ReadPlan:
        """Plan a read, again until no takeover is under way, for at most one second."""
        home = self._home
        durable = partial(home.durable_position, key)
        make_plan = partial(reader.plan, reverse=reverse, limit=limit)
        deadline, pause = anyio.current_time() + _SETTLE, _POLL
        while True:
            plan = await self._run_in_thread(
                "read", make_plan, home.root, key, after, before, durable, home.owners
            )
            if plan.settled or anyio.current_time() >= deadline:
                return plan
            await anyio.sleep(pause)
            pause *= 2

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        is_held = key in self._home.writers
        if past_damage.get():
            salvaged = await self._run_in_thread("read", salvaged_log, self._root, key)
            if salvaged.began_anew:  # their numbers are not those of the records any more
                return Documents()
        return await self._run_in_thread("read", read_documents, self._root, key, names, is_held)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Fold: documents first, the manifest last."""
        await self._home.run_with_writer(
            "write", key, manifest.epoch, write_documents, dict(documents), manifest
        )

    async def log_tails(self, key: SessionKey) -> list[reader.CutTail]:
        """Return bytes at a log's end that are no whole records, unless they were accepted."""
        return await self._run_in_thread("read", reader.log_tails, self._root, key, self._owners)

    async def accept_log(self, key: SessionKey) -> bool:
        """Accept a log without the bytes that were cut from its end; they stay in quarantine.

        Returns whether there were any.
        """
        return await self._run_in_thread("write", reader.accept_tails, self._root, key)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._run_in_thread("write", put, self._root, tenant, dict(blobs), time.time())

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._run_in_thread("read", get, self._root, tenant, name)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        return await self._run_in_thread(
            "sweep", sweep, self._root, tenant, reachable, older_than, time.time(), among
        )

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return await self._run_in_thread(
            "write", renew, self._root, tenant, frozenset(names), time.time()
        )

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._run_in_thread("read", blob_names, self._root, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._run_in_thread(
            "delete", remove_blobs, self._root, tenant, frozenset(names)
        )

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._run_in_thread("read", leases.lease_state, self._root, key, self._owners)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        abandoned = threading.Event()
        try:
            return await self._run_in_thread("write", self._home.acquire, key, terms, abandoned)
        except BaseException:
            abandoned.set()
            raise

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self._home.run_with_writer("write", key, epoch, publish)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self._run_in_thread("read", directory.list_drafts, self._root, tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        home = self._home
        if home.writer_of(key, epoch) is not None:
            await home.run_with_writer("write", key, epoch, home.release)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and drain its mailbox."""
        return await self._home.heartbeat()

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another owner left a request, or after ``timeout`` seconds."""
        await self._owners.wait_for_request(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._run_in_thread("write", self._owners.send, holder.owner, key, "handover")

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self._run_in_thread(
            "write", inbox.enqueue, self._root, self._owners, key, tuple(items), limit
        )

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        home = self._home
        if home.writer_of(key, epoch) is None:  # a reader knows the epoch, too
            return await home.run_in_thread("read", inbox.peek, home.root, key, epoch, limit)
        return await home.run_with_writer("read", key, epoch, inbox.receive, limit)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        if epoch is None:
            await self._run_in_thread(
                "write", inbox.drop_dead_letters, self._root, key, tuple(op_ids)
            )
            return
        await self._home.run_with_writer("write", key, epoch, inbox.ack, tuple(op_ids), tuple(dead))

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        list_keys = partial(directory.list_waiting, dead_letters=dead_letters)
        return await self._run_in_thread("read", list_keys, self._root)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._run_in_thread("read", inbox.dead_letters, self._root, key)

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        held = dict(self._home.writers)
        return await self._run_in_thread("read", directory.list_sessions, self._root, query, held)

    async def tenants(self) -> list[str]:
        return await self._run_in_thread("read", directory.list_tenants, self._root)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        home = self._home
        await home.run_with_writer("delete", key, epoch, home.delete, keep_posts)

    async def scrub(self) -> None:
        """Finish interrupted deletions and heartbeats. Removed files need no further work."""
        await self._run_in_thread("clean", directory.end_deletions, self._root)
        await self._run_in_thread("clean", self._owners.remove_stale_temporary)
