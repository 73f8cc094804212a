"""Execution of saves: the writer, through which batches leave and answers come.

All of it runs in the host or in callbacks of its event loop, so that no caller's cancellation ever
reaches a save.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import final

import anyio

from perdure._lib.logs import log_facts
from perdure._lib.loop import post_to_loop
from perdure._lib.tasks import Host, HostClosedError
from perdure.autosave.core import (
    ANSWERS,
    REFUSALS,
    Core,
    Save,
    complete,
    in_doubt,
    outcome_of,
)
from perdure.autosave.schedule import SLOT
from perdure.autosave.tracked import State, Tracked
from perdure.errors import StoreUnavailableError
from perdure.store import Batch, Outcome, Status, Store, SupportsBeginAppend, capability

log: logging.Logger = logging.getLogger("perdure.autosave")

QUEUE_BELOW = 0.05
"""Seconds that a batch takes at most while others may wait for it in the store's queue."""
_NOT_BEGUN = "the task that brings the records to the store has not begun; another one is started"
CHUNK = 8
"""Sessions whose hooks are called, or callers woken, in one step of the event loop."""


@final
class _InFlightBatch:
    """A batch that is with the store."""

    __slots__ = ("began", "captured", "outcomes", "saves", "scope", "sent", "settled", "until")

    def __init__(self, saves: list[Save], began: float, until: float) -> None:
        self.saves = saves
        self.began = began
        self.until = until
        """Time at which it is given up."""
        self.sent = False
        """True if the store has it; False while its task has yet to begin."""
        self.scope: anyio.CancelScope | None = None
        """Of that task, where the store needs one."""
        self.captured = 0
        """To how many of the saves it was said that they were captured."""
        self.outcomes: Sequence[Outcome] | None = None
        """The store's answer."""
        self.settled = 0
        """To how many of the saves it was applied."""


@final
class Writer:
    """Bring to the store what is due, as many batches at once as it has slots for.

    A batch leaves in one place, for every cause: the end of a turn, the timer, a save, or the
    answer to the batch before. It captures then, not when it is asked for: all that was appended
    until then is in it, which is group commit without a timer. Where several sessions save at
    once, it captures one step of the event loop later, when all of them have asked, or
    ``batch_linger`` seconds later where the store asks for that.

    A save that takes longer than ``save_timeout`` is given up and in doubt: its slot is free for
    others, and nothing more of its sessions is sent until the store has answered, or failed.

    Args:
        core: Decides what to save.
        store: Where to save: by its ``begin_append``, or else by ``append_many`` in a task.
        host: Where such tasks run.
        clock: The loop's.
        prepare: Called with sessions whose contributors must be asked first.
        settled: Called with each batch's sessions, when all their waiters have been woken.
        begin_due: Calls `begin`, and notes the error if that fails.
        watch: Called with the time at which a save is to be given up.

    """

    def __init__(
        self,
        core: Core,
        store: Store,
        host: Host,
        clock: Callable[[], float],
        *,
        prepare: Callable[[list[Tracked]], None],
        settled: Callable[[list[Tracked]], None],
        begin_due: Callable[[], None],
        watch: Callable[[float], None],
    ) -> None:
        self._busy = 0.0
        # How long the last batch took.
        self._last_took = float("inf")
        self._core = core
        self._store = store
        self._host = host
        self._clock = clock
        self._prepare = prepare
        self._settled = settled
        self._begin_due = begin_due
        self._watch = watch
        self._batches = core.batch_max > 1
        linger = core.engine.batch_linger
        self._linger = store.capabilities.batch_linger if linger is None else linger
        self._soon = post_to_loop(from_any_thread=False)
        # Set when nothing is in flight any more, if a task waits for that.
        self._idle: anyio.Event | None = None
        # Sessions in the last batch: where several save at once, they are grouped.
        self._company = 1
        # When the sessions that are due now are captured, with all that ask until then.
        self._joined_at: float | None = None
        # Batches in the store's slots, the first to be given up in front.
        self._out: dict[_InFlightBatch, None] = {}
        # Batches that were given up, and may still be answered.
        self._doubtful: dict[_InFlightBatch, None] = {}
        direct = capability(store, SupportsBeginAppend)
        self._begin_append = None if direct is None else direct.begin_append

    # The way out.

    def begin(self, now: float) -> None:
        """Send what is due, as far as the store has slots."""
        # What is due waits for others to join it.
        if self._joined_at is not None:
            if now < self._joined_at:
                return
            self._joined_at = None
        elif not self._has_slot() or (self._batches and self._joins(now)):
            return
        core = self._core
        try:
            while self._has_slot() and core.may_capture(now) and self._host.running:
                saves, unprepared = core.capture(now)
                if unprepared:
                    self._prepare(unprepared)
                if saves:
                    self._send(saves, now)
        except BaseException as error:
            # A Ctrl-C between capture and sending leaves captured sessions with no batch.
            self.recover(_interrupted(error))
            raise
        if self._idle is not None and not self.is_busy:
            self._idle.set()

    def begin_alone(self, t: Tracked, now: float, version: int) -> bool:
        """Send a session's save if it is the only one that waits; return whether it was.

        Args:
            t: The session.
            now: The present time.
            version: What a caller waits for; 0 if none does.

        """
        if t.inflight is not None or len(self._out) >= self._core.parallel:
            return False
        # Others save at about the same time: one batch for all is cheaper.
        if self._batches and (self._out or self._company > 1 or self._joined_at is not None):
            return False
        try:
            save = self._core.capture_alone(t, version) if self._host.running else None
            if save is None:
                return False
            self._send([save], now)
        except BaseException as error:
            self.recover(_interrupted(error))
            raise
        return True

    def _joins(self, now: float) -> bool:
        """Let others join what is due, if it is less than a batch and they are likely to."""
        ready = len(self._core.schedule.ready)
        if not 0 < ready < self._core.batch_max:
            return False
        if self._linger and ready > 1 and not self._core.schedule.draining:
            self._joined_at = now + self._linger
            self._watch(self._joined_at)
        elif self._company > 1 or self._out:
            self._joined_at = now + SLOT  # at the latest: a Ctrl-C may come in its place
            self._soon(self._begin_joined)
        return self._joined_at is not None

    def _begin_joined(self) -> None:
        if self._joined_at is not None:
            self._joined_at = float("-inf")
            self._begin_due()

    def _has_slot(self) -> bool:
        """Return whether the store takes one batch more.

        One more than it works on waits in its queue, at least half full, and only while the store
        is fast: waiting counts against the timeout, and a batch that is given up there runs all
        the same.
        """
        core, out = self._core, len(self._out)
        if out < core.parallel:
            return True
        is_fast = self._last_took <= QUEUE_BELOW
        return (
            is_fast
            and out < core.parallel + core.queue_depth
            and 2 * len(core.schedule.ready) >= core.batch_max
        )

    def _send(self, saves: list[Save], now: float) -> None:
        flight = _InFlightBatch(saves, now, now + self._core.engine.save_timeout)
        batches = [save.batch for save in saves]
        try:
            # Before it is sent: an answer to a batch that is not out counts for nothing.
            self._out[flight] = None
            begin = self._begin_append
            flight.sent = begin is not None and begin(batches, partial(self._heard, flight))
            if not flight.sent:
                self._host.spawn(self._carry, flight, batches)
        except HostClosedError as error:  # it was not sent
            self._settle(flight, [Outcome(Status.TRANSIENT, error)] * len(saves))
            return
        except Exception as error:  # noqa: BLE001  # becomes the outcome
            self._settle(flight, [outcome_of(error)] * len(saves))
            return
        except BaseException:  # the store may have it or not: an answer counts for nothing
            self._out.pop(flight, None)
            raise
        self._captured(flight)  # now, while the store's thread wakes up
        if len(self._out) == 1:
            self._watch(flight.until)

    async def _carry(self, flight: _InFlightBatch, batches: list[Batch]) -> None:
        """Have a batch appended by a coroutine of the store's."""
        # Given up before this task came to run: others may have its slot by now.
        if flight not in self._out:
            return
        outcomes: Sequence[Outcome] | None = None
        with anyio.CancelScope() as scope:
            flight.scope, flight.sent = scope, True
            try:
                outcomes = await self._append(flight, batches)
            finally:
                flight.scope = None
                # Cancelled, by `give_up` or with the whole loop: what the store did is not known.
                if outcomes is None:
                    ended = "the save was cut off when its event loop ended"
                    reason = self._too_late() if scope.cancel_called else ended
                    outcomes = [in_doubt(reason)] * len(batches)
                self._settle(flight, outcomes)

    async def _append(self, flight: _InFlightBatch, batches: list[Batch]) -> list[Outcome]:
        try:
            outcomes = complete(await self._store.append_many(batches), len(batches))
        except Exception as error:  # noqa: BLE001  # becomes the outcome
            return [outcome_of(error)] * len(batches)
        refused = all(outcome.status is Status.PERMANENT for outcome in outcomes)
        if refused and len(batches) > 1:
            # One session may be the reason for refusing all of them: bisect.
            if flight in self._out:  # each attempt has its time, and the last to end is late
                del self._out[flight]
                flight.until = self._clock() + self._core.engine.save_timeout
                self._out[flight] = None
            half = len(batches) // 2
            first = await self._append(flight, batches[:half])
            return [*first, *await self._append(flight, batches[half:])]
        return outcomes

    def _captured(self, flight: _InFlightBatch) -> None:
        """Let the sessions take in what is captured while the store is busy, some in each step."""
        self._tell_captured(flight, min(len(flight.saves), flight.captured + CHUNK))
        if flight.captured < len(flight.saves):
            self._soon(self._captured, flight)

    def _tell_captured(self, flight: _InFlightBatch, upto: int) -> None:
        while flight.captured < upto:
            t = flight.saves[flight.captured].t
            flight.captured += 1
            if t.heard_by is not None and t.of is not None:
                self._call(t, t.heard_by.captured, t.of)

    # The way back.

    def _heard(self, flight: _InFlightBatch, outcomes: Sequence[Outcome]) -> None:
        """Take what a store answered to ``begin_append``; called by the event loop."""
        for outcome in outcomes:
            if outcome.status is not Status.OK and outcome.status in REFUSALS:
                # No task can be started any more: the refusal counts without its reason.
                if not self._host.running or self._core.stopped:
                    break
                if flight not in self._out:  # late: what is sent again is refused in time
                    outcomes = [in_doubt(self._too_late())] * len(flight.saves)
                    break
                # Its reason is read from the log, which must be awaited: from a task.
                with contextlib.suppress(Exception):  # else the refusal counts as it is
                    self._host.spawn(self._carry, flight, [save.batch for save in flight.saves])
                    return
        self._settle(flight, outcomes)

    def _settle(self, flight: _InFlightBatch, answer: Sequence[Outcome] | None = None) -> None:
        """Apply the outcomes of a batch, however late, some in each step of the event loop.

        Each caller that is woken does something at once, such as its next turn: all of a batch in
        one step would keep the loop busy for many milliseconds. A Ctrl-C may come at any point,
        and then this is called again.
        """
        saves, core = flight.saves, self._core
        if answer is not None:
            whole = len(answer) == len(saves)
            flight.outcomes = answer if whole else complete(answer, len(saves))
        outcomes = flight.outcomes
        if outcomes is None or not (flight in self._out or flight in self._doubtful):
            return
        now = self._clock()
        took = now - flight.began
        upto = len(saves)
        if self._host.running and not core.stopped:  # else the report waits for it
            upto = min(upto, flight.settled + CHUNK)
        # The answer may come before a session has heard of its capture: its records leave memory.
        self._tell_captured(flight, upto)
        while flight.settled < upto:
            save = saves[flight.settled]
            try:
                self._settle_one(save, outcomes[flight.settled], now, took)
            except Exception as error:  # noqa: BLE001  # reported
                key = str(save.t.key)
                log_facts(log, logging.ERROR, "a save was not settled", error, session=key)
            # After the call: one that a Ctrl-C cuts is repeated, and `carried` says whether it was
            # done.
            flight.settled += 1
        if upto < len(saves):
            self._soon(self._settle, flight)
            return
        self._doubtful.pop(flight, None)
        self._end(flight, outcomes, now)

    def _settle_one(self, save: Save, outcome: Outcome, now: float, took: float) -> None:
        t = save.t
        if t.carried is not save.batch:
            return  # settled before a Ctrl-C; another one may have left since
        had_ended = t.end
        for wake in self._core.completed(t, outcome, now, took):
            wake()
        if outcome.status is Status.OK:
            if t.heard_by is not None and t.end is None:
                self._call(t, t.heard_by.saved, t.of, t.durable)
        elif t.end is State.LOST and had_ended is None and t.heard_by is not None:
            self._call(t, t.heard_by.lost, t.of)

    def _end(self, flight: _InFlightBatch, outcomes: Sequence[Outcome], now: float) -> None:
        """Free a batch's slot, and let the breaker and the engine know what became of it."""
        # One that was given up has left its slot already: a late answer frees nothing.
        if flight in self._out:
            del self._out[flight]
            self._last_took = now - flight.began
            self._busy += self._last_took
            self._company = len(flight.saves)
        if self._idle is not None and not self.is_busy:
            self._idle.set()
        well = outcomes[0].status is Status.OK or any(
            outcome.status in ANSWERS for outcome in outcomes
        )
        if not (well and self._core.is_calm):  # it nearly always is
            error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
            self._core.answered(well=well, error=None if well else error, now=now)
        self._settled([save.t for save in flight.saves])

    def _call(self, t: Tracked, hook: Callable[..., None], *args: object) -> None:
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001  # reported
            log_facts(log, logging.ERROR, "a hook failed", error, session=str(t.key))

    # What is not answered.

    @property
    def next_at(self) -> float:
        """Time when the next save in flight is given up, or when due saves have been joined."""
        at = next(iter(self._out)).until if self._out else float("inf")
        return at if self._joined_at is None else min(at, self._joined_at)

    def give_up(self, now: float, *, until: float | None = None) -> None:
        """Give up the saves that have taken too long: they are in doubt, and leave their slots."""
        upto = now if until is None else until
        for flight in [flight for flight in self._out if flight.until <= upto]:
            if flight.outcomes is not None:
                self._settle(flight)  # a Ctrl-C came amid it
                continue
            if not flight.sent:
                # The store never had it: failed, not in doubt, so that it is sent again soon.
                outcome = Outcome(Status.TRANSIENT, StoreUnavailableError(_NOT_BEGUN))
                self._settle(flight, [outcome] * len(flight.saves))
                continue
            # The store has it: it may be written at any time, until it answers or fails.
            self._doubtful[flight] = None
            outcome = in_doubt(self._too_late())
            for save in flight.saves:
                self._core.give_up(save.t, outcome.error, now)
            if flight.scope is not None:
                flight.scope.cancel()
            self._end(flight, [outcome], now)

    def cut(self) -> None:
        """Give up all saves in flight; an answer that still comes to one counts for nothing."""
        self.give_up(self._clock(), until=float("inf"))
        # One that a task carries is settled by that task, when its cancellation arrives.
        for flight in [flight for flight in self._doubtful if flight.scope is None]:
            doubt = [in_doubt(self._too_late())] * len(flight.saves)
            self._settle(flight, flight.outcomes or doubt)
            self._doubtful.pop(flight, None)

    def _too_late(self) -> str:
        if self._core.stopped:
            return "the store did not answer before the manager was closed"
        timeout = self._core.engine.save_timeout
        return f"the store did not answer within {timeout} s; the records are sent again after that"

    def recover(self, reason: str, *, most: int | None = None) -> None:
        """Send again what a Ctrl-C has left unassigned: neither on its way nor due.

        Args:
            reason: What became of saves that were on their way.
            most: How many sessions to look at, those that wait longest first; None for all.

        """
        core, flights = self._core, [*self._out, *self._doubtful]
        carried = {save.t for flight in flights for save in flight.saves[flight.settled :]}
        left = [t for t in islice(core.registry.unsaved, most) if t not in carried]
        lost = [t for t in left if t.inflight is not None]
        for t in lost:
            core.completed(t, in_doubt(reason), self._clock(), 0.0)
        # It may have come before they were counted, or amid their answers.
        core.in_flight = sum([len(flight.saves) - flight.settled for flight in self._out])
        core.reclaim(left)
        if lost:
            self._settled(lost)

    # How busy it is.

    def utilization(self, period: float) -> float:
        """Return the share of ``period`` seconds that the store was busy; reset the counter."""
        busy, self._busy = self._busy, 0.0
        return busy / (period * self._core.parallel)

    @property
    def is_busy(self) -> bool:
        """True if a save is in flight, or about to be; a given-up one counts if it will end."""
        if self._out or self._joined_at is not None:
            return True
        return any(flight.scope is not None for flight in self._doubtful)

    async def idle(self) -> None:
        """Wait until no save is in flight."""
        while self.is_busy:
            if self._idle is None or self._idle.is_set():
                self._idle = anyio.Event()
            await self._idle.wait()


def _interrupted(error: BaseException) -> str:
    return f"{error!r} came while it was sent; the records will be sent again"
