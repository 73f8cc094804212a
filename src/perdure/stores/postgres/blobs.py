"""Blobs: one row each, by tenant and name. Blocking. Ages are by the server's clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from perdure.records.chunks import require_named, verified
from perdure.store import BlobSweep
from perdure.stores.postgres.connections import Connection
from perdure.stores.postgres.leases import tenant_id
from perdure.stores.postgres.statements import Statements

PUT_BYTES = 16 * 1024 * 1024


def put(connection: Connection, sql: Statements, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable, up to ``PUT_BYTES`` of them in a statement."""
    require_named(blobs)
    if blobs:
        tenant_number = tenant_id(connection, sql, tenant)
        for part in _parts(blobs):
            values = [blobs[name] for name in part]
            connection.execute(sql["put_blobs"], (tenant_number, part, values))


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
    row = connection.execute(sql["get_blob"], (tenant, name), binary=True).fetchone()
    return None if row is None else verified(name, row[0])


def names(connection: Connection, sql: Statements, tenant: str) -> list[str]:
    """List a tenant's blobs."""
    return [row[0] for row in connection.execute(sql["blob_names"], (tenant,))]


def remove(connection: Connection, sql: Statements, tenant: str, removed: Collection[str]) -> int:
    """Remove blobs at once, and return how many bytes they had."""
    row = connection.execute(sql["remove_blobs"], (tenant, list(removed))).fetchone()
    return int(row[0]) if row else 0


def sweep(
    connection: Connection,
    sql: Statements,
    tenant: str,
    reachable: Collection[str],
    older_than: float,
) -> BlobSweep:
    """Quarantine unreachable blobs, and remove those that were quarantined long enough ago."""
    reached = list(reachable)
    with connection.transaction():
        connection.execute(b"SELECT set_config('statement_timeout', '0', true)")
        connection.execute(sql["come_back"], (tenant, reached))
        counts = connection.execute(
            sql["sweep"], {"tenant": tenant, "age": float(older_than), "reachable": reached}
        ).fetchone()
    return BlobSweep(*map(int, counts)) if counts else BlobSweep()
