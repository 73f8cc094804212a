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
import msgspec

from perdure._lib.ids import random_id
from perdure._lib.loop import unopened
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, SessionQuery
from perdure.records.records import Record
from perdure.records.rows import NO_END, LogPart
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
    RestoreData,
    SessionInfo,
    Status,
    Taken,
    Terms,
    past_damage,
)
from perdure.stores.postgres import (
    documents as content,
    inbox,
    leases,
    log,
)
from perdure.stores.postgres.calls import PARALLELISM, Calls
from perdure.stores.postgres.connections import Password, settings_of
from perdure.stores.postgres.log import HeldSessionsByKey, OwnedSession
from perdure.stores.postgres.schema import Statements

_CAPABILITIES = Capabilities(
    durability="unknown",
    batch_max=128,
    parallelism=PARALLELISM,
    shared=True,
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
            raise ConfigError(
                "password= and a password in the URL: leave one of them out", option="password"
            )
        self._password = password
        self._owner = owner or random_id()
        self._sql = Statements(self._settings.schema)
        self._opened: Calls | None = None
        self._connection_hook: ConnectionHook | None = None
        self._held_sessions: HeldSessionsByKey = {}
        self._reported_ids: tuple[int, ...] = ()
        self._notified = anyio.Event()

    def __repr__(self) -> str:
        return f"PostgresStore({self.location!r})"

    @property
    def capabilities(self) -> Capabilities:
        """Properties of this store; its durability is known once it is open."""
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
        self._notified = anyio.Event()
        calls = Calls(self._settings, self._sql)
        await calls.open(self._owner, self._password, self._connection_hook)
        self._opened = calls

    async def aclose(self) -> None:
        """Close every connection; leases that were not released look like those of a dead owner."""
        calls, self._opened = self._opened, None
        self._held_sessions.clear()
        if calls is not None and calls.is_in_this_process:
            await calls.close(self._owner)

    def connection_pool(self) -> ConnectionPool:
        return ConnectionPool() if self._opened is None else self._opened.pool()

    def watch_connections(self, hook: ConnectionHook) -> None:
        self._connection_hook = hook

    @property
    def _calls(self) -> Calls:
        calls = self._opened
        if calls is not None and calls.is_in_this_process:
            return calls
        raise unopened(self.location, elsewhere=calls is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append all batches in one transaction."""
        try:
            calls = self._calls
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
        before, limit = NO_END if before is None else before, NO_END if limit is None else limit
        part = LogPart(after, before, limit, reverse)
        # Row by row past damage, so that a damaged row hides no others.
        max_rows = 1 if past_damage.get() else log.PAGE_ROWS
        count = min(max_rows, limit)
        start = await self._calls.run_idempotent("read", log.read_start, key, part, count)
        if start is None:
            return
        reader, records = start
        while True:
            if records:
                yield LogChunk(tuple(records))
            if reader.is_done:
                return
            records = await self._calls.run_idempotent("read", log.read_page, reader, max_rows)

    async def head(self, key: SessionKey) -> int:
        state = await self._calls.run_idempotent("read", log.state_of, key)
        return 0 if state is None or state.deleted else state.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole commits that end before a record."""
        return await self._calls.run_idempotent("trim", content.trim, key, epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._calls.run_together("read", content.read, (key, names))

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None, *, newest: int = 0
    ) -> RestoreData:
        """Read documents, and the log after them, in one round trip."""
        (found,) = await self.read_many_for_restore([key], names)
        return found or RestoreData(await self.read_documents(key, names))

    async def read_many_for_restore(
        self, keys: Sequence[SessionKey], names: Collection[str] | None = None
    ) -> list[RestoreData | None]:
        """Read documents, and the logs after them, of several sessions in one round trip."""
        return await self._calls.run_idempotent("read", content.read_many, keys, names)

    async def read_logs(self, keys: Sequence[SessionKey]) -> list[tuple[Record, ...] | None]:
        """Read the logs of several sessions in one round trip."""
        return await self._calls.run_idempotent("read", content.read_logs, keys)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one transaction."""
        fold = content.Fold(self._row_id(key), key, dict(documents), manifest)
        size = sum(map(len, documents.values()))
        await self._calls.run_together("write to", content.write, fold, size=size)

    def _row_id(self, key: SessionKey) -> int:
        session = self._held_sessions.get(key)
        return 0 if session is None else session.id

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._calls.run_idempotent("write to", content.put, tenant, dict(blobs))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._calls.run_idempotent("read", content.get, tenant, name)

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        return await self._calls.run_long(
            "sweep", content.sweep, tenant, frozenset(reachable), older_than, among
        )

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        return await self._calls.run_idempotent("write to", content.renew, tenant, list(names))

    async def blob_names(self, tenant: str) -> list[str]:
        return await self._calls.run_idempotent("read", content.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._calls.run_idempotent("write to", content.remove, tenant, list(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return await self._calls.run_together("read", leases.holders, key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        wanted = leases.Acquire(key, terms)
        answer: Held | leases.Acquired = await self._calls.run_together(
            "write to", leases.acquire, wanted, is_repeatable=False
        )
        if isinstance(answer, Held):
            return answer
        taken, state = answer
        self._held_sessions[key] = OwnedSession(
            state.id, state.epoch, state.head, state.crc, state.owner
        )
        return taken

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self._calls.run_idempotent("write to", leases.publish, key, epoch)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self._calls.run_idempotent("read", leases.drafts, tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        lease = (self._row_id(key), key, epoch)
        await self._calls.run_together("write to", leases.release, lease)
        session = self._held_sessions.get(key)
        if session is not None and session.epoch == epoch:
            del self._held_sessions[key]

    async def heartbeat(self) -> HeartbeatRequests:
        requests, self._reported_ids = await self._calls.run_idempotent(
            "write to", leases.renew_heartbeat, self._owner, self._reported_ids
        )
        return requests

    async def wait_for_notification(self, timeout: float) -> None:
        """Return when the server has sent a notification, or after ``timeout`` seconds."""
        self._calls.listen(self._owner, self._notify)
        with anyio.move_on_after(timeout):
            await self._notified.wait()
        self._notified = anyio.Event()

    def _notify(self) -> None:
        self._notified.set()

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._calls.run_idempotent("write to", leases.request_handover, key, holder.owner)

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return (
            await self._calls.run_idempotent("write to", inbox.enqueue, key, tuple(items), limit)
            if items
            else 0
        )

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._calls.run_idempotent("read", inbox.receive, key, epoch, limit)

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        await self._calls.run_idempotent(
            "write to", inbox.ack, key, epoch, tuple(op_ids), tuple(dead)
        )

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._calls.run_idempotent(
            "read", inbox.sessions_with_pending_items, dead_letters
        )

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._calls.run_idempotent("read", inbox.dead_letters, key)

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        return await self._calls.run_idempotent("read", content.list_sessions, query)

    async def tenants(self) -> list[str]:
        return await self._calls.run_idempotent("read", content.tenants)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        await self._calls.run_once("delete from", content.delete, key, epoch, keep_posts)
        self._held_sessions.pop(key, None)

    async def scrub(self) -> None:
        """Rewrite the tables without what was removed."""
        await self._calls.run_long("scrub", content.scrub)
