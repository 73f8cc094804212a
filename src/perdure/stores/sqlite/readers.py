"""Connections that only read, one a thread at a time, each look in one transaction."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, final

import msgspec

from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.stores.sqlite.connecting import connect
from perdure.stores.sqlite.log import Rows, Seal
from perdure.stores.sqlite.rows import DELETED, Row, find
from perdure.stores.sqlite.trouble import driver_error

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Part", "Readers", "part_of"]

PART_BYTES = 1024 * 1024


@final
class Readers:
    """A few connections, opened when they are needed. Blocking; from any thread."""

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._idle: list[sqlite3.Connection] | None = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Look at the database as it is at one moment."""
        with self._lock:
            con = self._idle.pop() if self._idle else None
        if con is None:
            con = connect(self._path, timeout=self._timeout, read_only=True)
        sound = False
        try:
            con.execute("BEGIN")
            yield con
            sound = True
        finally:
            with contextlib.suppress(driver_error()):
                if con.in_transaction:
                    con.execute("ROLLBACK")
            with self._lock:
                kept = self._idle is not None and sound
                if kept and self._idle is not None:
                    self._idle.append(con)
            if not kept:
                con.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is."""
        with self._lock:
            idle, self._idle = self._idle, None
        for con in idle or ():
            con.close()


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
) -> Part | None:
    """Return the next part of a log, None behind its end; ``after`` counts for the first one."""
    row = find(con, key)
    if row is None or not row.epoch or row.state == DELETED:
        return None
    if before is not None and before.born != row.born:
        return None  # deleted meanwhile, and taken anew
    return _back(con, row, before, after) if reverse else _on(con, row, before, after)


def _on(con: sqlite3.Connection, row: Row, before: Part | None, after: int) -> Part | None:
    at, expected = (before.at, before.expected) if before else (max(after, row.low), None)
    if at < row.low:
        at, expected = row.low, None  # removed meanwhile
    if at > row.head:
        return None
    rows = Rows(con, row, at, expected)
    records = rows.forward(PART_BYTES)
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
