"""Blobs, and the sweep of unreachable ones. Blocking; called within a transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from perdure.errors import CorruptRecordError
from perdure.records.chunks import require_named, verified
from perdure.store import BlobSweep
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


def put(con: sqlite3.Connection, tenant: str, blobs: Mapping[str, bytes], now: float) -> None:
    """Store blobs; putting bytes that exist renews their age.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    require_named(blobs)
    con.executemany(Q["put_blob"], [(tenant, name, now, data) for name, data in blobs.items()])


def get(con: sqlite3.Connection, tenant: str, name: str) -> bytes | None:
    """Return a blob, None if it does not exist.

    Raises:
        CorruptRecordError: Its bytes do not match its name.

    """
    row = con.execute(Q["blob"], {"tenant": tenant, "name": name}).fetchone()
    if row is None:
        return None
    (data,) = row
    return verified(name, data if isinstance(data, bytes) else b"")


def names(con: sqlite3.Connection, tenant: str) -> list[str]:
    """List a tenant's blobs."""
    return [name for (name,) in con.execute(Q["blob_names"], {"tenant": tenant})]


def remove(con: sqlite3.Connection, tenant: str, removed: Collection[str]) -> int:
    """Remove blobs, and return how many bytes they had."""
    freed = 0
    for name in set(removed):
        (size,) = con.execute(Q["blob_size"], {"tenant": tenant, "name": name}).fetchone() or (0,)
        freed += size
        con.execute(Q["delete_blob"], (tenant, name))
    return freed


def sweep(
    con: sqlite3.Connection, tenant: str, keep: frozenset[str], older_than: float, now: float
) -> BlobSweep:
    """Remove blobs that were quarantined long enough ago, then quarantine unreachable ones."""
    moved: list[tuple[float | None, str, str]] = []
    expired: list[tuple[str, str]] = []
    quarantined = freed = 0
    for name, renewed_at, moved_at, size in con.execute(Q["blobs"], {"tenant": tenant}).fetchall():
        _require_times(name, renewed_at, moved_at)
        if name in keep:
            if moved_at is not None:
                moved.append((None, tenant, name))
        elif moved_at is None:
            if now - renewed_at >= older_than:
                moved.append((now, tenant, name))
                quarantined += 1
        elif now - moved_at >= older_than:
            expired.append((tenant, name))
            freed += size
    con.executemany(Q["move_blob"], moved)
    con.executemany(Q["delete_blob"], expired)
    return BlobSweep(quarantined, len(expired), freed)


def _require_times(name: object, renewed_at: object, moved_at: object) -> None:
    """Raise if a row does not hold its blob's age: nothing is removed by guessing."""
    if not isinstance(renewed_at, float) or not isinstance(moved_at, float | None):
        message = (
            f"blob {name!r} is damaged in the database: its row has times of other types; nothing "
            "was removed: restore the database from a copy, or run `perdure check`"
        )
        raise CorruptRecordError(message, blob=str(name))
