"""Lifecycle of open sessions, and exclusive access to those that are not open.

`SessionLifecycle` pins, folds, hibernates, hands over and closes. A session leaves memory only
when it is durable, or can no longer be written; it stays registered until its lease is
released, so that a load cannot meet a close that is under way.

`ExclusiveAccess` holds a session under its lease and appends as its holder: forks, renames,
deletions and prunes go through it. Each may be killed at any point: its steps are ordered so
that running it again completes it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self, final

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from perdure._lib.logs import log_facts
from perdure._lib.tasks import HostClosedError, each
from perdure.autosave.deadline import Deadline
from perdure.autosave.tracked import ended, require_outside
from perdure.errors import (
    InvalidArgumentError,
    LeaseLostError,
    PerdureError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    SessionQuarantinedError,
    StoreError,
    StoreUnavailableError,
    UnsavedChangesError,
)
from perdure.lease import OnHeld, acquire_lease, not_found
from perdure.lineage import require_plain
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT, origin_in
from perdure.records.media import filled
from perdure.records.messages import decode_message, kind_of
from perdure.records.records import (
    CONTEXT,
    HOLDER_KINDS,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    META,
    STATE,
    Entry,
    Record,
)
from perdure.restore.ladder import RestoredSession, restore
from perdure.session.events import Closed, ClosedWhy, Folded, FoldFailed
from perdure.session.fold import (
    LEAST_TAIL,
    PreparedFold,
    fold,
    fold_due,
    fold_first,
    phase_of,
    prepare_fold,
)
from perdure.session.media import hold_media
from perdure.session.runtime import (
    Runtime,
    exclusive,
    try_exclusive,
    wait_idle,
)
from perdure.session.stored import SessionStore
from perdure.store import Batch, Status, Store, Terms, first_record, record_at

if TYPE_CHECKING:
    from perdure.session.base import SessionBase


_MOVABLE = frozenset({ITEM, MEMORY_DROP, MEMORY_SET, META, STATE})
"""Kinds of records that mean the same under another number."""


def rescued(session: SessionBase, after: int) -> tuple[list[Entry], Entry]:
    """Return the acknowledged records of a session after one that memory holds, oldest first.

    That is messages of the working context, and what was changed since the last fold; and, as a
    record of its own, the working context as it is now.
    """
    contents, durable = session._contents, session._tracked.durable
    known = [
        (seq, Entry(kind_of(decode_message(payload)), filled(payload, contents.context.media)))
        for seq, payload in contents.context.by_record()
    ]
    known += [
        (record.seq, Entry(record.kind, record.payload)) for record in contents.changes(_MOVABLE)
    ]
    known.sort(key=lambda record: record[0])
    context = Entry(CONTEXT, contents.context.as_record("rescue"))
    return [entry for seq, entry in known if after < seq <= durable], context


log: logging.Logger = logging.getLogger("perdure")

FIRST_TURN = 0.1
"""Seconds that the caller that opens a session has to begin a turn before a handover."""
PATIENCE = 1.0
"""Seconds for which a handover has turns wait for the store; then it is asked for again."""
MOST_EPOCHS: Final = 16
"""Opens without a fold at most: each adds a record, to be read by the next ones, and on files a log
file."""
AT_ONCE = 64
"""Sessions at most that are folded, or released, at a time."""
REST = 0.05
"""Seconds without an append after which a session is at rest: a fold then delays no turn."""
BEGUN = 16
"""Folds at most that have begun, and hold what they write, while others wait for their sessions."""
LOOKS = 64
"""Sessions that are looked at in one step of the event loop, while their folds wait."""
LONG_TAIL = 1.5
"""A session that never is at rest is folded with a tail this many times as long."""
MAX_HANDED_OVER = 1000
"""Handed-over sessions whose epochs are remembered, at most."""


@final
class _Fold:
    """One fold of a session, as of its newest durable record when it began.

    What a session at rest has in memory is taken at once, so that the fold need not read it back.
    An error is an event and a warning: only time is lost.
    """

    def __init__(self, lifecycle: SessionLifecycle, session: SessionBase) -> None:
        self.session: SessionBase = session
        self._runtime = lifecycle._runtime
        self._failed = lifecycle._fold_failed
        self.version: int = 0
        """The session's version when it was last looked at, while this waits for it to rest."""

    def begin(self) -> Self:
        """Take what the session has in memory, as of its newest durable record."""
        session = self.session
        self._upto = session._tracked.durable
        # A fold needs nothing else of a session at rest.
        at_rest = session._tracked.clean
        self._open_tail = session._contents.open_tail(self._upto) if at_rest else None
        self._tail = session._durable_tail()
        self._since = session._contents.as_of_seq
        self._prepared: PreparedFold | None = None
        return self

    async def prepare(self) -> None:
        """Compute what to write."""
        session = self.session
        try:
            self._prepared = await prepare_fold(
                self._runtime.store,
                session.key,
                epoch=session.epoch,
                upto=self._upto,
                limits=self._runtime.limits,
                mend=tuple(session._contents.damaged),
                tail=self._open_tail,
            )
        except Exception as error:  # noqa: BLE001  # reported
            self._failed(session, error)

    async def write(self, *, urgent: bool = True) -> None:
        """Write it; after another fold, what that one left."""
        if not urgent and self.session.key in self._runtime.pending_loads:
            # Who has it exclusively may have announced a base: a fold now would hold it, and not
            # be of it.
            return
        session = self.session
        # Another fold was written in between: this one's result is out of date.
        if session._contents.as_of_seq != self._since:
            self.begin()
            await self.prepare()
        if self._prepared is None:
            return
        try:
            manifest = await self._prepared.write(self._runtime.store)
        except Exception as error:  # noqa: BLE001  # reported
            self._failed(session, error)
            return
        session._folded(manifest, self._tail)
        self._runtime.hooks.emit(Folded(key=session.key, as_of_seq=manifest.as_of_seq))


Why = Literal["idle", "handover", "close", "drop", "rename", "lost", "deleted", "shutdown"]


class LeaveSteps(NamedTuple):
    """The steps for a session that leaves memory, in this order."""

    turns: Literal["first", "ignored"]
    """First: those that run and wait by then end before, and no other begins meanwhile."""
    unsaved: Literal["saved", "refused", "dropped", "kept"]
    """Saved, or it stays open; refused: it stays open if anything is unsaved, or it is in use."""
    fold: Literal["always", "if long", "never"]
    """Condition for writing documents that are older than the log."""
    lease: Literal["released", "kept"]
    event: ClosedWhy | Literal[""]
    """The reason in the event ``closed``; a session without one stays registered."""


LEAVES: Final[dict[Why, LeaveSteps]] = {
    "idle": LeaveSteps("ignored", "refused", "always", "released", "hibernated"),
    "handover": LeaveSteps("first", "saved", "if long", "released", "handed over"),
    "close": LeaveSteps("first", "saved", "always", "released", "closed"),
    "drop": LeaveSteps("ignored", "dropped", "never", "released", "closed"),
    "rename": LeaveSteps("first", "saved", "always", "kept", "closed"),
    "lost": LeaveSteps("ignored", "kept", "never", "kept", "lost"),
    "deleted": LeaveSteps("ignored", "dropped", "never", "kept", "deleted"),
    # Turns are waited for, and records are saved, of all sessions at once.
    "shutdown": LeaveSteps("ignored", "kept", "always", "released", ""),
}
"""The only ways out of memory."""

_MESSAGES: Final[dict[Why, str]] = {
    "idle": "session {} was idle and left memory after its last `async with` ended: "
    "open it again with sessions.open(…)",
    "handover": "session {} was handed over to another process or manager that asked for it: "
    "open it again to ask for it back",
    "close": "session {} is closed: open it again with sessions.open(…)",
    "drop": "session {} was closed without its unsaved changes: "
    "open it again with sessions.open(…)",
    "deleted": "session {} was deleted",
    "shutdown": "session {} is closed with its manager: call connect(…) again",
}
_ERRORS: Final[dict[Why, type[PerdureError]]] = {
    "handover": LeaseLostError,
    "deleted": SessionNotFoundError,
}


def left(key: SessionKey, why: Why) -> PerdureError:
    """Return the error that the objects of a session raise once it has left memory."""
    return _ERRORS.get(why, SessionClosedError)(_MESSAGES[why].format(key), key=str(key))


class SessionLifecycle:
    """The life of a manager's sessions between open and close."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.sessions: dict[SessionKey, SessionBase] = {}
        """The sessions in memory. One stays until it is durable and its lease is released."""
        self._handing_over: set[SessionKey] = set()
        self._folding: dict[SessionBase, _Fold] = {}
        """Folds in the background."""
        self._waiting: dict[SessionBase, _Fold] = {}
        """Those of them that wait until their sessions are at rest."""
        self._is_looking = False
        self._given: dict[SessionKey, int] = {}
        self.set_aside: dict[SessionKey, str] = {}
        """Parts of logs that do not count, by session, as of its last open here."""

    # pins

    def keep(self, session: SessionBase) -> None:
        """Register a session that was just loaded."""
        session._tracked.heard_by = self
        self.sessions[session.key] = session
        self._attach_hooks(session)

    def attach_hooks(self) -> None:
        """Run the hooks that there are by now before saves, and after each."""
        if self._runtime.hooks.has("saved"):
            self._runtime.saver.report_saves(wanted=True)
        for session in self.sessions.values():
            self._attach_hooks(session)

    def _attach_hooks(self, session: SessionBase) -> None:
        hooks, tracked = self._runtime.hooks, session._tracked
        if tracked.before_capture is None and hooks.has("before_save"):
            tracked.before_capture = session._before_save

    def pin(self, session: SessionBase, *, force: bool = False) -> None:
        """Pin a session for a caller.

        Raises:
            SessionQuarantinedError: It is quarantined, and ``force`` is False.

        """
        tracked = session._tracked
        if tracked.quarantined and not force:
            raise SessionQuarantinedError(
                f"session {session.key} is quarantined: the store refuses a record of it; "
                "open it with force=True to see what is unsaved",
                key=str(session.key),
            ) from tracked.last_error
        tracked.pins += 1

    def unpin(self, session: SessionBase) -> None:
        """Let go of a session; autosave and hibernation own it from then on."""
        tracked = session._tracked
        tracked.pins = max(tracked.pins - 1, 0)
        if tracked.pins == 0 and session._closed_by is None:
            self._runtime.saver.touch(tracked)

    # folds

    def saved(self, session: SessionBase, durable: int, /) -> None:
        """Decide, after each save, whether to fold."""
        limits = self._runtime.limits
        if (
            session._folded_format < FORMAT
            and session._behind.context.has_lifted
            and session not in self._folding
            and limits.fold_ratio < inf
        ):
            # A fold has to say that messages refer to media in blobs.
            self.fold_soon(session)
            return
        if session._tail_bytes < LEAST_TAIL and session._tail_records < limits.fold_records:
            return  # nearly always: the rest costs more than this
        if self._runtime.saver.crowded:
            return
        fold = self._folding.get(session)
        if fold is None:
            if self._is_due(session):
                self.fold_soon(session)
        elif session in self._waiting and self._is_due(session, LONG_TAIL):
            self._begin_fold(fold)  # now, while memory has what is durable

    def _is_due(self, session: SessionBase, times: float = 1.0) -> bool:
        """Return whether the log's tail is long enough for a fold, or this many times as long."""

        def is_due(phase: float) -> bool:
            return fold_due(
                tail_bytes=session._tail_bytes,
                tail_records=session._tail_records,
                rewrite_bytes=session._rewrite_bytes,
                limits=self._runtime.limits,
                phase=phase,
            )

        # Without its phase first, which is dear to compute after each save.
        return is_due(times) and is_due(times * phase_of(session.key))

    def fold_soon(self, session: SessionBase) -> None:
        """Fold in the background, when the session is next at rest, unless that is planned already.

        A session that never is at rest is folded once its log's tail is long.
        """
        if session in self._folding or self._runtime.draining or session._closed_by is not None:
            return
        if not self._is_looking:
            self._runtime.host.spawn(self._look_for_rest)
            self._is_looking = True
        self._waiting[session] = self._folding[session] = _Fold(self, session)

    async def _look_for_rest(self) -> None:
        """Begin the folds that wait, each when its session's newest records have been saved.

        One task for all of them: very many may wait, for sessions that are busy.
        """
        try:
            while self._waiting:
                await anyio.sleep(REST)
                for at, fold in enumerate([*self._waiting.values()], 1):
                    if len(self._folding) - len(self._waiting) >= BEGUN:
                        break
                    if self._look_at(fold) or at % LOOKS == 0:
                        await checkpoint()
        finally:
            self._is_looking = False
            for session in self._waiting:  # if it was cancelled
                del self._folding[session]
            self._waiting.clear()

    def _look_at(self, fold: _Fold) -> bool:
        """Begin a fold if its session is at rest; return whether it was begun."""
        session, before = fold.session, fold.version
        if self._waiting.get(session) is not fold:
            return False  # begun while others were looked at
        fold.version = session.version
        if session._closed_by is not None or self._runtime.draining:
            del self._waiting[session], self._folding[session]
        elif fold.version == before and session._tracked.clean:
            self._begin_fold(fold)
            return True
        return False

    def _begin_fold(self, fold: _Fold) -> None:
        """Fold in a task of its own; one that cannot begin keeps no other from it."""
        session = fold.session
        del self._waiting[session]
        try:
            fold.begin()
            self._runtime.host.spawn(self._fold_in_background, fold)
        except HostClosedError:  # the next holder folds
            del self._folding[session]
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            del self._folding[session]
            self._fold_failed(session, error)

    async def _fold_in_background(self, fold: _Fold) -> None:
        try:
            # It may wait until the manager has closed: then the next holder folds.
            with suppress(HostClosedError):
                await self._fold_alone(fold, urgent=False)
        finally:
            del self._folding[fold.session]

    async def _fold_alone(self, fold: _Fold, *, urgent: bool) -> None:
        """Fold; only the write waits until no save of the session is with the store."""
        saver, tracked = self._runtime.saver, fold.session._tracked
        write = partial(fold.write, urgent=urgent)
        try:
            await saver.exclusive(tracked, write, prepare=fold.prepare, urgent=urgent)
        except StoreUnavailableError as error:  # given up, since it took too long
            self._fold_failed(fold.session, error)

    async def fold(self, session: SessionBase) -> None:
        """Fold what is durable of a session; a failure is an event and a warning."""
        fold = _Fold(self, session).begin()
        await fold.prepare()
        await fold.write()

    def _fold_failed(self, session: SessionBase, error: Exception) -> None:
        log_facts(log, logging.WARNING, "fold failed", error, session=str(session.key))
        self._runtime.hooks.emit(FoldFailed(key=session.key, error=error))

    # leaving memory

    def captured(self, session: SessionBase, /) -> None:
        """Let a session take in what is about to leave memory."""
        session._catch_up()

    def unused(self, session: SessionBase, /) -> None:
        """Put a session to rest that was not used for a while."""
        self._runtime.host.spawn(self.idle, session)

    async def leave(
        self,
        session: SessionBase,
        why: Why,
        deadline: Deadline | None = None,
        *,
        error: Exception | None = None,
    ) -> bool:
        """Have a session leave memory, as `LEAVES` says; return False if it stays open.

        The caller is alone with it. It stays registered until its lease is released.

        Args:
            session: Which.
            why: What the table is asked for.
            deadline: When it has to be over; by default as a close that begins after the turns.
            error: What its objects raise from then on, in place of the table's.

        Raises:
            StoreError: It could not be saved, and stays open.

        """
        row, saver, tracked = LEAVES[why], self._runtime.saver, session._tracked
        with nullcontext() if deadline is None else deadline.scope("saves"):
            # 1. Wait for the turns that run, and let no other begin.
            if row.turns == "first":
                await session._turns.enter(session.key)
            try:
                deadline = deadline or self.deadline()
                # 2. Unsaved records, as the table says. Contributors come first: they may add some.
                if row.unsaved == "refused":
                    if session._contributors is not None:
                        await saver.contribute(tracked)
                    if tracked.pins or not tracked.clean or session._closed_by is not None:
                        return False
                with anyio.move_on_after(PATIENCE) if why == "handover" else nullcontext():
                    if row.unsaved == "saved":
                        await self._seal(session)
                    # 3. From here on its objects raise: nothing is appended before the release.
                    session._close_with(error or left(session.key, why))
                if row.unsaved == "dropped":
                    await saver.abandon(tracked)
            finally:
                if row.turns == "first":
                    session._turns.leave()
        # Its time was over before it was closed: it stays open.
        if session._closed_by is None or deadline is None:
            return False
        # 4. Fold, release, forget.
        await self.let_go([session], why, deadline)
        return True

    async def let_go(self, sessions: Collection[SessionBase], why: Why, deadline: Deadline) -> None:
        """Fold, release and forget sessions of which nothing is left to save."""
        row, able = LEAVES[why], self._runtime.store.capabilities
        # A store that takes batches joins calls as well.
        at_once = max(able.parallelism, min(able.batch_max, AT_ONCE))

        async def fold(session: SessionBase) -> None:
            if why == "shutdown":  # nothing is saved any more that a fold could meet
                await self.fold(session)
            else:
                await self._fold_alone(_Fold(self, session).begin(), urgent=True)

        try:
            # Folds come before releases: after its release another process may write a session.
            behind = [session for session in sessions if _is_to_fold(session, row)]
            if behind:
                with deadline.scope("folds"):
                    await each(behind, fold, at_once=at_once)
            if row.lease == "released":
                with deadline.scope("releases"):
                    held = [(session.key, session.epoch) for session in sessions]
                    await each(held, lambda hold: self.release(*hold), at_once=at_once)
        finally:
            # Also where time ran out: nothing of it is left to save.
            if row.event:
                for session in sessions:
                    self._forget(session, row.event)

    def deadline(self) -> Deadline:
        """Return the deadline of a session's close that begins now."""
        return Deadline.of(self._runtime.shutdown, self._runtime.clock())

    def giving_up(self) -> anyio.CancelScope:
        """Return a shield for the release of what is not open here: it ends before any close."""
        seconds = self._runtime.shutdown.hard_grace  # which each close has, from where it begins
        return anyio.CancelScope(deadline=anyio.current_time() + seconds, shield=True)

    async def idle(self, session: SessionBase) -> None:
        """Hibernate a session that is unpinned and was not changed for long."""
        with try_exclusive(self._runtime.pending_loads, session.key) as free:
            if free and session._closed_by is None:
                await self.leave(session, "idle")

    async def drop(self, session: SessionBase) -> None:
        """Close an unpinned session without what is unsaved of it."""
        with try_exclusive(self._runtime.pending_loads, session.key) as free:
            if free and session._closed_by is None and not session._tracked.pins:
                await self.leave(session, "drop")

    async def hand_over(self, key: SessionKey) -> None:
        """Give a session to another process that asks: end the turn, save, fold, release."""
        if key in self._handing_over:
            return
        self._handing_over.add(key)
        runtime = self._runtime
        try:
            await wait_idle(runtime.pending_loads, key)
            session = self.sessions.get(key)
            if session is None:
                await self._release_stray(key)
                return
            # A new holder has one turn first, or two processes that ask in turns get none done.
            await session._turns.used(FIRST_TURN)
            await runtime.saver.save(session._tracked)  # turns continue as long as the store takes
            with try_exclusive(runtime.pending_loads, key) as free:
                if not free or runtime.draining or self.sessions.get(key) is not session:
                    return  # it is being let go of already, or will be when the manager stops
                if await self.leave(session, "handover"):  # else who wants it asks again
                    self._given[key] = session.epoch
                    if len(self._given) > MAX_HANDED_OVER:
                        del self._given[next(iter(self._given))]
        except (LeaseLostError, SessionError):
            pass  # taken already; or stuck with a refused record, and the asking process gets that
        except StoreUnavailableError as error:  # the process that wants it asks again
            if not runtime.draining:  # then everything is released, and the store closes
                log_facts(log, logging.WARNING, "a handover failed", error, session=str(key))
        finally:
            self._handing_over.discard(key)

    async def _release_stray(self, key: SessionKey) -> None:
        """Release a lease of ours that no session here has: a load or a release has failed."""
        store = self._runtime.store
        with try_exclusive(self._runtime.pending_loads, key) as free:
            holder = await store.holder(key) if free else None
            if holder is not None and holder.owner == store.owner and not holder.released:
                await store.release(key, holder.epoch)

    def last_handover_epoch(self, key: SessionKey) -> int:
        """Return the epoch in which a session was handed over from here last, once; else 0."""
        return self._given.pop(key, 0)

    async def close(self, session: SessionBase) -> None:
        """Save, fold and release a session for every caller in this process."""
        self.require_closable(session)
        if session._closed_by is None:
            await self._runtime.host.call(self._close, session)
        if session._tracked.undecided and session._closed_by is not None:
            raise session._closed_by

    def require_closable(self, session: SessionBase) -> None:
        """Refuse to wait for this very task.

        Raises:
            SessionError: It is in a turn of the session, or in a hook of its save.

        """
        if session._turns.is_own:
            raise SessionError(
                f"session {session.key}: this task is in a turn of it; "
                "end the turn before closing the session",
                key=str(session.key),
            )
        if session._closed_by is None:
            require_outside(session._tracked, "to close")

    async def _close(self, session: SessionBase) -> None:
        deadline, loads = self.deadline(), self._runtime.pending_loads
        if session.key in loads:
            with deadline.scope("saves"):
                await wait_idle(loads, session.key)
        with try_exclusive(loads, session.key) as free:
            if free and session._closed_by is None:
                await self.leave(session, "close", deadline)
        if session._closed_by is None:
            raise self._still_open(session)

    async def between_turns(self, session: SessionBase) -> None:
        """Wait for the turns that run and wait by now, as long as a close would."""
        with self.deadline().scope("saves") as scope:
            await session._turns.pass_by(session.key)
        if scope.cancelled_caught:
            raise self._still_open(session)

    def _still_open(self, session: SessionBase) -> SessionError:
        """Return the error for a session that could not be closed in time."""
        seconds = self._runtime.shutdown.deadline
        if session._turns.busy:
            message = (
                f"a turn of session {session.key} still runs after {seconds} s; the session stays "
                "open, and is saved as before: close it when the turn has ended"
            )
            error = SessionError if session._tracked.clean else UnsavedChangesError
            return error(message, key=str(session.key))
        return UnsavedChangesError(
            f"session {session.key} could not be saved within {seconds} s; it stays open "
            "and autosave keeps trying: see sessions.health()",
            key=str(session.key),
        )

    async def discard(self, session: SessionBase) -> int:
        """Drop the records of a session that are not durable, and return how many they were.

        If the store cannot be read, nothing is dropped: what the session holds would be wrong.
        """
        saver, tracked = self._runtime.saver, session._tracked
        saver.require_stuck(tracked)
        restored = await _read(session)
        dropped = saver.discard(tracked)  # raises if it was retried meanwhile
        session._renew(restored)
        await session._load_memory()
        return dropped

    def lost(self, session: SessionBase) -> None:
        """Handle a takeover: the session can no longer be written by this process."""
        if session._closed_by is not None:
            return
        unsaved, missed = session.version - session.durable_version, self._runtime.watch.missed()
        message = (
            f"session {session.key} was taken over by another process or manager, with "
            f"{unsaved} record{'s' * (unsaved != 1)} unsaved here"
        )
        if missed:
            message += (
                f", after this one had sent no heartbeat for {missed:.0f} s: something blocked its "
                "event loop, such as input(), time.sleep or a synchronous client, or the store did "
                f"not answer (a lease is held for LeaseOptions(ttl={self._runtime.lease.ttl:g}))"
            )
        message += ": "
        if unsaved:
            message += (
                "keep them with session.fork_unsaved(new_id), or drop them with "
                "session.discard_unsaved(). To continue, "
            )
        message += "open it again"
        tracked = session._tracked
        error = LeaseLostError(message, key=str(session.key), unsaved=unsaved)
        session._close_with(ended(tracked) if tracked.missing else error)
        session._catch_up()  # it may hear no more of records that leave memory
        if tracked.missing:
            tracked.rescue = partial(rescued, session)  # what it holds is needed, then
        self._forget(session, "lost")
        # What autosave keeps for its records is not to keep all that the session holds.
        tracked.of = None

    async def _seal(self, session: SessionBase) -> None:
        """Save a session and stop accepting records; if that fails, it stays open."""
        saver, tracked = self._runtime.saver, session._tracked
        # Before the seal, since the store may be slow: appends continue until little is left.
        await saver.save(tracked)
        saver.seal(tracked)
        try:
            if not tracked.clean:  # changed between the save and the seal
                await saver.save(tracked)
        except BaseException:
            saver.unseal(tracked)
            raise

    async def release(self, key: SessionKey, epoch: int) -> None:
        """Release a session's lease. If that fails, others get it when they ask, or when we end."""
        try:
            await self._runtime.store.release(key, epoch)
        except Exception as error:  # noqa: BLE001  # what was to be kept is durable
            log_facts(log, logging.WARNING, "release failed", error, session=str(key))

    def _forget(self, session: SessionBase, why: ClosedWhy) -> None:
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
        self._runtime.saver.untrack(session._tracked)
        version = session._tracked.durable
        self._runtime.hooks.emit(Closed(key=session.key, why=why, version=version))


def _is_to_fold(session: SessionBase, row: LeaveSteps) -> bool:
    epochs = session._tracked.epoch - session._folded_epoch
    many_epochs = session._folded_epoch > 0 and epochs >= MOST_EPOCHS
    if row.fold == "never" or not (session._tail_records or many_epochs):
        return False
    return row.fold == "always" or fold_first(
        tail_bytes=session._tail_bytes,
        tail_records=session._tail_records,
        rewrite_bytes=session._rewrite_bytes,
    )


_MOST_SAVES = 100
"""Saves at most that a read may meet in a row."""


async def read_again(session: SessionBase) -> None:
    """Reload a session's contents from the store."""
    session._renew(await _read(session))
    await session._load_memory()


async def _read(session: SessionBase) -> RestoredSession:
    """Return what the store has of a session, nothing that is durable left out."""
    runtime = session._runtime
    limit = runtime.limits.context_bytes
    restored = await restore(runtime.store, session.key, context_bytes=limit)
    for _ in range(_MOST_SAVES):
        if restored.head >= session.durable_version:
            break
        # A save came between, and what it saved has left memory.
        restored = await restore(runtime.store, session.key, context_bytes=limit)
    await hold_media(runtime.store, session.key, restored.context, runtime.media_budget)
    return restored


_TRIES = 3
_NEWEST = 8
MAX_WAITING = 1_000_000
"""Posts that are read at a time where all that wait are needed."""


class HandoverTerms(msgspec.Struct, frozen=True):
    """Terms for a session that another process holds."""

    on_held: OnHeld = "handover"
    wait: float = 10.0


async def append_durably(store: Store, batch: Batch) -> None:
    """Make a batch durable.

    Raises:
        LeaseLostError: Another process took the session over.
        StoreError: The store refuses it, or cannot be reached.

    """
    error: Exception | None = None
    for _ in range(_TRIES):
        (outcome,) = await store.append_many([batch])
        if outcome.status is Status.OK:
            return
        # In doubt, it is sent again under the same numbers: a no-op if the log has it.
        error = outcome.error
        if outcome.status in (Status.CONFLICT, Status.PERMANENT):
            break
    raise error or StoreError(f"session {batch.key}: the store would not take a record")


@final
class HeldSession:
    """A session that is held for a change, and is not open in this process."""

    def __init__(self, store: SessionStore, key: SessionKey, epoch: int, head: int) -> None:
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
        await append_durably(self._store, Batch(self.key, self.epoch, self.head + 1, entries))
        self.head += len(entries)

    async def delete(self, *, keep_posts: bool = False) -> None:
        """Remove the session; what was posted to its id waits on, if that is kept."""
        await self._store.delete(self.key, self.epoch, keep_posts=keep_posts)
        self.is_there = False


@final
class ExclusiveAccess:
    """The sessions of one manager, to be changed from outside."""

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle) -> None:
        self.runtime: Runtime = runtime
        self.lifecycle: SessionLifecycle = lifecycle
        self.store: SessionStore = runtime.store
        self.sessions: dict[SessionKey, SessionBase] = lifecycle.sessions

    def exclusive(self, key: SessionKey) -> AbstractAsyncContextManager[None]:
        """Keep others of this process from opening or closing a session meanwhile."""
        return exclusive(self.runtime.pending_loads, key)

    @asynccontextmanager
    async def held(
        self,
        key: SessionKey,
        terms: HandoverTerms,
        *,
        new: bool = False,
        goes: bool = False,
        aside: bool = False,
    ) -> AsyncGenerator[HeldSession, None]:
        """Hold a session that is not open here; the caller is alone with it.

        One of before 0.1.0 that is numbered after a base is only held if it *goes*. To delete one
        that was found damaged, ask for it with *aside*: nothing of it is read, and a store of files
        sets its log aside, which a deletion removes too.

        Raises:
            LeaseHeldError: Another process keeps holding it.
            SessionError: It is open here: its holder would take it over from itself.
            SessionNotFoundError: There is none, unless it may be ``new``.

        """
        runtime = self.runtime
        if key in self.sessions:
            raise SessionError(f"session {key} is open here: close it first", key=str(key))
        if not goes:
            require_plain(key, await self.store.base_of(key))
        grant = await acquire_lease(
            # The outer one reads what comes before the log.
            self.store.inner if aside else self.store,
            key,
            Terms(me=self.store.owner, create=new, set_aside=aside),
            watch=runtime.watch,
            on_held=terms.on_held,
            wait=terms.wait,
        )
        async with self.still_held(key, grant.epoch, grant.head) as hold:
            if grant.created and not new:
                await hold.delete(keep_posts=True)  # an empty one, which the lease has made
                raise not_found(key)
            yield hold

    @asynccontextmanager
    async def still_held(
        self, key: SessionKey, epoch: int, head: int
    ) -> AsyncGenerator[HeldSession, None]:
        """Keep a session under its lease, and release it if it still exists at the end."""
        hold = HeldSession(self.store, key, epoch, head)
        try:
            yield hold
        finally:
            if hold.is_there:
                with self.lifecycle.giving_up():
                    await self.store.release(key, epoch)
            else:
                self.lifecycle.set_aside.pop(key, None)

    @asynccontextmanager
    async def left(
        self,
        session: SessionBase,
        why: Why,
        deadline: Deadline | None = None,
        *,
        error: Exception | None = None,
    ) -> AsyncGenerator[HeldSession, None]:
        """Have a session that is open here leave memory, and keep its lease."""
        if not await self.lifecycle.leave(session, why, deadline, error=error):
            raise self.lifecycle._still_open(session)
        head = await self.store.head(session.key)
        async with self.still_held(session.key, session.epoch, head) as hold:
            yield hold

    def open_here(self, key: SessionKey) -> SessionBase | None:
        """Return a session that is open in this process, and can be saved."""
        session = self.sessions.get(key)
        saves = session is not None and session.is_writable and not session._tracked.quarantined
        return session if saves else None

    async def save_here(self, key: SessionKey) -> None:
        """Save what is unsaved of a session here."""
        session = self.open_here(key)
        if session is not None:
            await session.save()

    async def fold(self, hold: HeldSession) -> None:
        """Have the documents be as of the newest record, and the manifest name the base."""
        limits = self.runtime.limits
        await fold(self.store, hold.key, epoch=hold.epoch, upto=hold.head, limits=limits)

    async def append_open(self, session: SessionBase, *entries: Entry) -> None:
        """Make entries durable at the end of a session that is open here."""
        session._accept(entries)
        await session.save()

    async def is_empty(self, key: SessionKey) -> bool:
        """Return whether a session was never written, or does not exist."""

        def says(record: Record) -> bool:
            return record.kind not in HOLDER_KINDS or origin_in(record) is not None

        return await first_record(self.store.inner.read_log(key), says) is None

    async def record(self, key: SessionKey, seq: int) -> Record | None:
        """Return one durable record of a session, None if there is none.

        Mostly one of the newest is asked for, which a reverse read finds first.
        """
        newest = self.store.read_log(key, reverse=True, limit=_NEWEST)
        record = await first_record(newest, lambda record: record.seq == seq)
        return record or await record_at(self.store, key, seq)

    async def head(self, key: SessionKey) -> int:
        """Return a session's durable end; what is unsaved of it here is saved first.

        Raises:
            SessionNotFoundError: There is no such session.

        """
        await self.save_here(key)
        loads = self.runtime.pending_loads
        is_coming = key in loads and key not in self.sessions
        if is_coming and await self.is_empty(key):  # it is just being made
            await wait_idle(loads, key)
        head = await self.store.head(key)
        if not head:
            raise SessionNotFoundError(f"there is no session {key}", key=str(key))
        return head


def require_different(key: SessionKey, new: SessionKey, what: str) -> None:
    """Raise ConfigError if a session is to become itself."""
    if key == new:
        raise InvalidArgumentError(
            f"{what}: {key} is the session itself: give another id", key=str(key)
        )


def group_of(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries as whole groups."""
    if entries and not entries[-1].end:
        return (*entries[:-1], entries[-1]._replace(end=True))
    return tuple(entries)


def groups_of(entries: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Yield entries in the groups that they were appended in."""
    group: list[Entry] = []
    for entry in entries:
        group.append(entry)
        if entry.end:
            yield tuple(group)
            group = []
