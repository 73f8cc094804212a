"""Blobs, one row each, by tenant and name: the blocking part. Ages are by the server's clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from perdure.records.blob_names import require_named, verified
from perdure.store import BlobSweep
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.leases import tenant_id
from perdure.stores.postgres.statements import Statements

PUT_BYTES = 16 * 1024 * 1024


def put(connection: Connection, sql: Statements, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable, as many in a statement as are not too large together."""
    require_named(blobs)
    if blobs:
        number = tenant_id(connection, sql, tenant)
        for part in _parts(blobs):
            values = [blobs[name] for name in part]
            connection.execute(sql["put_blobs"], (number, part, values))


def _parts(blobs: Mapping[str, bytes]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for name in sorted(blobs):
        if part and size + len(blobs[name]) > PUT_BYTES:
            yield part
            part, size = [], 0
        part.append(name)
        size += len(blobs[name])
    yield part


def get(connection: Connection, sql: Statements, tenant: str, name: str) -> bytes | None:
    """Return a blob, verified; None when there is none."""
    found = connection.execute(sql["get_blob"], (tenant, name), binary=True).fetchone()
    return None if found is None else verified(name, found[0])


def names(connection: Connection, sql: Statements, tenant: str) -> list[str]:
    """List a tenant's blobs."""
    return [row[0] for row in connection.execute(sql["blob_names"], (tenant,))]


def remove(connection: Connection, sql: Statements, tenant: str, unwanted: Collection[str]) -> int:
    """Remove blobs at once, and return how many bytes they had."""
    found = connection.execute(sql["remove_blobs"], (tenant, list(unwanted))).fetchone()
    return int(found[0]) if found else 0


def sweep(
    connection: Connection,
    sql: Statements,
    tenant: str,
    reachable: Collection[str],
    older_than: float,
) -> BlobSweep:
    """Move away what nobody reaches, and remove what was moved long ago."""
    reached = list(reachable)
    with connection.transaction():
        connection.execute(b"SELECT set_config('statement_timeout', '0', true)")
        connection.execute(sql["come_back"], (tenant, reached))
        found = connection.execute(
            sql["sweep"], {"tenant": tenant, "age": float(older_than), "reachable": reached}
        ).fetchone()
    return BlobSweep(*map(int, found)) if found else BlobSweep()
