"""Connections that only read, one a thread at a time, each look in one transaction."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, final

import msgspec

from perdure.errors import StoreUnavailableError
from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.stores.sqlite.connecting import connect, connect_unlocked
from perdure.stores.sqlite.log import Rows, Seal
from perdure.stores.sqlite.rows import DELETED, Row, find
from perdure.stores.sqlite.trouble import CANNOT_SHARE, code_of, driver_error

if TYPE_CHECKING:
    import sqlite3

__all__ = ["PART_BYTES", "Part", "Readers", "part_of"]

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


class Part(msgspec.Struct, frozen=True):
    """Some records of a log, and where the next part goes on."""

    records: list[Record]
    born: int
    at: int
    expected: Seal | None
    more: bool


def part_of(
    con: sqlite3.Connection,
    key: SessionKey,
    before: Part | None,
    after: int,
    reverse: bool,  # noqa: FBT001  # passed through a thread, by position
    most: int = PART_BYTES,
) -> Part | None:
    """Return the next part of a log, None behind its end; ``after`` counts for the first one."""
    row = find(con, key)
    if row is None or not row.epoch or row.state == DELETED:
        return None
    if before is not None and before.born != row.born:
        return None  # deleted meanwhile, and taken anew
    return _back(con, row, before, after) if reverse else _on(con, row, before, after, most)


def _on(
    con: sqlite3.Connection, row: Row, before: Part | None, after: int, most: int
) -> Part | None:
    at, expected = (before.at, before.expected) if before else (max(after, row.low), None)
    if at < row.low:
        at, expected = row.low, None  # removed meanwhile
    if at > row.head:
        return None
    rows = Rows(con, row, at, expected)
    records = rows.forward(most)
    last = records[-1].seq if records else row.head
    return Part(records, row.born, last + 1, rows.expected, last < row.head)


def _back(con: sqlite3.Connection, row: Row, before: Part | None, last: int) -> Part | None:
    at, expected = (before.at, before.expected) if before else (min(last, row.head), None)
    if at < row.low:
        return None
    rows = Rows(con, row, at, expected)
    records = rows.backward(PART_BYTES)
    first = records[-1].seq if records else row.low
    return Part(records, row.born, first - 1, rows.expected, first > row.low)
