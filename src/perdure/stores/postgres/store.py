"""The PostgreSQL store: the port of `perdure.store` on a database that many servers share.

Use it from the event loop that opened it. Each call is one transaction on a connection of its
own, in one hop into a thread, or for plain appends from the event loop: so it has its effect
whole or not at all, whoever stopped waiting for it meanwhile. Every call has a deadline; a
connection whose server says nothing until then is cut.
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
from perdure.stores.postgres import blobs as _blobs
from perdure.stores.postgres import directory, inbox, leases, log
from perdure.stores.postgres import documents as _documents
from perdure.stores.postgres.calls import PARALLELISM, Calls, open_calls
from perdure.stores.postgres.connections import Password
from perdure.stores.postgres.rows import MAX_RECORD_BYTES, Holding, RowReader
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
        schema: The schema of the tables, made when it is missing; by default ``perdure``.
        connections: The most connections at once, one more for listening aside.
        owner: This store's id as a holder of leases; by default one that nobody can guess.
        password: The password, or a function that returns one, plain or async: it is called for
            each new connection, so that a token may expire.

    Raises:
        ConfigError: The URL or an argument does not fit.

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
        self._held: Holding = {}
        self._heard: tuple[int, ...] = ()
        self._news = False
        self._bell = anyio.Event()

    def __repr__(self) -> str:
        return f"PostgresStore({self.location!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What this store is; its durability is known once it is open."""
        here = self._opened
        if here is None:
            return _CAPABILITIES
        return msgspec.structs.replace(_CAPABILITIES, durability=here.durability)

    @property
    def owner(self) -> str:
        """The id of this store object as a holder of leases."""
        return self._owner

    @property
    def location(self) -> str:
        """User, host, database and schema; no password."""
        return self._settings.location

    async def open(self) -> None:
        """Connect, make or update the tables, and become known as an owner.

        Raises:
            MissingExtraError: The driver is not installed.
            ConfigError: The URL is not one, or the database's encoding is not UTF-8.
            StoreUnavailableError: The server cannot be reached, or refuses.
            UnsupportedVersionError: A newer release has made the tables.

        """
        if self._opened:
            return
        self._opened = await open_calls(self._settings, self._sql, self._owner, self._password)

    async def aclose(self) -> None:
        """Close every connection; leases that were not released look like a dead owner's."""
        here, self._opened = self._opened, None
        self._held.clear()
        if here is not None and here.is_here:
            await here.close(self._owner)

    @property
    def _calls(self) -> Calls:
        return self._require_open()

    def _require_open(self) -> Calls:
        here = self._opened
        if here is not None and here.is_here:
            return here
        raise unopened(self.location, elsewhere=here is not None)

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Append each batch in one transaction for all of them."""
        try:
            here = self._require_open()
        except StoreUnavailableError as error:
            return [Outcome(Status.TRANSIENT, error)] * len(batches)
        return await here.append(self._held, batches)

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
        state = await self._calls.again("read", log.state_of, key)
        if state is None or state.deleted:
            return
        low = max(after + 1, state.since)
        high = state.head if before is None else min(before - 1, state.head)
        run = RowReader(key, state, reverse=reverse)
        left = state.head if limit is None else limit
        start, end = low, high
        most = 1 if past_damage.get() else log.PAGE_ROWS  # one damaged row hides no others then
        while left > 0 and low <= high:
            span = log.RowSpan(key, state, low, high, reverse, min(left, most))
            page = await self._calls.again("read", log.page, run, span)
            records = [one for one in page.records if start <= one.seq <= end][:left]
            left -= len(records)
            if records:
                yield LogChunk(tuple(records))
            if page.on is None:
                break
            low, high = (low, page.on) if reverse else (page.on, high)

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        state = await self._calls.again("read", log.state_of, key)
        return 0 if state is None or state.deleted else state.head

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove whole commits that end before a record."""
        return await self._calls.again("trim", directory.trim, key, epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        return await self._calls.again("read", _documents.read, key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Replace documents and manifest in one transaction."""
        await self._calls.again("write to", _documents.write, key, dict(documents), manifest)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await self._calls.again("write to", _blobs.put, tenant, dict(blobs))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, verified; None when there is none."""
        return await self._calls.again("read", _blobs.get, tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        return await self._calls.long(
            "sweep", _blobs.sweep, tenant, frozenset(reachable), older_than
        )

    async def blob_names(self, tenant: str) -> list[str]:
        """List the tenant's blobs that can be read, by name."""
        return await self._calls.again("read", _blobs.names, tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self._calls.again("write to", _blobs.remove, tenant, list(names))

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Say who has the session; None when nobody ever had."""
        return await self._calls.again("read", leases.holder, key)

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        grant, held = await self._calls.once("write to", leases.acquire, key, after, self._owner)
        self._held[key] = held
        return grant

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._calls.again("write to", leases.release, key, epoch)
        held = self._held.get(key)
        if held is not None and held.epoch == epoch:
            del self._held[key]

    async def heartbeat(self) -> HeartbeatRequests:
        """Renew this owner's heartbeat, and return what others want."""
        heard = await self._calls.again("write to", leases.beat, self._owner, self._heard)
        self._heard = heard.ids
        return heard.asked

    async def news(self, at_most: float) -> None:
        """Return when the server has said that there is news, or after ``at_most`` seconds."""
        self._calls.listen(self._owner, self._notify)
        if not self._news:
            self._bell = anyio.Event()
            with anyio.move_on_after(at_most):
                await self._bell.wait()
        await anyio.lowlevel.checkpoint()
        self._news = False

    def _notify(self) -> None:
        self._news = True
        self._bell.set()

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        """Ask the holder for the session."""
        await self._calls.again("write to", leases.ask, key, holder.owner)

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        return (
            await self._calls.again("write to", inbox.post, key, tuple(items), limit)
            if items
            else 0
        )

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        return await self._calls.again("read", inbox.take, key, epoch, limit)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        await self._calls.again("write to", inbox.settle, key, epoch, list(op_ids))

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        return await self._calls.again("read", inbox.waiting, dead_letters)

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        await self._calls.again("write to", inbox.reject, key, epoch, tuple(letters))

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        return await self._calls.again("read", inbox.dead_letters, key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._calls.again("write to", inbox.drop_dead_letters, key, list(op_ids))

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
        return await self._calls.again(
            "read",
            directory.listed,
            directory.PostgresListQuery(tenant, owner, tag, prefix, after, limit),
        )

    async def tenants(self) -> list[str]:
        """List the tenants that have anything here, by name."""
        return await self._calls.again("read", directory.tenants)

    async def delete(self, key: SessionKey, epoch: int) -> None:
        await self._calls.once("delete from", directory.delete, key, epoch)
        self._held.pop(key, None)

    async def scrub(self) -> None:
        """Rewrite the tables without what was removed."""
        await self._calls.long("scrub", directory.scrub)
