"""The workers: they take batches from the core, bring them to the store, tell what came back.

Workers run in the host, so that no caller's cancellation ever reaches a save. A worker
captures when it starts to run, not when it is asked for: whatever was appended or asked
for until then is in its batch, which is group commit without a timer. It goes on until
nothing is due, and starts another while there is more and the store can take it; then it
waits to be woken, because a task that is there is faster than one that has to be made.

A save that takes longer than ``save_timeout`` is given up and in doubt: the store may
still be writing in a thread, and sending the same records again is safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import final

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint

from perdure._lib.host import Host
from perdure._lib.loop import OneShotEvent, event_maker, soon_maker
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
from perdure.autosave.tracked import State, Tracked
from perdure.store import Batch, Outcome, Status, Store

log: logging.Logger = logging.getLogger("perdure.autosave")

CHUNK = 32
"""Sessions between two looks at the clock."""


class _InFlightSave:
    """A save that is under way without a worker."""

    __slots__ = ("began", "save")

    def __init__(self, save: Save, began: float) -> None:
        self.save = save
        self.began = began


@final
class _Worker:
    """One task that brings batches to the store. A worker that is replaced counts no more."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event: OneShotEvent | None = None
        """What wakes it while it has nothing to do."""


@final
class Writer:
    """Run as many saves at once as the store can take, each session's one by one.

    Args:
        core: Says what to save.
        store: Where to.
        host: Where the workers run.
        clock: The loop's.
        prepare: Called with sessions whose contributors have to be asked before.
        settled: Called after each batch, when everybody who waited has been woken.
        watch: Called with the time until which a save has to be watched.

    """

    def __init__(
        self,
        core: Core,
        store: Store,
        host: Host,
        clock: Callable[[], float],
        *,
        prepare: Callable[[list[Tracked]], None],
        settled: Callable[[list[Save]], None],
        watch: Callable[[float], None],
    ) -> None:
        self._busy = 0.0
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
        self._workers: set[_Worker] = set()
        """Those that are at work, or about to be."""
        self._new_event = event_maker()
        self._soon = soon_maker()
        self._parked: list[_Worker] = []
        """Those that have nothing to do."""
        self._starting: _Worker | None = None
        """The one that is about to look for work."""
        self._idle = anyio.Event()
        self._flights: dict[_InFlightSave, float] = {}
        """Saves without a worker, with the time when each is given up."""
        begin = getattr(type(store), "begin_append", None) if core.batch_max == 1 else None
        self._begin = None if begin is None else partial(begin, store)
        # With the time when each is given up; all may take equally long, so they are in order.
        self._scopes: dict[anyio.CancelScope, float] = {}
        """Workers whose batch is with the store."""

    def launch(self, now: float) -> None:
        """Start a worker if something is due and the store can take it."""
        # One that is about to start will find this too, and start the next one itself.
        if self._starting is not None or len(self._workers) >= self._core.parallel:
            return
        if self._core.may_capture(now) and self._host.running:
            worker = self._parked.pop() if self._parked else _Worker()
            self._workers.add(worker)
            self._starting = worker
            try:
                self._rouse(worker)
            except BaseException:
                # It does not come: leave it to the next one.
                self._workers.discard(worker)
                self._started(worker)
                raise

    def _rouse(self, worker: _Worker) -> None:
        if worker.event is None:
            self._host.spawn(self._serve, worker)
        else:
            worker.event.set()

    def replace_workers(self, now: float) -> None:
        """Count on none of the workers any more, and start a fresh one.

        What they have with the store is answered, or given up after its time, as ever.
        """
        parked, self._parked = self._parked, []
        self._workers.clear()
        self._starting = None
        self.launch(now)
        for worker in parked:
            if worker.event is not None:
                worker.event.set()

    def begin(self, now: float) -> bool:
        """Start the one save that is due without a worker; False if that is not possible.

        It spares whoever waits for the save two rounds of the event loop. With several
        sessions due, or a store that writes them together, a worker does better.
        """
        core = self._core
        if self._begin is None or self._starting or len(core.schedule.ready) != 1:
            return False
        room = len(self._workers) + len(self._flights) < core.parallel
        if not (room and core.may_capture(now) and self._host.running):
            return False
        (save,), _ = core.capture(now)
        flight = _InFlightSave(save, now)
        self._flights[flight] = until = now + core.engine.save_timeout
        try:
            if not self._begin(save.batch, partial(self._landed, flight)):
                self._host.spawn(self._carry, flight)
                return True
        except Exception as error:  # noqa: BLE001  # becomes the outcome
            self._landed(flight, outcome_of(error))
            return True
        self._soon(self._captured, (save,))
        if len(self._flights) == 1:
            self._watch(until)
        return True

    def _landed(self, flight: _InFlightSave, outcome: Outcome) -> None:
        """Take the answer to a save that was begun without a worker; the event loop calls this."""
        if flight not in self._flights:
            return  # given up: the same records are sent again
        if outcome.status in REFUSALS and self._host.running:
            # Why it is refused is looked into where that can be awaited: there it is sent again.
            self._host.spawn(self._carry, flight)
            return
        del self._flights[flight]
        try:
            now = self._clock()
            took, unsettled = now - flight.began, iter([(flight.save, outcome)])
            try:
                self._settle(unsettled, now, took)
            finally:
                # Ctrl-C just now must not leave a session with the store for ever.
                self._finish([flight.save], [outcome], now, took, unsettled)
        except Exception:
            log.exception("a save was not settled", extra={"session": str(flight.save.t.key)})
        self._now_idle()

    async def _carry(self, flight: _InFlightSave) -> None:
        """Save what could not be begun at once: a call that was given up is still in a thread."""
        if self._flights.pop(flight, None) is None:
            return  # given up before this task had begun
        worker = _Worker()
        self._workers.add(worker)
        try:
            with anyio.CancelScope() as scope:
                await self._commit([flight.save], scope)
        finally:
            self._workers.discard(worker)
            self._now_idle()
            self.launch(self._clock())

    def _now_idle(self) -> None:
        if not self.is_busy:
            self._idle.set()

    def utilization(self, period: float) -> float:
        """Return which share of ``period`` seconds the store was busy, and begin anew."""
        busy, self._busy = self._busy, 0.0
        return busy / (period * self._core.parallel)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return bool(self._workers or self._flights)

    async def idle(self) -> None:
        """Wait until no save is under way."""
        while self.is_busy:
            if self._idle.is_set():
                self._idle = anyio.Event()
            await self._idle.wait()

    @property
    def next_timeout(self) -> float:
        """When the oldest save under way is to be given up."""
        never = float("inf")
        flight = next(iter(self._flights.values()), never) if self._flights else never
        return min(flight, next(iter(self._scopes.values()), never))

    def give_up(self, now: float) -> None:
        """Cancel the saves that have taken too long: they are in doubt."""
        for scope in [scope for scope, until in self._scopes.items() if until <= now]:
            scope.cancel()
        for flight in [flight for flight, until in self._flights.items() if until <= now]:
            self._landed(flight, in_doubt(self._too_late()))

    def cut(self) -> None:
        """Cancel all saves that are under way."""
        self.give_up(float("inf"))

    async def _serve(self, worker: _Worker) -> None:
        while True:
            # For all its saves, until one is given up: to make it takes a part of a save's time.
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
            # Chosen and ended at once, as the loop ends: the work is still to be done.
            await self._work(worker, scope)
            raise

    async def _work(self, worker: _Worker, scope: anyio.CancelScope) -> None:
        try:
            try:
                await self._wait_for_company()
            finally:
                self._started(worker)
            while not scope.cancel_called and (saves := self._take()):
                await self._commit(saves, scope)
                if self._batches and 0 < len(self._core.schedule.ready) < self._core.batch_max:
                    await self._let_others_join(worker)
        finally:
            self._workers.discard(worker)
            self._now_idle()
            self.launch(self._clock())  # there may be more, and now there is room

    def _started(self, worker: _Worker) -> None:
        if self._starting is worker:
            self._starting = None

    async def _let_others_join(self, worker: _Worker) -> None:
        """Let those run who have waited for a save: what they ask for joins the next batch."""
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

    def _take(self) -> list[Save]:
        now = self._clock()
        while True:
            saves, unprepared = self._core.capture(now)
            if unprepared:
                self._prepare(unprepared)
            if saves or not unprepared:
                break
        self.launch(now)
        return saves

    async def _commit(self, saves: list[Save], scope: anyio.CancelScope) -> None:
        began = self._clock()
        outcomes: list[Outcome] | None = None
        self._soon(self._captured, saves)
        try:
            outcomes = await self._send([save.batch for save in saves], scope)
        finally:
            if outcomes is None:
                outcomes = [in_doubt(self._why_cut(scope))] * len(saves)
            now = self._clock()
            unsettled = iter(zip(saves, outcomes, strict=True))
            try:
                while not self._settle(unsettled, now, now - began):
                    await cancel_shielded_checkpoint()
            finally:
                # A native cancel just now must not leave a session with the store for ever.
                self._finish(saves, outcomes, now, now - began, unsettled)

    def _finish(
        self,
        saves: list[Save],
        outcomes: list[Outcome],
        now: float,
        took: float,
        unsettled: Iterator[tuple[Save, Outcome]] | None = None,
    ) -> None:
        """Apply what is left of the outcomes, and let others know."""
        self._busy += took
        unsettled = zip(saves, outcomes, strict=True) if unsettled is None else unsettled
        while not self._settle(unsettled, now, took):
            pass
        self._tell_breaker(outcomes, now)
        self._settled(saves)

    # with the store

    async def _send(self, batches: list[Batch], scope: anyio.CancelScope) -> list[Outcome]:
        outcomes = await self._attempt(batches, scope)
        if len(batches) > 1 and all_permanent(outcomes):
            # One session may have spoiled it for the others: find out which.
            half = len(batches) // 2
            first = await self._send(batches[:half], scope)
            return [*first, *await self._send(batches[half:], scope)]
        return outcomes

    async def _attempt(self, batches: list[Batch], scope: anyio.CancelScope) -> list[Outcome]:
        # No timer for each save: the engine's looks after all of them.
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
        timeout = self._core.engine.save_timeout
        return f"the store did not answer within {timeout} s; the records will be sent again"

    # and back

    def _settle(self, unsettled: Iterator[tuple[Save, Outcome]], now: float, took: float) -> bool:
        """Apply outcomes until the time slice is over; return whether all are applied."""
        begun = self._clock()
        for n, (save, outcome) in enumerate(unsettled, 1):
            t = save.t
            had_ended = t.end
            self._captured((save,))
            for waiter in self._core.completed(t, outcome, now, took):
                waiter.wake()
            if outcome.status is Status.OK:
                if t.on_saved is not None and t.end is None:
                    self._call(t, t.on_saved, t.durable)
            elif t.end is State.LOST and had_ended is None and t.on_lost is not None:
                self._call(t, t.on_lost)
            if n % CHUNK == 0 and self._clock() - begun >= self._core.engine.loop_slice:
                return False
        return True

    def _captured(self, saves: Sequence[Save]) -> None:
        """Let sessions see to what leaves memory when it is saved, while the store is busy."""
        for save in saves:
            if save.t.on_captured is not None:
                self._call(save.t, save.t.on_captured)

    def _call(self, t: Tracked, hook: Callable[..., None], *args: int) -> None:
        try:
            hook(*args)
        except Exception:
            log.exception("a hook failed", extra={"session": str(t.key)})

    def _tell_breaker(self, outcomes: list[Outcome], now: float) -> None:
        well = outcomes[0].status is Status.OK or any(
            outcome.status in ANSWERS for outcome in outcomes
        )
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        self._core.answered(well=well, error=None if well else error, now=now)
