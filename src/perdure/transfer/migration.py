"""Migration of all sessions of a store to another one: verified, crash-safe, repeatable.

A session is read without a lease, even while a program writes it. What the target has of it is
compared with it, record by record, and `decide` says what becomes of that. What is written is read
back and compared again. The source is unchanged, pending inbox items included.

A lease in the target takes the number after its last record. If the source has an epoch record
there, the copy continues. If a program has held the session throughout, the source has another
record at that number, so the target's copy is deleted and written again, as a draft.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final, final

import anyio
import msgspec

from perdure import errors
from perdure._lib.tasks import each
from perdure.lease import LeaseOptions, OnHeld, OwnerWatch, while_beating
from perdure.lineage import require_unread
from perdure.records.keys import SessionKey, require_filters, require_list, stored_key
from perdure.records.manifest import Origin
from perdure.records.records import FORK
from perdure.session.copier import continue_copy, copy_session
from perdure.session.delete import tenant_sessions
from perdure.session.options import Limits, require_no_backup
from perdure.session.reach import ReachedBlob, lost_error
from perdure.session.stored import followed
from perdure.store import Draft, Store, Taken, blobs_are_apart, first_record
from perdure.transfer import bundle_files
from perdure.transfer.bundle_files import ChangedError, dead_letters_of
from perdure.transfer.receipts import Receipts, written_under
from perdure.transfer.second_look import Moment, exact_moment_of, look_again, moment_of

AT_ONCE: Final = 8


class MigrationProgress(msgspec.Struct, frozen=True):
    """Progress of a migration."""

    done: int
    total: int
    key: SessionKey
    """The session that was just processed."""


class Migration(msgspec.Struct, kw_only=True):
    """Result of a migration."""

    sessions: int = 0
    """Sessions in the source."""
    copied: int = 0
    """Sessions that were written in full."""
    continued: int = 0
    """Sessions of which the target had the beginning; the rest was appended."""
    there: int = 0
    """Sessions that the target already had, equal in every record."""
    deleted: int = 0
    """Sessions that an earlier run had copied and the source has deleted since."""
    open: int = 0
    """Sessions open in the source: run again when their program has ended."""
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Bytes of records, documents and blobs that were copied."""
    empty: int = 0
    """Sessions without any record or document: there is nothing to copy."""
    posted: int = 0
    """Pending inbox items that this run copied to the target."""
    dead_letters: int = 0
    """Dead letters that this run copied to the target."""
    failed: dict[str, str] = {}
    """Reasons why sessions were not copied, by key."""


async def migrate(
    source: Store,
    target: Store,
    *,
    tenants: Sequence[str] | None = None,
    on_held: OnHeld = "handover",
    wait: float = 10.0,
    progress: Callable[[MigrationProgress], None] | None = None,
) -> Migration:
    """Copy every session of an open store into another open store, and verify each.

    Crash-safe and repeatable; it may run while a program writes to the source. Each run copies what
    is new since the previous one. Run one at a time into a target: a second one meanwhile may name
    as failed what the first is just writing, and the next run copies that.

    A session that the target already has is replaced only if it is a prefix of the source's.
    Pending items, also those of sessions that were never opened, and dead letters are copied, too.
    The source is unchanged.

    Args:
        source: The store to copy from; only read, without a lease, so it may be open read-only.
        target: The store to copy to.
        tenants: The tenants whose sessions to copy; None for all.
        on_held: What to do about a session that another process holds in the target.
        wait: Seconds to wait for a holder.
        progress: Called after each session.

    Raises:
        ConfigError: The source or the target is a backup.

    """
    mover = _Mover(source, target, on_held=on_held, wait=wait)
    act = partial(_move_all, mover, tenants, progress)
    await while_beating(target, mover.watch, act)
    return mover.report


async def _move_all(
    mover: _Mover,
    tenants: Sequence[str] | None,
    progress: Callable[[MigrationProgress], None] | None,
) -> None:
    source, target, report = mover.source, mover.target, mover.report
    for store in (source, target):
        await require_no_backup(store)
    keys = await keys_of(source, tenants)
    report.sessions = len(keys)
    mover.behind = {
        *await source.sessions_with_pending_items(),
        *await source.sessions_with_pending_items(dead_letters=True),
    }
    others = {key for key in mover.behind if tenants is None or key.tenant in tenants}
    mover.behind.update(await target.sessions_with_pending_items(dead_letters=True))
    # And those that the source has deleted since an earlier run.
    for key in await keys_of(target, tenants):
        holder = await source.holder(key)
        if holder is not None and holder.deleted:
            others.add(key)

    async def move(key: SessionKey) -> None:
        try:
            await mover.move(key)
        except errors.PerdureError as error:
            report.failed[str(key)] = str(error)

    await each_session(keys + sorted(others.difference(keys)), move, progress)
    report.open = len(mover.open)


async def each_session(
    keys: Sequence[SessionKey],
    act: Callable[[SessionKey], Awaitable[None]],
    progress: Callable[[MigrationProgress], None] | None,
) -> None:
    """Act on sessions, a few at a time, and report each that is done."""
    done = 0

    async def one(key: SessionKey) -> None:
        nonlocal done
        await act(key)
        done += 1
        if progress is not None:
            progress(MigrationProgress(done, len(keys), key))

    await each(keys, one, at_once=AT_ONCE)


async def keys_of(store: Store, tenants: Sequence[str] | None = None) -> list[SessionKey]:
    """List all sessions of these tenants; of all tenants for None."""
    require_list("tenants", tenants)
    keys: list[SessionKey] = []
    for tenant in await store.tenants() if tenants is None else tenants:
        require_filters(tenant=tenant)
        async with contextlib.aclosing(tenant_sessions(store, tenant)) as listed:
            keys += [info.key async for info in listed]
    return keys


# What becomes of a session


class Act(enum.Enum):
    """Act on a session in the target."""

    NOTHING = "there is nothing to copy"
    WRITE = "write all of it"
    KEEP = "it is there"
    CONTINUE = "append what it lacks"
    REPLACE = "delete it, and write all of it"
    REMOVE = "delete it"
    REFUSE = "leave it alone, and report it"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A session in both stores, compared record by record without what is a store's own."""

    ours: Moment
    """The source's, from before its log was read."""
    theirs: Moment
    """The target's, from before its log was read."""
    has_content: bool
    """True if the source has a record or a document."""
    differs: int = 0
    """The target's first record that the source does not have; 0 for none."""
    next: int = 0
    """The source's first record that the target does not have; 0 for none."""
    is_damaged: bool = False
    """True if documents of the target are damaged."""
    is_superseded: bool = False
    """True if this source had all that the target has, and has deleted, pruned or restarted it."""
    is_outdated: bool = False
    """True if the source has pruned more, or a release before 0.1.0 numbered it after a base."""


def decide(found: Found) -> Act:
    """Say what becomes of a session. Pure.

    The target is written only where it has nothing, or nothing but what this source had.
    """
    # 1. The target has no session.
    if not found.theirs.head:
        return Act.WRITE if found.has_content else Act.NOTHING
    # 2. It has another one than the source: an earlier one of the source's, or one of its own.
    if found.ours.deleted or found.differs:
        if not found.is_superseded:
            return Act.REFUSE
        return Act.REPLACE if found.has_content else Act.REMOVE
    # 3. It has nothing else than the source, but cannot be continued: the lease takes a number.
    if found.is_outdated or 0 < found.next <= found.theirs.head + 1:
        return Act.REPLACE
    # 4. It has the beginning.
    if found.next or found.is_damaged or found.ours.manifest != found.theirs.manifest:
        return Act.CONTINUE
    # 5. It has all.
    return Act.KEEP if found.has_content else Act.NOTHING


@final
class _Mover:
    def __init__(self, source: Store, target: Store, *, on_held: OnHeld, wait: float) -> None:
        self.source = source
        self.target = target
        self.report = Migration()
        self.behind: set[SessionKey] = set()
        """Sessions with pending items in the source, or with dead letters in one of the stores."""
        self.open: set[SessionKey] = set()
        """Sessions that a process holds in the source."""
        self.watch = OwnerWatch(LeaseOptions(), anyio.current_time)
        self._on_held: OnHeld = on_held
        self._wait = wait
        self._receipts = Receipts(source, target)
        self._sound: dict[str | SessionKey, set[str]] = {}
        """Names of the blobs that were read back, with all that they name, by tenant."""

    async def move(self, key: SessionKey) -> None:
        """Copy what the target lacks of a session: records, pending items and dead letters."""
        stored_key(key.agent)  # a source may be of another user: it brings no keys, and no journal
        await look_again(self.source, key, lambda: self._move(key))
        if key in self.behind:
            move = partial(self._move_posts, key)
            if reasons := await look_again(self.source, key, move, is_wrong=bool):
                raise errors.StoreError("; ".join(reasons), key=str(key))

    async def _move(self, key: SessionKey) -> None:
        holder = await self.source.holder(key)
        if holder is not None and not (holder.deleted or holder.released or holder.alive is False):
            self.open.add(key)
        ours, theirs = await self._moments(key)
        # Both are still as an earlier run has left them, equal: nothing is read.
        if theirs.head and await self._receipts.has("equal", key, ours, theirs):
            self.report.there += 1
            return
        found = await self._look(key, ours, theirs)
        match decide(found):
            case Act.REFUSE:
                raise self._refusal(key, found)
            case Act.NOTHING:
                self.report.empty += 1
            case Act.REMOVE:
                await self._remove(key, found)
                self.report.deleted += 1
            case Act.KEEP:
                await self._read_blobs_back(key)
                self.report.there += 1
                await self._note_equal(key, found)
            case Act.CONTINUE:
                async with self._lease(key, found.theirs) as grant:
                    found = await self._copy(key, grant)
                self.report.continued += 1
                await self._note_equal(key, found)
            case Act.WRITE | Act.REPLACE as act:
                if act is Act.REPLACE:
                    await self._remove(key, found)
                found = await self._copy(key)
                self.report.copied += 1
                await self._note_equal(key, found)

    # comparing

    async def _moments(self, key: SessionKey) -> tuple[Moment, Moment]:
        return await exact_moment_of(self.source, key), await exact_moment_of(self.target, key)

    async def _look(self, key: SessionKey, ours: Moment, theirs: Moment) -> Found:
        cut = (await followed(self.source).beginning_of(key)).cut
        has_records, differs, following = await self._compare(key, cut)
        has_content = has_records or ours.manifest is not None
        if not theirs.head:
            return Found(ours=ours, theirs=theirs, has_content=has_content, next=following)
        base = await followed(self.target).base_of(key) or Origin()
        if base.cut > max(ours.head, cut):  # it begins after what the source has
            differs = differs or base.cut
        return Found(
            ours=ours,
            theirs=theirs,
            has_content=has_content,
            differs=differs,
            next=following,
            is_damaged=bool((await self.target.read_documents(key)).damaged),
            is_superseded=(ours.deleted or differs > 0)
            and (ours.deleted or differs <= cut or await self._is_begun_anew(key))
            and await self._receipts.has("written", key, await written_under(self.target, key)),
            is_outdated=cut > base.cut or base.at > 0,
        )

    async def _is_begun_anew(self, key: SessionKey) -> bool:
        """Return whether the source's session began after the target's was copied.

        Epochs never start again. A source that went back to an earlier state has old ones.
        """
        copy = await self.target.holder(key)
        first = await first_record(self.source.read_log(key, limit=1))
        if copy is None or copy.draft is None or first is None:
            return False
        return first.epoch > copy.draft.generation

    async def _compare(self, key: SessionKey, cut: int) -> tuple[bool, int, int]:
        """Return whether the source has records, and both stores' first that the other lacks."""
        source, target = followed(self.source), followed(self.target)
        ours = bundle_files.said(source, key, await source.head(key))
        theirs = bundle_files.said(target, key, await target.head(key))
        differs = 0
        async with contextlib.aclosing(ours), contextlib.aclosing(theirs):
            our = await anext(ours, None)
            has_records, is_related = our is not None, False
            async for record in theirs:
                # Until one record is the same in both, nothing shows that they are related.
                differs = differs or record.seq
                if record.seq <= cut:
                    continue  # the source has pruned it
                if record != our:
                    return has_records, record.seq, our.seq if our else 0
                is_related = True
                our = await anext(ours, None)
        return has_records, 0 if is_related else differs, our.seq if our else 0

    def _refusal(self, key: SessionKey, found: Found) -> errors.StoreError:
        source, target = self.source.location, self.target.location
        why = (
            f"{target} has another session {key}: its record {found.differs} is not in {source}, "
            "or another one there"
        )
        if found.ours.deleted:
            why = (
                f"{source} has deleted {key}, and {target} has it: it was written there since, or "
                "never came from here"
            )
        message = (
            f"{why}; keep both by `perdure rename {key.agent} NEW-ID {_place(key)}`, or give that "
            f"one up by `perdure forget {key.agent} {_place(key)}`, and migrate again"
        )
        return errors.StoreError(message, key=str(key), seq=found.differs)

    # writing

    @contextlib.asynccontextmanager
    async def _lease(self, key: SessionKey, theirs: Moment) -> AsyncGenerator[Taken, None]:
        """Hold the target's session, which no one has written since that moment."""
        watch, on_held, wait = self.watch, self._on_held, self._wait
        lease = bundle_files.leased(self.target, key, watch=watch, on_held=on_held, wait=wait)
        async with lease as grant:
            if (grant.epoch, grant.head) != (theirs.epoch + 1, theirs.head + 1):
                message = f"{key} changed in {self.target.location} meanwhile: try again"
                raise ChangedError(message, key=str(key))
            # Before any write under it: killed after this, the next run knows the copy for its own.
            await self._receipts.leave("written", key, grant.epoch)
            yield grant

    async def _copy(self, key: SessionKey, grant: Taken | None = None) -> Found:
        """Have the copier write a session, or what it lacks under a lease, and compare both then.

        Raises:
            StoreError: The target has not what was written.

        """
        source = followed(self.source)
        bundle_files.require_whole(key, await source.read_documents(key))
        newest = await first_record(source.read_log(key, reverse=True, limit=1))
        if newest is None:
            raise ChangedError(f"{key} was deleted while it was read: try again", key=str(key))
        draft = Draft(source=key, generation=newest.epoch, up_to=newest.seq, purpose="migrate")
        copy = partial(copy_session, self.source, key, self.target, key, draft=draft)
        go_on = partial(continue_copy, self.source, key, self.target, draft=draft)
        note, limits = partial(self._receipts.leave, "written", key), Limits()
        try:
            if grant is None:
                watch, wait = self.watch, self._wait
                written = await copy(watch=watch, limits=limits, wait=wait, on_epoch=note)
            else:
                written = await go_on(grant, limits=limits)
        except errors.LeaseHeldError as error:  # it may be what a killed run had on its way
            raise ChangedError(str(error), key=str(key)) from error
        found = None
        with contextlib.suppress(ChangedError):  # the target's log may lack what it says it has
            found = await self._look(key, *await self._moments(key))
        if not found or found.differs or 0 < found.next <= newest.seq or found.is_damaged:
            raise errors.StoreError(
                f"session {key} is not the same in {self.target.location} after it was "
                "written: another program writes there, or the store is not sound",
                key=str(key),
            )
        await self._read_blobs_back(key)
        self.report.records += written.records
        self.report.blobs += written.blobs
        self.report.bytes += written.bytes
        return found

    async def _read_blobs_back(self, key: SessionKey) -> None:
        """Read all blobs that the target's copy reaches, and copy again those that it lacks.

        Raises:
            CorruptRecordError: The source has lost some, too; all else of the session is there.

        """
        whose = key if blobs_are_apart(self.target) else key.tenant
        sound = self._sound.setdefault(whose, set())
        lost: list[ReachedBlob] = []
        reached = (await bundle_files.reach(self.target, key)).blobs(sound, other=self.source)
        async with contextlib.aclosing(reached) as blobs:
            async for blob in blobs:
                if blob.data is None:
                    lost.append(blob)
                elif blob.why:
                    await self.target.put_blobs(key.blobs, {blob.name: blob.data})
                if blob.is_whole:
                    sound.add(blob.name)
        if lost:
            raise lost_error(
                key,
                lost,
                f"all else of it is in {self.target.location}; put the blob back into "
                f"{self.source.location} from a copy, and run this again",
            )

    async def _remove(self, key: SessionKey, found: Found) -> None:
        """Delete the target's session; what was posted to it there goes on waiting."""
        await require_unread(followed(self.target), self.target, key)
        async with self._lease(key, found.theirs) as grant:
            if own := await self._not_in_source(key, copies=False):
                raise errors.StoreError(
                    f"{self.target.location} has {len(own)} dead letters of {key}, which would be "
                    f"lost if it were deleted or written again there: `perdure inbox {key.agent} "
                    f"{_place(key)} --retry --all` lets them wait again, or --drop removes them; "
                    "then migrate again",
                    key=str(key),
                    count=len(own),
                )
            keep_posts = not found.ours.deleted
            if keep_posts and (copied := await self._copied_posts(key, grant.epoch)):
                await self.target.ack(key, grant.epoch, copied)
            await self.target.delete(key, grant.epoch, keep_posts=keep_posts)

    async def _note_equal(self, key: SessionKey, found: Found) -> None:
        # Moments never come again: it does not matter whether one of them has passed already.
        # What differs in documents alone is equal: what before 0.1.0 was a fork may have none.
        if decide(found) in {Act.KEEP, Act.CONTINUE} and found.has_content and not found.next:
            await self._receipts.leave("equal", key, found.ours, found.theirs)

    # pending items and dead letters

    async def _move_posts(self, key: SessionKey) -> list[str]:
        """Copy pending items and dead letters; return why some stay in the source."""
        why: list[str] = []
        await self._post(key, why)
        await self._move_letters(key, why)
        return why

    async def _copied_posts(self, key: SessionKey, epoch: int) -> list[str]:
        """Return the op ids that wait in the target and came from the source, and notes of forks.

        The source posts again what still waits there, and what it has taken is in its log.
        """
        return [
            item.op_id
            for item in await self.target.receive(key, epoch, limit=bundle_files.ALL)
            if item.kind == FORK or await self._receipts.has("post", key, item.op_id)
        ]

    async def _post(self, key: SessionKey, why: list[str]) -> None:
        """Post what waits in the source to the target; the op id makes a repeat a no-op."""
        refused: list[str] = []
        holder = await self.source.holder(key)
        epoch = 0 if holder is None else holder.epoch
        for item in await self.source.receive(key, epoch, limit=bundle_files.ALL):
            if item.damage:
                refused.append(item.damage)
                continue
            # Before the post: one that waits there without a receipt counts as the target's own.
            await self._receipts.leave("post", key, item.op_id)
            try:
                new = await self.target.enqueue(key, [item])
            except errors.NotStorableError as error:
                refused.append(str(error))
            else:
                self.report.posted += new
        if refused:
            why.append(f"{len(refused)} of its posts cannot be stored there: {refused[0]}")

    async def _move_letters(self, key: SessionKey, why: list[str]) -> None:
        """Copy the dead letters that the target lacks, and drop those that the source dropped."""
        if dropped := await self._not_in_source(key, copies=True):
            await self.target.ack(key, None, dropped)
        ours = await dead_letters_of(self.source, key)
        theirs = {letter.item.op_id: letter for letter in await dead_letters_of(self.target, key)}
        readable = [letter for letter in ours if not letter.item.damage]
        new = [letter for letter in readable if theirs.get(letter.item.op_id) != letter]
        if new:
            try:
                async with self._lease(key, await moment_of(self.target, key)) as grant:
                    for letter in new:
                        await self._receipts.leave("letter", key, letter.item.op_id, letter.at)
                    await self.target.ack(key, grant.epoch, dead=new)
            except errors.NotStorableError:
                why.append(
                    f"{self.target.location} keeps no dead letters, and {len(new)} of {key} stay "
                    "in the source: `perdure inbox` there lists them; retry or drop them"
                )
            else:
                self.report.dead_letters += len(new)
        if len(readable) < len(ours):
            why.append(
                f"{len(ours) - len(readable)} of its dead letters are damaged: `perdure inbox "
                f"{key.agent}` shows them, and --drop removes them"
            )

    async def _not_in_source(self, key: SessionKey, *, copies: bool) -> list[str]:
        """Return the target's dead letters that the source has not: copied ones, or all others."""
        ours = {letter.item.op_id for letter in await dead_letters_of(self.source, key)}
        return [
            letter.item.op_id
            for letter in await dead_letters_of(self.target, key)
            if letter.item.op_id not in ours
            and copies is await self._receipts.has("letter", key, letter.item.op_id, letter.at)
        ]


def _place(key: SessionKey) -> str:
    """Return where a session is in the target, for a command."""
    tenant = f" --tenant {key.tenant}" if key.tenant else ""
    return f"--session {key.session}{tenant} --store TARGET"
