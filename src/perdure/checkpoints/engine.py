"""Checkpoints of a session: create, read, compare, verify, roll back and prune.

A checkpoint of the session itself is one short record, however long the session is: the log has
the history, and the checkpoint has the position and the digest of the log there. History is never
changed. A rollback is a new entry, written as one group of the log: after a crash, the log has all
of it or none.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, final

import anyio
import msgspec

from perdure import errors
from perdure._lib.logs import log_facts
from perdure.checkpoints.chain import (
    CheckpointChain,
    let_go,
    problems_of,
    sealed,
)
from perdure.checkpoints.events import read_events
from perdure.checkpoints.journal import Journal, JournalReader, LogWalk, RollbackEntries
from perdure.checkpoints.states import CheckpointStates, encoded, read_bytes, read_state
from perdure.checkpoints.verify import Verification, state_problems, verified
from perdure.records.checkpoints import (
    GROUP,
    SNAPSHOT_CREATED,
    CapturedState,
    Checkpoint,
    ExplicitState,
    KernelEvent,
    Pruning,
)
from perdure.records.json import decode, encode
from perdure.records.keys import require_text
from perdure.records.records import CHECKPOINT, CHECKPOINTS_PRUNED, EVENT, Entry

# The difference of two JSON values, by path: pure


class ValueChange(msgspec.Struct, frozen=True):
    """A value before and after a change."""

    before: Any
    after: Any


class Difference(msgspec.Struct, frozen=True):
    """Changes between two values; paths are JSON pointers, "" for the root."""

    added: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    changed: dict[str, ValueChange] = {}

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def difference(before: Any, after: Any) -> Difference:
    """Return the changes that turn one JSON value into another.

    >>> difference({"a": 1, "b": [1, 2]}, {"b": [1, 3], "c": 0})  # doctest: +NORMALIZE_WHITESPACE
    Difference(added={'/c': 0}, removed={'/a': 1},
               changed={'/b/1': ValueChange(before=2, after=3)})
    """
    result = Difference(added={}, removed={}, changed={})
    _compare(before, after, "", result)
    return result


def _compare(before: Any, after: Any, path: str, result: Difference) -> None:
    if type(before) is not type(after) or not isinstance(before, dict | list):
        if repr(before) != repr(after):  # 1 equals neither 1.0 nor true
            result.changed[path] = ValueChange(before, after)
        return
    theirs, ours = dict(_items(before)), dict(_items(after))
    for step, value in theirs.items():
        if step in ours:
            _compare(value, ours[step], path + step, result)
        else:
            result.removed[path + step] = value
    result.added.update({path + step: value for step, value in ours.items() if step not in theirs})


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a dict or a list, each with its step of the path."""
    if isinstance(value, list):
        yield from ((f"/{at}", item) for at, item in enumerate(value))
        return
    for key, item in value.items():
        yield "/" + key.replace("~", "~0").replace("/", "~1"), item


# Checkpoints


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint with a copy of its state."""

    id: int
    label: str
    timestamp: int
    """Time on the session's logical clock."""
    state: Any
    """The caller's state; of the session itself, a dict: ``context``, ``memory``, ``state`` …"""


class CheckpointReader:
    """Read access to a session's checkpoints: ``view.checkpoints``."""

    __slots__ = ("_reading",)

    def __init__(self, reading: JournalReader) -> None:
        self._reading: JournalReader = reading

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._reading.key}>"

    async def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that was not pruned, None if there is none."""
        return (await self._reading.chain()).latest

    async def get(self, id: int) -> Checkpoint | None:
        """Return a checkpoint without its state; None for an unknown id."""
        return (await self._reading.chain()).by_id.get(id)

    async def states(self) -> list[Checkpoint]:
        """Return all checkpoints that were not pruned, by id, without their states."""
        return list((await self._reading.chain()).by_id.values())

    async def restore(self, id: int) -> CheckpointState | None:
        """Return a checkpoint with a copy of its state, None for an unknown id; changes nothing.

        Raises:
            HistoryPrunedError: It is of the session itself, and the history before it was pruned.
            CorruptRecordError: A part of the state is missing or damaged.
            SessionNotFoundError: The session was deleted meanwhile.

        """
        checkpoint = await self.get(id)
        if checkpoint is None:
            return None
        reading = self._reading
        async with _looking_again(reading):
            if isinstance(checkpoint.state, CapturedState):
                state_at = reading.walk()
                state: Any = await state_at(checkpoint.event_seq)
                state["context"] = list(state["context"].values())
            else:
                whose = reading.key.blobs
                state = await read_state(reading.store, whose, checkpoint.state, reading.types)
        return CheckpointState(
            id=checkpoint.id,
            label=checkpoint.label,
            timestamp=checkpoint.timestamp,
            state=state,
        )

    async def diff(self, a: int, b: int) -> Difference:
        """Return what was added, removed and changed from one checkpoint's state to another's.

        Paths are JSON pointers. The context's messages are named by the records that brought
        them, so that a message keeps its path.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CorruptRecordError: A part of a state is missing or damaged.
            SessionNotFoundError: The session was deleted meanwhile.

        """
        before, after = await self._known(a), await self._known(b)
        walk = self._reading.walk()
        async with _looking_again(self._reading):
            return difference(await self._plain(before, walk), await self._plain(after, walk))

    async def verify(self) -> Verification:
        """Verify the chain, the log and the states against change and loss.

        Reads all of the session's log, and every state that a caller passed.

        Raises:
            SessionNotFoundError: The session was deleted meanwhile.

        """
        return await verified(self._reading)

    async def _plain(self, checkpoint: Checkpoint, walk: LogWalk) -> Any:
        """Return a checkpoint's state as plain JSON."""
        reading = self._reading
        if isinstance(checkpoint.state, CapturedState):
            return await walk(checkpoint.event_seq)
        return decode(await read_bytes(reading.store, reading.key.blobs, checkpoint.state))

    async def _known(self, id: int) -> Checkpoint:
        chain = await self._reading.chain()
        checkpoint = chain.by_id.get(id)
        if checkpoint is None:
            fate = "was pruned" if chain.had(id) else "was never made"
            raise errors.CheckpointNotFoundError(
                f"session {self._reading.key} has no checkpoint {id}: it {fate}; "
                f"checkpoints.states() and `perdure checkpoints {self._reading.key.agent}` list "
                "the existing ones",
                key=str(self._reading.key),
                checkpoint=id,
            )
        return checkpoint

    async def _sound(self, id: int) -> Checkpoint:
        """Return a checkpoint after verifying it and its state."""
        checkpoint = await self._known(id)
        bad = [
            problem
            for problem in problems_of((await self._reading.chain()).links)
            if problem.id == id
        ]
        bad += await state_problems(self._reading, checkpoint)
        if bad:
            what = "; ".join(problem.what for problem in bad)
            raise errors.CorruptRecordError(
                f"checkpoint {id} of session {self._reading.key} cannot be rolled back to: {what}; "
                "nothing was changed",
                key=str(self._reading.key),
                checkpoint=id,
            )
        return checkpoint


@asynccontextmanager
async def _looking_again(reading: JournalReader) -> AsyncGenerator[None, None]:
    """Have a session that is gone by now called gone, and not damaged."""
    try:
        yield
    except errors.CorruptRecordError:
        await reading.require_same()
        raise


log: logging.Logger = logging.getLogger("perdure")

_TRIES = 10
"""Attempts at a rollback while the session is being appended to."""


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a rollback."""

    checkpoint: Checkpoint
    """The new entry, ``rollback::<label>#<id>``."""
    to: Checkpoint
    """The checkpoint that was rolled back to."""
    version: int
    """The session's version after the rollback."""
    state: Any = None
    """A copy of the caller's state, for the caller to apply."""
    events: tuple[KernelEvent, ...] = ()
    """With ``replay``: the events after that checkpoint, to feed to a runtime again."""


@final
class CheckpointEngine(CheckpointReader):
    """A session's checkpoints: ``session.checkpoints``."""

    __slots__ = ("_journal", "_lock", "_states")

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self._journal = journal
        self._states = CheckpointStates(journal.store, journal.key.blobs)
        self._lock = anyio.Lock()

    async def create(self, label: str, state: Any = None) -> Checkpoint:
        """Create a checkpoint; it is durable when this returns.

        Args:
            label: A name for people; it need not be unique.
            state: The state to store, of the types that a session's state can hold. None for the
                session itself as of now: its context, memory and states, without a copy.

        Raises:
            InvalidArgumentError: The label is not text.
            NotStorableError: The state cannot be stored; nothing was changed.

        """
        require_text("checkpoint label", label)
        if state is None:
            async with self._lock, _looking_again(self._journal):
                await self._journal.contribute()
                return await self._append(label, None)
        data, types = encoded(
            state, self._journal.types
        )  # independent of the caller's object from here on
        async with self._lock:
            newest_first = reversed((await self._journal.chain()).by_id.values())
            states = (checkpoint.state for checkpoint in newest_first)
            before = next((state for state in states if isinstance(state, ExplicitState)), None)
            given = await self._states.keep(data, types, before)  # it may share parts with that
            return await self._append(label, given)

    async def rollback(self, id: int, *, replay: bool = False) -> RolledBack:
        """Roll back to a checkpoint; everything is durable when this returns.

        The checkpoint is verified first. Then context, memory and states are set to what they were
        or, if the caller passed a state, a copy of it is returned. A rollback is a new entry, in
        one group of the log. It erases nothing: a rollback to before it undoes it.

        Args:
            id: The checkpoint's id.
            replay: Whether to return the events since the checkpoint.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CorruptRecordError: The checkpoint or its state was changed or lost.
            LeaseLostError: Another process has taken the session over.
            SessionError: Other tasks kept appending to the session.
            Exception: A contributor raised it; all else is rolled back.

        """
        return await self._journal.call(lambda: self._rollback(id, replay=replay))

    async def _rollback(self, id: int, *, replay: bool) -> RolledBack:
        journal = self._journal
        async with self._lock, _looking_again(journal):
            old = await self._sound(id)
            upto = journal.version + 1
            label = f"rollback::{old.label}#{old.id}"
            state = None
            if isinstance(old.state, ExplicitState):
                whose = journal.key.blobs
                state = await read_state(journal.store, whose, old.state, journal.types)
                new = await self._append(label, old.state)
            else:
                try:
                    new = await self._append(label, None, back_to=old.event_seq)
                finally:
                    # Contributors were set aside: they take over what is stored, rolled back or
                    # not.
                    await journal.gone_back()
            events: list[KernelEvent] = []
            if replay:
                behind = old.event_seq + GROUP  # its own event is no part of what follows
                events = await read_events(journal, after=behind, before=upto)
            return RolledBack(
                checkpoint=new,
                to=old,
                version=journal.version,
                state=state,
                events=tuple(events),
            )

    @asynccontextmanager
    async def guard(self, label: str) -> AsyncGenerator[Checkpoint, None]:
        """Create a checkpoint, and roll back to it if the block fails or is cancelled.

        ``async with session.checkpoints.guard("before the trial"): …``. The exception propagates.
        If the rollback fails, the exception gets a note that says so, and the session stays as it
        was when the block failed.
        """
        checkpoint = await self.create(label)
        try:
            yield checkpoint
        except BaseException as error:
            await self._journal.finish(partial(self._undo, checkpoint.id, error))
            raise

    async def _undo(self, id: int, error: BaseException) -> None:
        try:
            await self.rollback(id)
        except Exception as failure:  # noqa: BLE001  # a note on the error that is raised
            log_facts(log, logging.ERROR, "rollback failed", failure, checkpoint=id)
            error.add_note(f"the session did not go back to checkpoint {id}: {failure!r}")

    async def prune(self, *, keep: int | Collection[int]) -> tuple[int, ...]:
        """Prune checkpoints, and return their ids; they are never pruned otherwise.

        Their links stay in the chain as tombstones, so it can still be verified, and their ids are
        never reused. ``perdure check --gc`` removes state data that only they referenced.

        Args:
            keep: How many of the newest to keep, or the ids to keep.

        Raises:
            CheckpointNotFoundError: *keep* names a checkpoint that does not exist.
            InvalidArgumentError: *keep* is invalid; nothing was pruned.

        """
        async with self._lock:
            journal = self._journal
            chain = await journal.chain()
            pruned = let_go(tuple(chain.by_id), keep)
            if pruned:
                pruning: Pruning = sealed(
                    Pruning(
                        ids=pruned,
                        timestamp=journal.clock + 1,
                        event_seq=journal.version,
                        previous=chain.head,
                        hash="",
                    )
                )
                journal.accept((Entry(CHECKPOINTS_PRUNED, encode(pruning)),))
                await journal.save()
            return pruned

    async def _append(
        self, label: str, given: ExplicitState | None, *, back_to: int | None = None
    ) -> Checkpoint:
        """Append a checkpoint and its event, in one group; with *back_to*, after the rollback."""
        journal = self._journal
        if given is None:
            rollback, chain, state = await self._captured(back_to)
        else:
            rollback, chain, state = (), await journal.chain(), given
        # No await from here to accept(): what was read must be as of the newest record.
        seq = journal.version + len(rollback)
        checkpoint: Checkpoint = sealed(
            Checkpoint(
                id=chain.newest_id + 1,
                label=label,
                timestamp=journal.clock + 1,
                event_seq=seq,
                state=state,
                previous=chain.head,
                hash="",
            )
        )
        event = KernelEvent(
            token_id=journal.token,
            timestamp=checkpoint.timestamp + 1,
            kind=SNAPSHOT_CREATED,
            label=label,
            detail={"snapshot": checkpoint.id},
        )
        group = (*rollback, Entry(CHECKPOINT, encode(checkpoint)), Entry(EVENT, encode(event)))
        if back_to is not None:
            journal.going_back()
        journal.accept(group, captured=None if given is not None else seq)
        await journal.save()
        return checkpoint

    async def _captured(
        self, back_to: int | None
    ) -> tuple[tuple[Entry, ...], CheckpointChain, CapturedState | ExplicitState]:
        """Return rollback entries, chain and the state after them, as of the newest record."""
        journal = self._journal
        # Each of these reads awaits: an append in between makes the others too old.
        for _ in range(_TRIES):
            rollback = (
                RollbackEntries(0, ()) if back_to is None else await journal.way_back(back_to)
            )
            digest = (await journal.digest()).copy()
            chain = await journal.chain()
            if digest.seq == journal.version and rollback.version in (0, digest.seq):
                for seq, entry in enumerate(rollback.entries, journal.version + 1):
                    digest.accept(seq, entry.kind, entry.payload)
                return rollback.entries, chain, CapturedState(digest.since, digest.value)
        raise errors.SessionError(
            f"session {journal.key} is being appended to all the time: roll back in a turn, or "
            "when nothing else runs",
            key=str(journal.key),
        )
