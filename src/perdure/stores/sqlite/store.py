"""The SQLite store: the port of `perdure.store` on one database file of this machine.

What writes goes through one connection in one thread, in the order it was asked for; a commit
takes along every session that is due. What reads has connections of its own and waits for
nobody. Cancelling a call abandons its thread, which goes on to its end: a transaction is
whole or nothing. Several processes may use one file.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar, final

import anyio.to_thread

from perdure._lib.ids import random_id
from perdure._lib.loop import unopened
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
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
    Status,
    past_damage,
)
from perdure.stores.sqlite import blobs as blob_rows
from perdure.stores.sqlite import database, directory, inbox, leases
from perdure.stores.sqlite import documents as document_rows
from perdure.stores.sqlite.connections import PART_BYTES, RowPage, part_of
from perdure.stores.sqlite.database import resolve
from perdure.stores.sqlite.engine import OpenDatabase, enter, enter_read_only, mended
from perdure.stores.sqlite.errors import troubles
from perdure.stores.sqlite.log import DELETED, MAX_RECORD_BYTES, find

if TYPE_CHECKING:
    import sqlite3


P = ParamSpec("P")
T = TypeVar("T")

_READERS = 4
_CHUNK = 256
_END = 2**62

_CAPABILITIES = Capabilities(
    durability="fsync",
    batch_max=96,
    parallelism=1,
    max_record_bytes=MAX_RECORD_BYTES,
    dead_letters=True,
)


@final
class SqliteStore:
    """Keep everything in one SQLite database.

    Args:
        path: The database file; its folder must belong to this user alone.
        owner: This store's id as a holder of leases; unguessable where it is left out.
        timeout: Seconds to wait for another process that writes, before that is an error.

    Raises:
        ConfigError: The path names no file, or the timeout is no time.

    Example:
        >>> store = SqliteStore("agents/agents.db")
    """

    def __init__(
        self, path: str | os.PathLike[str], *, owner: str | None = None, timeout: float = 5.0
    ) -> None:
        if not 0 <= timeout < float("inf"):
            message = f"timeout={timeout!r} does not fit: give seconds, such as 5.0"
            raise ConfigError(message, option="timeout", value=timeout)
        self._path = resolve(path)
        self._owner = owner or random_id()
        self._timeout = timeout
        self._told = 0
        self._opened: OpenDatabase | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What this store is."""
        return _CAPABILITIES

    @property
    def owner(self) -> str:
        """The id of this store object as a holder of leases."""
        return self._owner

    @property
    def location(self) -> str:
        """The database file."""
        return self._path

    @property
    def local_path(self) -> str:
        """The database file, which may not be there yet."""
        return self._path

    async def open(self) -> None:
        """Open the database, make it if only it is missing, and become known as an owner.

        Raises:
            ConfigError: Its folder is open to others, or it is another program's.
            CorruptRecordError: It is no database any more.
            StoreUnavailableError: It cannot be made, read or written.
            UnsupportedVersionError: A newer release wrote it.

        """
        if self._opened is not None:
            return
        self._opened = await enter(self._path, self._owner, self._timeout)

    async def open_read_only(self) -> None:
        """Open a database that is there to read it, also on a full or read-only disk.

        Where SQLite cannot have its files for locks beside it, the database is read without, and a
        look during which somebody else has changed it is refused.

        Raises:
            ConfigError: Its folder is open to others, or it is another program's.
            CorruptRecordError: It is no database any more.
            StoreUnavailableError: It is not there, or cannot be read.
            UnsupportedVersionError: Another release wrote it.

        """
        if self._opened is None:
            self._opened = await enter_read_only(self._path, self._timeout)

    async def aclose(self) -> None:
        """Close the connections; leases that were not released look like a dead owner's."""
        here, self._opened = self._opened, None
        if here is None or here.pid != os.getpid():
            return
        await here.aclose()

    @property
    def _here(self) -> OpenDatabase:
        here = self._opened
        if here is not None and here.pid == os.getpid():
            return here
        raise unopened(self._path, elsewhere=here is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append all of them in one commit."""
        if not batches:
            return []
        try:
            here = self._here
        except StoreUnavailableError as error:
            return [Outcome(Status.TRANSIENT, error)] * len(batches)
        return await here.writes.run(here.engine.append, batches)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        stop = _END if before is None else before
        left = _END if limit is None else limit
        at = stop - 1 if reverse else after
        part: RowPage | None = None
        most = PART_BYTES
        if past_damage.get() and not reverse:
            at, most = after + 1, 1  # one damaged row hides no others then
        while left > 0:
            part = await self._here.read(part_of, key, part, at, reverse, most)
            if part is None:
                return
            records = [one for one in part.records if after < one.seq < stop][:left]
            left -= len(records)
            for start in range(0, len(records), _CHUNK):
                yield LogChunk(tuple(records[start : start + _CHUNK]))
            if not part.more or not (part.at > after if reverse else part.at < stop):
                return

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        row = await self._here.read(find, key)
        return 0 if row is None or row.state == DELETED else row.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove the commits that lie below a record."""
        engine = self._here.engine

        def trim(con: sqlite3.Connection) -> int:
            freed, tail = leases.trim(con, key, epoch, below, time.time())
            engine.tails[key] = tail
            return freed

        return await self._here.write("trim", trim)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._here.read(document_rows.read, key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one transaction."""
        await self._here.write("write", document_rows.write, key, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._here.write("write", blob_rows.put, tenant, dict(blobs), time.time())

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, verified; None when there is none."""
        return await self._here.read(blob_rows.get, tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        keep = frozenset(reachable)
        return await self._here.write(
            "sweep", blob_rows.sweep, tenant, keep, older_than, time.time()
        )

    async def blob_names(self, tenant: str) -> list[str]:
        """List the tenant's blobs."""
        return await self._here.read(blob_rows.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._here.write("remove from", blob_rows.remove, tenant, frozenset(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Say who has the session; None when nobody ever had."""
        return await self._here.read(leases.look, key, self._here.presence)

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        engine = self._here.engine
        owner = self._owner
        waited_for = [True]

        def acquire(con: sqlite3.Connection) -> HeldLease:
            grant, tail = leases.acquire(con, key, after, owner, time.time())
            if waited_for:
                engine.tails[key] = tail  # if the commit fails it fits nowhere, and is made anew
            else:  # let the next one have it at once
                leases.release(con, key, grant.epoch, time.time())
            return grant

        try:
            return await self._here.write("write", acquire)
        except BaseException:
            waited_for.clear()
            raise

    async def release(self, key: SessionKey, epoch: int) -> None:
        engine = self._here.engine

        def release(con: sqlite3.Connection) -> None:
            leases.release(con, key, epoch, time.time())
            tail = engine.tails.get(key)
            if tail is not None and tail.epoch == epoch:
                del engine.tails[key]

        await self._here.write("write", release)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and return what others want."""
        asked, self._told = await self._here.write("write", leases.beat, self._owner, self._told)
        return asked

    async def news(self, at_most: float) -> None:
        """Wait until another process has left something for this one, or that long."""
        await self._here.news(at_most)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Ask the holder for the session."""
        await self._here.write("write", leases.ask, holder.owner, key)
        await self._here.notify(holder.owner)

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        here = self._here
        new, owner = await here.write("write", inbox.post, key, tuple(items), time.time(), limit)
        if owner:
            await here.notify(owner)
        return new

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._here.read(inbox.take, key, epoch, limit)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        await self._here.write("write", inbox.settle, key, epoch, tuple(op_ids))

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._here.read(inbox.waiting, dead_letters=dead_letters)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        await self._here.write("write", inbox.reject, key, epoch, tuple(letters))

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._here.read(inbox.dead_letters, key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._here.write("write", inbox.drop_dead_letters, key, set(op_ids))

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
        return await self._here.read(directory.sessions, tenant, owner, tag, prefix, after, limit)

    async def tenants(self) -> list[str]:
        """List the tenants that have anything here."""
        return await self._here.read(directory.tenants)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        engine = self._here.engine

        def delete(con: sqlite3.Connection) -> None:
            leases.delete(con, key, epoch, time.time())
            engine.tails.pop(key, None)

        await self._here.write("delete from", delete)

    # the database as a whole

    async def integrity_problems(self) -> list[str]:
        """Return what SQLite's check of every page and index finds; nothing if all is sound.

        Reads the whole database.
        """
        return await self._here.read(database.problems)

    async def readable_keys(self) -> list[SessionKey]:
        """List the sessions that can be found at all, past damage that keeps `sessions` from it."""
        return await self._here.read(database.readable_keys)

    async def reindex(self) -> list[str]:
        """Make the indexes anew of a database that is not open here; return the problems left.

        Nothing is changed where that mends nothing. Other processes wait meanwhile.

        Raises:
            StoreUnavailableError: It cannot be written.

        """
        if self._opened is not None:
            message = f"{self._path} is open here: close the store first"
            raise StoreUnavailableError(message, path=self._path)
        with troubles("reindex", self._path):
            return await anyio.to_thread.run_sync(mended, self._path, self._timeout)

    async def scrub(self) -> None:
        """Write the database anew without its free pages, and empty the write-ahead log.

        Takes as long as copying the database, and keeps writers waiting meanwhile.

        Raises:
            StoreUnavailableError: Somebody reads or writes all the time: try again later.

        """
        await self._here.scrub()
