"""Schema of the tables and the statements on them, from the files in ``sql``.

A file holds several statements, each below a line ``-- name: word``; the append is a prepared
statement. The tables are created and migrated to the version that this release writes.

Many replicas may start at once: the one that gets the advisory lock migrates in one transaction,
and the others find it done.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import struct
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import anyio

from perdure.errors import ConfigError, UnsupportedVersionError
from perdure.records.rows import named_statements
from perdure.stores.postgres.connections import Connection, driver, quoted

if TYPE_CHECKING:
    import psycopg
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


def bigints(values: Sequence[int | None]) -> bytes:
    """Return numbers as an array of type bigint, in the text format.

    >>> bigints([1, None])
    b'{1,NULL}'
    """
    texts = ["NULL" if value is None else str(value) for value in values]
    return b"{%b}" % ",".join(texts).encode()


def byteas(values: Sequence[bytes]) -> bytes:
    """Return values as an array of type bytea, in the binary format."""
    parts = [_ARRAY.pack(1, 0, _BYTEA, len(values), 1)]
    for value in values:
        parts.append(_SIZE.pack(len(value)))
        parts.append(value)
    return b"".join(parts)


@final
class PreparedStatement:
    """A statement whose parameters are arrays: bigints first, two of bytea last.

    Each connection prepares it on first use.
    """

    def __init__(self, name: str, query: bytes, numbers: int) -> None:
        self._name = f"perdure_{name}".encode()
        self._query = query
        self._formats = [_TEXT] * numbers + [_BINARY, _BINARY]
        self._ready: weakref.WeakSet[Connection] = weakref.WeakSet()

    def run(self, connection: Connection, values: Sequence[bytes]) -> set[int]:
        """Run it in autocommit mode; return the first column of its rows, bigints.

        Raises:
            psycopg.Error: The server's error, or a lost connection.

        """
        if connection not in self._ready:
            self._prepare(connection)
        moved = self._result_ids(connection, self._exec(connection, values))
        if moved is None:
            self._prepare(connection)
            moved = self._result_ids(connection, self._exec(connection, values))
        return moved or set()

    def is_ready(self, connection: Connection) -> bool:
        """Return whether it is prepared on a connection."""
        return connection in self._ready

    async def exchange(self, connection: Connection, values: Sequence[bytes]) -> set[int] | None:
        """Run it from the event loop; None if it has to be prepared again.

        Raises:
            psycopg.Error: As `run`.

        """
        pgconn, fd = connection.pgconn, connection.fileno()
        pgconn.send_query_prepared(self._name, values, self._formats, _BINARY)
        try:
            while pgconn.flush():
                await anyio.wait_writable(fd)
            while pgconn.is_busy():
                await anyio.wait_readable(fd)
                pgconn.consume_input()
        except OSError as error:  # the loop could not watch a connection that was just closed
            message = "the connection was lost while its answer was due"
            raise driver().OperationalError(message) from error
        result = pgconn.get_result()
        while pgconn.get_result() is not None:
            pass
        return self._result_ids(connection, result)

    def _result_ids(self, connection: Connection, result: PGresult | None) -> set[int] | None:
        if result is None:
            raise driver().OperationalError("the connection was lost")
        error = _error_in(result)
        if error is not None and error.sqlstate == _UNKNOWN_STATEMENT:
            # The driver deallocates every statement when it rolls back.
            self._ready.discard(connection)
            return None
        if error is not None:
            raise error
        values = [result.get_value(row, 0) for row in range(result.ntuples)]
        return {int.from_bytes(value, "big") for value in values if value is not None}

    def _exec(self, connection: Connection, values: Sequence[bytes]) -> PGresult:
        return connection.pgconn.exec_prepared(self._name, values, self._formats, _BINARY)

    def _prepare(self, connection: Connection) -> None:
        error = _error_in(connection.pgconn.prepare(self._name, self._query))
        if error is not None:
            raise error
        self._ready.add(connection)


def _error_in(result: PGresult) -> psycopg.Error | None:
    if result.status in (_COMMAND, _TUPLES):
        return None
    error: psycopg.Error = driver().errors.error_from_result(result)
    return error


LATEST = 4
"""The version of the tables that this release writes."""

_FILES = ("version", "log", "leases", "documents", "blobs", "inbox", "directory")


@final
class Statements:
    """Statements by name, for one schema."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        """Its name, not quoted."""
        self._by_name: dict[str, bytes] = {}
        name = quoted(schema).replace("%", "%%")
        for file in _FILES:
            for word, body in named_statements(_text(f"{file}.sql")).items():
                self._by_name[word] = body.replace("{schema}", name).encode()
        self.append: PreparedStatement = PreparedStatement(
            "append", self["append"].replace(b"%%", b"%"), numbers=7
        )

    def __getitem__(self, name: str) -> bytes:
        return self._by_name[name]


def _text(name: str) -> str:
    return (importlib.resources.files(__package__) / "sql" / name).read_text(encoding="utf-8")


# The tables, created and migrated


_PATIENCE = 120
"""Seconds that one replica waits for another's migration."""
_SAFE = ("on", "local", "remote_write", "remote_apply")


def migrate(connection: Connection, sql: Statements, location: str) -> None:
    """Create or migrate the tables; nothing is written if they are up to date.

    Raises:
        UnsupportedVersionError: A newer release has created them.

    """
    if _version(connection, sql, location) == LATEST:
        return
    with connection.transaction():
        connection.execute(b"SELECT set_config('statement_timeout', '0', true)")
        connection.execute(b"SELECT set_config('lock_timeout', %s, true)", (str(_PATIENCE * 1000),))
        connection.execute(b"SELECT pg_advisory_xact_lock(%s)", (_lock(sql.schema),))
        version = _version(connection, sql, location)
        if not version:
            connection.execute(sql["create_schema"], ())
            connection.execute(sql["create_version_table"], ())
            connection.execute(sql["add_version"], (0,))
        for number in range(version + 1, LATEST + 1):
            step = _text(f"{number:04}.sql").replace("{schema}", quoted(sql.schema))
            connection.execute(step.encode(), prepare=False)
        connection.execute(sql["change_version"], (LATEST,))


def _version(connection: Connection, sql: Statements, location: str) -> int:
    """Return the version of the tables, 0 if there are none."""
    # Not to_regclass, which may use what this connection saw before it waited for the lock.
    if connection.execute(sql["version_table"], (sql.schema,)).fetchone() is None:
        return 0
    row = connection.execute(sql["version"], ()).fetchone()
    version = int(row[0]) if row else 0
    if version > LATEST:
        raise UnsupportedVersionError(
            f"the tables at {location} have version {version}, this release reads up to "
            f"{LATEST}: use a newer release of perdure, or another schema",
            version=version,
            location=location,
        )
    return version


def _lock(schema: str) -> int:
    digest = hashlib.sha256(b"perdure tables\0" + schema.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def durability_of(connection: Connection, location: str) -> str:
    """Return a commit's durability: "fsync", or "unsafe" and the settings that make it so.

    Raises:
        ConfigError: The database's encoding cannot hold every id.

    """
    ((encoding, fsync, commit, pages),) = connection.execute(
        b"SELECT current_setting('server_encoding'), current_setting('fsync'), "
        b"current_setting('synchronous_commit'), current_setting('full_page_writes')"
    ).fetchall()
    if encoding != "UTF8":
        raise ConfigError(
            f"the database at {location} has the encoding {encoding}: create one with "
            "ENCODING 'UTF8'",
            encoding=encoding,
        )
    unsafe = [
        f"{name}={value}"
        for name, value, safe in (
            ("fsync", fsync, ("on",)),
            ("synchronous_commit", commit, _SAFE),
            ("full_page_writes", pages, ("on",)),
        )
        if value not in safe
    ]
    return f"unsafe: {', '.join(unsafe)}" if unsafe else "fsync"
