"""Blobs that nothing reaches: counted by every whole check, removed when told to.

What was just put may not be named by a record yet: so nothing younger than the grace period goes,
and what goes is set aside first, and removed one grace period later.
"""

from __future__ import annotations

import msgspec

from perdure.errors import CorruptRecordError, PerdureError
from perdure.model.keys import SessionKey
from perdure.moving import receipts
from perdure.moving.taking import names_of
from perdure.session.lineage import followed
from perdure.store import Store, Swept

__all__ = ["Garbage", "collect", "garbage"]


class Garbage(msgspec.Struct, kw_only=True):
    """What of a tenant's blobs nothing reaches."""

    tenant: str
    blobs: int = 0
    """All that can be read."""
    receipts: int = 0
    """Those by which a migration finds out what an earlier one did: they stay."""
    unreachable: int = 0
    unknown: str | None = None
    """Why it cannot be told: a session cannot be read, and may need any of them."""
    swept: Swept | None = None
    """What was done about it."""


async def garbage(store: Store, tenant: str, keys: list[SessionKey]) -> tuple[Garbage, set[str]]:
    """Look for blobs that none of a tenant's sessions, which are *keys*, reaches."""
    reached: set[str] = set()
    try:
        there = set(await store.blob_names(tenant))
    except CorruptRecordError as error:
        return Garbage(tenant=tenant, unknown=str(error)), reached
    found = Garbage(tenant=tenant, blobs=len(there))
    if not there:
        return found, reached
    lineage = followed(store)
    for key in keys:
        try:
            documents = await lineage.read_documents(key)
            reached |= await names_of(store, key, documents, await store.head(key))
        except PerdureError as error:
            found.unknown = f"{key} cannot be read: {error}"
            return found, there
    kept = await receipts.current(store, tenant, there - reached)
    found.receipts = len(kept)
    reached |= kept
    found.unreachable = len(there - reached)
    return found, reached


async def collect(store: Store, found: Garbage, reached: set[str], grace: float) -> None:
    """Set aside what nothing reaches, and remove what was set aside long enough ago."""
    if found.unknown is None:
        found.swept = await store.sweep(found.tenant, reached, grace)
