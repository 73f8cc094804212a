"""The autosave engine: sessions, timer, writer and background jobs of one manager.

It runs in the host's task group. A job that needs a session to itself (a fold, mostly) waits
until no save of that session is with the store, and none begins before the job has ended.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVarTuple, final

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from perdure._lib.loop import event_maker
from perdure._lib.tasks import Host
from perdure.autosave import tracked
from perdure.autosave.core import Core
from perdure.autosave.deadline import Deadline
from perdure.autosave.events import Event, Reporter, StoreWarned
from perdure.autosave.jobs import BackgroundJobs, StateCapture, T
from perdure.autosave.options import INHERIT, Autosave, AutosaveStatus, EngineOptions, Inherit
from perdure.autosave.reports import Health, ShutdownReport, health_of, report_of
from perdure.autosave.schedule import IdleWheel
from perdure.autosave.timer import Timer
from perdure.autosave.tracked import LOOKED_AT, State, Tracked, Wake
from perdure.autosave.writer import Writer
from perdure.errors import SessionError, UnsavedChangesError
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Store

Ts = TypeVarTuple("Ts")


@final
class Autosaver:
    """Save sessions automatically, and at once on request.

    What is synchronous may be called from any task of the host's event loop. Work that takes time
    runs in the host's tasks: cancelling a caller, in any way, ends its wait and changes
    nothing else. One timer for all sessions sleeps until the first of them is due, and is woken
    only when something becomes due earlier. A save with a waiting caller leaves as soon as there is
    a slot and no save of the session is with the store, without a round through the timer.

    Args:
        store: Where to save.
        host: Runs the engine's tasks, for as long as anything is appended.
        autosave: The setting of sessions that have none of their own; None for no timers.
        engine: The finer options.
        clock: The loop's, from ``loop_clock()``, or a test's.
        ticking: Whether it is the loop's; if not, call `catch_up` each time that it was moved.
        seed: Makes jitter and back-off repeatable.
        on_event: Called with each event, synchronously.

    """

    def __init__(
        self,
        store: Store,
        host: Host,
        *,
        autosave: Autosave | None,
        engine: EngineOptions,
        clock: Callable[[], float],
        ticking: bool = True,
        seed: int | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._clock = clock
        self._host = host
        self._core = core = Core(
            autosave=autosave,
            engine=engine,
            capabilities=store.capabilities,
            chance=random.Random(seed).random,
        )
        self._registry = core.registry
        self._schedule = core.schedule
        self._append = core.append
        self._idle = IdleWheel(engine.hibernate_after)
        self._reporter = Reporter(core.registry.events, on_event)
        self._contributors = StateCapture(core, host, clock, serve_due=self._serve_due)
        self._jobs = BackgroundJobs(core, host, clock, serve_due=self._serve_due)
        self._writer = Writer(
            core,
            store,
            host,
            clock,
            prepare=self._contributors.ask,
            settled=self._settled,
            begin_due=self._begin_due,
            watch=self._watch,
        )
        self._timer = Timer(
            core,
            self._idle,
            self._writer,
            host,
            clock,
            self._reporter,
            serve_all=self._serve_all,
            ticking=ticking,
        )
        self._new_event = event_maker()
        # Set when there is room again, for appends that wait for it.
        self._room: anyio.Event | None = None
        # What became of everything, once the engine has stopped.
        self._report: ShutdownReport | None = None
        self._one_stop = anyio.Lock()
        host.at_end(self._host_ended)

    # Sessions come and go.

    def track(
        self,
        key: SessionKey,
        *,
        epoch: int,
        head: int,
        autosave: Autosave | Inherit | None = INHERIT,
    ) -> Tracked:
        """Start to track a session whose log ends with ``head``, which is durable."""
        now = self._clock()
        t = self._core.track(key, epoch=epoch, head=head, autosave=autosave, now=now)
        self._idle.add(t, now)
        if self._host.running and not self._core.stopped:
            self._watch(self._idle.next_at)  # though nothing may ever be appended
        return t

    def untrack(self, t: Tracked) -> None:
        """Stop tracking a session. It must be clean, or not ours any more.

        Unsaved records of a lost session stay in `lost` until they are discarded or settled.

        Raises:
            UnsavedChangesError: It has records that are not durable, and may still be saved.

        """
        ended = t.end in (State.LOST, State.CLOSED) or self._core.stopped
        if not (t.clean or ended):
            raise UnsavedChangesError(
                f"session {t.key} has {t.version - t.durable} records that are not durable: "
                "save it first, or discard them",
                key=t.key,
                version=t.version,
                durable=t.durable,
            )
        self._drop(t, keep_lost=True)

    async def abandon(self, t: Tracked) -> None:
        """Stop tracking a session and drop its unsaved records, once no save of it runs."""
        await self._host.call(self._abandon, t)

    async def _abandon(self, t: Tracked) -> None:
        await self._jobs.alone(t)
        self._drop(t)

    def _drop(self, t: Tracked, *, keep_lost: bool = False) -> None:
        self._idle.forget(t)
        _wake(self._core.drop(t, keep_lost=keep_lost))
        t.before_capture = None
        self._make_room()

    def tune(self, autosave: Autosave | None) -> None:
        """Change the setting of all sessions that have none of their own."""
        self._core.tune(autosave)
        self._serve_due()

    def tune_one(self, t: Tracked, autosave: Autosave | Inherit | None) -> None:
        """Give a session a setting of its own, or the one of all."""
        self._core.tune_one(t, autosave)
        self._serve_due()

    def status(self, t: Tracked | None = None) -> AutosaveStatus:
        """Return the setting of a session, or of all, and what of it is in force."""
        return self._core.status(t)

    def touch(self, t: Tracked) -> None:
        """Note that a session was used: it is not idle."""
        t.idle_since = self._clock()

    async def contribute(self, t: Tracked) -> None:
        """Ask a session's contributors without a due save; only in a task of the host."""
        await self._contributors.capture(t)
        t.prepared = False  # a save that is due later asks again

    # Records.

    def append(self, t: Tracked, entries: tuple[Entry, ...]) -> int:
        """Accept entries as one group, all or none; return the version with them.

        Raises:
            LeaseLostError: Another process has the session.
            SessionClosedError: It is closed.
            SessionQuarantinedError: It is quarantined, and holds much already.
            StoreUnavailableError: Too much is unsaved.

        """
        version = self._append(t, entries, self._clock())
        if self._schedule.nudged:
            self._serve_due()
        return version

    @contextmanager
    def grouped(self, t: Tracked) -> Iterator[None]:
        """Make one group of what is appended in the block, which must not await."""
        before = t.version
        self._core.hold(t)
        try:
            yield
        finally:
            self._core.group(t, before)
            self._core.release(t, self._clock())
            self._serve_due()

    def turn_ended(self, t: Tracked) -> None:
        """Begin to save a turn whose end no caller waits for, unless ``on_turn_end`` is off."""
        if t.options is None or t.options.on_turn_end:
            now = self._clock()
            if not self._timer.armed:
                self._timer.arm()
            if not self._writer.begin_alone(t, now, 0):
                self._schedule.make_due(t, now)
                self._serve_due()

    async def room(self, t: Tracked) -> None:
        """Wait while too much is unsaved; then let one append of the session through.

        Raises:
            StoreUnavailableError: It took too long, or the policy is to reject.

        """
        if self._has_room():
            return
        engine = self._core.engine
        if engine.outage_policy == "backpressure":
            with anyio.move_on_after(engine.backpressure_timeout):
                while not self._has_room():
                    self._room = self._room or anyio.Event()
                    await self._room.wait()
        # It may have been lost, or closed, during the wait.
        self._check(t)
        if not self._has_room():
            raise self._registry.overloaded(t, self._clock())
        # For one append: the others that were woken compete for what room is left.
        t.granted = True

    def _has_room(self) -> bool:
        return self._core.stopped or not self._registry.blocking

    def _make_room(self) -> None:
        """Wake appends that wait for room, if there is some."""
        if self._room is not None and self._has_room():
            self._room.set()
            self._room = None

    # Durability.

    async def save(self, t: Tracked) -> int:
        """Make everything appended so far durable now; return the durable version.

        Raises:
            LeaseLostError: Another process has the session.
            SessionClosedError: The engine stopped before.
            SessionError: What was appended was discarded while contributors were asked.
            SessionQuarantinedError: The store refuses a record permanently.

        """
        if t.before_capture is not None and t.end is None and not self._core.stopped:
            tracked.require_outside(t, "to save it")
            dropped = t.dropped
            await self._host.call(self._contributors.capture, t)
            # Its version went back to the durable one: the comparison below would take it for
            # saved.
            if t.dropped != dropped:
                count = t.dropped - dropped
                raise SessionError(
                    f"session {t.key}: {count} unsaved records were discarded while they were "
                    "about to be saved; append again what is still wanted",
                    key=t.key,
                    discarded=count,
                )
        version = t.version
        if t.durable < version:
            self._check(t)
            now, nudged = self._clock(), self._schedule.nudged
            if not self._timer.armed:
                self._timer.arm()
            if not self._writer.begin_alone(t, now, version):
                self._schedule.make_urgent(t, version, now)
                if not self._core.is_calm:
                    self._serve_due()
                elif t.inflight is None:
                    self._schedule.nudged = nudged  # it is due: the timer has nothing to do for it
                    self._start(self._writer.begin, now)
            await self._durable(t, version)
        return t.durable

    async def wait_durable(self, t: Tracked, version: int | None = None) -> int:
        """Wait until a version, or everything appended so far, is durable; start no save for it.

        Raises: as ``save``.
        """
        await self._durable(t, t.version if version is None else version)
        return t.durable

    def _check(self, t: Tracked) -> None:
        """Raise if nothing more of a session will become durable."""
        if t.end is not None or self._core.stopped:
            raise tracked.ended(t)

    async def _durable(self, t: Tracked, version: int) -> None:
        """Wait until a version is durable, or raise because it will not be."""
        while t.durable < version:
            self._check(t)
            tracked.require_outside(t, "to wait until it is durable")
            await self._woken(t, version)

    async def _until_settled(self, t: Tracked, version: int) -> None:
        """Wait until a version is durable, or will not be; raise nothing."""
        while t.durable < version and t in self._registry.unsaved and not self._core.stopped:
            # A task that is woken in each step, as by a large batch, may never be cancelled.
            await checkpoint_if_cancelled()
            await self._woken(t, version)

    async def _woken(self, t: Tracked, version: int) -> None:
        """Wait in the caller's own task: cancelling it removes the waiter and nothing else."""
        woken = self._new_event()
        waiter = t.add_waiter(version, woken.set)
        try:
            await woken.wait()
        except BaseException:
            t.drop_waiter(waiter)
            raise

    def unsaved_keys(self) -> list[SessionKey]:
        """Return the sessions whose newest records are not durable."""
        return [t.key for t in self._registry.unsaved]

    async def flush(self, deadline: float | None = None) -> bool:
        """Save all sessions now, and return whether all is durable within ``deadline`` seconds."""
        tracked.require_outside(None, "to flush")
        saves: list[tuple[Tracked, int]] | None = None
        with anyio.move_on_after(deadline):
            # Twice: what is unsaved leaves while contributors are asked; then what they appended.
            self._flush()
            await self._contributors.ask_quiet()
            self._flush()
            saves = [(t, t.version) for t in self._registry.unsaved]
            # One after another: all of them are on their way already.
            for t, version in saves:
                await self._until_settled(t, version)
        # What was discarded, or deleted, is not to be saved any more.
        settled = (
            min(version, t.version) <= t.durable or t.end is State.CLOSED
            for t, version in saves or ()
        )
        return saves is not None and all(settled) and not self._registry.stuck

    def _flush(self) -> None:
        self._schedule.flush(self._registry.unsaved, self._clock())
        self._serve_due()

    # Jobs, and what to do about stuck sessions.

    async def exclusive(
        self,
        t: Tracked,
        job: Callable[[], Awaitable[T]],
        *,
        prepare: Callable[[], Awaitable[object]] | None = None,
        urgent: bool = False,
    ) -> T | None:
        """Run a job while no save of the session is with the store, and none begins.

        It runs in the background, in a queue of low priority. Returns None if the job was
        refused: the queue is full, the store is failing, or the engine drains.

        Args:
            t: The session.
            job: What to run; it must not wait for a save of the session.
            prepare: Awaited before it, while saves of the session continue.
            urgent: Skip the queue, and run even while the engine drains.

        """
        return await self._jobs.run(t, job, prepare=prepare, urgent=urgent)

    @property
    def crowded(self) -> bool:
        """True if the queue is full: `exclusive` would refuse a job that is not urgent."""
        return self._jobs.full

    def retry(self, t: Tracked) -> None:
        """Send a session's records again now: out of quarantine, or before its back-off ends."""
        self._core.retry(t, self._clock())
        self._serve_due()

    def discard(self, t: Tracked) -> int:
        """Forget the unsaved records of a quarantined or lost session; return how many.

        Raises:
            SessionError: It is neither.

        """
        self.require_stuck(t)
        count = self._core.discard(t)
        self._make_room()
        return count

    def require_stuck(self, t: Tracked) -> None:
        """Raise SessionError unless a session is quarantined or lost."""
        if t.end not in (State.QUARANTINED, State.LOST):
            raise SessionError(
                f"session {t.key} is {t.state.value}: only stuck sessions discard records",
                key=t.key,
            )

    def report_saves(self, *, wanted: bool) -> None:
        """Have an event for each save, or none: there are very many, and rarely a listener."""
        self._registry.reports_saves = wanted

    def warn(self, reasons: tuple[str, ...]) -> None:
        """Note what is wrong with the store's settings; an empty tuple once they are right."""
        new = [reason for reason in reasons if reason not in self._registry.warnings]
        self._registry.warnings = reasons
        self._registry.events += [StoreWarned(reason=reason) for reason in new]
        if new:
            self._reporter.deliver()

    def settle_lost(self, t: Tracked) -> None:
        """Note that a lost session's records are durable elsewhere."""
        self._core.settle_lost(t)

    @property
    def lost(self) -> list[Tracked]:
        """Lost sessions whose records have been neither forked nor discarded."""
        return [t for t in self._registry.stuck if t.undecided]

    def lose(self, t: Tracked) -> None:
        """Note that another process has the session: nothing of it is sent any more."""
        if t.end in (State.LOST, State.CLOSED):
            return
        _wake(self._core.lose(t))
        if t.heard_by is not None:
            t.heard_by.lost(t.of)
        self._reporter.deliver()

    async def catch_up(self) -> float:
        """Do what is due, after a clock that does not tick was moved.

        Returns:
            When more will be due; nothing runs until then.

        """
        self._timer.wake()
        while self._host.running and not self._core.stopped:
            await self._contributors.idle()
            await self._writer.idle()
            awake = self._timer.alarm <= self._clock()
            if not (awake or self._contributors.is_busy or self._writer.is_busy):
                return self._timer.alarm
            await checkpoint()
        return float("inf")

    def unsaved_age(self, t: Tracked) -> float:
        """Return for how long the session's oldest change has not been durable, in seconds."""
        return 0.0 if t.oldest_at is None else self._clock() - t.oldest_at

    def health(self) -> Health:
        """Return the state of autosave."""
        now = self._clock()
        return health_of(self._core, now, self._timer.reasons(now))

    # Shutdown.

    def begin_drain(self) -> None:
        """From now on save everything at once, probe more often, and start no fold."""
        if self._schedule.draining:
            return
        now = self._clock()
        self._schedule.drain(self._registry.unsaved, now)
        self._core.breaker.hurry(now)
        self._timer.serve_due()

    def seal(self, t: Tracked | None = None) -> None:
        """Accept no more records, for one session or for all; contributors still may append."""
        self._core.seal(t)

    def unseal(self, t: Tracked) -> None:
        """Accept records of one session again; a seal of all sessions stays."""
        self._core.unseal(t)

    async def aclose(self, deadline: Deadline) -> ShutdownReport:
        """Save everything, stop and report, by the deadline.

        Runs in the host, once, however often it is called: a caller that is cancelled meanwhile
        leaves nothing half-stopped.
        """
        if not self._host.running:
            return self._finish(self._clock(), saved=0)
        return await self._host.call(self._stop, deadline)

    async def _stop(self, deadline: Deadline) -> ShutdownReport:
        # A second caller waits for the first one's report.
        async with self._one_stop:
            if self._report is not None:
                return self._report
            began = self._clock()
            # 1. Make everything due, and close the intake: only contributors may still append.
            self.begin_drain()
            self._timer.serve_due()  # if the loop is ending, its task was cancelled like all others
            self.seal()
            before = list(self._registry.unsaved)
            # 2. Ask contributors and wait for the saves. If their time is over, save without them.
            with deadline.scope("saves"):
                with deadline.scope("captures") as asking:
                    await self._contributors.ask_quiet()
                    await self._all_settled()
                if asking.cancelled_caught:
                    self._contributors.stop()
                    self._timer.serve_due()
                    await self._all_settled()
            # From here on nothing new is sent: what the report says stays true.
            self._core.stopped = True
            self._jobs.cut()
            # 3. Saves in flight may still be answered. What is not is given up, and in doubt.
            with deadline.scope("answers"):
                await self._writer.idle()
            self._writer.cut()
            # 4. Tasks that were cancelled have to settle their saves before the report.
            with deadline.scope("cuts"):
                await self._writer.idle()
            return self._finish(began, saved=len([t for t in before if t.clean]))

    async def _all_settled(self) -> None:
        while self._registry.unsaved:
            t = next(iter(self._registry.unsaved))
            await self._until_settled(t, t.version)

    def _finish(self, began: float, *, saved: int) -> ShutdownReport:
        """Begin no more saves, account for every record, and wake all waiters."""
        self._core.stopped = True
        self.seal()
        if self._report is None:
            self._report = report_of(self._core, began=began, saved=saved, now=self._clock())
            self._report.log()
        self._timer.wake()
        self._make_room()
        for t in self._registry.sessions:
            _wake(t.take_waiters())
        return self._report

    # What keeps it running.

    def _serve_all(self) -> None:
        """Do what is due, and what an error or a Ctrl-C has left undone."""
        self._contributors.ask(())
        self._writer.recover("a Ctrl-C came amid the save; it is sent again", most=LOOKED_AT)
        self._serve_due()

    def _begin_due(self) -> None:
        self._start(self._writer.begin, self._clock())

    def _serve_due(self) -> None:
        """Send what has become due, or wake the timer."""
        if not self._core.stopped:
            if not self._timer.armed:
                self._timer.arm()
            self._start(self._timer.serve_due)

    def _watch(self, until: float) -> None:
        """Have the timer check what is due at this time at the latest."""
        if until < self._timer.alarm:
            self._start(self._timer.wake_or_start)

    def _start(self, call: Callable[[*Ts], None], *args: *Ts) -> None:
        """Call what may start a task; accepted records stay accepted if that fails."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  # `health` reports it, and it is tried again
            self._timer.failed(error)

    def _host_ended(self) -> None:
        """Accept no more records: without a host nothing will be saved."""
        self._timer.stop()
        # Before the report, which counts saves in flight as in doubt.
        self._writer.cut()
        self._finish(self._clock(), saved=0)

    def _settled(self, sessions: list[Tracked]) -> None:
        """After a batch, start the jobs that waited for it, and wake appends that wait for room."""
        for t in sessions:
            if t.holds:
                self._jobs.freed(t)
        if self._registry.events:
            self._reporter.deliver()
        if self._room is not None:
            self._make_room()
        if not self._host.running:
            return
        if self._schedule.nudged:
            self._serve_due()
        elif len(self._schedule.ready):
            self._begin_due()


def _wake(waiters: Iterable[Wake]) -> None:
    for wake in waiters:
        wake()
