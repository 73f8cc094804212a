"""Schema of the tables: created and migrated to the version that this release writes.

Many replicas may start at once: the one that gets the advisory lock migrates in one transaction,
and the others find it done.
"""

from __future__ import annotations

import hashlib

from perdure.errors import ConfigError, UnsupportedVersionError
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.settings import quoted
from perdure.stores.postgres.statements import LATEST, migrations

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
