"""Open state of a SQLite store: the writing connection and its thread, the readers, the owner.

`Engine` owns the one connection that writes and is used in one thread only; `OpenDatabase` runs
functions in its thread, in a durable transaction each, or in the readers' threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, final

import anyio
import msgspec

from perdure._lib.files import Folder
from perdure._lib.locks import Presence, PresenceReader
from perdure._lib.loop import Threads
from perdure._lib.platform import host_name
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    NotStorableError,
    PerdureError,
    SessionError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.store import Batch, Outcome, Status
from perdure.stores.sqlite import leases
from perdure.stores.sqlite.connections import (
    Readers,
    check_existing,
    connect,
    format_of,
    make_durable,
    make_ready,
    pragma,
    reindex,
)
from perdure.stores.sqlite.errors import (
    InDoubtError,
    driver_error,
    integrity_error,
    is_busy,
    is_not_durable,
    map_errors,
    perdure_error,
)
from perdure.stores.sqlite.log import LogTail, PlannedWrite, append_one, plan_write, save_all
from perdure.stores.sqlite.sql import MAX_ROWS, MIGRATIONS

if TYPE_CHECKING:
    import sqlite3

_log = logging.getLogger("perdure")


@final
class Engine:
    """Durable transactions, and the tails of the logs that this store writes.

    Blocking. Everything but the constructor runs in the writer's thread.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.tails: dict[SessionKey, LogTail] = {}
        """Where the logs of the held sessions end."""
        self._timeout = timeout
        self._con: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the connection; the last one of all processes checkpoints the write-ahead log."""
        con, self._con = self._con, None
        if con is not None:
            con.close()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, reopened if the last one failed."""
        if self._con is None:
            con = connect(self.path, timeout=self._timeout)
            try:
                make_durable(con, self.path)
            except BaseException:
                con.close()
                raise
            self._con = con
        return self._con

    @contextlib.contextmanager
    def transaction(self, *, reads_first: bool = False) -> Iterator[sqlite3.Connection]:
        """Run the body in one durable transaction, all or nothing.

        Args:
            reads_first: Take the write lock only at the first write. That raises SQLite's "busy" at
                once where another process has written since the first read, or writes now.

        Raises:
            InDoubtError: The commit failed, and may or may not be durable.

        """
        con = self.connection
        con.execute("BEGIN" if reads_first else "BEGIN IMMEDIATE")
        try:
            self._require_format(con)
            yield con
        except BaseException:
            self._roll_back()
            raise
        with self._committing():
            con.execute("COMMIT")

    def _require_format(self, con: sqlite3.Connection) -> None:
        """Raise if a newer release has changed the format since the database was opened.

        The next heartbeat detects it at the latest; then nothing is written in the older format.
        """
        ((version,),) = con.execute("PRAGMA user_version")
        if version == len(MIGRATIONS):
            return
        try:
            format_of(con, self.path)
        finally:
            self._roll_back()
            self._drop()
        raise StoreUnavailableError(
            f"{self.path} was changed to format {version} meanwhile: try again", path=self.path
        )

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        try:
            yield
        except driver_error() as error:
            self._roll_back()
            if is_not_durable(error):
                raise
            # Pages that a failed sync left in the WAL may reappear after a crash.
            self._drop()
            raise InDoubtError from error

    def _roll_back(self) -> None:
        con = self._con
        if con is not None and con.in_transaction:
            try:
                con.execute("ROLLBACK")
            except driver_error():
                self._drop()

    def _drop(self) -> None:
        con, self._con = self._con, None
        if con is not None:
            with contextlib.suppress(driver_error()):
                con.close()

    # appending

    def append(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Make batches durable in one commit; raise nothing."""
        now = time.time()
        plans = self._plan(batches)
        try:
            if plans is not None and self._save(plans, now):
                return [Outcome(Status.OK, None, len(plan.data)) for plan in plans]
            return self._one_by_one(batches, now)
        except (driver_error(), InDoubtError, PerdureError, OSError, UnicodeDecodeError) as error:
            return self._outcomes_of_error(batches, error, now)

    def _plan(self, batches: Sequence[Batch]) -> list[PlannedWrite] | None:
        plans: list[PlannedWrite] = []
        tails = self.tails
        for batch in batches:
            tail = tails.get(batch.key)
            try:
                plan = None if tail is None else plan_write(tail, batch)
            except NotStorableError:
                plan = None
            if plan is None:
                return None
            plans.append(plan)
        return plans if len({plan.tail.id for plan in plans}) == len(plans) else None

    def _save(self, plans: list[PlannedWrite], now: float) -> bool:
        """Append all of them; False if a log is not where its holder left it."""
        try:
            if len(plans) <= MAX_ROWS and not any(plan.about for plan in plans):
                con = self.connection
                with self._committing():  # a single statement is a transaction
                    save_all(con, plans, now)
            else:
                with self.transaction() as con:
                    save_all(con, plans, now)
        except integrity_error():
            return False
        for plan in plans:
            plan.tail.advance(plan, now)
        return True

    def _one_by_one(self, batches: Sequence[Batch], now: float) -> list[Outcome]:
        done: list[tuple[Outcome, LogTail | None]] = []
        with self.transaction() as con:
            for batch in batches:
                try:
                    done.append(append_one(con, batch, now, self.tails.get(batch.key)))
                except CorruptRecordError as error:
                    done.append((Outcome(Status.PERMANENT, error), None))
        for batch, (_, tail) in zip(batches, done, strict=True):
            if tail is None:
                self._doubt(batch.key)
            else:
                self.tails[batch.key] = tail
        return [outcome for outcome, _ in done]

    def _outcomes_of_error(
        self, batches: Sequence[Batch], error: Exception, now: float
    ) -> list[Outcome]:
        status = Status.TRANSIENT
        if isinstance(error, InDoubtError):
            status = Status.IN_DOUBT
            assert isinstance(error.__cause__, driver_error())
            error = error.__cause__
        cause: Exception = error
        if isinstance(error, (driver_error(), UnicodeDecodeError)):
            cause = perdure_error(error, "append to", self.path)
            cause.__cause__ = error
        if isinstance(cause, UnsupportedVersionError):
            status = Status.PERMANENT
        elif (
            isinstance(cause, CorruptRecordError | NotStorableError) and status is Status.TRANSIENT
        ):
            if len(batches) > 1:  # one session's damage must not fail the others
                return [outcome for batch in batches for outcome in self.append([batch])]
            status = Status.PERMANENT
        for batch in batches:
            self._doubt(batch.key)
        return [Outcome(status, cause)] * len(batches)

    def _doubt(self, key: SessionKey) -> None:
        """Read the end of a log again before the next append to it; its owner stays known."""
        tail = self.tails.get(key)
        if tail is not None:
            tail.head = -1


# Writes that share a transaction


P = ParamSpec("P")
T = TypeVar("T")

TOGETHER = 64
"""Writes in one transaction, at most."""
_TOGETHER_SECONDS = 0.02
"""How long a transaction takes in more writes: an append may be waiting behind it."""


class _WriteError(Exception):
    """One of several writes raised, and all were rolled back."""


class _SharedWrite(Generic[T]):
    """One caller's write, and what became of it."""

    __slots__ = ("error", "function", "is_awaited", "is_done", "reads_first", "since", "value")

    def __init__(self, function: Callable[[sqlite3.Connection], T], *, reads_first: bool) -> None:
        self.function: Callable[[sqlite3.Connection], T] = function
        self.reads_first: bool = reads_first
        self.is_awaited: bool = True
        """Whether its caller waits for it: if not, it is not begun any more."""
        self.is_done: bool = False
        self.since: float = time.monotonic()
        self.error: Exception | None = None
        self.value: T


class SharedWrites:
    """Writes of several callers: those that wait at the same time are one commit.

    `add` is called on the event loop, and then `run` in the writer's thread. A Ctrl-C may come
    between the two: such a write is made with the next one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[_SharedWrite[Any]] = deque()

    def add(
        self, function: Callable[[sqlite3.Connection], T], *, reads_first: bool = False
    ) -> _SharedWrite[T]:
        """Queue a function; it may be called twice, where another one's error rolls it back.

        One that *reads first*, and then may write, needs no write lock until it does.
        """
        write: _SharedWrite[T] = _SharedWrite(function, reads_first=reads_first)
        self._waiting.append(write)
        return write

    def run(self, write: _SharedWrite[Any]) -> None:
        """Commit what waits, in its order, until a write is done; an earlier commit may have it."""
        while not write.is_done and (first := self._next()):
            self._commit([first], reads_first=first.reads_first)

    def _next(self) -> _SharedWrite[Any] | None:
        """Take the first write whose caller still waits."""
        while self._waiting:
            write = self._waiting.popleft()
            if write.is_awaited:
                return write
            write.is_done = True
        return None

    def _commit(self, writes: list[_SharedWrite[Any]], *, reads_first: bool) -> None:
        began = time.monotonic()
        try:
            with self._engine.transaction(reads_first=reads_first) as con:
                self._take_in(con, writes)
        except _WriteError as error:
            if reads_first and is_busy(error.__cause__):
                # Another process wrote after the first read, or writes now: wait for it.
                self._commit(writes, reads_first=False)
                return
            self._run_alone(writes, error)
        except Exception as error:  # noqa: BLE001  # raised in the callers
            if is_busy(error):
                self._take_waiting((began + time.monotonic()) / 2, writes)
            for one in writes:
                one.error = error
        for one in writes:
            one.is_done = True

    def _take_waiting(self, since: float, writes: list[_SharedWrite[Any]]) -> None:
        """Take what has waited for the same lock, at least half as long as SQLite has."""
        while self._waiting and self._waiting[0].since <= since:
            writes.append(self._waiting.popleft())

    def _take_in(self, con: sqlite3.Connection, writes: list[_SharedWrite[Any]]) -> None:
        until = time.monotonic() + _TOGETHER_SECONDS
        try:
            for write in writes:  # which others join meanwhile
                write.value = write.function(con)
                may_join = write is writes[-1] and len(writes) < TOGETHER
                if may_join and time.monotonic() < until and (other := self._next()):
                    writes.append(other)
        except Exception as error:
            raise _WriteError from error

    def _run_alone(self, writes: list[_SharedWrite[Any]], error: _WriteError) -> None:
        if len(writes) == 1 and isinstance(error.__cause__, Exception):
            writes[0].error = error.__cause__
            return
        for write in writes:
            try:
                with self._engine.transaction() as con:
                    write.value = write.function(con)
            except Exception as own:  # noqa: BLE001  # raised in the caller
                write.error = own


# Opening a database, and running functions in its threads


_READERS = 4
_POLL = 0.1
"""Seconds between two polls for a notification."""


class OpenDatabase(msgspec.Struct, frozen=True):
    """An open database: one thread that writes, a few that read, and the owner's lock."""

    path: str
    engine: Engine
    readers: Readers
    presence: Presence | PresenceReader
    writes: Threads
    reads: Threads
    pid: int
    last_notified: list[int]
    """The notification counter at the last poll: one item, since the struct is frozen."""
    shared: SharedWrites
    read_only: bool = False

    async def write(
        self,
        doing: str,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a function in a durable transaction.

        After a cancellation it is not begun any more; begun, it runs to its end. It may be called
        twice, and has to do the same then: see `SharedWrites`.

        Raises:
            SessionError: The store was opened read-only.

        """
        return await self._write(doing, lambda con: function(con, *args, **options))

    async def write_if(self, doing: str, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function that reads, and then may write; as `write`."""
        return await self._write(doing, function, reads_first=True)

    async def _write(
        self,
        doing: str,
        function: Callable[[sqlite3.Connection], T],
        *,
        reads_first: bool = False,
    ) -> T:
        if self.read_only:
            raise SessionError(
                f"cannot {doing} {self.path}: it was opened read-only", path=self.path
            )
        write = self.shared.add(function, reads_first=reads_first)
        with map_errors(doing, self.path):
            try:
                # Its several statements give the interpreter back anyway.
                await self.writes.run(self.shared.run, write, prompt=False)
            except BaseException:
                write.is_awaited = False
                raise
            if write.error is not None:
                raise write.error.with_traceback(None)
            return write.value

    async def read(
        self,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a function on a snapshot of the database."""

        def work() -> T:
            with self.readers.snapshot() as con:
                return function(con, *args, **options)

        with map_errors("read", self.path):
            return await self.reads.run(work)

    async def notify(self, owner: str) -> None:
        """Wake an owner to read its requests before its next heartbeat, if it is alive."""
        with contextlib.suppress(OSError):
            await self.reads.run(self.presence.notify, owner)

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another owner notified this one, or after ``timeout`` seconds."""
        with anyio.move_on_after(timeout):
            while True:
                notified = await self.reads.run(self.presence.notified)
                if notified != self.last_notified[0]:
                    self.last_notified[0] = notified
                    return
                await anyio.sleep(_POLL)

    async def scrub(self) -> None:
        """Rewrite the database, and empty the write-ahead log."""
        with map_errors("scrub", self.path):
            await self.writes.run(_scrub, self.engine)

    async def aclose(self) -> None:
        """Close everything, after the pending writes; if the caller's time ends, only begin to."""
        try:
            await self.writes.run(_close_all, self)
        except anyio.get_cancelled_exc_class():
            _log.warning(
                "the database was busy while the store was closed: it stays open until its last "
                "write has ended",
                extra={"path": self.path},
            )
            raise
        finally:
            self.writes.close()
            self.reads.close()


async def open_database(path: str, owner: str, timeout: float) -> OpenDatabase:
    """Open a database as an owner."""
    writes = Threads(1, name="perdure sqlite write", prompt=True)
    opened: list[tuple[Engine, Presence]] = []
    try:
        with map_errors("open", path):
            await writes.run(lambda: opened.append(_open_as_owner(path, owner, timeout)))
    except BaseException:  # after a cancellation the thread is still opening it
        writes.start(_abandon, opened, then=bool)  # after that, in the same thread
        writes.close()
        raise
    ((engine, presence),) = opened
    reads = Threads(_READERS, name="perdure sqlite read")
    readers = Readers(path, timeout)
    shared = SharedWrites(engine)
    return OpenDatabase(path, engine, readers, presence, writes, reads, os.getpid(), [0], shared)


def _open_as_owner(path: str, owner: str, timeout: float) -> tuple[Engine, Presence]:
    owners = make_ready(path)
    try:
        presence = Presence(owners, owner)
    except BlockingIOError:
        owners.close()
        raise ConfigError(
            f"owner id {owner!r} is in use by another process or store object at {path}: leave "
            "owner out, or give each its own",
            owner=owner,
        ) from None
    engine = Engine(path, timeout)
    try:
        with engine.transaction() as con:
            leases.register_owner(con, owner, host_name(), os.getpid(), presence)
        presence.sweep()
    except BaseException:
        engine.close()
        presence.close()
        raise
    return engine, presence


def _abandon(opened: list[tuple[Engine, Presence]]) -> None:
    for engine, presence in opened:
        engine.close()
        presence.close()


async def open_database_read_only(path: str, timeout: float) -> OpenDatabase:
    """Open an existing database for reading."""
    writes = Threads(1, name="perdure sqlite close", prompt=True)
    readers = Readers(path, timeout, read_only=True)
    with map_errors("read", path):
        owners = await writes.run(_open_files, path, readers)
    reads = Threads(_READERS, name="perdure sqlite read")
    engine = Engine(path, timeout)  # connects when it writes, which is never
    presence = PresenceReader(owners)
    pid, shared = os.getpid(), SharedWrites(engine)
    return OpenDatabase(
        path, engine, readers, presence, writes, reads, pid, [0], shared, read_only=True
    )


def _open_files(path: str, readers: Readers) -> Folder | None:
    owners = check_existing(path)
    try:
        with readers.snapshot() as con:
            _require_newest(con, path)
    except BaseException:
        readers.close()
        if owners is not None:
            owners.close()
        raise
    return owners


def rebuild_indexes(path: str, timeout: float) -> list[str]:
    """Rebuild a database's indexes, and return the remaining problems. Blocking."""
    owners = check_existing(path)
    if owners is not None:
        owners.close()
    return reindex(path, timeout)


def _require_newest(con: sqlite3.Connection, path: str) -> None:
    version = format_of(con, path)
    if version < len(MIGRATIONS):
        raise UnsupportedVersionError(
            f"{path} has format {version}, and this release reads {len(MIGRATIONS)}: open it once "
            "for writing, which migrates it, as `perdure doctor` does",
            path=path,
            format=version,
        )


def _scrub(engine: Engine) -> None:
    con = engine.connection
    con.execute("VACUUM")
    ((busy, *_),) = pragma(con, "wal_checkpoint(TRUNCATE)")
    if busy:
        raise StoreUnavailableError(
            f"the write-ahead log of {engine.path} is in use and could not be emptied: scrub "
            "again when no other connection reads",
            path=engine.path,
        )


def _close_all(database: OpenDatabase) -> None:
    database.readers.close()
    database.engine.close()
    database.presence.close()
