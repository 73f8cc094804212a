"""Directory of sessions and tenants, and removing: delete, trim and scrub. Blocking."""

from __future__ import annotations

from typing import NamedTuple

from perdure.records.keys import SessionKey
from perdure.records.records import open_sealed
from perdure.store import SessionInfo
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.documents import without_nul
from perdure.stores.postgres.log import require_held
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
"""Seconds that a scrub waits for the lock on a table."""


class PostgresListQuery(NamedTuple):
    """Filters and page of a listing."""

    tenant: str
    owner: str | None
    tag: str | None
    prefix: str
    after: SessionKey | None
    limit: int


def list_sessions(
    connection: Connection, sql: Statements, query: PostgresListQuery
) -> list[SessionInfo]:
    """List a tenant's sessions by key."""
    tenant, owner, tag, prefix, after, limit = query
    rows = connection.execute(
        sql["sessions"],
        {
            "tenant": tenant,
            "owner": without_nul(owner),
            "tag": without_nul(tag),
            "prefix": without_nul(prefix),
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
            owner=about_owner,
            title=title,
            tags=tuple(tags or ()),
            turns=turns or 0,
            damaged=sealed is not None and open_sealed(sealed) is None,
        )
        for (
            agent,
            session,
            epoch,
            head,
            created,
            updated,
            about_owner,
            title,
            tags,
            turns,
            sealed,
        ) in rows
    ]


def end_of(prefix: str) -> str | None:
    """Return the first text after all those with a prefix, None if there is none.

    >>> end_of("app/")
    'app0'
    """
    for index in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[index]) + 1
        if code == 0xD800:  # surrogates, up to 0xE000, are not text
            code = 0xE000
        if code <= 0x10FFFF:
            return prefix[:index] + chr(code)
    return None


def tenants(connection: Connection, sql: Statements) -> list[str]:
    """List the tenants that have sessions or blobs, by name."""
    return [row[0] for row in connection.execute(sql["tenants"])]


def delete(connection: Connection, sql: Statements, key: SessionKey, epoch: int) -> None:
    """Remove all that a session owns; its row stays, with its epoch."""
    with connection.transaction():
        row_id = require_held(connection, sql, key, epoch)
        connection.execute(sql["delete"], {"id": row_id})


def trim(connection: Connection, sql: Statements, key: SessionKey, epoch: int, below: int) -> int:
    """Remove the commits whose records are all below *below*; return how many bytes they had."""
    with connection.transaction():
        row_id = require_held(connection, sql, key, epoch)
        row = connection.execute(sql["trim"], {"id": row_id, "below": below}).fetchone()
    return int(row[0]) if row else 0


def scrub(connection: Connection, sql: Statements) -> None:
    """Rewrite the tables, so that no bytes of removed rows remain in them.

    The server's write-ahead log holds them until it is recycled; a checkpoint, if this user may
    request one, speeds that up.
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
        connection.close()  # it has other settings than the pool's
