"""Forks and copies: sessions that begin with another one's history, and have it as their own.

This finds where a fork begins; what it takes along is in `copied` and `copier`.

What becomes of one session changes no other. `LostSession` is what remains of a session whose
lease was lost with records unsaved: they can be forked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import msgspec

from perdure.autosave.tracked import State
from perdure.errors import (
    HistoryPrunedError,
    InvalidArgumentError,
    LeaseHeldError,
    SessionError,
    SessionNotFoundError,
    StoreError,
)
from perdure.memory.traces import find_turn
from perdure.records.checkpoints import GROUP, Checkpoint
from perdure.records.json import decode
from perdure.records.keys import SessionKey, session_key
from perdure.records.records import (
    BASE,
    CHECKPOINT,
    CHECKPOINTS_PRUNED,
    HOLDER_KINDS,
    RETRACT,
    Entry,
    Record,
)
from perdure.session.copier import FORK, FORK_CONTEXT, copy_session, exists, is_made
from perdure.session.lifecycle import ExclusiveAccess, HandoverTerms, group_of, require_different
from perdure.store import Draft, first_record

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.session.lifecycle import SessionLifecycle
    from perdure.session.runtime import Runtime


History = Literal["full", "context"]
"""Extent of a fork: all of its parent's records, or only what they fold to."""


def require_history(history: Any) -> None:
    """Raise InvalidArgumentError for a part of a session that no fork takes."""
    if history not in FORKS:
        raise InvalidArgumentError(
            f"fork: invalid history={history!r}: choose {' or '.join(FORKS)}",
            option="history",
            value=history,
        )


FORKS: dict[History, str] = {"full": FORK, "context": FORK_CONTEXT}
_NUMBERED = frozenset({BASE, CHECKPOINT, CHECKPOINTS_PRUNED, RETRACT})


class Fork(msgspec.Struct, frozen=True):
    """A session that begins with another one's history."""

    key: SessionKey
    parent: SessionKey
    at: int
    """The last record that both have; the first one of its own has the next number."""


async def fork(
    access: ExclusiveAccess,
    parent: SessionKey,
    child: SessionKey,
    at: int | str | Checkpoint | None,
    more: Sequence[Entry] = (),
    *,
    history: History = "full",
) -> Fork:
    """Begin a session with another one's history up to a record, and ``more`` after it.

    Raises:
        HistoryPrunedError: The parent's history up to ``at`` was pruned, or no such turn is left
            in what was not.
        InvalidArgumentError: ``at`` names no end of a group, no turn that is over, or a
            checkpoint of another session.
        SessionError: The new session exists.
        SessionNotFoundError: The parent does not, or was deleted meanwhile.

    """
    require_different(parent, child, "fork")
    head = await access.head(parent)
    point = await _without_epochs(access, parent, await _point(access, parent, head, at))
    async with access.exclusive(child):
        return await made_of(access, parent, child, point, FORKS[history], more)


async def made_of(
    access: ExclusiveAccess,
    parent: SessionKey,
    child: SessionKey,
    point: Record | None,
    purpose: str,
    more: Sequence[Entry] = (),
) -> Fork:
    """Make a session of another one's content up to a record, and ``more`` after it.

    Without a record, of that alone. The caller is alone with the new session.
    """
    if point is None:
        return await _begun_anew(access, parent, child, more)
    store = access.store.inner
    draft = Draft(source=parent, generation=point.epoch, up_to=point.seq, purpose=purpose)
    if child in access.sessions:
        raise exists(child)
    # The very same fork may have been made before, and its answer lost.
    is_there = await is_made(store, child, draft)
    if is_there is None:  # it was opened, and never written
        async with access.held(child, HandoverTerms("raise", 0), new=True) as hold:
            # Again, under its lease: nothing can be written to it from here on.
            if await is_made(store, child, draft) is None:
                await hold.delete(keep_posts=True)
    # A draft does not say what followed it: with more, a copy that is there is not the answer.
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
        access.store.forget(child)
    return Fork(child, parent, point.seq)


async def newest(access: ExclusiveAccess, key: SessionKey, head: int) -> Record | None:
    """Return the last record of a session that says something, None if there is none."""
    return await _without_epochs(access, key, await _point(access, key, head, None))


async def _begun_anew(
    access: ExclusiveAccess, parent: SessionKey, child: SessionKey, records: Sequence[Entry]
) -> Fork:
    if child in access.sessions or not await access.is_empty(child):
        raise exists(child)
    async with access.held(child, HandoverTerms("raise", 0), new=True) as hold:
        # Again, under its lease.
        if not await access.is_empty(child):
            raise exists(child)
        if records:
            try:
                await hold.append(*records)
            except StoreError:
                await hold.delete(keep_posts=True)
                raise
    return Fork(child, parent, 0)


async def _point(
    access: ExclusiveAccess, parent: SessionKey, head: int, at: int | str | Checkpoint | None
) -> Record:
    """Return the record that a fork continues from."""
    if not (at is None or type(at) is int or isinstance(at, str | Checkpoint)):
        raise InvalidArgumentError(
            f"invalid at={at!r}: give a record's seq, a turn's id or a checkpoint", option="at"
        )
    seq = at if isinstance(at, int) else head
    if isinstance(at, Checkpoint):
        seq = await _end_of(access, parent, at)
    if isinstance(at, str):
        turn = await find_turn(access.store, parent, at)
        if turn is None:
            await _require_unpruned(access, parent, f"turn {at!r}")
        if turn is None or turn.phase == "open":
            raise InvalidArgumentError(
                f"session {parent} has no turn {at!r} that is over: give the id of one that "
                "has ended, or the seq of a record",
                key=str(parent),
                at=at,
            )
        seq = turn.last
    point = await access.record(parent, seq) if 0 < seq <= head else None
    if point is None:
        raise await _no_record(access, parent, seq, head)
    if not point.end:
        raise InvalidArgumentError(
            f"record {seq} of session {parent} is in the middle of a group: fork at its end, "
            "or at a turn's",
            key=str(parent),
            at=seq,
        )
    return point


async def _without_epochs(
    access: ExclusiveAccess, parent: SessionKey, point: Record
) -> Record | None:
    """Return the last record up to one that is no epoch's; None if there is nothing to copy.

    Those after it say nothing, and a copy of the parent elsewhere has others there, or none.
    Of one that says nothing, but begins with something, the first record counts as that.
    """
    if point.kind not in HOLDER_KINDS:
        return point
    log = access.store.read_log(parent, before=point.seq, reverse=True)
    last = await first_record(log, lambda record: record.kind not in HOLDER_KINDS)
    if last is None and await access.store.base_of(parent) is not None:
        last = await first_record(access.store.read_log(parent, limit=1))
    if last is None and await access.record(parent, point.seq) != point:
        raise _deleted(parent)
    return last


async def _end_of(access: ExclusiveAccess, parent: SessionKey, checkpoint: Checkpoint) -> int:
    """Return the record that ends a checkpoint's group."""
    # A checkpoint's record follows the one that it is as of.
    record = await access.record(parent, checkpoint.event_seq + 1)
    is_checkpoint = record is not None and record.kind == CHECKPOINT
    if record is None or not is_checkpoint or decode(record.payload, Checkpoint) != checkpoint:
        named = f"checkpoint {checkpoint.id} ({checkpoint.label!r})"
        if record is None:
            await _require_unpruned(access, parent, named, upto=checkpoint.event_seq + 1)
        raise InvalidArgumentError(
            f"{named} does not stand in the log of session {parent}: give one of that session's",
            key=str(parent),
            checkpoint=checkpoint.id,
        )
    return checkpoint.event_seq + GROUP


async def copy(access: ExclusiveAccess, key: SessionKey, new: SessionKey) -> Fork:
    """Make a session with the same history and state; what is in progress stays so.

    Raises:
        HistoryPrunedError: It was pruned again and again while it was read.
        SessionError: The new session exists.
        SessionNotFoundError: There is nothing to copy, or it was deleted meanwhile.

    """
    require_different(key, new, "copy")
    point = await newest(access, key, await access.head(key))
    async with access.exclusive(new):
        return await made_of(access, key, new, point, "copy")


async def _require_unpruned(
    access: ExclusiveAccess, key: SessionKey, what: str, *, upto: int = 1
) -> None:
    """Raise HistoryPrunedError for what a session lacks, if its log was pruned that far."""
    cut = (await access.store.beginning_of(key)).cut
    if upto <= cut:
        raise HistoryPrunedError(
            f"session {key} was pruned up to record {cut}, and has no {what}: choose what is "
            "after that",
            key=str(key),
            cut=cut,
        )


async def _no_record(
    access: ExclusiveAccess, key: SessionKey, seq: int, head: int
) -> SessionError | InvalidArgumentError:
    if 0 < seq <= head:
        await _require_unpruned(access, key, f"record {seq}", upto=seq)
        return _deleted(key)
    return InvalidArgumentError(
        f"session {key} has no record {seq} to fork at: its log ends at {head}",
        key=str(key),
        at=seq,
        head=head,
    )


def _deleted(key: SessionKey) -> SessionNotFoundError:
    return SessionNotFoundError(
        f"session {key} was deleted while another one was made of it", key=str(key)
    )


async def fork_unsaved(
    runtime: Runtime,
    lifecycle: SessionLifecycle,
    tracked: Tracked,
    new_id: str,
    *,
    new_session: str | None,
    history: History,
) -> Fork:
    """Begin a session with what is durable of another one, and what is not.

    If the store has lost a part of what was durable, what memory holds of that comes between.
    """
    require_history(history)
    access = ExclusiveAccess(runtime, lifecycle)
    key = tracked.key
    child = session_key(new_id, new_session or key.session, key.tenant)
    require_different(key, child, "fork_unsaved")

    async def fork() -> Fork:
        at = tracked.durable - tracked.missing
        point = await access.record(key, at) if at else None
        more = group_of(tracked.pending)
        if tracked.missing and tracked.rescue is not None:
            known, context = tracked.rescue(at)
            # A record that gets another number must refer to none, and need none before it.
            moved = tuple(entry for entry in tracked.pending if entry.kind not in _NUMBERED)
            more = (*known, *group_of(moved), context)
        if point is not None:
            point = await _without_epochs(access, key, point)
        elif not tracked.missing and tracked.end is not State.LOST:  # neither gone nor deleted
            raise await _no_record(access, key, at, tracked.version)
        async with access.exclusive(child):
            forked = await made_of(access, key, child, point, FORKS[history], more)
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
        """The store's error when the session was lost."""
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
