"""Schema of the tables and the statements on them, from the files in ``sql``.

A file holds several statements, each below a line ``-- name: word``; the append is a prepared
statement. The tables are created and migrated to the version that this release writes.

Many replicas may start at once: the one that gets the advisory lock migrates in one transaction,
and the others find it done.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import re
import struct
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from perdure.errors import ConfigError, UnsupportedVersionError
from perdure.stores.postgres.connections import Connection, driver, quoted

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


LATEST = 4
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
            "append", self["append"].replace(b"%%", b"%"), numbers=7
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


# The tables, created and migrated


_PATIENCE = 120
"""Seconds that one replica waits for another's migration."""
_VERSION_TABLE_EXISTS = b"""
SELECT 1 FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = 'perdure'
"""
_SAFE = ("on", "local", "remote_write", "remote_apply")


def migrate(connection: Connection, schema: str, location: str) -> None:
    """Create or migrate the tables; nothing is written if they are up to date.

    Raises:
        UnsupportedVersionError: A newer release has created them.

    """
    if _version(connection, schema, location) == LATEST:
        return
    with connection.transaction():
        connection.execute(b"SELECT set_config('statement_timeout', '0', true)")
        connection.execute(b"SELECT set_config('lock_timeout', %s, true)", (str(_PATIENCE * 1000),))
        connection.execute(b"SELECT pg_advisory_xact_lock(%s)", (_lock(schema),))
        version = _version(connection, schema, location)
        if not version:
            name = quoted(schema).encode()
            connection.execute(b"CREATE SCHEMA IF NOT EXISTS " + name)
            connection.execute(
                b"CREATE TABLE IF NOT EXISTS " + name + b".perdure (version integer NOT NULL)"
            )
        for _, step in migrations(schema, version):
            connection.execute(step, prepare=False)
        _save_version(connection, schema, version)


def _save_version(connection: Connection, schema: str, before: int) -> None:
    table = quoted(schema).replace("%", "%%").encode() + b".perdure"
    change = b"UPDATE %b SET version = %%s" if before else b"INSERT INTO %b VALUES (%%s)"
    connection.execute(change % table, (LATEST,))


def _version(connection: Connection, schema: str, location: str) -> int:
    """Return the version of the tables, 0 if there are none."""
    table = f"{quoted(schema)}.perdure"
    # Not to_regclass, which may use what this connection saw before it waited for the lock.
    if connection.execute(_VERSION_TABLE_EXISTS, (schema,)).fetchone() is None:
        return 0
    query = b"SELECT version FROM %b" % table.encode()  # an identifier, quoted
    row = connection.execute(query).fetchone()
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
