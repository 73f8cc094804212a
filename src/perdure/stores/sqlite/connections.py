"""Connections that are as durable as the store promises, and the steps between formats.

SQLite may fail to switch to WAL and say so only in a later step of the same statement, so
each pragma is read to its end, and what was set is asked for again; after the first write
too, since a switch that failed shows only then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import quote

import msgspec

from perdure.errors import ConfigError, StoreUnavailableError, UnsupportedVersionError
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.stores.sqlite.errors import CANNOT_SHARE, code_of, driver_error
from perdure.stores.sqlite.log import DELETED, LogRows, Seal, SessionRow, find
from perdure.stores.sqlite.sql import MIGRATIONS, Q

if TYPE_CHECKING:
    import sqlite3


# Connections that are as durable as the store promises, and the steps between formats


APPLICATION = 0x50524455
"""Says in the file's header whose database it is."""

OLDEST = (3, 32)
"""The first SQLite that takes as many values in a statement as a save of many sessions has."""

_FULL = 2
_CHECKPOINT_PAGES = 4000


def connect(
    path: str, *, timeout: float, read_only: bool = False, how: str = "mode=rw"
) -> sqlite3.Connection:
    """Open a connection to a database that is there, for use in one thread at a time.

    Args:
        path: Absolute.
        timeout: Seconds to wait for another process that writes.
        read_only: Whether it refuses to write.
        how: The parameters of SQLite's URI.

    Raises:
        ConfigError: This Python's SQLite is too old.

    """
    import sqlite3

    if sqlite3.sqlite_version_info < OLDEST:
        message = (
            f"the SQLite of this Python is {sqlite3.sqlite_version}, and {OLDEST[0]}.{OLDEST[1]} "
            "is needed: use a Python that brings a newer one, or the file store"
        )
        raise ConfigError(message, found=sqlite3.sqlite_version)
    con = sqlite3.connect(
        f"file:{quote(path)}?{how}",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        pragma(con, "trusted_schema = OFF")
        pragma(con, "cell_size_check = ON")
        if read_only:
            pragma(con, "query_only = ON")
            pragma(con, "temp_store = MEMORY")  # the disk may be full
            return con
        pragma(con, "synchronous = FULL")  # looks into the file already
        con.execute(Q["make_save"])
        con.execute(Q["do_save"])
        pragma(con, "secure_delete = ON")
        pragma(con, f"wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if sys.platform == "darwin":  # pragma: no cover  # macOS only
            pragma(con, "fullfsync = ON")
            pragma(con, "checkpoint_fullfsync = ON")
    except BaseException:
        con.close()
        raise
    return con


def pragma(con: sqlite3.Connection, text: str) -> list[tuple[object, ...]]:
    """Run a pragma to its end: an error may come with its last step only."""
    import sqlite3

    try:
        return con.execute(f"PRAGMA {text}").fetchall()
    except UnicodeDecodeError as error:  # SQLite names a damaged part of the schema, as it lies
        message = f"Could not decode what is damaged: {error}"
        raise sqlite3.DatabaseError(message) from error


def connect_unlocked(path: str, *, wal: bool) -> sqlite3.Connection:
    """Open a database to read it, without locks or shared memory; nobody may write meanwhile.

    Args:
        path: Absolute.
        wal: Whether there is a write-ahead log with commits: that is read along.

    """
    if not wal:
        return connect(path, timeout=0.0, read_only=True, how="mode=ro&immutable=1")
    # An immutable database would be read without its log, and so as an older state. Exclusive
    # locking keeps the log's index in this process's own memory, and "none" asks for no lock.
    vfs = "win32-none" if sys.platform == "win32" else "unix-none"
    con = connect(path, timeout=0.0, read_only=True, how=f"mode=ro&vfs={vfs}")
    try:
        pragma(con, "locking_mode = EXCLUSIVE")
    except BaseException:
        con.close()
        raise
    return con


def create(path: str) -> None:
    """Make an empty file a database of the newest format."""
    con = connect(path, timeout=1.0)
    try:
        pragma(con, "page_size = 4096")
        pragma(con, f"application_id = {APPLICATION}")
        make_durable(con, path)
        pragma(con, "wal_checkpoint(TRUNCATE)")
    finally:
        con.close()


def make_durable(con: sqlite3.Connection, path: str) -> None:
    """Bring a database to the newest format, and see that its commits are synced.

    Raises:
        ConfigError: It is another program's.
        StoreUnavailableError: Commits might not last.
        UnsupportedVersionError: It has a newer format.

    """
    found = format_of(con, path)  # before anything is changed
    pragma(con, "journal_mode = WAL")
    if found != len(MIGRATIONS):
        migrate(con, path)
    con.execute("BEGIN IMMEDIATE")
    pragma(con, f"user_version = {len(MIGRATIONS)}")
    con.execute("COMMIT")
    # Only now, behind a first write: before it, a switch that failed looks like one that did not.
    modes = (pragma(con, "journal_mode"), pragma(con, "synchronous"))
    if modes != ([("wal",)], [(_FULL,)]):
        message = (
            f"{path} is not in WAL mode with full syncs ({modes}), so a commit might not last: "
            "look at the disk, and open the store again"
        )
        raise StoreUnavailableError(message, path=path)


def migrate(con: sqlite3.Connection, path: str) -> None:
    """Take all missing steps in one transaction; of several who want to, one does."""
    con.execute("BEGIN IMMEDIATE")
    try:
        found = format_of(con, path)  # now that nobody else can change it
        for step in MIGRATIONS[found:]:
            for statement in step:
                con.execute(statement)
        pragma(con, f"user_version = {len(MIGRATIONS)}")
        con.execute("COMMIT")
    finally:
        if con.in_transaction:
            con.execute("ROLLBACK")


def format_of(con: sqlite3.Connection, path: str) -> int:
    """Return a database's format.

    Raises:
        ConfigError: It is another program's.
        UnsupportedVersionError: It has a newer format.

    """
    (((application,),), ((found,),)) = (pragma(con, "application_id"), pragma(con, "user_version"))
    assert isinstance(found, int)
    if application != APPLICATION:
        message = f"{path} is another program's database: choose another file"
        raise ConfigError(message, path=path)
    if found > len(MIGRATIONS):
        message = (
            f"{path} has format {found}, this release reads up to {len(MIGRATIONS)}: use a newer "
            "release of perdure, here and wherever else the store is used"
        )
        raise UnsupportedVersionError(message, path=path, format=found, reads=len(MIGRATIONS))
    return found


# Connections that only read, one a thread at a time, each look in one transaction


PART_BYTES = 1024 * 1024
_SHM_BYTES = 32768
"""What SQLite's shared memory has at least where somebody uses it."""


@final
class Readers:
    """A few connections, opened when they are needed. Blocking; from any thread."""

    def __init__(self, path: str, timeout: float, *, read_only: bool = False) -> None:
        self._path = path
        self._timeout = timeout
        self._read_only = read_only
        self._idle: list[_Reader] | None = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Look at the database as it is at one moment."""
        reader = self._reader()
        con = reader.con
        sound = False
        try:
            con.execute("BEGIN")
            yield con
            self._require_same(reader)
            sound = True
        finally:
            with contextlib.suppress(driver_error()):
                if con.in_transaction:
                    con.execute("ROLLBACK")
            with self._lock:
                kept = self._idle is not None and sound
                if kept and self._idle is not None:
                    self._idle.append(reader)
            if not kept:
                con.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is."""
        with self._lock:
            idle, self._idle = self._idle, None
        for reader in idle or ():
            reader.con.close()

    def _reader(self) -> _Reader:
        with self._lock:
            reader = self._idle.pop() if self._idle else None
        if reader is not None and reader.files not in (None, _files_of(self._path)):
            reader.con.close()
            reader = None
        if reader is None:
            how = _read_only if self._read_only else _beside_writers
            reader = how(self._path, self._timeout)
        return reader

    def _require_same(self, reader: _Reader) -> None:
        if reader.files not in (None, _files_of(self._path)):
            message = (
                f"{self._path} was changed while it was read without locks: read again; where "
                "somebody writes to it, read it where its -shm file can be opened"
            )
            raise StoreUnavailableError(message, path=self._path)


class _Reader(NamedTuple):
    con: sqlite3.Connection
    files: tuple[int, ...] | None
    """What the files looked like, where no lock keeps others from writing meanwhile."""


def _beside_writers(path: str, timeout: float) -> _Reader:
    return _Reader(connect(path, timeout=timeout, read_only=True), None)


def _read_only(path: str, timeout: float) -> _Reader:
    """Connect as everybody does; where the files for that cannot be made, without locks."""
    try:
        return _Reader(_shared(path, timeout), None)
    except driver_error() as error:
        if code_of(error) not in CANNOT_SHARE or _is_shared(path):
            raise
    files = _files_of(path)
    return _Reader(connect_unlocked(path, wal=_size(path + "-wal") > 0), files)


def _shared(path: str, timeout: float) -> sqlite3.Connection:
    # Not "rw": the last one who leaves would bring the write-ahead log into the database.
    con = connect(path, timeout=timeout, read_only=True, how="mode=ro")
    try:
        con.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except BaseException:
        con.close()
        raise
    return con


def _is_shared(path: str) -> bool:
    """Say whether somebody may have the database open: the writers' shared memory is there."""
    return _size(path + "-shm") >= _SHM_BYTES and os.path.exists(path + "-wal")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _files_of(path: str) -> tuple[int, ...]:
    found: list[int] = []
    for file in (path, path + "-wal"):
        try:
            one = os.stat(file)
        except FileNotFoundError:
            found += (0, 0, 0)
        else:
            found += (one.st_ino, one.st_size, one.st_mtime_ns)
    return tuple(found)


class RowPage(msgspec.Struct, frozen=True):
    """Some records of a log, and where the next part goes on."""

    records: list[Record]
    born: int
    at: int
    expected: Seal | None
    more: bool


def part_of(
    con: sqlite3.Connection,
    key: SessionKey,
    before: RowPage | None,
    after: int,
    reverse: bool,  # noqa: FBT001  # passed through a thread, by position
    most: int = PART_BYTES,
) -> RowPage | None:
    """Return the next part of a log, None behind its end; ``after`` counts for the first one."""
    row = find(con, key)
    if row is None or not row.epoch or row.state == DELETED:
        return None
    if before is not None and before.born != row.born:
        return None  # deleted meanwhile, and taken anew
    return _back(con, row, before, after) if reverse else _on(con, row, before, after, most)


def _on(
    con: sqlite3.Connection, row: SessionRow, before: RowPage | None, after: int, most: int
) -> RowPage | None:
    at, expected = (before.at, before.expected) if before else (max(after, row.low), None)
    if at < row.low:
        at, expected = row.low, None  # removed meanwhile
    if at > row.head:
        return None
    rows = LogRows(con, row, at, expected)
    records = rows.forward(most)
    last = records[-1].seq if records else row.head
    return RowPage(records, row.born, last + 1, rows.expected, last < row.head)


def _back(
    con: sqlite3.Connection, row: SessionRow, before: RowPage | None, last: int
) -> RowPage | None:
    at, expected = (before.at, before.expected) if before else (min(last, row.head), None)
    if at < row.low:
        return None
    rows = LogRows(con, row, at, expected)
    records = rows.backward(PART_BYTES)
    first = records[-1].seq if records else row.low
    return RowPage(records, row.born, first - 1, rows.expected, first > row.low)
