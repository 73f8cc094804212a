"""File store: the port of `perdure.store` on a folder of readable files.

Use it from the event loop that opened it. Each method does its blocking work in one call into
a thread of the store's own limiters. A session's writes also wait for an abandoned write of
that session, without holding a thread. Cancelling a method abandons its thread, which runs to
its end and leaves the session's state consistent.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple, final

from perdure._lib.files import Folder, store_errors
from perdure._lib.ids import random_id
from perdure._lib.loop import unopened
from perdure._lib.platform import synced_by
from perdure._lib.tasks import all_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery
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
    past_damage,
)
from perdure.stores.file import directory, inbox, leases, log, reader
from perdure.stores.file.documents import blob_names, get, put, remove_blobs, sweep
from perdure.stores.file.home import (
    QUEUE_DEPTH,
    THREADS,
    HeldSessions,
    Home,
    PendingAcquire,
    delete,
    open_home,
    read_documents,
    release,
    resolve_root,
    wait_settled,
    write_documents,
)
from perdure.stores.file.layout import session_path
from perdure.stores.file.leases import Owners
from perdure.stores.file.log import LogWriter
from perdure.stores.file.reader import LogStream, contiguous_run, salvageable_records

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CAPABILITIES = Capabilities(
    durability="fsync" if synced_by()[1] else "fsync of files, not of folders",
    batch_max=1,
    parallelism=THREADS,
    queue_depth=QUEUE_DEPTH,
    dead_letters=True,
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
        self._held_sessions = HeldSessions()

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
        self._held_sessions.clear()
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
        return await all_of(batches, partial(self._held_sessions.append, self._opened))

    def begin_append(self, batch: Batch, done: Callable[[Outcome], object]) -> bool:
        """Append one batch without a task, calling ``done`` later; False means: use append_many."""
        return self._held_sessions.begin_append(self._opened, batch, done)

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
            salvaged = await self._run_in_thread("read", salvageable_records, self._root, key)
            for record in itertools.islice(contiguous_run(key, salvaged, after, before), limit):
                yield LogChunk((record,))
            return
        plan = await self._plan(key, after, before, reverse=reverse)
        stream = LogStream(self._root, key, plan, reverse=reverse)
        last = before if before is not None else plan.head + 1
        remaining, is_settled_reported = (plan.head if limit is None else limit), plan.settled
        while remaining > 0:
            with store_errors("read", self.location):
                records = await stream.part()
            if records is None:
                break
            wanted = [record for record in records if after < record.seq < last][:remaining]
            if wanted:
                remaining -= len(wanted)
                is_settled_reported = True
                yield LogChunk(tuple(wanted), plan.settled)
            if records and (
                records[-1].seq <= after + 1 if reverse else records[-1].seq >= last - 1
            ):
                break  # nothing that was requested follows
        if not is_settled_reported:
            yield LogChunk((), settled=False)

    async def head(self, key: SessionKey) -> int:
        if past_damage.get():
            _, records = await self._run_in_thread("read", salvageable_records, self._root, key)
            return records[-1].seq if records else 0
        return (await self._plan(key, _AFTER_EVERY_RECORD, None)).head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove the log files whose records are all below ``below``."""
        return await self._run_in_thread("trim", log.trim, await self._idle(key, epoch), below)

    async def _plan(
        self, key: SessionKey, after: int, before: int | None, *, reverse: bool = False
    ) -> reader.ReadPlan:
        async def make_plan() -> reader.ReadPlan:
            durable = self._held_sessions.durable_position(key)
            plan = partial(reader.plan, reverse=reverse)
            return await self._run_in_thread(
                "read", plan, self._root, key, after, before, durable, self._owners
            )

        return await wait_settled(make_plan)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        is_held = key in self._held_sessions
        return await self._run_in_thread("read", read_documents, self._root, key, names, is_held)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Fold: documents first, the manifest last."""
        writer = await self._idle(key, manifest.epoch)
        await self._run_in_thread("write", write_documents, writer, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._run_in_thread("write", put, self._root, tenant, dict(blobs), time.time())

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._run_in_thread("read", get, self._root, tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        return await self._run_in_thread(
            "sweep", sweep, self._root, tenant, frozenset(reachable), older_than, time.time()
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

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        claim = PendingAcquire()
        try:
            return await self._run_in_thread(
                "write", self._held_sessions.acquire, self._home, key, after, claim
            )
        except BaseException:
            self._held_sessions.abandon(claim)
            raise

    async def release(self, key: SessionKey, epoch: int) -> None:
        self._home  # noqa: B018  # raises if it is closed
        if self._held_sessions.writer_of(key, epoch) is not None:
            writer = await self._idle(key, epoch)
            self._held_sessions.drop(writer)
            await self._run_in_thread("write", release, writer)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and drain its mailbox."""
        return await self._home.heartbeat()

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another owner left a request, or after ``timeout`` seconds."""
        await self._owners.wait_for_request(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._run_in_thread("write", self._owners.request_handover, holder.owner, key)

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self._run_in_thread(
            "write", inbox.enqueue, self._root, self._owners, key, tuple(items), limit
        )

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        self._home  # noqa: B018  # raises if it is closed
        if self._held_sessions.writer_of(key, epoch) is None:  # a reader knows the epoch, too
            return await self._run_in_thread("read", inbox.peek, self._root, key, epoch, limit)
        return await self._run_in_thread("read", inbox.receive, await self._idle(key, epoch), limit)

    async def ack(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        writer = await self._idle(key, epoch)
        await self._run_in_thread("write", inbox.ack, writer, frozenset(op_ids))

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        list_keys = partial(directory.list_waiting, dead_letters=dead_letters)
        return await self._run_in_thread("read", list_keys, self._root)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        await self._run_in_thread(
            "write", inbox.reject, await self._idle(key, epoch), tuple(letters)
        )

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._run_in_thread("read", inbox.dead_letters, self._root, key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._run_in_thread(
            "write", inbox.drop_dead_letters, self._root, key, set(op_ids)
        )

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
        query = SessionQuery(
            tenant=tenant, owner=owner, tag=tag, prefix=prefix, after=after, limit=limit
        )
        return await self._run_in_thread("read", directory.list_sessions, self._root, query)

    async def tenants(self) -> list[str]:
        return await self._run_in_thread("read", directory.list_tenants, self._root)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        writer = await self._idle(key, epoch)
        self._held_sessions.drop(writer)
        await self._run_in_thread("delete", delete, writer, self._owners.me)

    async def scrub(self) -> None:
        """Finish interrupted deletions and heartbeats. Removed files need no further work."""
        await self._run_in_thread("clean", directory.end_deletions, self._root)
        await self._run_in_thread("clean", self._owners.remove_stale_temporary)

    async def _idle(self, key: SessionKey, epoch: int) -> LogWriter:
        self._home  # noqa: B018  # raises if it is closed
        return await self._held_sessions.idle_writer(key, epoch)
