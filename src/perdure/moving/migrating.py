"""All sessions of a store into another one: each verified, and resumable after a kill.

A session is copied under leases in both stores, then read back and compared. What a killed run has
left half is removed and copied again; what is whole is passed over. The source keeps
everything.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Final, final

import anyio
import msgspec

from perdure.errors import (
    ConfigError,
    LeaseHeldError,
    NotStorableError,
    PerdureError,
    StoreError,
)
from perdure.lease.lease import obtain
from perdure.lease.terms import Lease, OnHeld
from perdure.model.keys import SessionKey, require_filters
from perdure.moving.beating import while_beating
from perdure.moving.bundle import Blob, End, Item, Writer
from perdure.moving.landing import land
from perdure.moving.taking import content, items
from perdure.session.lineage import followed
from perdure.store import Grant, Posted, Store

__all__ = ["Migration", "Progress", "migrate"]

AT_ONCE: Final = 8
PAGE: Final = 500
_ALL: Final = 1_000_000
TRIES: Final = 3
POSTS: Final = 100


class Progress(msgspec.Struct, frozen=True):
    """How far a migration is."""

    done: int
    total: int
    key: SessionKey
    """The session that was just done."""


class Migration(msgspec.Struct, kw_only=True):
    """What a migration has done."""

    sessions: int = 0
    """All that the source has."""
    copied: int = 0
    there: int = 0
    """Sessions that the target had already, the same in every record."""
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Of records, documents and blobs that were copied."""
    empty: int = 0
    """Sessions in which nothing was ever said, opened or not: there is nothing to copy."""
    posted: int = 0
    """Items that waited in inboxes, and do so there now."""
    failed: dict[str, str] = {}
    """Why a session was not copied, by its key."""


async def migrate(
    source: Store,
    target: Store,
    *,
    tenants: Sequence[str] | None = None,
    on_held: OnHeld = "handover",
    wait: float = 10.0,
    progress: Callable[[Progress], None] | None = None,
) -> Migration:
    """Copy every session of an open store into another open store, and verify each.

    May be repeated, also after it was killed: whole sessions are passed over. A session that
    differs from the source's is never replaced unless it is the beginning of the same one. What
    waits for sessions, also for those that nobody has opened yet, waits in the target afterwards.

    Args:
        source: Keeps everything.
        target: Where to.
        tenants: Whose sessions; None for everybody's.
        on_held: What to do about a session that somebody holds, in either store.
        wait: Seconds to wait for a holder.
        progress: Called after each session.

    """
    found = Migration()
    mover = _Mover(source, target, found, on_held=on_held, wait=wait)
    act = partial(_move_all, mover, source, tenants, progress)
    await while_beating((source, target), act)
    return found


async def _move_all(
    mover: _Mover,
    source: Store,
    tenants: Sequence[str] | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    names = await source.tenants() if tenants is None else tenants
    keys = [key for tenant in names for key in await _keys(source, tenant)]
    found, done = mover.found, 0
    found.sessions = len(keys)
    theirs = await source.waiting()
    keys += [
        key
        for key in sorted({*theirs}.difference(keys))
        if tenants is None or key.tenant in tenants
    ]

    async def move(key: SessionKey, limiter: anyio.CapacityLimiter) -> None:
        nonlocal done
        async with limiter:
            try:
                await mover.move(key)
            except PerdureError as error:
                found.failed[str(key)] = str(error)
        done += 1
        if progress is not None:
            progress(Progress(done, len(keys), key))

    for wave in await _waves(source, keys):
        limiter = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as group:
            for key in wave:
                group.start_soon(move, key, limiter)


async def _keys(store: Store, tenant: str) -> list[SessionKey]:
    keys: list[SessionKey] = []
    require_filters(tenant=tenant)
    while True:
        after = keys[-1] if keys else None
        page = await store.sessions(tenant=tenant, after=after, limit=PAGE)
        keys += [info.key for info in page]
        if len(page) < PAGE:
            return keys


async def _waves(store: Store, keys: list[SessionKey]) -> list[list[SessionKey]]:
    """Return the keys in groups, in which no session comes before the one that it forked from."""
    lineage = followed(store)
    parents: dict[SessionKey, SessionKey | None] = {}
    for key in keys:
        with contextlib.suppress(PerdureError):  # told when its turn comes
            base = await lineage.base_of(key)
            parents[key] = None if base is None else base.parent
    waves: list[list[SessionKey]] = []
    for key in keys:
        depth, above = 0, parents.get(key)
        while above is not None and depth < len(keys):
            depth, above = depth + 1, parents.get(above)
        while len(waves) <= depth:
            waves.append([])
        waves[depth].append(key)
    return waves


@final
class _Mover:
    def __init__(
        self, source: Store, target: Store, found: Migration, *, on_held: OnHeld, wait: float
    ) -> None:
        self._source = source
        self._target = target
        self.found = found
        self._on_held: OnHeld = on_held
        self._wait = wait

    async def move(self, key: SessionKey) -> None:
        async with self._lease(self._source, key) as grant:
            if await self._is_empty(key):
                self.found.empty += 1
            else:
                await self._bring(key)
            await self._post(key, grant)

    async def _is_empty(self, key: SessionKey) -> bool:
        """Say whether nothing was ever said in a session, perhaps since nobody has opened it."""
        if (await self._source.read_documents(key, ())).manifest is not None:
            return False
        head = await self._source.head(key)
        async with contextlib.aclosing(content(self._source, key, head)) as records:
            return await anext(records, None) is None

    async def _bring(self, key: SessionKey) -> None:
        for left in reversed(range(TRIES)):
            if await self._is_there(key):
                self.found.there += 1
                return
            try:
                await self._copy(key)
            except (LeaseHeldError, ConfigError):
                # Somebody was there first: a killed run may arrive at a server after its end.
                if not left:
                    raise
            else:
                return

    async def _copy(self, key: SessionKey) -> None:
        digest = _Digest()
        landed = await land(self._target, key, digest.through(items(self._source, key)))
        if await _digest(self._target, key) != digest.value:
            message = (
                f"session {key} is not the same in {self._target.location} after it was "
                "written: somebody else writes there, or the store is not sound"
            )
            raise StoreError(message, key=str(key))
        self.found.copied += 1
        self.found.records += landed.records
        self.found.blobs += landed.blobs
        self.found.bytes += landed.bytes

    async def _is_there(self, key: SessionKey) -> bool:
        """Say whether the target has all of a session; a beginning of it is removed."""
        if not await self._target.head(key):
            return False
        if await _digest(self._target, key) != await _digest(self._source, key):
            await self._require_beginning(key)
        elif await self._goes_on(key):
            return True
        async with self._lease(self._target, key) as grant:
            # What an earlier run passed on comes again behind the session.
            waiting = await self._target.take(key, grant.epoch, limit=_ALL)
            if waiting:
                await self._source.post(key, waiting)
            await self._target.delete(key, grant.epoch)
        return False

    async def _goes_on(self, key: SessionKey) -> bool:
        """Say whether the target has what a session goes on behind: a fork's parent, as it was."""
        lineage = followed(self._target)
        base = await lineage.base_of(key)
        if base is None or base.parent is None:
            return True
        if await lineage.has(base.parent, base.at, base.epoch):
            return True
        newer = await lineage.newest_base(key)
        return newer is not None and newer.parent is None

    async def _require_beginning(self, key: SessionKey) -> None:
        """Raise unless what the target has may be what a killed run has left."""
        theirs, ours = _lines(self._target, key), _lines(self._source, key)
        async with contextlib.aclosing(theirs), contextlib.aclosing(ours):
            async for line in theirs:
                if line != await anext(ours, None):
                    message = (
                        f"{self._target.location} has another session {key}: "
                        "rename or delete one of them"
                    )
                    raise StoreError(message, key=str(key))

    async def _post(self, key: SessionKey, grant: Grant) -> None:
        """Pass on what waits in the inbox; who posts the same again posts nothing.

        Raises:
            NotStorableError: The target refuses an item; it waits on, and those behind it came.

        """
        refused: dict[str, NotStorableError] = {}
        while True:
            limit = len(refused) + POSTS
            found = await self._source.take(key, grant.epoch, limit=limit)
            waiting = [item for item in found if item.op_id not in refused]
            if not waiting:
                break
            refused |= await self._passed_on(key, waiting)
            done = [item.op_id for item in waiting if item.op_id not in refused]
            await self._source.settle(key, grant.epoch, done)
            self.found.posted += len(done)
        if refused:
            first = next(iter(refused.values()))
            message = f"{len(refused)} of its posts cannot be stored there, and wait on: {first}"
            raise NotStorableError(message, key=str(key), count=len(refused)) from first

    async def _passed_on(
        self, key: SessionKey, waiting: Sequence[Posted]
    ) -> dict[str, NotStorableError]:
        """Post items to the target; return why those were refused that were."""
        try:
            await self._target.post(key, waiting)
        except NotStorableError as error:
            if len(waiting) == 1:
                return {waiting[0].op_id: error}
        else:
            return {}
        middle = len(waiting) // 2
        head = await self._passed_on(key, waiting[:middle])
        return head | await self._passed_on(key, waiting[middle:])

    @contextlib.asynccontextmanager
    async def _lease(self, store: Store, key: SessionKey) -> AsyncGenerator[Grant, None]:
        grant = await obtain(
            store,
            key,
            me=store.owner,
            lease=Lease(),
            on_held=self._on_held,
            wait=self._wait,
            clock=anyio.current_time,
        )
        try:
            yield grant
        finally:
            with anyio.CancelScope(shield=True):
                await store.release(key, grant.epoch)


@final
class _Digest:
    """What all of a session comes to, wherever it is kept: its records name its blobs."""

    def __init__(self) -> None:
        self._writer = Writer()
        self._hash = hashlib.sha256()

    @property
    def value(self) -> str:
        return self._hash.hexdigest()

    async def through(self, found: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """Pass items on, and take them in."""
        async with contextlib.aclosing(found):
            async for item in found:
                if not isinstance(item, Blob | End):
                    self._hash.update(self._writer.line(item))
                yield item


async def _digest(store: Store, key: SessionKey) -> str:
    digest = _Digest()
    async with contextlib.aclosing(digest.through(items(store, key, blobs=False))) as found:
        async for _ in found:
            pass
    return digest.value


async def _lines(store: Store, key: SessionKey) -> AsyncGenerator[bytes, None]:
    """Yield what counts of a session: its records name its blobs."""
    writer = Writer()
    async with contextlib.aclosing(items(store, key, blobs=False)) as found:
        async for item in found:
            if not isinstance(item, End):
                yield writer.line(item)
