"""SQL statements of the store, from the files in ``sql``; the append as a prepared statement.

A file holds several statements, each below a line ``-- name: word``.
"""

from __future__ import annotations

import importlib.resources
import re
import struct
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from perdure.stores.postgres.connections import Connection, driver
from perdure.stores.postgres.settings import quoted

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult


# Prepared statement for the append, the one statement that every save waits for, on bare libpq


_ARRAY = struct.Struct("!5i")
_SIZE = struct.Struct("!i")
_BYTEA = 17
"""The type's OID, the same on every server."""
_TEXT, _BINARY = 0, 1
_TUPLES = 2
_COMMAND = 1
_UNKNOWN_STATEMENT = "26000"


def bigints(values: Sequence[int]) -> bytes:
    """Return numbers as an array of type bigint, in the text format.

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
    """A statement whose parameters are arrays: bigints first, one of bytea last.

    Each connection prepares it on first use.
    """

    def __init__(self, name: str, query: bytes, numbers: int) -> None:
        self._name = f"perdure_{name}".encode()
        self._query = query
        self._formats = [_TEXT] * numbers + [_BINARY]
        self._ready: weakref.WeakSet[Connection] = weakref.WeakSet()

    def run(self, connection: Connection, values: Sequence[bytes]) -> set[int]:
        """Run it in autocommit mode; return the first column of its rows, bigints.

        Raises:
            psycopg.Error: The server's error, or a lost connection.

        """
        if connection not in self._ready:
            self._prepare(connection)
        moved = self.result_ids(connection, self._exec(connection, values))
        if moved is None:
            self._prepare(connection)
            moved = self.result_ids(connection, self._exec(connection, values))
        return moved or set()

    def is_ready(self, connection: Connection) -> bool:
        """Return whether it is prepared on a connection."""
        return connection in self._ready

    def send(self, connection: Connection, values: Sequence[bytes]) -> None:
        """Start sending it, without waiting."""
        connection.pgconn.send_query_prepared(self._name, values, self._formats, _BINARY)

    def result_ids(self, connection: Connection, result: PGresult | None) -> set[int] | None:
        """Return the first column of an answer; None if it has to be prepared again.

        Raises:
            psycopg.Error: The server's error, or a lost connection.

        """
        if result is None:
            raise driver().OperationalError("the connection was lost")
        if result.status not in (_COMMAND, _TUPLES) and _code(result) == _UNKNOWN_STATEMENT:
            # The driver deallocates every statement when it rolls back.
            self._ready.discard(connection)
            return None
        _check(result)
        values = [result.get_value(row, 0) for row in range(result.ntuples)]
        return {int.from_bytes(value, "big") for value in values if value is not None}

    def _exec(self, connection: Connection, values: Sequence[bytes]) -> PGresult:
        return connection.pgconn.exec_prepared(self._name, values, self._formats, _BINARY)

    def _prepare(self, connection: Connection) -> None:
        _check(connection.pgconn.prepare(self._name, self._query))
        self._ready.add(connection)


def _code(result: PGresult) -> str:
    code = result.error_field(driver().pq.DiagnosticField.SQLSTATE)
    return code.decode() if code else ""


def _check(result: PGresult) -> None:
    if result.status in (_COMMAND, _TUPLES):
        return
    errors = driver().errors
    text = result.error_field(driver().pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    code = _code(result)
    try:
        kind = errors.lookup(code) if code else errors.OperationalError
    except KeyError:
        kind = errors.DatabaseError
    raise kind(text.decode("utf-8", "replace").strip())


LATEST = 2
"""The version of the tables that this release writes."""

_FILES = ("log", "leases", "documents", "blobs", "inbox", "directory")
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@final
class Statements:
    """Statements by name, for one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        """Its name, not quoted."""
        self._by_name: dict[str, bytes] = {}
        name = quoted(schema).replace("%", "%%")
        for file in _FILES:
            _, *parts = _NAME.split(_text(f"{file}.sql"))
            for word, body in zip(parts[::2], parts[1::2], strict=True):
                self._by_name[word] = body.strip().replace("{schema}", name).encode()
        self.append: PreparedStatement = PreparedStatement(
            "append", self["append"].replace(b"%%", b"%"), numbers=6
        )

    def __getitem__(self, name: str) -> bytes:
        return self._by_name[name]


def migrations(schema: str, since: int) -> list[tuple[int, bytes]]:
    """Return the migrations from a version of the tables to the latest, in order."""
    name = quoted(schema)
    return [
        (number, _text(f"{number:04}.sql").replace("{schema}", name).encode())
        for number in range(since + 1, LATEST + 1)
    ]


def _text(name: str) -> str:
    return (importlib.resources.files(__package__) / "sql" / name).read_text(encoding="utf-8")
