"""The calls that a wrapper passes on as they are."""

from __future__ import annotations

from collections.abc import Collection

from perdure.model.keys import SessionKey
from perdure.store import Asked, Holder, Store

__all__ = ["Passing"]


class Passing:
    """Leases, heads and the like: they hold nothing that people wrote."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def owner(self) -> str:
        """The inner store's id as a holder of leases."""
        return self._store.owner

    @property
    def local_path(self) -> str | None:
        """The inner store's, if it has one."""
        path: str | None = getattr(self._store, "local_path", None)
        return path

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._store.aclose()

    async def head(self, key: SessionKey) -> int:
        """See the port."""
        return await self._store.head(key)

    async def release(self, key: SessionKey, epoch: int) -> None:
        """See the port."""
        await self._store.release(key, epoch)

    async def heartbeat(self) -> Asked:
        """See the port."""
        return await self._store.heartbeat()

    async def news(self, at_most: float) -> None:
        """See the port."""
        await self._store.news(at_most)

    async def request_handover(self, key: SessionKey, holder: Holder) -> None:
        """See the port."""
        await self._store.request_handover(key, holder)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        """See the port."""
        await self._store.settle(key, epoch, op_ids)

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        """See the port."""
        # A store that keeps no dead letters may not know the option.
        return await (
            self._store.waiting(dead_letters=True) if dead_letters else self._store.waiting()
        )

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        """See the port."""
        return await self._store.drop_dead_letters(key, op_ids)

    async def scrub(self) -> None:
        """See the port."""
        await self._store.scrub()
