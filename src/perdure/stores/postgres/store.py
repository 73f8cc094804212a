"""PostgreSQL store: the port of `perdure.store` on a database that many servers share.

Use it from the event loop that opened it. Each method is one transaction on its own connection,
in one call into a thread, or for simple appends from the event loop itself. So it takes effect
completely or not at all, even if its caller was cancelled. Every call has a deadline; a connection
whose server does not answer by then is cut.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import final

import anyio
import anyio.lowlevel
import msgspec

from perdure._lib.ids import random_id
from perdure._lib.loop import unopened
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import (
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Documents,
    HeartbeatRequests,
    HeldLease,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    Status,
    past_damage,
)
from perdure.stores.postgres import documents as _blobs
from perdure.stores.postgres import documents as _documents
from perdure.stores.postgres import documents as directory
from perdure.stores.postgres import inbox, leases, log
from perdure.stores.postgres.calls import PARALLELISM, Calls, open_calls
from perdure.stores.postgres.connections import Password
from perdure.stores.postgres.rows import MAX_RECORD_BYTES, HeldSessionsByKey, RowReader
from perdure.stores.postgres.settings import settings_of
from perdure.stores.postgres.statements import Statements

_CAPABILITIES = Capabilities(
    durability="unknown",
    batch_max=128,
    parallelism=PARALLELISM,
    max_record_bytes=MAX_RECORD_BYTES,
    shared=True,
    dead_letters=True,
)


@final
class PostgresStore:
    """Keep sessions in a PostgreSQL database, version 13 or newer.

    Args:
        url: ``postgresql://user@host:5432/database``, with libpq's parameters, and with
            ``schema`` and ``connections`` as further ones. Passwords are never shown.
        schema: The schema of the tables, created if it is missing; by default ``perdure``.
        connections: The maximum number of connections, not counting one for notifications.
        owner: This store's id as a holder of leases; by default an unguessable one.
        password: The password, or a function that returns one, plain or async: it is called for
            each new connection, so that a token may expire.

    Raises:
        ConfigError: The URL or an argument is not valid.

    """

    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        connections: int | None = None,
        owner: str | None = None,
        password: Password | None = None,
    ) -> None:
        self._settings = settings_of(url, schema=schema, connections=connections)
        if password is not None and self._settings.has_password:
            message = "password= and a password in the URL: leave one of them out"
            raise ConfigError(message, option="password")
        self._password = password
        self._owner = owner or random_id()
        self._sql = Statements(self._settings.schema)
        self._opened: Calls | None = None
        self._held_sessions: HeldSessionsByKey = {}
        self._reported_ids: tuple[int, ...] = ()
        self._has_news = False
        self._notified = anyio.Event()

    def __repr__(self) -> str:
        return f"PostgresStore({self.location!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What this store is; its durability is known once it is open."""
        calls = self._opened
        if calls is None:
            return _CAPABILITIES
        return msgspec.structs.replace(_CAPABILITIES, durability=calls.durability)

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def location(self) -> str:
        """User, host, database and schema, without the password."""
        return self._settings.location

    async def open(self) -> None:
        """Connect, create or migrate the tables, and register as an owner.

        Raises:
            MissingExtraError: The driver is not installed.
            ConfigError: The URL is not valid, or the database's encoding is not UTF-8.
            StoreUnavailableError: The server cannot be reached, or refuses.
            UnsupportedVersionError: A newer release has created the tables.

        """
        if self._opened:
            return
        self._opened = await open_calls(self._settings, self._sql, self._owner, self._password)

    async def aclose(self) -> None:
        """Close every connection; leases that were not released look like those of a dead owner."""
        calls, self._opened = self._opened, None
        self._held_sessions.clear()
        if calls is not None and calls.is_in_this_process:
            await calls.close(self._owner)

    @property
    def _calls(self) -> Calls:
        return self._require_open()

    def _require_open(self) -> Calls:
        calls = self._opened
        if calls is not None and calls.is_in_this_process:
            return calls
        raise unopened(self.location, elsewhere=calls is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append all batches in one transaction."""
        try:
            calls = self._require_open()
        except StoreUnavailableError as error:
            return [Outcome(Status.TRANSIENT, error)] * len(batches)
        return await calls.append(self._held_sessions, batches)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records as of now, a page of rows at a time."""
        state = await self._calls.run_idempotent("read", log.state_of, key)
        if state is None or state.deleted:
            return
        low = max(after + 1, state.since)
        high = state.head if before is None else min(before - 1, state.head)
        reader = RowReader(key, state, reverse=reverse)
        remaining = state.head if limit is None else limit
        first, last = low, high
        max_rows = (
            1 if past_damage.get() else log.PAGE_ROWS
        )  # row by row, so that a damaged one hides no others
        while remaining > 0 and low <= high:
            span = log.RowSpan(key, state, low, high, reverse, min(remaining, max_rows))
            page = await self._calls.run_idempotent("read", log.read_page, reader, span)
            records = [record for record in page.records if first <= record.seq <= last][:remaining]
            remaining -= len(records)
            if records:
                yield LogChunk(tuple(records))
            if page.next is None:
                break
            low, high = (low, page.next) if reverse else (page.next, high)

    async def head(self, key: SessionKey) -> int:
        state = await self._calls.run_idempotent("read", log.state_of, key)
        return 0 if state is None or state.deleted else state.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole commits that end before a record."""
        return await self._calls.run_idempotent("trim", directory.trim, key, epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._calls.run_idempotent("read", _documents.read, key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one transaction."""
        await self._calls.run_idempotent(
            "write to", _documents.write, key, dict(documents), manifest
        )

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._calls.run_idempotent("write to", _blobs.put, tenant, dict(blobs))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._calls.run_idempotent("read", _blobs.get, tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        return await self._calls.run_long(
            "sweep", _blobs.sweep, tenant, frozenset(reachable), older_than
        )

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._calls.run_idempotent("read", _blobs.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._calls.run_idempotent("write to", _blobs.remove, tenant, list(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._calls.run_idempotent("read", leases.holder, key)

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        grant, session = await self._calls.run_once(
            "write to", leases.acquire, key, after, self._owner
        )
        self._held_sessions[key] = session
        return grant

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._calls.run_idempotent("write to", leases.release, key, epoch)
        session = self._held_sessions.get(key)
        if session is not None and session.epoch == epoch:
            del self._held_sessions[key]

    async def heartbeat(self) -> HeartbeatRequests:
        reply = await self._calls.run_idempotent(
            "write to", leases.renew_heartbeat, self._owner, self._reported_ids
        )
        self._reported_ids = reply.ids
        return reply.requests

    async def news(self, at_most: float) -> None:
        """Return when the server has sent a notification, or after ``at_most`` seconds."""
        self._calls.listen(self._owner, self._notify)
        if not self._has_news:
            self._notified = anyio.Event()
            with anyio.move_on_after(at_most):
                await self._notified.wait()
        await anyio.lowlevel.checkpoint()
        self._has_news = False

    def _notify(self) -> None:
        self._has_news = True
        self._notified.set()

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._calls.run_idempotent("write to", leases.request_handover, key, holder.owner)

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return (
            await self._calls.run_idempotent("write to", inbox.post, key, tuple(items), limit)
            if items
            else 0
        )

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._calls.run_idempotent("read", inbox.take, key, epoch, limit)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        await self._calls.run_idempotent("write to", inbox.settle, key, epoch, list(op_ids))

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._calls.run_idempotent("read", inbox.waiting, dead_letters)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        await self._calls.run_idempotent("write to", inbox.reject, key, epoch, tuple(letters))

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._calls.run_idempotent("read", inbox.dead_letters, key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._calls.run_idempotent(
            "write to", inbox.drop_dead_letters, key, list(op_ids)
        )

    # directory

    async def sessions(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionKey | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        return await self._calls.run_idempotent(
            "read",
            directory.list_sessions,
            directory.PostgresListQuery(tenant, owner, tag, prefix, after, limit),
        )

    async def tenants(self) -> list[str]:
        return await self._calls.run_idempotent("read", directory.tenants)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        await self._calls.run_once("delete from", directory.delete, key, epoch)
        self._held_sessions.pop(key, None)

    async def scrub(self) -> None:
        """Rewrite the tables without what was removed."""
        await self._calls.run_long("scrub", directory.scrub)
