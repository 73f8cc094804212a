"""Database file: created atomically, checked before it is opened, verified and reindexed.

A new database is created under a temporary name, with its tables, in WAL mode and synced, and
then linked to its path. So the file exists completely or not at all, of several processes that
create it one wins, and an empty file at the path is damage, never a new store. Blocking.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from perdure._lib.files import TEMPORARY, Folder, LinkFoundError, open_private
from perdure._lib.ids import random_id
from perdure._lib.platform import network_file_system, sync_file
from perdure.errors import ConfigError, CorruptRecordError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.stores.sqlite.connections import connect, create, format_of, pragma
from perdure.stores.sqlite.errors import driver_error, is_damage
from perdure.stores.sqlite.log import DELETED
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


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


def make_ready(path: str) -> Folder:
    """Create the database if it is missing, check it, and return the folder of its owners.

    Raises:
        ConfigError: Other users can write to its folder, the folder is not local, or it is not a
            file.
        CorruptRecordError: It is empty, or not a database.
        StoreUnavailableError: It cannot be created or read.

    """
    folder_path, name = os.path.split(path)
    with open_private(folder_path, parents=False) as folder:
        _require_local(folder_path)
        with _refuse_links(path):
            if folder.stat(name) is None:
                _create(folder, name)
            _check(folder, name)
            return folder.make(name + OWNERS)


def check_existing(path: str) -> Folder | None:
    """Check an existing database for reading; return the folder of its owners if it has one.

    Raises:
        ConfigError: As `make_ready`.
        CorruptRecordError: It is empty, or not a database.
        StoreUnavailableError: It does not exist, or cannot be read.

    """
    folder_path, name = os.path.split(path)
    with open_private(folder_path, make=False) as folder:
        _require_local(folder_path)
        with _refuse_links(path):
            if folder.stat(name) is None:
                raise StoreUnavailableError(
                    f"there is no database at {path}: check the path", path=path, errno=errno.ENOENT
                )
            _check(folder, name)
            try:
                return folder.enter(name + OWNERS)
            except (FileNotFoundError, PermissionError):
                return None  # a copy of the database alone, or not readable for this user


@contextlib.contextmanager
def _refuse_links(path: str) -> Iterator[None]:
    try:
        yield
    except LinkFoundError as error:
        raise ConfigError(
            f"{error.filename} is a symbolic link, which could lead anywhere: give the real "
            "path of the database",
            path=path,
        ) from error


def _require_local(folder: str) -> None:
    kind = network_file_system(folder)
    if kind is not None:
        raise ConfigError(
            f"{folder} is on a network file system ({kind}), where SQLite's shared memory does "
            "not reach other machines and databases get damaged: use a local disk, or a server "
            "store",
            path=folder,
            type=kind,
        )


def _create(folder: Folder, name: str) -> None:
    temporary = f".{random_id()}{TEMPORARY}"
    os.close(folder.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    try:
        path = os.path.join(folder.path, temporary)
        create(path)
        fd = folder.open(temporary, os.O_RDWR)
        try:
            sync_file(fd)
        finally:
            os.close(fd)
        folder.link(temporary, name)
    except driver_error() as error:
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
            f"{path} was removed while it was being opened: open it again", path=path
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
    except driver_error() as error:
        if not is_damage(error):
            raise
        return [str(error)]
    return [] if lines == ["ok"] else [part for line in lines for part in line.splitlines()]


def reindex(path: str, timeout: float) -> list[str]:
    """Rebuild all indexes from their tables, if that repairs anything; return what remains."""
    con = connect(path, timeout=timeout)
    with contextlib.closing(con):
        format_of(con, path)
        con.execute("BEGIN IMMEDIATE")
        try:
            before = problems(con)
            if not before:
                return []
            remaining = _try_reindex(con, before)
            con.execute("COMMIT" if len(remaining) < len(before) else "ROLLBACK")
        finally:
            if con.in_transaction:
                con.execute("ROLLBACK")
    return remaining


def _try_reindex(con: sqlite3.Connection, before: list[str]) -> list[str]:
    try:
        con.execute("REINDEX")
    except driver_error() as error:  # a table is damaged, or has a row twice
        return [*before, f"REINDEX: {error}"]
    return problems(con)


def readable_keys(con: sqlite3.Connection) -> list[SessionKey]:
    """List the sessions whose rows can be read, past damaged pages and without any index."""
    keys: set[SessionKey] = set()
    for query in ("keys_from_the_first", "keys_from_the_last"):
        try:
            for tenant, agent, session, epoch, state in con.execute(Q[query]):
                key = _key(tenant, agent, session)
                if key is not None and epoch and state != DELETED:
                    keys.add(key)
        except driver_error() as error:
            if not is_damage(error):
                raise
    return sorted(keys)


def _key(tenant: Any, agent: Any, session: Any) -> SessionKey | None:
    try:
        return msgspec.convert({"tenant": tenant, "agent": agent, "session": session}, SessionKey)
    except (ValueError, msgspec.MsgspecError):
        return None
