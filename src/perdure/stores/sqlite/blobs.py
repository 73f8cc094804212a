"""Blobs, and the sweep of what nobody reaches. Blocking; in transactions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from perdure.errors import CorruptRecordError
from perdure.records.blob_names import require_named, verified
from perdure.store import BlobSweep
from perdure.stores.sqlite.sql import Q

if TYPE_CHECKING:
    import sqlite3


def put(con: sqlite3.Connection, tenant: str, blobs: Mapping[str, bytes], now: float) -> None:
    """Keep blobs; bytes that are there grow young again.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    require_named(blobs)
    con.executemany(Q["put_blob"], [(tenant, name, now, data) for name, data in blobs.items()])


def get(con: sqlite3.Connection, tenant: str, name: str) -> bytes | None:
    """Return a blob, None if there is none.

    Raises:
        CorruptRecordError: Its bytes are not those of its name.

    """
    found = con.execute(Q["blob"], {"tenant": tenant, "name": name}).fetchone()
    if found is None:
        return None
    (data,) = found
    return verified(name, data if isinstance(data, bytes) else b"")


def names(con: sqlite3.Connection, tenant: str) -> list[str]:
    """List a tenant's blobs."""
    return [name for (name,) in con.execute(Q["blob_names"], {"tenant": tenant})]


def remove(con: sqlite3.Connection, tenant: str, gone: Collection[str]) -> int:
    """Remove blobs, and return how many bytes they had."""
    freed = 0
    for name in set(gone):
        (size,) = con.execute(Q["blob_size"], {"tenant": tenant, "name": name}).fetchone() or (0,)
        freed += size
        con.execute(Q["delete_blob"], (tenant, name))
    return freed


def sweep(
    con: sqlite3.Connection, tenant: str, keep: frozenset[str], older_than: float, now: float
) -> BlobSweep:
    """Remove what was moved away long enough ago, then move away what nobody reaches."""
    moved: list[tuple[float | None, str, str]] = []
    gone: list[tuple[str, str]] = []
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
            gone.append((tenant, name))
            freed += size
    con.executemany(Q["move_blob"], moved)
    con.executemany(Q["delete_blob"], gone)
    return BlobSweep(quarantined, len(gone), freed)


def _require_times(name: object, renewed_at: object, moved_at: object) -> None:
    """Refuse a row that cannot say how old its blob is: nothing is removed by guessing."""
    if not isinstance(renewed_at, float) or not isinstance(moved_at, float | None):
        message = (
            f"blob {name!r} is damaged in the database: its row has times of other types; nothing "
            "was removed: restore the database from a copy, or see what `perdure check` says"
        )
        raise CorruptRecordError(message, blob=str(name))
