"""Open state of a SQLite store: the writing connection and its thread, the readers, the owner.

`Engine` owns the one connection that writes and is used in one thread only; `OpenDatabase` runs
functions in its thread, in a durable transaction each, or in the readers' threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import anyio
import msgspec

from perdure._lib.locks import Presence
from perdure._lib.logs import log_facts
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
from perdure.store import Batch, Outcome, Status, past_damage
from perdure.stores.sqlite import leases
from perdure.stores.sqlite.connections import (
    Readers,
    connect,
    format_of,
    make_durable,
    open_owners,
    pragma,
    require_newest,
)
from perdure.stores.sqlite.errors import (
    InDoubtError,
    is_busy,
    is_not_durable,
    map_errors,
    perdure_error,
)
from perdure.stores.sqlite.log import LogTail, PlannedWrite, append_one, plan_write, save_all
from perdure.stores.sqlite.sql import MAX_ROWS, MIGRATIONS

_log = logging.getLogger("perdure")


@final
class Engine:
    """Durable transactions, and the tails of the logs that this store writes.

    Blocking. Everything but the constructor runs in the writer's thread.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.tails: dict[SessionKey, LogTail] = {}
        """Ends of the logs of the held sessions."""
        self._timeout = timeout
        self._con: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the connection; the last one of all processes checkpoints the write-ahead log."""
        con, self._con = self._con, None
        if con is not None:
            with contextlib.suppress(sqlite3.Error):
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
        try:
            con.execute("COMMIT")
        except sqlite3.Error as error:
            self._commit_failed(error)
            raise

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
            self.close()  # a save of one statement finds out where it connects again
        raise StoreUnavailableError(
            f"{self.path} was changed to format {version} meanwhile: try again", path=self.path
        )

    def _commit_failed(self, error: sqlite3.Error) -> None:
        """Roll back, and raise InDoubtError unless it is certain that nothing is durable."""
        self._roll_back()
        if not is_not_durable(error):
            # Pages that a failed sync left in the WAL may reappear after a crash.
            self.close()
            raise InDoubtError from error

    def _roll_back(self) -> None:
        con = self._con
        if con is not None and con.in_transaction:
            try:
                con.execute("ROLLBACK")
            except sqlite3.Error:
                self.close()

    # appending

    def append(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Make batches durable in one commit; raise nothing."""
        now = time.time()
        try:
            # Nearly always each log ends where its holder left it. Else each session is read by
            # itself.
            plans = self._plan(batches)
            if plans is not None and self._save(plans, now):
                return [Outcome(Status.OK, None, len(plan.data)) for plan in plans]
            return self._one_by_one(batches, now)
        except (sqlite3.Error, InDoubtError, PerdureError, OSError, UnicodeDecodeError) as error:
            return self._outcomes_of_error(batches, error, now)

    def _plan(self, batches: Sequence[Batch]) -> list[PlannedWrite] | None:
        """Return a write for each batch; None if one does not simply follow a log's known end."""
        plans: dict[int, PlannedWrite] = {}
        for batch in batches:
            tail = self.tails.get(batch.key)
            try:
                # After a session's first batch its end is not known before the commit.
                plan = None if tail is None or tail.id in plans else plan_write(tail, batch)
            except NotStorableError:
                plan = None
            if plan is None:
                return None
            plans[plan.tail.id] = plan
        return [*plans.values()]

    def _save(self, plans: list[PlannedWrite], now: float) -> bool:
        """Append all of them; False if a log is not where its holder left it."""
        try:
            if len(plans) <= MAX_ROWS and not any(plan.about for plan in plans):
                con = self.connection
                try:
                    save_all(con, plans, now)  # a single statement is a transaction
                except sqlite3.Error as error:
                    self._commit_failed(error)
                    raise
            else:
                with self.transaction() as con:
                    save_all(con, plans, now)
        except sqlite3.IntegrityError:
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
            assert isinstance(error.__cause__, sqlite3.Error)
            error = error.__cause__
        cause: Exception = error
        if isinstance(error, sqlite3.Error | UnicodeDecodeError):
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
            # No batch begins there, so it is not planned from memory.
            tail.head = -1


# Writes that share a transaction


P = ParamSpec("P")
T = TypeVar("T")

TOGETHER = 64
"""Writes in one transaction, at most."""
_TOGETHER_SECONDS = 0.02
"""Seconds for which a transaction takes in more writes: an append may be waiting for its end."""


class _SharedWrite(msgspec.Struct, eq=False):
    """One caller's write, and what became of it."""

    function: Callable[[sqlite3.Connection], Any]
    reads_first: bool
    since: float
    is_awaited: bool = True
    """True if its caller waits for it: if not, it is not begun any more."""
    is_done: bool = False
    error: Exception | None = None
    value: Any = None


class SharedWrites:
    """Writes of several callers: those that wait at the same time are one commit.

    `add` is called on the event loop, and then `run` in the writer's thread. A Ctrl-C may come
    between the two: such a write is made with the next one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[_SharedWrite] = deque()

    def add(
        self, function: Callable[[sqlite3.Connection], object], *, reads_first: bool = False
    ) -> _SharedWrite:
        """Queue a function; it may be called twice, where another one's error rolls it back.

        One that *reads first*, and then may write, needs no write lock until it does.
        """
        write = _SharedWrite(function, reads_first, time.monotonic())
        self._waiting.append(write)
        return write

    def run(self, write: _SharedWrite) -> None:
        """Commit what waits, in its order, until a write is done; an earlier commit may have it."""
        while not write.is_done and (first := self._next()):
            self._commit([first], reads_first=first.reads_first)

    def _next(self) -> _SharedWrite | None:
        """Take the first write whose caller still waits."""
        while self._waiting:
            write = self._waiting.popleft()
            if write.is_awaited:
                return write
            write.is_done = True
        return None

    def _commit(
        self, writes: list[_SharedWrite], *, reads_first: bool, most: int = TOGETHER
    ) -> None:
        """Commit writes together with those that wait, up to ``most`` in all."""
        began = time.monotonic()
        is_writing = False
        try:
            with self._engine.transaction(reads_first=reads_first) as con:
                is_writing = True
                self._take_in(con, writes, most)
                # An error of the commit itself leaves open what was written: nothing is run again.
                is_writing = False
        except Exception as error:  # noqa: BLE001  # raised in the callers
            if is_writing and reads_first and is_busy(error):
                # Another process wrote after the first read, or writes now: wait for it.
                self._commit(writes, reads_first=False)
                return
            if is_writing and len(writes) > 1:  # one of them raised, and all were rolled back
                for write in writes:
                    self._commit([write], reads_first=False, most=1)
                return
            if is_busy(error):
                # What has waited for the same lock, at least half as long as SQLite has, fails too.
                since = (began + time.monotonic()) / 2
                while self._waiting and self._waiting[0].since <= since:
                    writes.append(self._waiting.popleft())
            for write in writes:
                write.error = error
        for write in writes:
            write.is_done = True

    def _take_in(self, con: sqlite3.Connection, writes: list[_SharedWrite], most: int) -> None:
        until = time.monotonic() + _TOGETHER_SECONDS
        for write in writes:  # which grows
            write.value = write.function(con)
            may_join = write is writes[-1] and len(writes) < most
            if may_join and time.monotonic() < until and (other := self._next()):
                writes.append(other)


# Opening a database, and running functions in its threads


_READERS = 4
_POLL = 0.1
"""Seconds between two polls for a notification."""


@final
class OpenDatabase:
    """An open database: one thread that writes, a few that read, and the owner's lock.

    Args:
        path: Absolute.
        timeout: Seconds to wait for another process that writes.
        owner: Who writes; None to read only.

    """

    def __init__(self, path: str, timeout: float, owner: str | None) -> None:
        self.path: str = path
        self.pid: int = os.getpid()
        self.engine: Engine = Engine(path, timeout)
        self.readers: Readers = Readers(path, timeout, read_only=owner is None)
        self.presence: Presence = Presence(None)
        self.shared: SharedWrites = SharedWrites(self.engine)
        self.writes: Threads = Threads(1, name="perdure:sqlite write", prompt=True)
        self.reads: Threads = Threads(_READERS, name="perdure:sqlite read")
        self._owner = owner
        self._last_notified = 0
        """The notification counter at the last poll."""

    async def open(self) -> None:
        """Open it, and create it if it is missing and there is an owner."""
        try:
            with map_errors("read" if self._owner is None else "open", self.path):
                await self.writes.run(self._open)
        except BaseException:
            # After a cancellation the thread is still opening it: it closes it after that.
            self.writes.start(self._close, then=bool)
            self.writes.close()
            self.reads.close()
            raise

    def _open(self) -> None:
        owners = open_owners(self.path, make=self._owner is not None)
        if self._owner is None or owners is None:
            self.presence = Presence(owners)
            with self.readers.snapshot() as con:
                require_newest(con, self.path)
            return
        try:
            presence = self.presence = Presence(owners, self._owner)
        except BlockingIOError:
            raise ConfigError(
                f"owner id {self._owner!r} is in use by another process or store object at "
                f"{self.path}: leave owner out, or give each its own",
                owner=self._owner,
            ) from None
        with self.engine.transaction() as con:
            leases.register_owner(con, self._owner, host_name(), os.getpid(), presence)
        presence.sweep()

    def _close(self) -> None:
        self.readers.close()
        self.engine.close()
        self.presence.close()

    async def act(
        self,
        doing: str,
        function: Callable[[sqlite3.Connection], T],
        *,
        reads_first: bool = False,
    ) -> T:
        """Call a function in a durable transaction.

        After a cancellation it is not begun any more; begun, it runs to its end. It may be called
        twice, and has to do the same then: see `SharedWrites`.

        Raises:
            SessionError: The store was opened read-only.

        """
        if self._owner is None:
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
            value: T = write.value
            return value

    async def write(
        self,
        doing: str,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a function in a durable transaction, as `act`."""
        return await self.act(doing, lambda con: function(con, *args, **options))

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

        # The threads copy no context.
        read = partial(copy_context().run, work) if past_damage.get() else work
        with map_errors("read", self.path):
            return await self.reads.run(read)

    async def notify(self, owner: str) -> None:
        """Wake an owner to read its requests before its next heartbeat, if it is alive."""
        with contextlib.suppress(OSError):
            await self.reads.run(self.presence.notify, owner)

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when another owner notified this one, or after ``timeout`` seconds."""
        with anyio.move_on_after(timeout):
            while True:
                notified = await self.reads.run(self.presence.notified)
                if notified != self._last_notified:
                    self._last_notified = notified
                    return
                await anyio.sleep(_POLL)

    async def scrub(self) -> None:
        """Rewrite the database, and empty the write-ahead log."""
        with map_errors("scrub", self.path):
            await self.writes.run(_scrub, self.engine)

    async def aclose(self) -> None:
        """Close everything, after the pending writes; if the caller's time ends, only begin to."""
        try:
            await self.writes.run(self._close)
        except anyio.get_cancelled_exc_class():
            log_facts(
                _log,
                logging.WARNING,
                "the database was busy while the store was closed: it stays open until its last "
                "write has ended",
                path=self.path,
            )
            raise
        finally:
            self.writes.close()
            self.reads.close()


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
