"""Exclusive access to sessions: alone with one, under its lease, appending as its holder.

Forks, copies, renames, deletions and prunes of sessions that are not open here go through this.
Each may be killed anywhere: its steps are ordered so that running it again completes it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, final

import anyio
import msgspec

from perdure.errors import InvalidArgumentError, SessionNotFoundError, StoreError
from perdure.lease import OnHeld, acquire_lease
from perdure.lineage.store import Lineage, followed
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.records import BASE, EPOCH, Entry, Record
from perdure.session.fold import fold
from perdure.session.runtime import exclusive
from perdure.store import Batch, Status, first_record

if TYPE_CHECKING:
    from perdure.session.base import SessionBase
    from perdure.session.lifecycle import SessionLifecycle
    from perdure.session.runtime import Runtime


_TRIES = 3
_NEWEST = 8


class Terms(msgspec.Struct, frozen=True):
    """What to do about a session that another process holds."""

    on_held: OnHeld = "handover"
    wait: float = 10.0


class LogOrigin(msgspec.Struct, frozen=True):
    """How far a session's own log has come."""

    base: Origin | None = None
    goes_on: bool = False
    """Whether there is more than the beginning."""


@final
class HeldSession:
    """A session that is held for a change, and is not open in this process."""

    def __init__(self, store: Lineage, key: SessionKey, epoch: int, head: int) -> None:
        self._store = store
        self.key: SessionKey = key
        self.epoch: int = epoch
        self.head: int = head
        self.is_there: bool = True

    async def append(self, *entries: Entry) -> None:
        """Make entries durable at the end of the log.

        Raises:
            LeaseLostError: Another process took the session over.
            StoreError: The store refuses them, or cannot be reached.

        """
        batch = Batch(self.key, self.epoch, self.head + 1, entries)
        error: Exception | None = None
        for _ in range(_TRIES):
            (outcome,) = await self._store.append_many([batch])
            if outcome.status is Status.OK:
                self.head += len(entries)
                return
            error = outcome.error
            if outcome.status in (Status.CONFLICT, Status.PERMANENT):
                break
        raise error or StoreError(f"session {self.key}: the store would not take a record")

    async def announce(self, base: Origin, *more: Entry) -> None:
        """Append a base, and what is to be durable with it; it does not count yet."""
        await self.append(Entry(BASE, encode(base)), *more)

    async def rebase(self, base: Origin, *more: Entry) -> None:
        """Append a base, and what is to be durable with it."""
        await self.announce(base, *more)
        self.count(base)

    def count(self, base: Origin) -> None:
        """Have a base that was announced count from now on."""
        self._store.rebased(self.key, self.epoch, base)

    async def delete(self) -> None:
        """Remove the session."""
        await self._store.delete(self.key, self.epoch)
        self.is_there = False


@final
class ExclusiveAccess:
    """The sessions of one manager, to be changed from outside."""

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle) -> None:
        self.runtime: Runtime = runtime
        self.lifecycle: SessionLifecycle = lifecycle
        self.store: Lineage = followed(runtime.store)

    def exclusive(self, key: SessionKey) -> AbstractAsyncContextManager[None]:
        """Keep others of this process from opening or closing a session meanwhile."""
        return exclusive(self.runtime.pending_loads, key)

    @asynccontextmanager
    async def held(self, key: SessionKey, terms: Terms) -> AsyncGenerator[HeldSession, None]:
        """Hold a session that is not open here; the caller is alone with it.

        Raises:
            LeaseHeldError: Another process keeps holding it.

        """
        runtime = self.runtime
        grant = await acquire_lease(
            self.store,
            key,
            me=self.store.owner,
            watch=runtime.watch,
            on_held=terms.on_held,
            wait=terms.wait,
        )
        hold = HeldSession(self.store, key, grant.epoch, grant.head)
        try:
            yield hold
        finally:
            if hold.is_there:
                with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                    await self.store.release(key, grant.epoch)

    def open_here(self, key: SessionKey) -> SessionBase | None:
        """Return a session that is open in this process, and can be saved."""
        session = self.runtime.sessions.get(key)
        saves = session is not None and session.is_writable and not session._tracked.quarantined
        return session if saves else None

    async def fold(self, hold: HeldSession) -> None:
        """Have the documents be as of the newest record, and the manifest name the base."""
        limits = self.runtime.limits
        await fold(self.store, hold.key, epoch=hold.epoch, upto=hold.head, limits=limits)

    async def announce_open(self, session: SessionBase, base: Origin) -> None:
        """Append a base to a session that is open here; it does not count yet."""
        session._accept((Entry(BASE, encode(base)),))
        await session.save()

    async def rebase_open(self, session: SessionBase, base: Origin) -> None:
        """Append a base to a session that is open here, and fold."""
        await self.announce_open(session, base)
        await self.count_open(session, base)

    async def count_open(self, session: SessionBase, base: Origin) -> None:
        """Have a base that was announced count from now on, and fold."""
        self.store.rebased(session.key, session.epoch, base)
        await self.fold_open(session)

    async def fold_open(self, session: SessionBase) -> None:
        """Fold a session that is open here; a failure is logged."""
        await self.runtime.saver.exclusive(session._tracked, lambda: self.lifecycle.fold(session))

    async def begun(self, key: SessionKey) -> LogOrigin:
        """Look how a session's own log begins."""
        base: Origin | None = None
        async with aclosing(self.store.inner.read_log(key)) as log:
            async for chunk in log:
                for record in chunk.records:
                    if record.kind == BASE and base is None:
                        base = decode(record.payload, Origin)
                    elif record.kind != EPOCH:
                        return LogOrigin(base, goes_on=True)
        return LogOrigin(base)

    async def record(self, key: SessionKey, seq: int) -> Record | None:
        """Return one durable record of a session, None if there is none.

        One of the newest is what is mostly asked for, and found without a look at those before.
        """
        newest = self.store.read_log(key, reverse=True, limit=_NEWEST)
        exactly = self.store.read_log(key, after=seq - 1, before=seq + 1)
        async with aclosing(newest), aclosing(exactly):
            for log in (newest, exactly):
                async for chunk in log:
                    for record in chunk.records:
                        if record.seq == seq:
                            return record
        return None

    async def newest(self, key: SessionKey) -> Record | None:
        """Return the newest record of a session's own log."""
        return await first_record(self.store.inner.read_log(key, reverse=True, limit=1))

    async def head(self, key: SessionKey) -> int:
        """Return a session's durable end; what is unsaved of it here is saved first.

        Raises:
            SessionNotFoundError: There is no such session.

        """
        session = self.open_here(key)
        if session is not None:
            await session.save()
        head = await self.store.head(key)
        if not head:
            raise SessionNotFoundError(f"there is no session {key}", key=str(key))
        return head


def require_different(key: SessionKey, new: SessionKey, what: str) -> None:
    """Raise ConfigError if a session is to become itself."""
    if key == new:
        message = f"{what}: {key} is the session itself: give another id"
        raise InvalidArgumentError(message, key=str(key))


def group_of(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries as whole groups."""
    if entries and not entries[-1].end:
        return (*entries[:-1], entries[-1]._replace(end=True))
    return tuple(entries)
