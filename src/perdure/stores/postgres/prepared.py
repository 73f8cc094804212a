"""The one statement that every save waits for, through libpq itself.

What ``connection.execute`` is for everything else. That one lets other threads run, and waits
for its turn again, several times in a statement, which costs more than the statement does while
the event loop is busy. This one is run in one blocking call, or sent and received.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from perdure.stores.postgres.connections import Connection, driver

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult


_ARRAY = struct.Struct("!5i")
_SIZE = struct.Struct("!i")
_BYTEA = 17
"""The type's number, the same on every server."""
_TEXT, _BINARY = 0, 1
_TUPLES = 2
_COMMAND = 1
_FORGOTTEN = "26000"


def bigints(values: Sequence[int]) -> bytes:
    """Return numbers as PostgreSQL writes an array of them.

    >>> bigints([1, 2])
    b'{1,2}'
    """
    return b"{%b}" % ",".join(map(str, values)).encode()


def byteas(values: Sequence[bytes]) -> bytes:
    """Return values as an array of type bytea, in the binary format."""
    parts = [_ARRAY.pack(1, 0, _BYTEA, len(values), 1)]
    for value in values:
        parts.append(_SIZE.pack(len(value)))
        parts.append(value)
    return b"".join(parts)


@final
class PreparedStatement:
    """A statement with arrays of numbers first and one of bytes last, prepared when first run."""

    def __init__(self, name: str, query: bytes, numbers: int) -> None:
        self._name = f"perdure_{name}".encode()
        self._query = query
        self._formats = [_TEXT] * numbers + [_BINARY]
        self._ready: weakref.WeakSet[Connection] = weakref.WeakSet()

    def run(self, connection: Connection, values: Sequence[bytes]) -> set[int]:
        """Run it in autocommit mode; return the first column of what it returns, bigints.

        Raises:
            psycopg.Error: As the server says, or because the connection was lost.

        """
        if connection not in self._ready:
            self._prepare(connection)
        moved = self.received(connection, self._exec(connection, values))
        if moved is None:
            self._prepare(connection)
            moved = self.received(connection, self._exec(connection, values))
        return moved or set()

    def is_ready(self, connection: Connection) -> bool:
        """Say whether it was prepared on a connection."""
        return connection in self._ready

    def send(self, connection: Connection, values: Sequence[bytes]) -> None:
        """Begin to send it, without waiting for anything."""
        connection.pgconn.send_query_prepared(self._name, values, self._formats, _BINARY)

    def received(self, connection: Connection, result: PGresult | None) -> set[int] | None:
        """Return the first column of an answer; None if it has to be prepared again.

        Raises:
            psycopg.Error: As the server says, or because the connection was lost.

        """
        if result is None:
            raise driver().OperationalError("the connection was lost")
        if result.status not in (_COMMAND, _TUPLES) and _code(result) == _FORGOTTEN:
            # The driver lets go of every statement when it rolls back.
            self._ready.discard(connection)
            return None
        _check(result)
        found = [result.get_value(row, 0) for row in range(result.ntuples)]
        return {int.from_bytes(value, "big") for value in found if value is not None}

    def _exec(self, connection: Connection, values: Sequence[bytes]) -> PGresult:
        return connection.pgconn.exec_prepared(self._name, values, self._formats, _BINARY)

    def _prepare(self, connection: Connection) -> None:
        _check(connection.pgconn.prepare(self._name, self._query))
        self._ready.add(connection)


def _code(result: PGresult) -> str:
    found = result.error_field(driver().pq.DiagnosticField.SQLSTATE)
    return found.decode() if found else ""


def _check(result: PGresult) -> None:
    if result.status in (_COMMAND, _TUPLES):
        return
    errors = driver().errors
    said = result.error_field(driver().pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    code = _code(result)
    try:
        kind = errors.lookup(code) if code else errors.OperationalError
    except KeyError:
        kind = errors.DatabaseError
    raise kind(said.decode("utf-8", "replace").strip())
