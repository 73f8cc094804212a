"""Connections to a database, and its file: created atomically, checked, migrated, reindexed.

SQLite may fail to switch to WAL and report it only in a later step of the same statement, so each
pragma is read to its end, and its setting is read back; after the first write too, since a failed
switch shows only then. `Readers` pools the connections that only read. Blocking.

A new database is created under a temporary name, with its tables, in WAL mode and synced, and
then linked to its path. So the file exists completely or not at all, of several processes that
create it one wins, and an empty file at the path is damage, never a new store.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, final
from urllib.parse import quote

import msgspec

from perdure._lib.files import TEMPORARY, Folder, open_private
from perdure._lib.ids import random_id
from perdure._lib.platform import network_file_system, sync_file
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.stores.sqlite.errors import CANNOT_SHARE, code_of, is_damage
from perdure.stores.sqlite.log import HIDDEN, row_problems
from perdure.stores.sqlite.sql import MIGRATIONS, Q

APPLICATION = 0x50524455
"""perdure's application id, in the database file's header."""

OLDEST = (3, 32)
"""The first SQLite that accepts as many values in a statement as a save of many sessions has."""

_FULL = 2
_CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Bytes that a write-ahead log takes before it is copied to the database."""

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
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigError(
            f"the SQLite of this Python is {sqlite3.sqlite_version}, and {OLDEST[0]}.{OLDEST[1]} "
            "is needed: use a Python with a newer one, or the file store",
            found=sqlite3.sqlite_version,
        )
    # After two slashes, a URI has the name of a host.
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
        con.execute(Q["do_step"])
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


def make_durable(con: sqlite3.Connection, path: str) -> None:
    """Migrate a database to the newest format, and ensure that its commits are synced.

    All missing migrations are one transaction; of several processes, only one runs them.

    Raises:
        ConfigError: It is another program's database.
        StoreUnavailableError: Commits might not be durable.
        UnsupportedVersionError: It has a newer format.

    """
    version = format_of(con, path)  # before anything is changed
    pragma(con, "journal_mode = WAL")
    con.execute("BEGIN IMMEDIATE")
    try:
        if version != len(MIGRATIONS):
            version = format_of(con, path)  # again, now that no other process can change it
        for step in MIGRATIONS[version:]:
            for statement in step:
                con.execute(statement)
        pragma(con, f"user_version = {len(MIGRATIONS)}")
        con.execute("COMMIT")
    finally:
        if con.in_transaction:
            con.execute("ROLLBACK")
    # Only after a first write: before it, a failed switch to WAL looks like a successful one.
    modes = (pragma(con, "journal_mode"), pragma(con, "synchronous"))
    if modes != ([("wal",)], [(_FULL,)]):
        raise StoreUnavailableError(
            f"{path} is not in WAL mode with full syncs ({modes}), so a commit might not be "
            "durable: check the disk, and open the store again",
            path=path,
        )


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


def require_newest(con: sqlite3.Connection, path: str) -> None:
    """Raise UnsupportedVersionError unless a database, which is only read, has this format."""
    version = format_of(con, path)
    if version < len(MIGRATIONS):
        raise UnsupportedVersionError(
            f"{path} has format {version}, and this release reads {len(MIGRATIONS)}: open it once "
            "for writing, which migrates it, as `perdure doctor` does",
            path=path,
            format=version,
        )


# Reading: pooled connections, each read in one transaction


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
        try:
            reader.con.execute("BEGIN")
            yield reader.con
            # After the reads: without locks, another process may have written in the middle of
            # them.
            self._require_unchanged(reader)
            reader.con.execute("ROLLBACK")
        except BaseException:
            reader.con.close()
            raise
        with self._lock:
            if self._idle is not None:
                self._idle.append(reader)
                return
        reader.con.close()

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
        if reader is None and self._read_only:
            return _open_read_only(self._path, self._timeout)
        return reader or _Reader(connect(self._path, timeout=self._timeout, read_only=True))

    def _require_unchanged(self, reader: _Reader) -> None:
        if self._was_changed(reader):
            raise StoreUnavailableError(
                f"{self._path} was changed while it was read without locks: read again; while "
                "another process writes to it, read it where its -shm file can be opened",
                path=self._path,
            )

    def _was_changed(self, reader: _Reader) -> bool:
        return reader.files is not None and reader.files != _files_of(self._path)


_Status = tuple[int, int, int]
"""A file's inode, size and time; zeros if it is missing."""


class _Reader(NamedTuple):
    con: sqlite3.Connection
    files: tuple[_Status, _Status] | None = None
    """The files' inodes, sizes and times, if no lock keeps other processes from writing."""


def _open_read_only(path: str, timeout: float) -> _Reader:
    """Connect with locks and shared memory, or without if their files cannot be created."""
    try:
        return _Reader(_connect_shared(path, timeout))
    except sqlite3.Error as error:
        if code_of(error) not in CANNOT_SHARE or _is_shared(path):
            raise
    files = _files_of(path)
    _, (_, wal_bytes, _) = files
    return _Reader(connect_unlocked(path, wal=wal_bytes > 0), files)


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
    _, size, _ = _status(path + "-shm")
    return size >= _SHM_BYTES and os.path.exists(path + "-wal")


def _files_of(path: str) -> tuple[_Status, _Status]:
    return _status(path), _status(path + "-wal")


def _status(path: str) -> _Status:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


# The database file


_SMALLEST = 512
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OWNERS = "-owners"


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a database.

    Raises:
        ConfigError: It names no file.

    """
    text = os.fspath(path)
    if text.startswith("~"):
        text = os.path.expanduser(text)
    if not text or text.startswith("~") or text.endswith(("/", os.sep)) or "\0" in text:
        raise ConfigError(
            f"{os.fspath(path)!r} names no database file: use a path such as agents.db",
            path=os.fspath(path),
        )
    if text == ":memory:":
        raise ConfigError(
            "a database in memory keeps nothing: use the store memory: for tests", path=text
        )
    return os.path.abspath(text)


def open_owners(path: str, *, make: bool) -> Folder | None:
    """Check a database, and return the folder of its owners.

    Args:
        path: Absolute.
        make: Whether to create what is missing. Else None is returned where there is no such
            folder, as next to a copy, or where this user may not read it.

    Raises:
        ConfigError: Other users can write to its folder, the folder is not local, or it is not a
            file.
        CorruptRecordError: It is empty, or not a database.
        StoreUnavailableError: It does not exist, or cannot be created or read.

    """
    folder_path, name = os.path.split(path)
    with open_private(folder_path, make=make) as folder:
        kind = network_file_system(folder_path)
        if kind is not None:
            raise ConfigError(
                f"{folder_path} is on a network file system ({kind}), where SQLite's shared "
                "memory does not reach other machines and databases get damaged: use a local "
                "disk, or a server store",
                path=folder_path,
                type=kind,
            )
        if make and folder.stat(name) is None:
            _create(folder, name)
        _check(folder, name)
        if make:
            return folder.make(name + OWNERS)
        try:
            return folder.enter(name + OWNERS)
        except (FileNotFoundError, PermissionError):
            return None


def _create(folder: Folder, name: str) -> None:
    temporary = f".{random_id()}{TEMPORARY}"
    os.close(folder.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    try:
        path = os.path.join(folder.path, temporary)
        with contextlib.closing(connect(path, timeout=1.0)) as con:
            pragma(con, f"page_size = {PAGE_BYTES}")
            pragma(con, f"application_id = {APPLICATION}")
            make_durable(con, path)
            pragma(con, "wal_checkpoint(TRUNCATE)")
        fd = folder.open(temporary, os.O_RDWR)
        try:
            sync_file(fd)
        finally:
            os.close(fd)
        # Of several processes that create it, one wins; it is never seen half made.
        folder.link(temporary, name)
    except sqlite3.Error as error:
        raise StoreUnavailableError(
            f"cannot create {folder.path}/{name}: {error}: free some room, or check the disk",
            path=os.path.join(folder.path, name),
        ) from error
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            folder.remove(temporary + ending)
    folder.sync()


def _check(folder: Folder, name: str) -> None:
    """Check the file without opening it.

    Only SQLite opens it: closing any descriptor of it would drop the locks that SQLite holds on
    it anywhere in this process, and another process would take the database for unused and
    remove the write-ahead log while it is in use.
    """
    path = os.path.join(folder.path, name)
    status = folder.stat(name)
    if status is None:
        raise StoreUnavailableError(
            f"there is no database at {path}: check the path", path=path, errno=errno.ENOENT
        )
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"{path} is a symbolic link, which could lead anywhere: give the real path of the "
            "database",
            path=path,
        )
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"{path} is not a file: choose another path (or file:{path} for a folder)", path=path
        )
    if os.name == "posix" and status.st_mode & _OTHERS_WRITE:
        raise ConfigError(f"{path} can be written by other users: chmod go-w {path}", path=path)
    if status.st_size < _SMALLEST:  # SQLite would take it for a new database
        raise CorruptRecordError(
            f"{path} has {status.st_size} bytes, so it is not a SQLite database, or has lost its "
            "content; it was left as it is: restore it from a copy, or move it away and a new one "
            "is created",
            path=path,
            size=status.st_size,
        )


# The database as a whole: checking its pages and indexes, and rebuilding the indexes
#
# Records and documents are verified whenever they are read; this is about the pages and indexes
# that lead to them.


MAX_PROBLEMS = 100
"""Stop the check after this many problems."""


def problems(con: sqlite3.Connection) -> list[str]:
    """Return the problems that SQLite's own check of every page and index finds."""
    try:
        lines = [str(line) for (line,) in pragma(con, f"integrity_check({MAX_PROBLEMS})")]
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return [str(error)]
    return [] if lines == ["ok"] else [part for line in lines for part in line.splitlines()]


def integrity_problems(con: sqlite3.Connection) -> list[str]:
    """Return the same, and what is wrong with the rows of sessions."""
    found = problems(con)
    try:
        found += itertools.islice(row_problems(con), MAX_PROBLEMS)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        found = found or [str(error)]
    return found


def reindex(path: str, timeout: float) -> list[str]:
    """Rebuild all indexes from their tables, if that repairs anything; return what remains."""
    with open_owners(path, make=False) or contextlib.nullcontext():
        pass
    with contextlib.closing(connect(path, timeout=timeout)) as con:
        format_of(con, path)
        con.execute("BEGIN IMMEDIATE")
        try:
            before = problems(con)
            if not before:
                return []
            remaining = _try_reindex(con, before)
            # Kept only if it helped: else the file stays as the damage left it.
            con.execute("COMMIT" if len(remaining) < len(before) else "ROLLBACK")
        finally:
            if con.in_transaction:
                con.execute("ROLLBACK")
    return remaining


def _try_reindex(con: sqlite3.Connection, before: list[str]) -> list[str]:
    try:
        con.execute("REINDEX")
    except sqlite3.Error as error:  # a table is damaged, or has a row twice
        return [*before, f"REINDEX: {error}"]
    return problems(con)


def readable_keys(con: sqlite3.Connection) -> list[SessionKey]:
    """List the sessions whose rows can be read, past damaged pages and without any index."""
    keys: set[SessionKey] = set()
    # From both ends: a damaged page ends each scan, and hides only what is between.
    for query in ("keys_from_the_first", "keys_from_the_last"):
        try:
            for tenant, agent, session, epoch, state in con.execute(Q[query]):
                key = _key(tenant, agent, session)
                if key is not None and epoch and not (isinstance(state, int) and state & HIDDEN):
                    keys.add(key)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
    return sorted(keys)


def _key(tenant: Any, agent: Any, session: Any) -> SessionKey | None:
    try:
        return msgspec.convert({"tenant": tenant, "agent": agent, "session": session}, SessionKey)
    except (ValueError, msgspec.MsgspecError):
        return None
