"""The directory's blocking part: what there is, and how it goes."""

from __future__ import annotations

from typing import NamedTuple

from perdure.records.frames import open_sealed
from perdure.records.keys import SessionKey
from perdure.store import SessionInfo
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.documents import plain
from perdure.stores.postgres.log import require
from perdure.stores.postgres.settings import quoted
from perdure.stores.postgres.statements import Statements

_SCRUBBED = (
    "commits",
    "documents",
    "manifests",
    "inbox",
    "dead_letters",
    "blobs",
    "requests",
    "sessions",
)
_SCRUB_LOCK = 60
"""Seconds that a scrub waits until nobody uses a table."""


class PostgresListQuery(NamedTuple):
    """Which sessions to list."""

    tenant: str
    owner: str | None
    tag: str | None
    prefix: str
    after: SessionKey | None
    limit: int


def listed(connection: Connection, sql: Statements, wanted: PostgresListQuery) -> list[SessionInfo]:
    """List a tenant's sessions by key."""
    tenant, owner, tag, prefix, after, limit = wanted
    rows = connection.execute(
        sql["sessions"],
        {
            "tenant": tenant,
            "owner": plain(owner),
            "tag": plain(tag),
            "prefix": plain(prefix),
            "end": end_of(prefix),
            "agent": after.agent if after else "",
            "session": after.session if after else "",
            "with_first": after is None or tenant > after.tenant,
            "limit": max(limit, 0),
        },
    )
    return [
        SessionInfo(
            key=SessionKey(agent, session, tenant),
            epoch=epoch,
            head=head,
            created_at=created,
            updated_at=updated,
            owner=of,
            title=title,
            tags=tuple(tags or ()),
            turns=turns or 0,
            damaged=sealed is not None and open_sealed(sealed) is None,
        )
        for agent, session, epoch, head, created, updated, of, title, tags, turns, sealed in rows
    ]


def end_of(prefix: str) -> str | None:
    """Return the first text behind all that begin with a prefix, None where there is none.

    >>> end_of("app/")
    'app0'
    """
    for place in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[place]) + 1
        if code == 0xD800:  # what follows up to 0xE000 is no text
            code = 0xE000
        if code <= 0x10FFFF:
            return prefix[:place] + chr(code)
    return None


def tenants(connection: Connection, sql: Statements) -> list[str]:
    """List the tenants that have anything here."""
    return [row[0] for row in connection.execute(sql["tenants"])]


def delete(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> None:
    """Remove what a session owns; its row stays, with its epoch."""
    with connection.transaction():
        row_id = require(connection, sql, key, epoch)
        connection.execute(sql["delete"], {"id": row_id})


def trim(connection: Connection, sql: Statements, key: SessionKey, epoch: int, below: int) -> int:
    """Remove the commits that end before a record."""
    with connection.transaction():
        row_id = require(connection, sql, key, epoch)
        found = connection.execute(sql["trim"], {"id": row_id, "below": below}).fetchone()
    return int(found[0]) if found else 0


def scrub(connection: Connection, sql: Statements) -> None:
    """Rewrite the tables, so that nothing is left of rows that were removed.

    The server's log of writes goes on holding them until it is recycled; a checkpoint, where
    this user may ask for one, brings that nearer.
    """
    name = quoted(sql.schema)
    try:
        connection.execute(b"SET statement_timeout = 0")
        connection.execute(f"SET lock_timeout = '{_SCRUB_LOCK}s'".encode())
        for table in _SCRUBBED:
            connection.execute(f"VACUUM (FULL) {name}.{table}".encode(), prepare=False)
        query = b"SELECT pg_has_role(current_user, 'pg_checkpoint', 'USAGE')"
        if connection.execute(query).fetchone() == (True,):
            connection.execute(b"CHECKPOINT", prepare=False)
    finally:
        connection.close()  # it has other settings than the rest
