"""All sessions of a store into another one: each verified, resumable after a kill, repeatable.

A session is read without a lease, also beside the program that writes it, is written under a lease
in the target, then read back and compared. Each further run brings what has come since: it
goes on behind what is there, once that was compared record by record. The source keeps
everything, what waits in inboxes included.

Numbers decide how. A lease in the target takes the number behind its last record. Where
the source has an epoch of its own there, the log goes on. Where a program has held the session all
the while, a record has that number, so the target's copy is removed and written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final, final

import anyio
import msgspec

from perdure.codec.json import decode, encode
from perdure.errors import (
    ConfigError,
    LeaseHeldError,
    LeaseLostError,
    NotStorableError,
    PerdureError,
    StoreError,
    StoreUnavailableError,
)
from perdure.lease.lease import obtain
from perdure.lease.terms import Lease, OnHeld
from perdure.lease.watch import OwnerWatch
from perdure.memory.documents import Taken
from perdure.model.base import Base
from perdure.model.keys import SessionKey, require_filters
from perdure.model.manifest import Manifest
from perdure.model.records import FORK, TAKEN
from perdure.moving.beating import while_beating
from perdure.moving.bundle import Blob, End, Item, Writer, neutral
from perdure.moving.landing import ALL, Landed, go_on, land
from perdure.moving.taking import content, items
from perdure.session.lineage import followed
from perdure.store import Document, Grant, Posted, Store

__all__ = [
    "AT_ONCE",
    "PAUSE",
    "TRIES",
    "Migration",
    "Progress",
    "keys_of",
    "migrate",
    "was_removed",
]

AT_ONCE: Final = 8
PAGE: Final = 500
TRIES: Final = 3
PAUSE: Final = 0.2
"""Seconds before another look at a session that changed while it was read."""
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
    """Sessions that were written whole."""
    continued: int = 0
    """Sessions of which the target had the beginning, and that go on behind it."""
    there: int = 0
    """Sessions that the target had already, the same in every record."""
    deleted: int = 0
    """Sessions that an earlier run had copied, and that were deleted in the source since."""
    open: int = 0
    """Sessions that somebody has open in the source: run again when that program has ended."""
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Of records, documents and blobs that were copied."""
    empty: int = 0
    """Sessions in which nothing was ever said, opened or not: there is nothing to copy."""
    posted: int = 0
    """Items that wait in the source's inboxes, and since this run in the target's, too."""
    dead_letters: int = 0
    """Items that the source has set aside as dead letters: they stay there, and are not copied."""
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

    May be repeated, also after it was killed, and beside a program that writes to the source:
    each run brings what has come since the last one. A session that the target has is
    never replaced unless it is the beginning of the source's. What waits for sessions, also for
    those that nobody has opened yet, waits in the target, too. The source stays as it is.

    Args:
        source: Where from. It is only read, without a lease; only a session that nobody has opened,
            and for which something waits, is leased for a moment.
        target: Where to.
        tenants: Whose sessions; None for everybody's.
        on_held: What to do about a session that somebody holds in the target.
        wait: Seconds to wait for a holder.
        progress: Called after each session.

    """
    found = Migration()
    mover = _Mover(source, target, found, on_held=on_held, wait=wait)
    act = partial(_move_all, mover, source, tenants, progress)
    await while_beating((source, target), act, watches=mover.watches)
    return found


async def _move_all(
    mover: _Mover,
    source: Store,
    tenants: Sequence[str] | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    names = await source.tenants() if tenants is None else tenants
    keys = [key for tenant in names for key in await keys_of(source, tenant)]
    found, done = mover.found, 0
    found.sessions = len(keys)
    mover.waiting = {
        key for key in await source.waiting() if tenants is None or key.tenant in tenants
    }
    keys += sorted(mover.waiting.difference(keys))

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

    mover.parents = await _parents(source, keys)
    for wave in _waves(mover.parents, keys):
        limiter = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as group:
            for key in wave:
                group.start_soon(move, key, limiter)
    await mover.follow_deletions(keys, tenants)
    found.dead_letters = await _dead_letters(source, tenants)


async def _dead_letters(store: Store, tenants: Sequence[str] | None) -> int:
    if not store.capabilities.dead_letters:
        return 0
    keys = await store.waiting(dead_letters=True)
    wanted = [key for key in keys if tenants is None or key.tenant in tenants]
    return sum([len(await store.dead_letters(key)) for key in wanted])


async def keys_of(store: Store, tenant: str) -> list[SessionKey]:
    """List all sessions of a tenant."""
    keys: list[SessionKey] = []
    require_filters(tenant=tenant)
    while True:
        after = keys[-1] if keys else None
        page = await store.sessions(tenant=tenant, after=after, limit=PAGE)
        keys += [info.key for info in page]
        if len(page) < PAGE:
            return keys


async def _parents(store: Store, keys: list[SessionKey]) -> dict[SessionKey, SessionKey | None]:
    lineage = followed(store)
    parents: dict[SessionKey, SessionKey | None] = {}
    for key in keys:
        with contextlib.suppress(PerdureError):  # told when its turn comes
            base = await lineage.base_of(key)
            parents[key] = None if base is None else base.parent
    return parents


def _waves(
    parents: dict[SessionKey, SessionKey | None], keys: list[SessionKey]
) -> list[list[SessionKey]]:
    """Return the keys in groups, in which no session comes before the one that it forked from."""
    waves: list[list[SessionKey]] = []
    for key in keys:
        depth, above = 0, parents.get(key)
        while above is not None and depth < len(keys):
            depth, above = depth + 1, parents.get(above)
        while len(waves) <= depth:
            waves.append([])
        waves[depth].append(key)
    return waves


class _Compared(msgspec.Struct, frozen=True):
    """How what the target has of a session stands to what the source has."""

    head: int = 0
    """The target's last record."""
    epoch: int = 0
    """Its newest epoch, as it was before it was read."""
    next: int = 0
    """The source's first record that the target does not have; 0 for none."""
    pruned: bool = False
    """Whether the target has history that the source has no more."""
    proven: bool = True
    """Whether records of both were compared, unless one of them has none."""
    differs: int = 0
    """The first record that the source has not, or has otherwise; 0 for none."""
    taken: frozenset[str] = frozenset()
    """What was posted and is in the source's log, by op id."""


class _ChangedError(StoreUnavailableError):
    """The session changed while it was read: the next look finds it whole."""


@final
class _Mover:
    def __init__(
        self, source: Store, target: Store, found: Migration, *, on_held: OnHeld, wait: float
    ) -> None:
        self._source = source
        self._target = target
        self.found = found
        self.waiting: set[SessionKey] = set()
        """Sessions for which something waits in the source."""
        self.parents: dict[SessionKey, SessionKey | None] = {}
        self._on_held: OnHeld = on_held
        self._wait = wait
        self._blobs: dict[str, set[str]] = {}
        """By tenant, the names of blobs that the target has."""
        self._gone: set[SessionKey] = set()
        self.watches: dict[str, OwnerWatch] = {
            store.owner: OwnerWatch(Lease(), anyio.current_time) for store in (source, target)
        }

    async def move(self, key: SessionKey) -> None:
        """Bring what the target lacks of a session, and what waits for it."""
        holder = await self._source.holder(key)
        if holder is not None and holder.deleted and key not in self.waiting:
            self._gone.add(key)  # since it was listed
            return
        if holder is not None and not holder.released and holder.alive is not False:
            self.found.open += 1
        if await self._is_known(key):
            self.found.there += 1
        elif await self._is_empty(key):
            self.found.empty += 1
            self._require_beginning(key, await self._compare(key))
        else:
            await self._bring(key)
        if key in self.waiting:
            await self._post(key)

    async def _is_empty(self, key: SessionKey) -> bool:
        """Say whether nothing was ever said in a session, perhaps since nobody has opened it."""
        if (await self._source.read_documents(key, ())).manifest is not None:
            return False
        head = await self._source.head(key)
        async with contextlib.aclosing(content(self._source, key, head)) as records:
            return await anext(records, None) is None

    async def _bring(self, key: SessionKey) -> None:
        for left in reversed(range(TRIES)):
            try:
                await self._catch_up(key)
            except (LeaseHeldError, ConfigError, StoreUnavailableError):
                # It changed on either side meanwhile: a killed run may arrive after its end.
                if not left:
                    raise
            else:
                return
            await anyio.sleep(PAUSE)

    async def _catch_up(self, key: SessionKey) -> None:
        before = await _state(self._source, key)
        lives = await self._lives(key)
        note = partial(self._note, key, lives)
        seen = await self._compare(key)
        if not seen.head:
            landed = await self._written(key, partial(land, self._target, key, on_epoch=note))
            self.found.copied += 1
        elif (
            await self._is_another_life(key, seen, before)
            or not await self._goes_on(key)
            or self._is_replaced(seen)
        ):
            await self._remove(key, seen)
            landed = await self._written(key, partial(land, self._target, key, on_epoch=note))
            self.found.copied += 1
        elif not seen.next and await self._same_documents(key):
            self.found.there += 1
            await self._acknowledge(key, seen.epoch, before, lives)
            return
        else:
            async with self._lease(self._target, key) as grant:
                self._require_unchanged(seen, grant)
                landed = await self._written(
                    key, partial(go_on, self._target, grant, on_epoch=note)
                )
            self.found.continued += 1
        self.found.records += landed.records
        self.found.blobs += landed.blobs
        self.found.bytes += landed.bytes
        await self._acknowledge(key, landed.epoch, before, lives)

    async def _is_another_life(
        self, key: SessionKey, seen: _Compared, before: _State | None
    ) -> bool:
        """Say whether the source has deleted what the target has, and begun it anew.

        Raises:
            StoreError: The target has other records, and they did not come from here.

        """
        if not seen.differs and seen.proven:
            return False
        untouched = await self._has(key, _untouched(self._source, key, seen.epoch))
        if untouched and not seen.differs:
            return True  # of the records that it has, the source has pruned all
        lives = await self._lives(key)
        if untouched and lives and not any([await self._has(key, life) for life in lives]):
            return True
        now = await _state(self._source, key)
        if before is None or now is None or now.epoch != before.epoch:
            raise _ChangedError(f"{key} was deleted while it was read: try again", key=str(key))
        self._require_beginning(key, seen)
        message = (
            f"{self._target.location} has a session {key} with other history than what was "
            f"left of it in {self._source.location} after pruning: {_way_out(key)}"
        )
        raise StoreError(message, key=str(key), seq=seen.head)

    @staticmethod
    def _is_replaced(seen: _Compared) -> bool:
        """Say whether the log that is there cannot go on under its numbers."""
        return seen.pruned or 0 < seen.next <= seen.head + 1

    async def _written(
        self, key: SessionKey, write: Callable[[AsyncGenerator[Item, None]], Awaitable[Landed]]
    ) -> Landed:
        """Write a session into the target, read it back and compare."""
        before = await self._base(key)
        digest = _Digest()
        landed = await write(self._new(key, digest.through(items(self._source, key))))
        if before != await self._base(key):
            message = f"history of {key} was pruned or moved while it was read: try again"
            raise _ChangedError(message, key=str(key))
        if await _digest(self._target, key) != digest.value:
            message = (
                f"session {key} is not the same in {self._target.location} after it was "
                "written: somebody else writes there, or the store is not sound"
            )
            raise StoreError(message, key=str(key))
        return landed

    async def _base(self, key: SessionKey) -> Base | None:
        manifest = (await self._source.read_documents(key, ())).manifest
        return None if manifest is None else manifest.base

    async def _new(
        self, key: SessionKey, found: AsyncGenerator[Item, None]
    ) -> AsyncGenerator[Item, None]:
        """Leave out blobs that the target has."""
        if key.tenant not in self._blobs:
            self._blobs[key.tenant] = set(await self._target.blob_names(key.tenant))
        known = self._blobs[key.tenant]
        async with contextlib.aclosing(found):
            async for item in found:
                if not isinstance(item, Blob) or item.name not in known:
                    yield item

    async def _same_documents(self, key: SessionKey) -> bool:
        return await _documents(self._source, key) == await _documents(self._target, key)

    # comparing

    async def _compare(self, key: SessionKey) -> _Compared:
        """Compare the target's records with the source's, one by one."""
        holder = await self._target.holder(key)
        head = 0 if holder is None or holder.deleted else await self._target.head(key)
        if holder is None or not head:
            return _Compared()
        taken: set[str] = set()
        shared, pruned, has_any = 0, False, False
        theirs = content(self._target, key, head)
        ours = content(self._source, key, await self._source.head(key))
        async with contextlib.aclosing(theirs), contextlib.aclosing(ours):
            our = await anext(ours, None)
            async for record in theirs:
                has_any = True
                if our is not None and record.seq < our.seq and not shared:
                    pruned = True
                    continue
                if record != our:
                    return _Compared(head, holder.epoch, differs=record.seq)
                shared += 1
                if record.kind == TAKEN:
                    taken.update(decode(record.payload, Taken).ops)
                our = await anext(ours, None)
            following = 0 if our is None else our.seq
            while our is not None:
                if our.kind == TAKEN:
                    taken.update(decode(our.payload, Taken).ops)
                our = await anext(ours, None)
        proven = bool(shared) or not has_any
        return _Compared(
            head, holder.epoch, following, pruned, proven=proven, taken=frozenset(taken)
        )

    def _require_beginning(self, key: SessionKey, seen: _Compared) -> None:
        """Raise unless what the target has may be what an earlier run has left."""
        if not seen.differs:
            return
        message = (
            f"{self._target.location} has another session {key}: its record {seen.differs} is "
            f"not in {self._source.location}, or another one there; {_way_out(key)}"
        )
        raise StoreError(message, key=str(key), seq=seen.differs)

    def _require_unchanged(self, seen: _Compared, grant: Grant) -> None:
        if (grant.epoch, grant.head) != (seen.epoch + 1, seen.head + 1):
            message = f"{grant.key} changed in {self._target.location} meanwhile: try again"
            raise _ChangedError(message, key=str(grant.key))

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

    # what an earlier run has left

    async def _acknowledge(
        self, key: SessionKey, epoch: int, before: _State | None, lives: Sequence[bytes]
    ) -> None:
        """Leave word, as blobs, of what the target has under an epoch of ours, and nobody else's.

        Args:
            key: Which session.
            epoch: The target's, when both were found equal.
            before: What the source was when that began.
            lives: Which life of the session that was.

        """
        there = await _state(self._target, key)
        if there is None or there.epoch != epoch:
            return  # somebody has opened it there
        receipts = [_untouched(self._source, key, epoch), *lives]
        if before is not None and before == await _state(self._source, key):
            receipts.append(_equal(self._source, key, before, there))
        await self._target.put_blobs(key.tenant, {_name(one): one for one in receipts})

    async def _note(self, key: SessionKey, lives: Sequence[bytes], epoch: int) -> None:
        """Leave word that an epoch in the target is a migration's, before it may be killed."""
        receipts = [_untouched(self._source, key, epoch), *lives]
        await self._target.put_blobs(key.tenant, {_name(one): one for one in receipts})

    async def _has(self, key: SessionKey, receipt: bytes) -> bool:
        return await self._target.get_blob(key.tenant, _name(receipt)) is not None

    async def _is_known(self, key: SessionKey) -> bool:
        """Say whether an earlier run found both equal, and neither has changed since."""
        there = await _state(self._target, key)
        here = None if there is None else await _state(self._source, key)
        if here is None or there is None:
            return False
        return await self._has(key, _equal(self._source, key, here, there))

    async def _lives(self, key: SessionKey) -> list[bytes]:
        """Return by what a session differs from one of its name that was deleted before it."""
        lives: list[object] = []
        async with contextlib.aclosing(self._source.read_log(key, limit=1)) as log:
            async for chunk in log:
                lives += [record.epoch for record in chunk.records if record.seq == 1]
        manifest = (await self._source.read_documents(key, ())).manifest
        if manifest is not None and manifest.about.created_at is not None:
            lives.append(f"of {manifest.about.created_at}")
        return [encode(["life", key, self._source.location, life]) for life in lives]

    async def _remove(self, key: SessionKey, seen: _Compared) -> None:
        """Remove the target's copy, for what is to come in its place."""
        await self._require_forks_follow(key)
        async with self._lease(self._target, key) as grant:
            self._require_unchanged(seen, grant)
            waiting = await self._target.take(key, grant.epoch, limit=ALL)
            known = {*seen.taken, *(item.op_id for item in await self._posted(key))}
            own = [item for item in waiting if item.op_id not in known]
            if any(item.kind == FORK for item in own):
                message = f"{key} was forked in {self._target.location}: {_way_out(key)}"
                raise StoreError(message, key=str(key))
            if own:  # left in the target itself: it comes again behind the session
                await self._source.post(key, own)
                self.waiting.add(key)
            await self._require_no_dead_letters(key)
            # First: who finds it deleted is to know that nobody has forgotten it.
            note = _removed(self._source, key, grant.epoch)
            await self._target.put_blobs(key.tenant, {_name(note): note})
            await self._target.delete(key, grant.epoch)

    async def _require_no_dead_letters(self, key: SessionKey) -> None:
        """Raise if the target has set posts aside: none was copied, so nobody else has them."""
        if not self._target.capabilities.dead_letters:
            return
        letters = await self._target.dead_letters(key)
        if letters:
            where = f" --tenant {key.tenant}" if key.tenant else ""
            message = (
                f"{self._target.location} has {len(letters)} dead letters of {key}, which would be "
                f"lost if it were written anew there: `perdure inbox {key.agent} --session "
                f"{key.session}{where} --store TARGET --retry --all` lets them wait again, or "
                "--drop removes them; then migrate again"
            )
            raise StoreError(message, key=str(key), count=len(letters))

    async def _require_forks_follow(self, key: SessionKey) -> None:
        """Raise if a fork in the target would lose its history, and nothing would replace it."""
        for fork in [fork for fork, parent in self.parents.items() if parent == key]:
            seen = await self._compare(fork)
            if seen.differs and not await self._has(
                key, _untouched(self._source, fork, seen.epoch)
            ):
                message = (
                    f"{fork}, which is a fork of {key}, was written in {self._target.location}, so "
                    f"{key} cannot be written anew there: {_way_out(fork)}"
                )
                raise StoreError(message, key=str(key), fork=str(fork))

    async def follow_deletions(
        self, keys: Sequence[SessionKey], tenants: Sequence[str] | None
    ) -> None:
        """Delete what the source has deleted since it was copied."""
        here = set(keys).difference(self._gone)
        for tenant in await self._target.tenants():
            if tenants is not None and tenant not in tenants:
                continue
            for key in await keys_of(self._target, tenant):
                if key in here:
                    continue
                try:
                    await self._follow_deletion(key)
                except PerdureError as error:
                    self.found.failed[str(key)] = str(error)

    async def _follow_deletion(self, key: SessionKey) -> None:
        was = await self._source.holder(key)
        if was is None or not was.deleted:
            return  # never one of the source's
        there = await self._target.holder(key)
        if there is None or there.deleted:
            return
        if not await self._has(key, _untouched(self._source, key, there.epoch)):
            message = (
                f"{self._source.location} has deleted {key}, and {self._target.location} has it: "
                f"it was opened there since, or never came from here; {_way_out(key)}"
            )
            raise StoreError(message, key=str(key))
        lineage = followed(self._target)
        for fork in await keys_of(self._target, key.tenant):
            base = await lineage.base_of(fork)
            if base is not None and base.parent == key:
                message = f"{key} was deleted, and {fork} still goes on behind it: migrate again"
                raise StoreError(message, key=str(key), fork=str(fork))
        async with self._lease(self._target, key) as grant:
            if grant.epoch == there.epoch + 1:
                await self._target.delete(key, grant.epoch)
                self.found.deleted += 1

    # what waits

    async def _posted(self, key: SessionKey) -> list[Posted]:
        """Return what waits in the source; its holder need not know."""
        if key not in self.waiting:
            return []
        for left in reversed(range(TRIES)):
            holder = await self._source.holder(key)
            if holder is None or holder.deleted:
                async with self._lease(self._source, key) as grant:
                    return await self._source.take(key, grant.epoch, limit=ALL)
            try:
                return await self._source.take(key, holder.epoch, limit=ALL)
            except LeaseLostError:  # somebody has just opened it
                if not left:
                    raise
            await anyio.sleep(PAUSE)
        raise AssertionError("unreachable")

    async def _post(self, key: SessionKey) -> None:
        """Leave in the target what waits in the source; who posts the same again posts nothing.

        Raises:
            NotStorableError: The target refuses an item; those behind it came.

        """
        refused: dict[str, NotStorableError] = {}
        items = await self._posted(key)
        for item in items:
            if item.damage:
                refused[item.op_id] = NotStorableError(item.damage, key=str(key))
        items = [item for item in items if not item.damage]
        for at in range(0, len(items), POSTS):
            refused |= await self._passed_on(key, items[at : at + POSTS])
        if refused:
            first = next(iter(refused.values()))
            message = f"{len(refused)} of its posts cannot be stored there: {first}"
            raise NotStorableError(message, key=str(key), count=len(refused)) from first

    async def _passed_on(
        self, key: SessionKey, waiting: Sequence[Posted]
    ) -> dict[str, NotStorableError]:
        """Post items to the target; return why those were refused that were."""
        try:
            new = await self._target.post(key, waiting)
        except NotStorableError as error:
            if len(waiting) == 1:
                return {waiting[0].op_id: error}
        else:
            self.found.posted += new
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
            watch=self.watches[store.owner],
            on_held=self._on_held,
            wait=self._wait,
        )
        try:
            yield grant
        finally:
            with anyio.CancelScope(shield=True):
                await store.release(key, grant.epoch)


class _State(msgspec.Struct, frozen=True):
    """What changes whenever a session does."""

    epoch: int
    head: int
    manifest: Manifest | None


async def _state(store: Store, key: SessionKey) -> _State | None:
    manifest = (await store.read_documents(key, ())).manifest
    head = await store.head(key)
    holder = await store.holder(key)
    if holder is None or holder.deleted:
        return None
    return _State(holder.epoch, head, None if manifest is None else neutral(manifest))


def _equal(source: Store, key: SessionKey, here: _State, there: _State) -> bytes:
    """Return the receipt by which a session, as it is here, was found equal to what is there."""
    return encode(["equal", key, source.location, here, there])


def _name(receipt: bytes) -> str:
    return hashlib.sha256(receipt).hexdigest()


def _untouched(source: Store, key: SessionKey, epoch: int) -> bytes:
    """Return the receipt by which nobody but a migration has written a session in the target."""
    return encode(["untouched", key, source.location, epoch])


def _removed(source: Store, key: SessionKey, epoch: int) -> bytes:
    """Return the receipt of a copy that a migration removed, to write it anew."""
    return encode(["removed", key, source.location, epoch])


async def was_removed(source: Store, target: Store, key: SessionKey, epoch: int) -> bool:
    """Say whether a migration has deleted a session under an epoch, to write it anew."""
    receipt = _name(_removed(source, key, epoch))
    return await target.get_blob(key.tenant, receipt) is not None


def _way_out(key: SessionKey) -> str:
    where = f" --tenant {key.tenant}" if key.tenant else ""
    return (
        f"keep both by `perdure rename {key.agent} NEW-ID --session {key.session}{where} --store "
        f"TARGET`, or give that one up by `perdure forget {key.agent} --session {key.session}"
        f"{where} --store TARGET`, and migrate again"
    )


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


async def _documents(store: Store, key: SessionKey) -> tuple[object, dict[str, Document]]:
    """Return what is folded of a session, without what depends on the store."""
    documents = await store.read_documents(key)
    manifest = documents.manifest
    return None if manifest is None else neutral(manifest), documents.found
