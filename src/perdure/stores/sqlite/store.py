"""SQLite store: the port of `perdure.store` on one local database file.

All writes go through one connection in one thread, in order of the calls; one commit saves every
session that is due. Reads have their own connections and wait for no writer. Cancelling a method
leaves out a write that has not begun, and else abandons its thread, which runs to its end: a
transaction is complete or absent. Several processes may use one file.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar, final

import anyio.to_thread

from perdure._lib.ids import random_id
from perdure._lib.loop import ThreadCall, unopened
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery
from perdure.records.records import Record
from perdure.records.rows import NO_END, LogPart
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
    RestoreData,
    SessionInfo,
    Status,
    Taken,
    Terms,
    past_damage,
)
from perdure.stores.sqlite import connections, documents as content, inbox, leases, log
from perdure.stores.sqlite.connections import resolve
from perdure.stores.sqlite.engine import OpenDatabase
from perdure.stores.sqlite.errors import map_errors
from perdure.stores.sqlite.log import PART_BYTES, find

P = ParamSpec("P")
T = TypeVar("T")

_FIRST_BYTES = 32 * 1024
"""Of a log that is read backward without a limit: mostly its newest records are all it takes."""

_CAPABILITIES = Capabilities(
    durability="fsync",
    batch_max=96,
    parallelism=1,
    queue_depth=1,
)


@final
class SqliteStore:
    """Keep everything in one SQLite database.

    Args:
        path: The database file; no other user may be able to write to its folder.
        owner: This store's id as a holder of leases; by default an unguessable one.
        timeout: Seconds to wait for another process that writes, before that is an error.

    Raises:
        ConfigError: The path names no file, or the timeout is negative or infinite.

    Example:
        >>> store = SqliteStore("agents/agents.db")
    """

    def __init__(
        self, path: str | os.PathLike[str], *, owner: str | None = None, timeout: float = 5.0
    ) -> None:
        if not 0 <= timeout < float("inf"):
            raise ConfigError(
                f"invalid timeout={timeout!r}: expected seconds, such as 5.0",
                option="timeout",
                value=timeout,
            )
        self._path = resolve(path)
        self._owner = owner or random_id()
        self._timeout = timeout
        self._last_request = 0
        self._opened: OpenDatabase | None = None

    def __repr__(self) -> str:
        return f"SqliteStore({self.location!r})"

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        """The database file."""
        return self._path

    @property
    def local_path(self) -> str:
        """The database file, which may not exist yet."""
        return self._path

    async def open(self) -> None:
        """Open the database, create it if only it is missing, and register as an owner.

        Raises:
            ConfigError: Other users can write to its folder, or it is another program's database.
            CorruptRecordError: It is no longer a database.
            StoreUnavailableError: It cannot be created, read or written.
            UnsupportedVersionError: A newer release wrote it.

        """
        await self._open(self._owner)

    async def open_read_only(self) -> None:
        """Open an existing database for reading, also on a full or read-only disk.

        If SQLite cannot create its lock files next to it, the database is read without locks, and
        a read during which another process changed it raises.

        Raises:
            ConfigError: Other users can write to its folder, or it is another program's database.
            CorruptRecordError: It is no longer a database.
            StoreUnavailableError: It does not exist, or cannot be read.
            UnsupportedVersionError: Another release wrote it.

        """
        await self._open(None)

    async def _open(self, owner: str | None) -> None:
        if self._opened is None:
            database = OpenDatabase(self._path, self._timeout, owner)
            await database.open()
            self._opened = database

    async def aclose(self) -> None:
        """Close the connections; leases that were not released look like those of a dead owner."""
        opened, self._opened = self._opened, None
        if opened is None or opened.pid != os.getpid():
            return
        await opened.aclose()

    @property
    def _database(self) -> OpenDatabase:
        opened = self._opened
        if opened is not None and opened.pid == os.getpid():
            return opened
        raise unopened(self._path, elsewhere=opened is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append all batches in one commit."""
        if not batches:
            return []
        try:
            opened = self._database
        except StoreUnavailableError as error:
            return [Outcome(Status.TRANSIENT, error)] * len(batches)
        return await opened.writes.run(opened.engine.append, batches)

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        """Append all batches in one commit, without a task, and call ``done``."""
        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            return False

        def answer(call: ThreadCall[list[Outcome]]) -> None:
            error = call.error
            done([Outcome(Status.IN_DOUBT, error)] * len(batches) if error else call.value)

        opened.writes.start(opened.engine.append, batches, then=answer, prompt=len(batches) > 1)
        return True

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        before, limit = NO_END if before is None else before, NO_END if limit is None else limit
        part = LogPart(after, before, limit, reverse)
        # Row by row past damage, so that a damaged one hides no others.
        largest = 1 if past_damage.get() else PART_BYTES
        max_bytes = min(_FIRST_BYTES if reverse and limit == NO_END else PART_BYTES, largest)
        start = await self._database.read(log.read_start, key, part, max_bytes)
        if start is None:
            return
        reader, records = start
        while True:
            if records:
                yield LogChunk(tuple(records))
            if reader.is_done:
                return
            max_bytes = min(max_bytes * 4, largest)
            records = await self._database.read(log.read_page, reader, max_bytes)

    async def head(self, key: SessionKey) -> int:
        row = await self._database.read(find, key)
        return 0 if row is None or row.is_hidden else row.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove the commits whose records are all below ``below``."""
        opened = self._database
        return await opened.write(
            "trim", leases.trim, opened.engine.tails, key, epoch, below, time.time()
        )

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._database.read(content.read, key, names)

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None, *, newest: int = 0
    ) -> RestoreData:
        """Read documents, the log after them, and whether the inbox is empty, in one snapshot."""
        return await self._database.read(content.read_to_restore, key, names, newest)

    async def read_many_for_restore(
        self, keys: Sequence[SessionKey], names: Collection[str] | None = None
    ) -> list[RestoreData | None]:
        """Read the same of several sessions in one snapshot, as one call of a thread."""
        return await self._database.read(_of_each, keys, content.read_to_restore, names)

    async def read_logs(self, keys: Sequence[SessionKey]) -> list[tuple[Record, ...] | None]:
        """Read the logs of several sessions in one snapshot, as one call of a thread."""
        return await self._database.read(_of_each, keys, log.read_all)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one transaction."""
        await self._database.write("write", content.write, key, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._database.write("write", content.put, tenant, dict(blobs), time.time())

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._database.read(content.get, tenant, name)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        keep, looked_at = frozenset(reachable), None if among is None else frozenset(among)
        return await self._database.write(
            "sweep", content.sweep, tenant, keep, looked_at, older_than, time.time()
        )

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return await self._database.write(
            "write", content.renew, tenant, frozenset(names), time.time()
        )

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._database.read(content.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._database.write("remove from", content.remove, tenant, frozenset(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._database.read(leases.lease_state, key, self._database.presence)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        opened, owner = self._database, self._owner
        is_awaited = [True]

        def acquire(con: sqlite3.Connection) -> Held | Taken:
            answer, tail = leases.acquire(con, key, terms, owner, opened.presence, time.time())
            if tail is None:
                return answer
            if is_awaited:  # after a failed commit it matches no row, and is replaced
                opened.engine.tails[key] = tail
            else:  # so that the next caller can have it at once
                leases.release(con, opened.engine.tails, key, tail.epoch, time.time())
            return answer

        try:
            return await opened.act("write", acquire, reads_first=True)
        except BaseException:
            is_awaited.clear()
            raise

    async def publish(self, key: SessionKey, epoch: int) -> None:
        opened = self._database
        await opened.write("write", leases.publish, opened.engine.tails, key, epoch, time.time())

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self._database.read(leases.drafts, tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        opened = self._database
        await opened.write("write", leases.release, opened.engine.tails, key, epoch, time.time())

    async def heartbeat(self) -> HeartbeatRequests:
        requests, self._last_request = await self._database.write(
            "write", leases.renew_heartbeat, self._owner, self._last_request
        )
        return requests

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another process left a request for this one, or after ``timeout`` seconds."""
        await self._database.wait_for_notification(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._database.write("write", leases.request_handover, holder.owner, key)
        await self._database.notify(holder.owner)

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        opened = self._database
        new, owner = await opened.write(
            "write", inbox.enqueue, key, tuple(items), time.time(), limit
        )
        if owner:
            await opened.notify(owner)
        return new

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._database.read(inbox.receive, key, epoch, limit)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        await self._database.write("write", inbox.ack, key, epoch, tuple(op_ids), tuple(dead))

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._database.read(
            inbox.sessions_with_pending_items, dead_letters=dead_letters
        )

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._database.read(inbox.dead_letters, key)

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        return await self._database.read(content.sessions, query)

    async def tenants(self) -> list[str]:
        return await self._database.read(content.tenants)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        opened = self._database
        await opened.write(
            "delete from", leases.delete, opened.engine.tails, key, epoch, keep_posts, time.time()
        )

    # the database as a whole

    async def integrity_problems(self) -> list[str]:
        """Run SQLite's check of every page and index, and check the rows of sessions.

        Reads the whole database, and returns the problems, if any.
        """
        return await self._database.read(connections.integrity_problems)

    async def readable_keys(self) -> list[SessionKey]:
        """List the sessions whose rows can be read, past damage that makes `sessions` fail."""
        return await self._database.read(connections.readable_keys)

    async def reindex(self) -> list[str]:
        """Rebuild the indexes of a database that is not open here; return the remaining problems.

        Nothing is changed if that repairs nothing. Other processes wait meanwhile.

        Raises:
            StoreUnavailableError: It cannot be written.

        """
        if self._opened is not None:
            raise StoreUnavailableError(
                f"{self._path} is open here: close the store first", path=self._path
            )
        with map_errors("reindex", self._path):
            return await anyio.to_thread.run_sync(connections.reindex, self._path, self._timeout)

    async def scrub(self) -> None:
        """Rewrite the database without its free pages, and empty the write-ahead log.

        Takes as long as copying the database, and blocks writers meanwhile.

        Raises:
            StoreUnavailableError: Another connection is reading or writing: try again later.

        """
        await self._database.scrub()


def _of_each(
    con: sqlite3.Connection,
    keys: Sequence[SessionKey],
    read: Callable[Concatenate[sqlite3.Connection, SessionKey, P], T | None],
    *args: P.args,
    **options: P.kwargs,
) -> list[T | None]:
    """Read each of several sessions; None where that raises."""
    found: list[T | None] = []
    for key in keys:
        try:
            found.append(read(con, key, *args, **options))
        except (CorruptRecordError, UnsupportedVersionError):
            found.append(None)
    return found
