"""Connections to a database: durable ones to write, snapshots to read, and format migrations.

SQLite may fail to switch to WAL and report it only in a later step of the same statement, so each
pragma is read to its end, and its setting is read back; after the first write too, since a failed
switch shows only then. `Readers` pools the connections that only read. Blocking.
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


APPLICATION = 0x50524455
"""perdure's application id, in the database file's header."""

OLDEST = (3, 32)
"""The first SQLite that accepts as many values in a statement as a save of many sessions has."""

_FULL = 2
_CHECKPOINT_BYTES = 16 * 1024 * 1024
"""What a write-ahead log takes before it is copied to the database."""

PAGE_BYTES = 2048
"""A commit writes every page that it changes, and most of them only in a few places."""


def connect(
    path: str, *, timeout: float, read_only: bool = False, uri_parameters: str = "mode=rw"
) -> sqlite3.Connection:
    """Open a connection to an existing database, for use in one thread at a time.

    Args:
        path: Absolute.
        timeout: Seconds to wait for another process that writes.
        read_only: Whether the connection refuses to write.
        uri_parameters: The query part of SQLite's URI.

    Raises:
        ConfigError: This Python's SQLite is too old.

    """
    import sqlite3

    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigError(
            f"the SQLite of this Python is {sqlite3.sqlite_version}, and {OLDEST[0]}.{OLDEST[1]} "
            "is needed: use a Python with a newer one, or the file store",
            found=sqlite3.sqlite_version,
        )
    # Behind two slashes, a URI has the name of a host.
    scheme = "file://" if path.startswith("//") else "file:"
    con = sqlite3.connect(
        f"{scheme}{quote(path)}?{uri_parameters}",
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
        pragma(con, "synchronous = FULL")  # reads the file already
        con.execute(Q["make_save"])
        con.execute(Q["do_save"])
        pragma(con, "secure_delete = ON")
        ((page_bytes,),) = con.execute("PRAGMA page_size")
        pragma(con, f"wal_autocheckpoint = {_CHECKPOINT_BYTES // page_bytes}")
        if sys.platform == "darwin":  # pragma: no cover  # macOS only
            pragma(con, "fullfsync = ON")
            pragma(con, "checkpoint_fullfsync = ON")
    except BaseException:
        con.close()
        raise
    return con


def pragma(con: sqlite3.Connection, text: str) -> list[tuple[object, ...]]:
    """Run a pragma to its end: an error may be raised by its last step only."""
    import sqlite3

    try:
        return con.execute(f"PRAGMA {text}").fetchall()
    except UnicodeDecodeError as error:  # SQLite quotes the damaged part of the schema
        raise sqlite3.DatabaseError(f"Could not decode what is damaged: {error}") from error


def connect_unlocked(path: str, *, wal: bool) -> sqlite3.Connection:
    """Open a database for reading without locks or shared memory; no process may write meanwhile.

    Args:
        path: Absolute.
        wal: Whether there is a write-ahead log with commits, which has to be read too.

    """
    if not wal:
        return connect(path, timeout=0.0, read_only=True, uri_parameters="mode=ro&immutable=1")
    # An immutable database would be read without its log, so in an older state. Exclusive locking
    # keeps the log's index in this process's own memory, and the VFS "none" takes no lock.
    vfs = "win32-none" if sys.platform == "win32" else "unix-none"
    con = connect(path, timeout=0.0, read_only=True, uri_parameters=f"mode=ro&vfs={vfs}")
    try:
        pragma(con, "locking_mode = EXCLUSIVE")
    except BaseException:
        con.close()
        raise
    return con


def create(path: str) -> None:
    """Turn an empty file into a database of the newest format."""
    con = connect(path, timeout=1.0)
    try:
        pragma(con, f"page_size = {PAGE_BYTES}")
        pragma(con, f"application_id = {APPLICATION}")
        make_durable(con, path)
        pragma(con, "wal_checkpoint(TRUNCATE)")
    finally:
        con.close()


def make_durable(con: sqlite3.Connection, path: str) -> None:
    """Migrate a database to the newest format, and ensure that its commits are synced.

    Raises:
        ConfigError: It is another program's database.
        StoreUnavailableError: Commits might not be durable.
        UnsupportedVersionError: It has a newer format.

    """
    version = format_of(con, path)  # before anything is changed
    pragma(con, "journal_mode = WAL")
    if version != len(MIGRATIONS):
        migrate(con, path)
    con.execute("BEGIN IMMEDIATE")
    pragma(con, f"user_version = {len(MIGRATIONS)}")
    con.execute("COMMIT")
    # Only after a first write: before it, a failed switch to WAL looks like a successful one.
    modes = (pragma(con, "journal_mode"), pragma(con, "synchronous"))
    if modes != ([("wal",)], [(_FULL,)]):
        raise StoreUnavailableError(
            f"{path} is not in WAL mode with full syncs ({modes}), so a commit might not be "
            "durable: check the disk, and open the store again",
            path=path,
        )


def migrate(con: sqlite3.Connection, path: str) -> None:
    """Run all missing migrations in one transaction; of several processes, only one runs them."""
    con.execute("BEGIN IMMEDIATE")
    try:
        version = format_of(con, path)  # again, now that no other process can change it
        for step in MIGRATIONS[version:]:
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
        ConfigError: It is another program's database.
        UnsupportedVersionError: It has a newer format.

    """
    (((application,),), ((version,),)) = (
        pragma(con, "application_id"),
        pragma(con, "user_version"),
    )
    assert isinstance(version, int)
    if application != APPLICATION:
        raise ConfigError(f"{path} is another program's database: choose another file", path=path)
    if version > len(MIGRATIONS):
        raise UnsupportedVersionError(
            f"{path} has format {version}, this release reads up to {len(MIGRATIONS)}: use a newer "
            "release of perdure in every process that uses the store",
            path=path,
            format=version,
            reads=len(MIGRATIONS),
        )
    return version


# Reading: pooled connections, each read in one transaction


PART_BYTES = 1024 * 1024
_SHM_BYTES = 32768
"""The minimum size of SQLite's shared memory file while a process uses it."""


@final
class Readers:
    """Pool of reading connections, opened on demand. Blocking; thread-safe."""

    def __init__(self, path: str, timeout: float, *, read_only: bool = False) -> None:
        self._path = path
        self._timeout = timeout
        self._read_only = read_only
        self._idle: list[_Reader] | None = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a read transaction: a snapshot of the database."""
        reader = self._reader()
        con = reader.con
        is_sound = False
        try:
            con.execute("BEGIN")
            yield con
            self._require_unchanged(reader)
            is_sound = True
        finally:
            with contextlib.suppress(driver_error()):
                if con.in_transaction:
                    con.execute("ROLLBACK")
            with self._lock:
                is_reusable = self._idle is not None and is_sound
                if is_reusable and self._idle is not None:
                    self._idle.append(reader)
            if not is_reusable:
                con.close()

    def close(self) -> None:
        """Close the idle connections now, and the others after use."""
        with self._lock:
            idle, self._idle = self._idle, None
        for reader in idle or ():
            reader.con.close()

    def _reader(self) -> _Reader:
        with self._lock:
            reader = self._idle.pop() if self._idle else None
        if reader is not None and self._was_changed(reader):
            reader.con.close()
            reader = None
        if reader is None:
            open_reader = _open_read_only if self._read_only else _open_shared
            reader = open_reader(self._path, self._timeout)
        return reader

    def _was_changed(self, reader: _Reader) -> bool:
        return reader.files is not None and reader.files != _files_of(self._path)

    def _require_unchanged(self, reader: _Reader) -> None:
        if self._was_changed(reader):
            raise StoreUnavailableError(
                f"{self._path} was changed while it was read without locks: read again; while "
                "another process writes to it, read it where its -shm file can be opened",
                path=self._path,
            )


class _Reader(NamedTuple):
    con: sqlite3.Connection
    files: tuple[int, ...] | None
    """The files' inodes, sizes and times, if no lock keeps other processes from writing."""


def _open_shared(path: str, timeout: float) -> _Reader:
    return _Reader(connect(path, timeout=timeout, read_only=True), None)


def _open_read_only(path: str, timeout: float) -> _Reader:
    """Connect with locks and shared memory, or without if their files cannot be created."""
    try:
        return _Reader(_connect_shared(path, timeout), None)
    except driver_error() as error:
        if code_of(error) not in CANNOT_SHARE or _is_shared(path):
            raise
    files = _files_of(path)
    return _Reader(connect_unlocked(path, wal=_size(path + "-wal") > 0), files)


def _connect_shared(path: str, timeout: float) -> sqlite3.Connection:
    # Not "rw": the last connection to close would checkpoint the write-ahead log.
    con = connect(path, timeout=timeout, read_only=True, uri_parameters="mode=ro")
    try:
        con.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except BaseException:
        con.close()
        raise
    return con


def _is_shared(path: str) -> bool:
    """Return whether another process may have the database open: its shared memory exists."""
    return _size(path + "-shm") >= _SHM_BYTES and os.path.exists(path + "-wal")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _files_of(path: str) -> tuple[int, ...]:
    facts: list[int] = []
    for file in (path, path + "-wal"):
        try:
            status = os.stat(file)
        except FileNotFoundError:
            facts += (0, 0, 0)
        else:
            facts += (status.st_ino, status.st_size, status.st_mtime_ns)
    return tuple(facts)


class RowPage(msgspec.Struct, frozen=True):
    """A page of a log's records, and where the next page begins."""

    records: list[Record]
    born: int
    at: int
    expected: Seal | None
    more: bool


def read_page(
    con: sqlite3.Connection,
    key: SessionKey,
    before: RowPage | None,
    after: int,
    *,
    reverse: bool,
    max_bytes: int,
    limit: int,
) -> RowPage | None:
    """Return the next page of a log, None after its end; ``after`` counts for the first page.

    It ends with the row that brings it to ``max_bytes`` or to ``limit`` records.
    """
    row = find(con, key)
    if row is None or not row.epoch or row.state == DELETED:
        return None
    if before is not None and before.born != row.born:
        return None  # deleted meanwhile, and acquired again
    return (
        _previous_page(con, row, before, after, max_bytes, limit)
        if reverse
        else next_page(con, row, before, after, max_bytes, limit)
    )


def next_page(
    con: sqlite3.Connection,
    row: SessionRow,
    before: RowPage | None,
    after: int,
    max_bytes: int,
    limit: int,
) -> RowPage | None:
    """Return the next page of a session's log, oldest first."""
    seq, expected = (before.at, before.expected) if before else (max(after, row.low), None)
    if seq < row.low:
        seq, expected = row.low, None  # trimmed meanwhile
    if seq > row.head:
        return None
    rows = LogRows(con, row, seq, expected)
    records = rows.forward(max_bytes, limit)
    last = records[-1].seq if records else row.head
    return RowPage(records, row.born, last + 1, rows.expected, last < row.head)


def _previous_page(
    con: sqlite3.Connection,
    row: SessionRow,
    before: RowPage | None,
    last: int,
    max_bytes: int,
    limit: int,
) -> RowPage | None:
    seq, expected = (before.at, before.expected) if before else (min(last, row.head), None)
    if seq < row.low:
        return None
    rows = LogRows(con, row, seq, expected)
    records = rows.backward(max_bytes, limit)
    first = records[-1].seq if records else row.low
    return RowPage(records, row.born, first - 1, rows.expected, first > row.low)
