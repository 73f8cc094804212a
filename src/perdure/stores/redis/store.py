"""Redis store: the port of `perdure.store` on a Redis or Valkey server.

Use it from the event loop that opened it. Each call is one write to the server and one reply
(a few take two). Each change is one script: atomic, fenced by the epoch, and one entry in the
server's append-only file. A cancelled call may have its whole effect or none, never a part.

What an acknowledged write survives depends on the server's settings: see
``capabilities.durability``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import final

import anyio
import msgspec

from perdure._lib.ids import random_id
from perdure.errors import ConfigError, StoreError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery
from perdure.store import (
    ALL,
    Batch,
    BlobSweep,
    Capabilities,
    ConnectionHook,
    ConnectionPool,
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
    Store,
    Taken,
    Terms,
)
from perdure.stores.redis import connection
from perdure.stores.redis.connection import RedisLink, settings_from
from perdure.stores.redis.documents import Blobs, Directory, RedisDocuments
from perdure.stores.redis.inbox import RedisInbox
from perdure.stores.redis.layout import KeyNames
from perdure.stores.redis.leases import Leases
from perdure.stores.redis.log import ColdHistory, RedisLog

_INSPECT_EVERY = 5
"""Heartbeats between two checks of the server's settings."""
_SLOW_SYNC = {"batch_max": 1024, "parallelism": 8}
"""For servers where a save waits up to a second for a sync, so that more saves share it."""
_CAPABILITIES = Capabilities(
    durability=connection.UNKNOWN,
    batch_max=64,
    parallelism=4,
    shared=True,
    memory_bound=True,
)


@final
class RedisStore:
    """Store on a Redis or Valkey server.

    Args:
        url: ``redis://``, ``rediss://`` or ``valkey://`` with host, port and database, or
            ``unix://`` with a socket's path. Options: ``prefix`` of all keys, ``timeout`` and
            ``connect_timeout`` in seconds, ``wait=no`` to let a save return before a server
            that syncs once a second has done so, ``ssl_ca_certs``, ``ssl_certfile`` and
            ``ssl_keyfile``.
        owner: This store's id as a lease holder; by default a random one.
        history: Another store for cold history: a fold moves records there that every document
                includes, a megabyte at a time. It is opened and closed together with this one.

    Raises:
        ConfigError: The URL is invalid.

    """

    def __init__(self, url: str, *, owner: str | None = None, history: Store | None = None) -> None:
        settings = settings_from(url)
        if settings.history and history is None:
            raise ConfigError(
                "history=… in a URL is for connect() and store_for(): pass a RedisStore the store "
                "itself, RedisStore(url, history=store)",
                option="history",
            )
        self._owner = owner or random_id()
        self._heartbeats = 0
        """Heartbeats since the settings were checked; a failed one resets it."""
        self._warnings: tuple[str, ...] = ()
        self._capabilities = _CAPABILITIES
        self._opened = False
        self._link = link = RedisLink(settings)
        names = KeyNames(settings.prefix)
        self._history = history
        self._cold = ColdHistory(link, names, history)
        self._log = RedisLog(link, names, self._cold, self._owner)
        self._leases = Leases(link, names, self._owner)
        self._inbox = RedisInbox(link, names, self._leases)
        self._documents = RedisDocuments(link, names)
        self._blobs = Blobs(link, names)
        self._directory = Directory(link, names, self._blobs, self._cold)

    def __repr__(self) -> str:
        return f"RedisStore({self.location!r})"

    def connection_pool(self) -> ConnectionPool:
        return self._link.pool()

    def watch_connections(self, hook: ConnectionHook) -> None:
        self._link.hook = hook

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities; durability is known once it is open."""
        return self._capabilities

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        """The server's address, without user and password."""
        return self._link.location

    async def open(self) -> None:
        """Connect to the server, check its settings, and register as an owner.

        Raises:
            ConfigError: The server may evict data when its memory is full, is a Sentinel, or one of
                several primaries of a cluster.
            MissingExtraError: The driver is not installed.
            StoreUnavailableError: The server does not answer, or refuses us.

        """
        if self._opened:
            return
        await self._link.open()
        try:
            durability = await connection.inspect_durability(self._link)
            await self._leases.register()
            if self._history is not None:
                await self._history.open()
        except BaseException:
            await self._link.aclose()
            raise
        batching = _SLOW_SYNC if self._link.waits else {}
        self._capabilities = msgspec.structs.replace(
            _CAPABILITIES,
            durability=durability,
            memory_bound=self._history is None,
            **batching,
        )
        self._opened = True

    async def aclose(self) -> None:
        """Close all connections; leases that were not released look like those of a dead owner."""
        if not self._opened:
            return
        self._opened = False
        try:
            # If this fails, other owners see that the heartbeat has stopped.
            with contextlib.suppress(StoreError):
                await self._leases.unregister()
        finally:
            with anyio.CancelScope(shield=True):
                await self._link.aclose()
            if self._history is not None:
                await self._history.aclose()

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append all batches in one write."""
        return await self._log.append_many(batches)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records, some hundred kilobytes at a time."""
        chunks = self._log.read(key, after=after, before=before, limit=limit, reverse=reverse)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def head(self, key: SessionKey) -> int:
        state = await self._log.state(key)
        return 0 if state.is_hidden else state.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole batches before a record."""
        return await self._log.trim(key, epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._documents.read(key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one step."""
        await self._documents.write(key, documents, manifest)
        await self._cold.move(key, manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._blobs.put(tenant, blobs)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._blobs.get(tenant, name)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        """Move unreachable blobs to quarantine, and remove those that are there long enough.

        Segments of cold history that no session lists are removed from their store, too.
        """
        swept = await self._blobs.sweep(tenant, reachable, older_than, among=among)
        if among is not None:
            return swept
        swept_history = await self._cold.sweep(tenant, older_than)
        return BlobSweep(
            swept.quarantined + swept_history.quarantined,
            swept.removed + swept_history.removed,
            swept.bytes + swept_history.bytes,
        )

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return await self._blobs.renew(tenant, names)

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._blobs.names(tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._blobs.remove(tenant, names)

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._leases.holder(key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        return await self._leases.acquire(key, terms)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self._leases.publish(key, epoch)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self._directory.drafts(tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._leases.release(key, epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew the heartbeat; return requests received since the previous call.

        The server's settings may change, so they are checked now and then, and after each failed
        heartbeat.
        """
        heartbeats, self._heartbeats = self._heartbeats, 0
        if heartbeats % _INSPECT_EVERY == 0:
            self._warnings = await connection.warnings(self._link)
        requests = await self._leases.heartbeat()
        self._heartbeats = heartbeats + 1
        return msgspec.structs.replace(requests, warnings=self._warnings)

    async def wait_for_notification(self, timeout: float) -> None:
        await self._leases.wait_for_notification(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._leases.request_handover(key, holder)

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return await self._inbox.enqueue(key, items, limit=limit)

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._inbox.receive(key, epoch, limit)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        await self._inbox.ack(key, epoch, op_ids, dead)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._inbox.sessions_with_pending_items(dead_letters=dead_letters)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._inbox.dead_letters(key)

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        return await self._directory.sessions(query)

    async def tenants(self) -> list[str]:
        """List the tenants that have a session, a blob or cold history, by name."""
        return sorted({*await self._directory.tenants(), *await self._cold.tenants()})

    async def rebuild_directory(self) -> int:
        """Rebuild the listing from the sessions themselves, and return how many there are.

        Scans all keys of the database: only for a listing that lacks sessions.
        """
        await self._inbox.rebuild()
        return await self._directory.rebuild()

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        await self._directory.delete(key, epoch, keep_posts=keep_posts)
        await self._inbox.forget(key)

    async def scrub(self) -> None:
        """Have the server rewrite its files without the removed data."""
        await connection.scrub(self._link)
