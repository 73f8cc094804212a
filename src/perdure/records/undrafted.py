"""What a store answers that keeps no drafts yet."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Collection

from perdure.errors import StoreError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Draft, DraftInfo, Origin


class Undrafted:
    """The calls of the port for drafts, refused."""

    async def publish(self, key: SessionKey, epoch: int) -> None:
        raise StoreError("this store keeps no drafts yet")

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        raise StoreError("this store keeps no drafts yet")

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        raise StoreError("this store renews no blobs yet")


def require_plain(first: int, base: Origin | None, draft: Draft | None) -> None:
    """Raise for a log that begins elsewhere, or as a draft."""
    if first != 1 or base is not None or draft is not None:
        raise StoreError("this store keeps no drafts yet")
