"""Base class of store wrappers, which forwards the whole port, and the read-only wrapper."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, final

import anyio

from perdure.errors import SessionError
from perdure.records.keys import SessionKey, require_filters, require_whole
from perdure.records.manifest import Manifest
from perdure.store import (
    ALL,
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Documents,
    DraftInfo,
    HeartbeatRequests,
    Held,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    SessionQuery,
    Status,
    Store,
    Taken,
    Terms,
    open_read_only,
)

_PASSING = ("inner", "begin_append", "read_for_restore", "read_many_for_restore", "read_logs")


class DelegatingStore:
    """Forward every call of the port to *inner*, which subclasses change call by call.

    What the inner store offers besides the port is offered too, but for ``begin_append`` and the
    reads for a restore: they would pass by what a subclass does to a log and to documents.
    """

    def __init__(self, store: Store) -> None:
        self.inner: Store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getattr__(self, name: str) -> Any:
        # Members of a backend beyond the port, such as a folder for each session.
        if name.startswith("_") or name in _PASSING:
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def owner(self) -> str:
        return self.inner.owner

    @property
    def location(self) -> str:
        return self.inner.location

    async def open(self) -> None:
        await self.inner.open()

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        return await self.inner.append_many(batches)

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        return self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)

    async def head(self, key: SessionKey) -> int:
        return await self.inner.head(key)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        return await self.inner.trim(key, epoch, below)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self.inner.read_documents(key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        await self.inner.write_documents(key, documents, manifest)

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self.inner.put_blobs(tenant, blobs)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self.inner.get_blob(tenant, name)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        return await self.inner.sweep(tenant, reachable, older_than, among=among)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return await self.inner.renew(tenant, names)

    async def blob_names(self, tenant: str) -> list[str]:
        return await self.inner.blob_names(tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self.inner.remove_blobs(tenant, names)

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self.inner.holder(key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        return await self.inner.acquire(key, terms)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self.inner.publish(key, epoch)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self.inner.drafts(tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self.inner.release(key, epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        return await self.inner.heartbeat()

    async def wait_for_notification(self, timeout: float) -> None:
        await self.inner.wait_for_notification(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self.inner.request_handover(key, holder)

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self.inner.enqueue(key, items, limit=limit)

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self.inner.receive(key, epoch, limit=limit)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        await self.inner.ack(key, epoch, op_ids, dead=dead)

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        """List sessions; the filters are checked here, for every store below.

        Raises:
            ConfigError: A filter is no text, time or number.

        """
        require_filters(
            tenant=query.tenant,
            owner=query.owner,
            tag=query.tag,
            prefix=query.prefix,
            since=query.since,
            before=query.before,
        )
        require_whole(limit=query.limit)
        return await self.inner.sessions(query)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self.inner.sessions_with_pending_items(dead_letters=dead_letters)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self.inner.dead_letters(key)

    async def tenants(self) -> list[str]:
        return await self.inner.tenants()

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        await self.inner.delete(key, epoch, keep_posts=keep_posts)

    async def scrub(self) -> None:
        await self.inner.scrub()


# Read-only wrapper of a store: ``connect(…, read_only=True)``


def _refusal(store: Store, doing: str) -> SessionError:
    return SessionError(
        f"cannot {doing}: {store.location} was connected to with read_only=True; connect "
        "without it to write",
        path=store.location,
    )


def _refusing(doing: str) -> Any:
    """Return a method that refuses every call."""

    async def refuse(self: ReadOnlyStore, *_args: Any, **_options: Any) -> None:
        raise _refusal(self, doing)

    return refuse


@final
class ReadOnlyStore(DelegatingStore):
    """Forward reads, and refuse writes with a SessionError. It registers no owner."""

    def __getattr__(self, name: str) -> Any:
        if name == "rebuild_directory":
            raise AttributeError(name)
        return super().__getattr__(name)

    async def open(self) -> None:
        """Open the inner store for reading."""
        await open_read_only(self.inner)

    # the owner

    async def heartbeat(self) -> HeartbeatRequests:
        """Do nothing: a reader holds no leases."""
        return HeartbeatRequests()

    async def wait_for_notification(self, timeout: float) -> None:
        """Sleep: a reader receives no requests."""
        await anyio.sleep(timeout)

    # writing

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        return [Outcome(Status.PERMANENT, _refusal(self, "append"))] * len(batches)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        raise _refusal(self, f"open {key}, which load() reads without a lease")

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        raise _refusal(self, "drop dead letters" if epoch is None else "take from an inbox")


_REFUSED = {
    "write_documents": "write",
    "put_blobs": "write",
    "renew": "write",
    "sweep": "remove anything",
    "remove_blobs": "remove anything",
    "trim": "prune",
    "publish": "publish",
    "release": "release a session",
    "request_handover": "ask for a session",
    "enqueue": "post",
    "delete": "delete",
    "scrub": "clean up",
}
# Set here, so that type checkers see the signatures of the class that it inherits from.
for _name, _what in _REFUSED.items():
    setattr(ReadOnlyStore, _name, _refusing(_what))
