"""What carries out saves: workers that bring batches to the store, and the timer.

All of it runs in the host, so that no caller's cancellation ever reaches a save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, final

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint

from perdure._lib.loop import OneShotEvent, event_maker, soon_maker
from perdure._lib.tasks import Host
from perdure.autosave.core import (
    ANSWERS,
    REFUSALS,
    Core,
    Save,
    all_permanent,
    complete,
    in_doubt,
    outcome_of,
)
from perdure.autosave.events import Idle, LoopBlocked, Reporter
from perdure.autosave.schedule import SLOT, IdleWheel
from perdure.autosave.tracked import State, Tracked
from perdure.store import Batch, Outcome, Status, Store, SupportsBeginAppend, capability

log: logging.Logger = logging.getLogger("perdure.autosave")

QUEUE_BELOW = 0.05
"""Seconds that a batch takes at most while others may wait for it in the store's queue."""
CHUNK = 8
"""Sessions whose hooks are called, or callers woken, in one step of the event loop."""


class _InFlightSave(NamedTuple):
    """A save in flight without a worker."""

    save: Save
    began: float
    until: float
    """When it is given up."""


@final
class _Worker:
    """One task that brings batches to the store. A replaced worker no longer counts."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        # What wakes it while it has nothing to do.
        self.event: OneShotEvent | None = None


@final
class Writer:
    """Run as many saves at once as the store can take, each session's one by one.

    A worker captures when it starts to run, not when it is asked for: whatever was appended until
    then is in its batch, which is group commit without a timer. It continues until nothing is
    due, and starts another worker while there is more and the store can take it; then it parks,
    because waking a task is faster than starting one. A store that takes one session at a time,
    and needs no task for it, gets all its batches without workers.

    A save that takes longer than ``save_timeout`` is given up and in doubt: the store may still
    be writing in a thread, and sending the same records again is safe.

    Args:
        core: Decides what to save.
        store: Where to save.
        host: Where the workers run.
        clock: The loop's.
        prepare: Called with sessions whose contributors must be asked first.
        settled: Called with each batch's sessions, when all their waiters have been woken.
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
        self._watch = watch
        self._batches = core.batch_max > 1
        self._linger = core.engine.batch_linger
        if self._linger is None:
            self._linger = store.capabilities.batch_linger
        # Workers that are working, or about to.
        self._workers: set[_Worker] = set()
        self._new_event = event_maker()
        self._soon = soon_maker()
        # Workers that have nothing to do.
        self._parked: list[_Worker] = []
        # The worker that is about to take a batch.
        self._starting: _Worker | None = None
        self._idle = anyio.Event()
        # Sessions in the last batch: where several save at once, a worker groups them.
        self._company = 1
        # Saves without a worker, in the order in which they began.
        self._flights: dict[Tracked, _InFlightSave] = {}
        direct = capability(store, SupportsBeginAppend)
        self._begin = None if direct is None else direct.begin_append
        # Scopes of workers whose batch is with the store, with the time when each is given up; all
        # have the same timeout, so they are in order.
        self._scopes: dict[anyio.CancelScope, float] = {}
        # Batches of workers, from before they are sent until they are settled.
        self._carried: dict[anyio.CancelScope, list[Save]] = {}

    def launch(self, now: float) -> None:
        """Send what is due, if the store can take it: a worker does, where the store needs one."""
        if self._begin is not None and not self._batches:
            while not self._is_full and (saves := self._capture(now)):
                try:
                    self._start(saves[0], now)
                except BaseException as error:
                    self.cut_off(saves[0].t, _interrupted(error))
                    raise
            return
        # A worker that is about to start finds this work too, and starts the next one itself.
        if self._starting is not None or not self._may_call(self._calls):
            return
        if self._core.may_capture(now) and self._host.running:
            worker = self._parked.pop() if self._parked else _Worker()
            self._workers.add(worker)
            self._starting = worker
            try:
                if worker.event is None:
                    self._host.spawn(self._serve, worker)
                else:
                    worker.event.set()
            except BaseException:
                # The task could not be started: leave the work to the next worker.
                self._workers.discard(worker)
                self._started(worker)
                raise

    def replace_workers(self, now: float) -> None:
        """Discard all workers, and start a new one.

        Their saves in flight are answered, or given up after the timeout, as usual.
        """
        parked, self._parked = self._parked, []
        self._workers.clear()
        self._starting = None
        self.launch(now)
        for worker in parked:
            if worker.event is not None:
                worker.event.set()

    def begin(self, t: Tracked, now: float, version: int) -> bool:
        """Start a session's save without a worker; False if that is not possible.

        This saves a waiting caller two rounds of the event loop. With several sessions due, or if
        there were several in the last batch, a worker does better.

        Args:
            t: The session.
            now: The present time.
            version: What a caller waits for; 0 if none does.

        """
        core = self._core
        if self._begin is None or self._starting or (self._batches and self._company > 1):
            return False
        if self._is_full or not self._host.running or t.inflight is not None:
            return False
        try:
            save = core.capture_alone(t, version)
            if save is None:
                return False
            self._start(save, now)
        except BaseException as error:
            self.cut_off(t, _interrupted(error))
            raise
        return True

    def cut_off(self, t: Tracked, reason: str) -> None:
        """Note that a session was captured and is with nobody: its save is in doubt, and retried.

        A Ctrl-C may come at any point; nothing else of the engine calls back for such a save.
        """
        self._flights.pop(t, None)  # an answer that still comes counts for nothing
        if t.inflight is not None:
            self._core.completed(t, in_doubt(reason), self._clock(), 0.0)
        # Not only subtracted from: the interrupt may have come before the save was counted.
        self._core.in_flight = len(self.carried)
        self._signal_idle()
        self._settled([t])

    @property
    def carried(self) -> set[Tracked]:
        """Sessions whose save in flight will be answered or given up."""
        batches = self._carried.values()
        carried = {*self._flights, *(save.t for saves in batches for save in saves)}
        return {t for t in carried if t.inflight is not None}

    def _start(self, save: Save, now: float) -> None:
        """Send a save without a worker."""
        assert self._begin is not None
        until = now + self._core.engine.save_timeout
        self._flights[save.t] = flight = _InFlightSave(save, now, until)
        try:
            if not self._begin(save.batch, partial(self._answered, flight)):
                self._host.spawn(self._save_in_task, flight)
                return
        except Exception as error:  # noqa: BLE001  # becomes the outcome
            self._answered(flight, outcome_of(error))
            return
        self._captured(iter((save,)))  # now, while the store's thread wakes up
        if len(self._flights) == 1:
            self._watch(until)

    def _answered(self, flight: _InFlightSave, outcome: Outcome) -> None:
        """Apply the answer to a save that was begun without a worker; called by the event loop."""
        if self._flights.get(flight.save.t) is not flight:
            return  # given up: the same records are sent again
        if outcome.status in REFUSALS and self._host.running:
            # The reason of a refusal is read from the log, which must be awaited: send it again
            # from a task.
            self._host.spawn(self._save_in_task, flight)
            return
        del self._flights[flight.save.t]
        try:
            now = self._clock()
            took, unsettled = now - flight.began, iter([(flight.save, outcome)])
            try:
                self._settle(unsettled, now, took)
            finally:
                # A Ctrl-C at this point must not leave the session in flight forever.
                self._finish([flight.save], [outcome], now, took, unsettled)
        except Exception:
            log.exception("a save was not settled", extra={"session": str(flight.save.t.key)})
        self._signal_idle()

    async def _save_in_task(self, flight: _InFlightSave) -> None:
        """Save in a task what could not be begun: a call that was given up still holds a thread."""
        if self._flights.get(flight.save.t) is not flight:
            return  # given up before this task had begun
        del self._flights[flight.save.t]
        worker = _Worker()
        self._workers.add(worker)
        try:
            with anyio.CancelScope() as scope:
                await self._carry([flight.save], scope)
        finally:
            self._workers.discard(worker)
            self._signal_idle()
            self.launch(self._clock())

    @property
    def _calls(self) -> int:
        """How many batches are with the store."""
        return len(self._workers) + len(self._flights)

    @property
    def _is_full(self) -> bool:
        """Whether the store has as many batches as it works on at a time."""
        return self._calls >= self._core.parallel

    def _may_call(self, others: int) -> bool:
        """Whether a batch may go to the store beside others that are there.

        One more than the store works on waits in its queue, at least half full, and only while the
        store is fast: waiting counts against the timeout, and a batch that is given up there runs
        all the same.
        """
        core = self._core
        if others < core.parallel:
            return True
        is_fast = self._last_took <= QUEUE_BELOW
        return (
            is_fast
            and others < core.parallel + core.queue_depth
            and 2 * len(core.schedule.ready) >= core.batch_max
        )

    def _signal_idle(self) -> None:
        if not self.is_busy:
            self._idle.set()

    def utilization(self, period: float) -> float:
        """Return the share of ``period`` seconds that the store was busy; reset the counter."""
        busy, self._busy = self._busy, 0.0
        return busy / (period * self._core.parallel)

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return bool(self._workers or self._flights)

    async def idle(self) -> None:
        """Wait until no save is in flight."""
        while self.is_busy:
            if self._idle.is_set():
                self._idle = anyio.Event()
            await self._idle.wait()

    @property
    def next_timeout(self) -> float:
        """When the oldest save in flight is to be given up."""
        never = float("inf")
        flight = next(iter(self._flights.values())).until if self._flights else never
        return min(flight, next(iter(self._scopes.values()), never))

    def give_up(self, now: float) -> None:
        """Cancel the saves that have taken too long: they are in doubt."""
        for scope in [scope for scope, until in self._scopes.items() if until <= now]:
            scope.cancel()
        for flight in [flight for flight in self._flights.values() if flight.until <= now]:
            self._answered(flight, in_doubt(self._too_late()))

    def cut(self) -> None:
        """Cancel all saves in flight."""
        self.give_up(float("inf"))

    async def _serve(self, worker: _Worker) -> None:
        while True:
            # One scope for all saves, until one is given up: creating a scope costs time.
            with anyio.CancelScope() as scope:
                while not scope.cancel_called:
                    await self._work(worker, scope)
                    await self._park(worker, scope)

    async def _park(self, worker: _Worker, scope: anyio.CancelScope) -> None:
        worker.event = woken = self._new_event()
        self._parked.append(worker)
        try:
            await woken.wait()
        except BaseException:
            if not woken.was_set:
                if worker in self._parked:
                    self._parked.remove(worker)
                raise
            # Woken and cancelled at once, because the loop is ending: do the work all the same.
            await self._work(worker, scope)
            raise

    async def _work(self, worker: _Worker, scope: anyio.CancelScope) -> None:
        try:
            try:
                await self._wait_for_company()
            finally:
                self._started(worker)
            while not scope.cancel_called and (saves := self._take(self._calls - 1)):
                await self._carry(saves, scope)
                if self._batches and 0 < len(self._core.schedule.ready) < self._core.batch_max:
                    await self._let_others_join(worker)
        finally:
            self._workers.discard(worker)
            self._signal_idle()
            self.launch(self._clock())  # more may be due, and a worker is free again

    def _started(self, worker: _Worker) -> None:
        if self._starting is worker:
            self._starting = None

    async def _let_others_join(self, worker: _Worker) -> None:
        """Let callers run whose save is done: what they save next joins the next batch."""
        self._starting = self._starting or worker
        try:
            await cancel_shielded_checkpoint()
        finally:
            self._started(worker)

    async def _wait_for_company(self) -> None:
        """Linger when several sessions are due but not a full batch: more may follow."""
        waiting = len(self._core.schedule.ready)
        if self._linger and 1 < waiting < self._core.batch_max and not self._core.schedule.draining:
            await anyio.sleep(self._linger)

    def _take(self, others: int) -> list[Save]:
        """Take the next batch, if the store takes one beside these others."""
        now = self._clock()
        saves = self._capture(now) if self._may_call(others) else []
        self.launch(now)
        return saves

    def _capture(self, now: float) -> list[Save]:
        """Take the next batch, and ask the contributors of sessions that have some."""
        while self._core.may_capture(now) and self._host.running:
            saves, unprepared = self._core.capture(now)
            if unprepared:
                self._prepare(unprepared)
            if saves:
                return saves
        return []

    async def _carry(self, saves: list[Save], scope: anyio.CancelScope) -> None:
        self._carried[scope] = saves
        try:
            await self._commit(saves, scope)
        finally:
            del self._carried[scope]

    async def _commit(self, saves: list[Save], scope: anyio.CancelScope) -> None:
        began = self._clock()
        outcomes: list[Outcome] | None = None
        self._soon(self._captured, iter(saves))
        try:
            outcomes = await self._send([save.batch for save in saves], scope)
        finally:
            if outcomes is None:
                outcomes = [in_doubt(self._why_cut(scope))] * len(saves)
            now = self._clock()
            unsettled = iter(zip(saves, outcomes, strict=True))
            try:
                while not self._settle(unsettled, now, now - began):
                    if not self._core.stopped:  # else the report waits for it
                        await cancel_shielded_checkpoint()
            finally:
                # A native cancel at this point must not leave a session in flight forever.
                self._finish(saves, outcomes, now, now - began, unsettled)

    def _finish(
        self,
        saves: list[Save],
        outcomes: list[Outcome],
        now: float,
        took: float,
        unsettled: Iterator[tuple[Save, Outcome]],
    ) -> None:
        """Apply the remaining outcomes, and notify the breaker and the engine."""
        self._busy += took
        self._last_took = took
        self._company = len(saves)
        while not self._settle(unsettled, now, took):
            pass
        self._notify_breaker(outcomes, now)
        self._settled([save.t for save in saves])

    async def _send(self, batches: list[Batch], scope: anyio.CancelScope) -> list[Outcome]:
        outcomes = await self._attempt(batches, scope)
        if len(batches) > 1 and all_permanent(outcomes):
            # One session may be the reason for refusing all of them: bisect.
            half = len(batches) // 2
            first = await self._send(batches[:half], scope)
            return [*first, *await self._send(batches[half:], scope)]
        return outcomes

    async def _attempt(self, batches: list[Batch], scope: anyio.CancelScope) -> list[Outcome]:
        # No timer per save: the engine's timer watches all of them.
        self._scopes[scope] = until = self._clock() + self._core.engine.save_timeout
        if len(self._scopes) == 1:
            self._watch(until)
        try:
            return complete(await self._store.append_many(batches), len(batches))
        except Exception as error:  # noqa: BLE001  # becomes the outcome
            return [outcome_of(error)] * len(batches)
        finally:
            del self._scopes[scope]

    def _why_cut(self, scope: anyio.CancelScope) -> str:
        if not scope.cancel_called:
            return "the save was cut off when its event loop ended"
        return self._too_late()

    def _too_late(self) -> str:
        if self._core.stopped:
            return "the store did not answer before the manager was closed"
        timeout = self._core.engine.save_timeout
        return f"the store did not answer within {timeout} s; the records will be sent again"

    def _settle(self, unsettled: Iterator[tuple[Save, Outcome]], now: float, took: float) -> bool:
        """Apply some outcomes; return whether all are applied.

        Each caller that is woken does something at once, such as its next turn: all of a batch in
        one step of the event loop would keep it busy for many milliseconds.
        """
        for n, (save, outcome) in enumerate(unsettled, 1):
            t = save.t
            had_ended = t.end
            if t.on_captured is not None:
                self._call(t, t.on_captured)
            for wake in self._core.completed(t, outcome, now, took):
                wake()
            if outcome.status is Status.OK:
                if t.on_saved is not None and t.end is None:
                    self._call(t, t.on_saved, t.durable)
            elif t.end is State.LOST and had_ended is None and t.on_lost is not None:
                self._call(t, t.on_lost)
            if n % CHUNK == 0:
                return False
        return True

    def _captured(self, saves: Iterator[Save]) -> None:
        """Call the sessions' ``on_captured`` hooks while the store is busy, some in each step."""
        for n, save in enumerate(saves, 1):
            t = save.t
            if t.inflight is None:
                return  # it is answered already: settling calls the hooks that are left
            if t.on_captured is not None:
                self._call(t, t.on_captured)
            if n % CHUNK == 0:
                self._soon(self._captured, saves)
                return

    def _call(self, t: Tracked, hook: Callable[..., None], *args: int) -> None:
        try:
            hook(*args)
        except Exception:
            log.exception("a hook failed", extra={"session": str(t.key)})

    def _notify_breaker(self, outcomes: list[Outcome], now: float) -> None:
        well = outcomes[0].status is Status.OK or any(
            outcome.status in ANSWERS for outcome in outcomes
        )
        if well and self._core.is_calm:
            return  # nearly always
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        self._core.answered(well=well, error=None if well else error, now=now)


def _interrupted(error: BaseException) -> str:
    return f"{error!r} came while it was sent; the records will be sent again"


DUE_CHUNK: Final = 128
"""Sessions armed between two readings of the clock."""
CONTROL_PERIOD: Final = 5.0
"""How often the debounce is fitted to what the store has to do."""
BLOCKED_AFTER: Final = 1.0
"""A wake-up that is so late means that the event loop was blocked."""


@final
class Timer:
    """The one timer of autosave: sleeps until a session may be due.

    Its task starts when it is first needed. It is woken only when something becomes due before
    its alarm; a session that is due right now needs no timer but a worker. While sessions change
    it wakes every slot, so that it hardly ever needs waking; otherwise it sleeps. If the task is
    ended from outside, the next caller that needs it starts it again.

    Args:
        core: Decides what is due when.
        idle: The sessions that may be idle.
        writer: Saves what is due.
        host: Where the timer runs.
        clock: The loop's, or one that a test moves.
        reporter: Delivers the events.
        ticking: Whether it is the loop's clock; if not, `wake` is called after it was moved.

    """

    def __init__(
        self,
        core: Core,
        idle: IdleWheel,
        writer: Writer,
        host: Host,
        clock: Callable[[], float],
        reporter: Reporter,
        *,
        ticking: bool,
    ) -> None:
        self._core = core
        self._schedule = core.schedule
        self._idle = idle
        self._writer = writer
        self._host = host
        self._clock = clock
        self._reporter = reporter
        self._ticking = ticking
        # Identifies the task that sleeps; None while there is none.
        self._running: object | None = None
        # When it will wake next; minus infinity while it is awake.
        self._alarm = float("inf")
        self._woken = anyio.Event()
        # Whether `serve_due` was called since the last wake-up.
        self._was_used = False
        self._blocked = False
        self._controlled_at = clock()

    def serve_due(self) -> None:
        """Start a worker for what is due, and wake the timer for what is due before its alarm."""
        self._schedule.nudged = False
        self._was_used = True
        now = self._clock()
        if len(self._schedule.ready):
            self._writer.launch(now)
        if self._next_at(now) < self._alarm:
            self._wake()

    def look_at(self, at: float) -> None:
        """Wake at this time at the latest."""
        if at < self._alarm:
            self._wake()

    @property
    def alarm(self) -> float:
        """When it will wake next; minus infinity once it was woken and has not run yet."""
        return float("-inf") if self._running is not None and self._woken.is_set() else self._alarm

    def wake(self) -> None:
        """Wake now, if the task runs."""
        if self._running is not None:
            self._woken.set()

    def _wake(self) -> None:
        if self._running is None:
            self.restart()
        else:
            self._woken.set()

    def restart(self) -> None:
        """Discard the task that sleeps, and start a new one, which wakes at once."""
        self._running = run = object()
        self._alarm = float("-inf")
        self._woken.set()
        try:
            self._host.spawn(self._run, run)
        except BaseException:
            # The task could not be started: leave it to the next caller.
            self._running, self._alarm = None, float("inf")
            raise

    def _next_at(self, now: float) -> float:
        at = self._schedule.next_at(now)
        if len(self._schedule.ready) and not self._core.in_flight:
            at = min(at, self._core.breaker.probe_at)
        if not self._schedule.draining:
            at = min(at, self._idle.next_at)
        return min(at, self._writer.next_timeout)

    async def _run(self, run: object) -> None:
        try:
            while not self._core.stopped and self._running is run:
                self._alarm = float("-inf")
                more = self._check()
                await (checkpoint() if more else self._sleep())
        finally:
            if self._running is run:
                self._running = None
                self._alarm = float("inf")

    async def _sleep(self) -> None:
        self._schedule.nudged = False
        now = self._clock()
        due = at = max(self._next_at(now), now)
        if self._was_used and self._ticking:
            # Waking again soon is cheaper than being woken for each change meanwhile.
            at = min(at, now + SLOT)
        self._was_used = False
        self._alarm = at
        self._woken = anyio.Event()
        with anyio.CancelScope(deadline=at if self._ticking else _moved(at, now)):
            await self._woken.wait()
        late = self._clock() - due
        if late > BLOCKED_AFTER and not self._woken.is_set() and not self._blocked:
            self._blocked = True
            self._core.registry.events.append(LoopBlocked(delay=late))

    def _check(self) -> bool:
        """Start what is due, for one time slice; return whether there is more."""
        begun = now = self._clock()
        more = self._schedule.advance(now, DUE_CHUNK)
        while more and now - begun < self._core.engine.loop_slice:
            now = self._clock()
            more = self._schedule.advance(now, DUE_CHUNK)
        self._writer.give_up(now)
        self._writer.launch(now)
        self._report_idle(now)
        self._control(now)
        if self._core.registry.events:
            self._reporter.deliver()
        return more

    def _report_idle(self, now: float) -> None:
        if self._schedule.draining or self._idle.next_at > now:
            return
        for t in self._idle.advance(now, DUE_CHUNK):
            if t.on_idle is not None:
                t.on_idle()
            self._core.registry.events.append(Idle(key=t.key))

    def _control(self, now: float) -> None:
        period = now - self._controlled_at
        if self._core.engine.eager and period >= CONTROL_PERIOD:
            self._schedule.control(self._writer.utilization(period))
            self._controlled_at = now


def _moved(at: float, now: float) -> float:
    """Return the deadline by a clock that a test moves: sleep until woken, or not at all."""
    return float("inf") if at > now else float("-inf")
