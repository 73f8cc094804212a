"""Read-only wrapper of a store: ``connect(…, read_only=True)``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import final

import anyio

from perdure.errors import SessionError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import (
    Batch,
    BlobSweep,
    DeadLetter,
    Documents,
    HeartbeatRequests,
    HeldLease,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    Status,
    open_read_only,
)
from perdure.stores.delegate import DelegatingStore


@final
class ReadOnlyStore(DelegatingStore):
    """Forward reads, and refuse writes with a SessionError. It registers no owner."""

    async def open(self) -> None:
        """Open the inner store for reading."""
        await open_read_only(self.inner)

    async def aclose(self) -> None:
        await self.inner.aclose()

    # reading

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        inner = self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        try:
            async for chunk in inner:
                yield chunk
        finally:
            await inner.aclose()

    async def head(self, key: SessionKey) -> int:
        return await self.inner.head(key)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self.inner.read_documents(key, names)

    # the owner

    async def heartbeat(self) -> HeartbeatRequests:
        """Do nothing: a reader holds no leases."""
        return HeartbeatRequests()

    async def news(self, at_most: float) -> None:
        """Sleep: a reader receives no requests."""
        await anyio.sleep(at_most)

    # writing

    def _refused(self, doing: str) -> SessionError:
        message = (
            f"cannot {doing}: {self.location} was connected to with read_only=True; connect "
            "without it to write"
        )
        return SessionError(message, path=self.location)

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        return [Outcome(Status.PERMANENT, self._refused("append"))] * len(batches)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        raise self._refused("prune")

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        raise self._refused("write")

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        raise self._refused("write")

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        raise self._refused("remove anything")

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        raise self._refused("remove anything")

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        raise self._refused(f"open {key}, which load() reads without a lease")

    async def release(self, key: SessionKey, epoch: int) -> None:
        raise self._refused("release a session")

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        raise self._refused("ask for a session")

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        raise self._refused("post")

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        raise self._refused("take from an inbox")

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        raise self._refused("set posts aside")

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        raise self._refused("drop dead letters")

    async def delete(self, key: SessionKey, epoch: int) -> None:
        raise self._refused("delete")

    async def scrub(self) -> None:
        raise self._refused("clean up")
