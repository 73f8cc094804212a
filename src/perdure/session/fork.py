"""Forks, copies and renames: sessions that begin with another one's history.

A fork writes one record, however long its parent's history is: where that ends for it. Before, the
parent records it, so that a deletion finds its forks. A copy keeps the history as blobs of
its own. A rename is a copy that remembers the old name, and then a deletion. `LostSession` is what
remains of a session whose lease was lost with records unsaved: they can be forked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import msgspec

from perdure._lib.ids import random_id
from perdure.autosave.tracked import State
from perdure.errors import (
    HistoryPrunedError,
    InvalidArgumentError,
    LeaseHeldError,
    SessionError,
    SessionNotFoundError,
    StoreError,
)
from perdure.lineage.history import keep_documents, keep_history
from perdure.memory.attempts import continued
from perdure.memory.traces import find_turn
from perdure.records.checkpoints import GROUP, Checkpoint
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey, session_key
from perdure.records.manifest import ForkNote, Origin
from perdure.records.records import (
    BASE,
    CHECKPOINT,
    CHECKPOINTS_PRUNED,
    ENDING,
    FORK,
    HOLDER_KINDS,
    RETRACT,
    Entry,
    Record,
)
from perdure.session.copier import (
    FORK as AS_FORK,
    FORK_CONTEXT,
    copy_session,
    exists,
    is_made,
)
from perdure.session.lifecycle import (
    ExclusiveAccess,
    HeldSession,
    LogOrigin,
    Terms,
    group_of,
    require_different,
)
from perdure.store import Draft, PendingItem, first_record

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.session.lifecycle import SessionLifecycle
    from perdure.session.runtime import Runtime


_TRIES = 3
"""Attempts at a copy of a session that is pruned meanwhile."""

COPIES: bool = False
"""Whether a fork is a copy: what was its parent's is its own, and refers to no other session."""


History = Literal["full", "context"]
"""What a fork takes: all of its parent's records, or only what they fold to."""


def require_history(history: Any) -> None:
    """Raise InvalidArgumentError for a part of a session that no fork takes."""
    if history not in FORKS:
        message = f"fork: invalid history={history!r}: choose {' or '.join(FORKS)}"
        raise InvalidArgumentError(message, option="history", value=history)


FORKS: dict[History, str] = {"full": AS_FORK, "context": FORK_CONTEXT}


class Fork(msgspec.Struct, frozen=True):
    """A session that begins with another one's history."""

    key: SessionKey
    parent: SessionKey
    at: int
    """The last record that both have; the first one of its own has the next number."""


@final
class ForkBuilder:
    """Make sessions out of sessions."""

    def __init__(self, access: ExclusiveAccess) -> None:
        self._access = access
        self._store = access.store

    # forks

    async def fork(
        self,
        parent: SessionKey,
        child: SessionKey,
        at: int | str | Checkpoint | None,
        more: Sequence[Entry] = (),
        *,
        history: History = "full",
    ) -> Fork:
        """Begin a session with another one's history up to a record, and write one record.

        ``more`` follows it in the same group.

        Raises:
            HistoryPrunedError: The parent's history up to ``at`` was pruned.
            InvalidArgumentError: ``at`` names no end of a group, no turn that is over, or a
                checkpoint of another session.
            SessionError: The new session exists.
            SessionNotFoundError: The parent does not, or was deleted meanwhile.

        """
        require_different(parent, child, "fork")
        head = await self._access.head(parent)
        point = await self._without_epochs(parent, await self._point(parent, head, at))
        if point is None:
            return await self._begin_anew(parent, child, more)
        return await self._begin(parent, child, point, more, history)

    async def _copy_to(
        self,
        parent: SessionKey,
        child: SessionKey,
        point: Record,
        purpose: str,
        more: Sequence[Entry] = (),
    ) -> Fork:
        async with self._access.exclusive(child):
            return await self.copied(parent, child, point, purpose, more)

    async def copied(
        self,
        parent: SessionKey,
        child: SessionKey,
        point: Record,
        purpose: str,
        more: Sequence[Entry] = (),
    ) -> Fork:
        """Make a session of another one's content up to a record; the caller is alone with it."""
        access, store = self._access, self._store.inner
        draft = Draft(source=parent, generation=point.epoch, up_to=point.seq, purpose=purpose)
        if child in access.runtime.sessions:
            raise exists(child)
        is_there = await is_made(store, child, draft)
        if is_there is None:  # it was opened, and never written
            async with access.held(child, Terms("raise", 0), new=True) as hold:
                if await is_made(store, child, draft) is None:
                    await hold.withdraw()
        if is_there and more:
            raise exists(child)
        if not is_there:
            watch, limits = access.runtime.watch, access.runtime.limits
            copy = partial(copy_session, store, parent, store, child, draft=draft)
            try:
                await copy(watch=watch, limits=limits, more=more)
            except LeaseHeldError:
                if more or not await is_made(store, child, draft):  # by another process, just now
                    raise
            self._store.forget(child)
        return Fork(child, parent, point.seq)

    async def newest(self, key: SessionKey, head: int) -> Record | None:
        """Return the last record of a session that says something, None if there is none."""
        return await self._without_epochs(key, await self._point(key, head, None))

    async def fork_unsaved(
        self, session: Tracked, child: SessionKey, *, history: History = "full"
    ) -> Fork:
        """Begin a session with a session's durable records, followed by its unsaved ones.

        If the store has lost a part of what was durable, what memory holds of that comes between.

        Raises:
            SessionError: The new session exists.
            StoreError: The store refuses a record there, too.

        """
        require_different(session.key, child, "fork_unsaved")
        at = session.durable - session.missing
        point = await self._access.record(session.key, at) if at else None
        more = group_of(session.pending)
        if session.missing and session.rescue is not None:
            known, context = session.rescue(at)
            moved = tuple(entry for entry in session.pending if _can_move(entry))
            more = (*known, *group_of(moved), context)
        if point is not None:
            point = await self._without_epochs(session.key, point)
            if point is not None:
                if more and not session.missing:
                    goes_on = await continued(
                        self._store, session.key, session.epoch, point.seq + 1
                    )
                    more = (*goes_on, *more)
                return await self._begin(session.key, child, point, more, history)
            return await self._begin_anew(session.key, child, more)
        if session.missing or session.end is State.LOST:  # gone, or deleted by its holder
            return await self._begin_anew(session.key, child, more)
        raise _no_record(session.key, at, session.version)

    async def _begin_anew(
        self, parent: SessionKey, child: SessionKey, records: Sequence[Entry]
    ) -> Fork:
        async with self._access.exclusive(child):
            return await self.begun_anew(parent, child, records)

    async def begun_anew(
        self, parent: SessionKey, child: SessionKey, records: Sequence[Entry] = ()
    ) -> Fork:
        """Make a session from memory alone: there is no stored history to continue.

        The caller is alone with it.
        """
        await self._require_free(child, None, records)
        async with self._access.held(child, Terms("raise", 0), new=True) as hold:
            if await self._access.begun(child) != LogOrigin():
                raise exists(child)
            if records:
                try:
                    await hold.append(*records)
                except StoreError:
                    await hold.withdraw()
                    raise
        return Fork(child, parent, 0)

    async def _point(
        self, parent: SessionKey, head: int, at: int | str | Checkpoint | None
    ) -> Record:
        """Return the record that a fork continues from."""
        if not (at is None or type(at) is int or isinstance(at, str | Checkpoint)):
            message = f"invalid at={at!r}: give a record's seq, a turn's id or a checkpoint"
            raise InvalidArgumentError(message, option="at")
        seq = at if isinstance(at, int) else head
        if isinstance(at, Checkpoint):
            seq = await self._end_of(parent, at)
        if isinstance(at, str):
            turn = await find_turn(self._store, parent, at)
            if turn is None or turn.phase == "open":
                message = (
                    f"session {parent} has no turn {at!r} that is over: give the id of one that "
                    "has ended, or the seq of a record"
                )
                raise InvalidArgumentError(message, key=str(parent), at=at)
            seq = turn.last
        point = await self._access.record(parent, seq) if 0 < seq <= head else None
        if point is None:
            raise _no_record(parent, seq, head)
        if not point.end:
            message = (
                f"record {seq} of session {parent} is in the middle of a group: fork at its end, "
                "or at a turn's"
            )
            raise InvalidArgumentError(message, key=str(parent), at=seq)
        return point

    async def _without_epochs(self, parent: SessionKey, point: Record) -> Record | None:
        """Return the last record up to one that is no epoch's; None if there is none.

        Those after it say nothing, and a copy of the parent elsewhere has others there, or none.
        """
        if point.kind not in HOLDER_KINDS:
            return point
        log = self._store.read_log(parent, before=point.seq, reverse=True)
        last = await first_record(log, lambda record: record.kind not in HOLDER_KINDS)
        if last is None and await self._access.record(parent, point.seq) != point:
            message = f"session {parent} was deleted while another one was made of it"
            raise SessionNotFoundError(message, key=str(parent))
        return last

    async def _end_of(self, parent: SessionKey, checkpoint: Checkpoint) -> int:
        """Return the record that ends a checkpoint's group."""
        record = await self._access.record(parent, checkpoint.event_seq + 1)
        is_checkpoint = record is not None and record.kind == CHECKPOINT
        if record is None or not is_checkpoint or decode(record.payload, Checkpoint) != checkpoint:
            message = (
                f"checkpoint {checkpoint.id} ({checkpoint.label!r}) does not stand in the log of "
                f"session {parent}: give one of that session's, whose history was not pruned"
            )
            raise InvalidArgumentError(message, key=str(parent), checkpoint=checkpoint.id)
        return checkpoint.event_seq + GROUP

    async def _begin(
        self,
        parent: SessionKey,
        child: SessionKey,
        point: Record,
        more: Sequence[Entry],
        history: History,
    ) -> Fork:
        if COPIES or history == "context":
            return await self._copy_to(parent, child, point, FORKS[history], more)
        origin = parent
        while True:  # a fork of what was shared already is a fork of the session that wrote it
            above = await self._store.base_of(origin)
            if above is None or above.parent is None or point.seq > above.at:
                break
            if not await self._store.has(above.parent, above.at, above.epoch):
                break
            origin = above.parent
        base = Origin(at=point.seq, parent=origin, epoch=point.epoch)
        async with self._access.exclusive(child):
            await self._require_free(child, base, more)
            await self._note(origin, child)
            await self._create(origin, child, base, more)
        return Fork(child, parent, point.seq)

    async def _require_free(
        self, child: SessionKey, base: Origin | None, more: Sequence[Entry]
    ) -> bool:
        """Refuse an id that is taken; return whether this very beginning was made before."""
        if child in self._access.runtime.sessions:
            raise exists(child)
        begun = await self._access.begun(child)
        if begun == LogOrigin():
            return False
        if begun.base != base or begun.has_records or more:
            raise exists(child)
        return True

    async def _note(self, parent: SessionKey, child: SessionKey) -> None:
        """Record the child in the parent, durably, before the child refers to it. No lease."""
        note = encode(ForkNote(child))
        session = self._access.open_here(parent)
        if session is not None:
            session._accept((Entry(FORK, note),))
            await session.save()
            return
        await self._store.enqueue(parent, [PendingItem(f"fork-{random_id()}/0", FORK, note, 0.0)])

    async def _create(
        self, source: SessionKey, child: SessionKey, base: Origin, more: Sequence[Entry]
    ) -> None:
        async with self._access.held(child, Terms("raise", 0), new=True) as hold:
            # No other process can write it from here on, or withdraw what it has begun.
            is_made = await self._require_free(child, base, more)
            if not is_made:
                try:
                    await hold.rebase(base, *more)
                except StoreError:
                    await self._undo(hold)
                    raise
            # From here on a deletion of the source finds what this needs of it; an earlier one
            # shows.
            if error := await self._gone(source, child, base):
                if not is_made:  # else it was acknowledged, maybe
                    await hold.withdraw()
                raise error

    async def _gone(self, parent: SessionKey, child: SessionKey, base: Origin) -> Exception | None:
        """Return why a fork's history is not there, or is about to go without its parent's notice.

        The parent's newest records show it: they are few, and before them is the one
        that the fork continues from.
        """
        newest, point = None, None
        log = self._store.read_log(parent, after=base.at - 1, reverse=True)
        pruned = False
        async with aclosing(log):
            async for chunk in log:
                for record in chunk.records:
                    newest = newest or record
                    point = record
                    pruned |= record.kind == BASE and decode(record.payload, Origin).cut >= base.at
        is_there = point is not None and (point.seq, point.epoch) == (base.at, base.epoch)
        if newest is None or newest.kind == ENDING or not is_there:
            message = f"session {parent} was deleted while {child} was made of it"
            return SessionNotFoundError(message, key=str(parent))
        is_fork = base.parent is not None  # what a copy has is its own
        return _no_record(parent, base.at, base.at) if pruned and is_fork else None

    async def _undo(self, hold: HeldSession) -> None:
        """Delete the session if it is empty."""
        begun = await self._access.begun(hold.key)
        if begun == LogOrigin():
            await hold.withdraw()

    # copies

    async def copy(
        self, key: SessionKey, new: SessionKey, *, moved: SessionKey | None = None
    ) -> Fork:
        """Make a session with the same history and state, which needs the other no more.

        Raises:
            HistoryPrunedError: It was pruned again and again while it was read.
            NotStorableError: The store keeps no blobs.
            SessionError: The new session exists.
            SessionNotFoundError: There is nothing to copy, or it was deleted meanwhile.

        """
        require_different(key, new, "copy")
        if COPIES:
            point = await self.newest(key, await self._access.head(key))
            if point is None:
                return await self._begin_anew(key, new, ())
            return await self._copy_to(key, new, point, "copy")
        base = await self._whole_base(key, moved)
        async with self._access.exclusive(new):
            await self._require_free(new, base, ())
            await self._create(key, new, base, ())
        return Fork(new, key, base.at)

    async def _whole_base(self, key: SessionKey, moved: SessionKey | None) -> Origin:
        """Return the base of a copy; begin anew if the session is pruned while it is read."""
        for left in reversed(range(_TRIES)):
            head = await self._access.head(key)
            before = await self._stored_base(key)
            try:
                base = await self.own_base(key, head, moved=moved)
                if before == await self._stored_base(key):
                    return base
                raise _no_record(key, head, head)
            except HistoryPrunedError:  # pruned, or deleted and made again, while it was read
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _stored_base(self, key: SessionKey) -> Origin | None:
        """Return the base that a session's manifest names: no prune removes anything before."""
        manifest = (await self._store.inner.read_documents(key, ())).manifest
        return None if manifest is None else manifest.base

    async def own_base(
        self, key: SessionKey, at: int, *, moved: SessionKey | None = None
    ) -> Origin:
        """Keep a session's history up to a record as blobs; return the base that names them."""
        store = self._store
        point = await self._access.record(key, at)
        if point is None:
            raise _no_record(key, at, at)
        begun = await store.beginning_of(key)
        cut = min(begun.cut, at)
        history = await keep_history(store, key, after=cut, upto=at)
        folded = begun.folded  # newer ones would leave nothing to fold the records after the cut on
        if not cut:
            documents = await store.documents_upto(key, at)
            folded = await keep_documents(store, key.tenant, documents)
        return Origin(at=at, epoch=point.epoch, kept=history, cut=cut, folded=folded, moved=moved)


def _can_move(entry: Entry) -> bool:
    """Whether a record may get another number: it refers to none, and needs none before it."""
    return entry.kind not in {BASE, CHECKPOINT, CHECKPOINTS_PRUNED, FORK, RETRACT}


def _no_record(key: SessionKey, seq: int, head: int) -> SessionError | InvalidArgumentError:
    facts: dict[str, object] = {"key": str(key), "at": seq, "head": head}
    if 0 < seq <= head:
        message = f"session {key} cannot be forked at record {seq}: that history was pruned"
        return HistoryPrunedError(message, **facts)
    message = f"session {key} has no record {seq} to fork at: its log ends at {head}"
    return InvalidArgumentError(message, **facts)


_QUIET = HOLDER_KINDS | {BASE, ENDING, FORK}
"""Kinds that say nothing of what the session holds."""


async def fork_unsaved(
    runtime: Runtime,
    lifecycle: SessionLifecycle,
    tracked: Tracked,
    new_id: str,
    *,
    new_session: str | None,
    history: History,
) -> Fork:
    """Begin a session with what is durable of another one, and what is not."""
    require_history(history)
    key = tracked.key
    new = session_key(new_id, new_session or key.session, key.tenant)
    forker = ForkBuilder(ExclusiveAccess(runtime, lifecycle))

    async def fork() -> Fork:
        forked = await forker.fork_unsaved(tracked, new, history=history)
        runtime.saver.settle_lost(tracked)  # here: a cancelled caller does not stop it
        return forked

    return await runtime.host.call(fork)


@final
class LostSession:
    """A session that can be written no more, and the records of it that are only in memory.

    From ``sessions.lost``. Fork or discard them, or they are named when the manager stops.
    """

    __slots__ = ("_lifecycle", "_runtime", "_tracked")

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle, tracked: Tracked) -> None:
        self._runtime = runtime
        self._lifecycle = lifecycle
        self._tracked = tracked

    def __repr__(self) -> str:
        unsaved = self.version - self.durable_version
        return f"<LostSession {self.key} epoch={self.epoch} unsaved={unsaved}>"

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._tracked.key

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self.key.agent

    @property
    def epoch(self) -> int:
        """The number of the lease that was lost."""
        return self._tracked.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._tracked.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that the store had acknowledged."""
        return self._tracked.durable

    @property
    def error(self) -> Exception | None:
        """What the store said when the session was lost."""
        return self._tracked.last_error

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are only in memory."""
        return self._tracked.pending_records()

    async def fork_unsaved(
        self, new_id: str, *, new_session: str | None = None, history: History = "full"
    ) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        As `Session.fork_unsaved`. What was lost is decided with that.
        """
        return await fork_unsaved(
            self._runtime,
            self._lifecycle,
            self._tracked,
            new_id,
            new_session=new_session,
            history=history,
        )

    async def discard_unsaved(self) -> int:
        """Drop the records that are only in memory, and return how many."""
        return self._runtime.saver.discard(self._tracked)
