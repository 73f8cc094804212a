"""Connections that are as durable as the store promises, and the steps between formats.

SQLite may fail to switch to WAL and say so only in a later step of the same statement, so
each pragma is read to its end, and what was set is asked for again; after the first write
too, since a switch that failed shows only then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from urllib.parse import quote

from perdure.errors import ConfigError, StoreUnavailableError, UnsupportedVersionError
from perdure.stores.sqlite.sql import MIGRATIONS, Q

if TYPE_CHECKING:
    import sqlite3

__all__ = [
    "APPLICATION",
    "connect",
    "connect_unlocked",
    "create",
    "format_of",
    "make_durable",
    "pragma",
]

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
