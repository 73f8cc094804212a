"""The autosave engine: sessions, timer, writer, background jobs and watchdog of one manager.

It runs in the host's task group. A job that needs a session to itself (a fold, mostly) waits
until no save of that session is with the store, and none begins before the job has ended.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVarTuple, final

import anyio
from anyio.lowlevel import checkpoint

from perdure._lib.host import Host
from perdure._lib.loop import event_maker
from perdure.autosave import tracked
from perdure.autosave.core import Core, Save
from perdure.autosave.events import Event, Reporter, StoreWarned
from perdure.autosave.jobs import BackgroundJobs, StateCapture, T
from perdure.autosave.options import INHERIT, Autosave, EngineOptions, Inherit
from perdure.autosave.reports import Health, ShutdownReport, health_of, report_of
from perdure.autosave.schedule import IdleWheel
from perdure.autosave.tracked import State, Tracked, Waiter, Waiters
from perdure.autosave.writer import Timer, Watchdog, Writer
from perdure.errors import SessionError, UnsavedChangesError
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Store


@final
class SaveWaiters:
    """Let callers wait.

    Args:
        core: Knows how far each session is.
        clock: The loop's.

    """

    def __init__(self, core: Core, clock: Callable[[], float]) -> None:
        self._core = core
        self._pressure = core.registry.pressure
        self._clock = clock
        self._new_event = event_maker()
        self._room: anyio.Event | None = None

    def check(self, t: Tracked) -> None:
        """Raise if nothing more of a session will become durable."""
        if t.end is not None or self._core.stopped:
            raise tracked.ended(t)

    async def durable(self, t: Tracked, version: int) -> None:
        """Wait until a version is durable, or raise because it will not be."""
        while t.durable < version:
            self.check(t)
            tracked.require_outside(t, "to wait until it is durable")
            await self._woken(t, version)

    async def settled(self, t: Tracked, version: int) -> None:
        """Wait until a version is durable, or will not be; raise nothing."""
        while t.durable < version and t in self._core.registry.unsaved and not self._core.stopped:
            await self._woken(t, version)

    async def _woken(self, t: Tracked, version: int) -> None:
        woken = self._new_event()
        waiters = t.waiters = t.waiters or Waiters()
        number = waiters.add(Waiter(version, woken.set))
        try:
            await woken.wait()
        finally:
            t.give_up(number, waiters)

    async def room(self, t: Tracked) -> None:
        """Wait while too much is unsaved, then let one append of the session through."""
        if self._has_room():
            return
        engine = self._core.engine
        if engine.outage_policy == "backpressure":
            with anyio.move_on_after(engine.backpressure_timeout):
                while not self._has_room():
                    self._room = self._room or anyio.Event()
                    await self._room.wait()
        self.check(t)
        if not self._has_room():
            raise self._core.registry.overloaded(t, self._clock())
        t.granted = True

    def _has_room(self) -> bool:
        return self._core.stopped or not self._pressure.blocking

    def make_room(self) -> None:
        """Wake those who wait for room, if there is some."""
        if self._room is not None and self._has_room():
            self._room.set()
            self._room = None

    def wake(self, waiters: Iterable[Waiter]) -> None:
        """Wake those whose wait is over."""
        for waiter in waiters:
            waiter.wake()


@final
class EngineShutdown:
    """Stop one engine.

    Args:
        core: What it knows.
        clock: The loop's.
        timer: Its timer.
        batcher: Its workers.
        jobs: Its background jobs.
        contributors: Asked once more, those of clean sessions included.
        waiting: Its waiters.

    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        *,
        timer: Timer,
        writer: Writer,
        jobs: BackgroundJobs,
        contributors: StateCapture,
        waiting: SaveWaiters,
    ) -> None:
        self.report: ShutdownReport | None = None
        """What became of everything, once it is over."""
        self._core = core
        self._clock = clock
        self._timer = timer
        self._writer = writer
        self._jobs = jobs
        self._contributors = contributors
        self._waiting = waiting
        self._one = anyio.Lock()
        self._flushing: anyio.CancelScope | None = None
        self._cut = False

    def drain(self) -> None:
        """Save everything as it comes from now on."""
        if self._core.schedule.draining:
            return
        now = self._clock()
        self._core.schedule.drain(self._core.registry.unsaved, now)
        self._core.breaker.hurry(now)
        self._timer.attend()

    def cut(self) -> None:
        """Wait no longer for the store: go on to the report."""
        self._cut = True
        if self._flushing is not None:
            self._flushing.cancel()

    async def stop(self, deadline: float, hard_grace: float) -> ShutdownReport:
        """Stop within ``deadline + hard_grace`` seconds, and say what became of everything."""
        async with self._one:
            if self.report is not None:
                return self.report
            began = self._clock()
            self.drain()
            self._timer.attend()  # in a loop that ends it was cut, as all other tasks were
            self._core.intake.seal(None)
            before = list(self._core.registry.unsaved)
            with anyio.move_on_after(deadline) as self._flushing:
                if not self._cut:
                    await self._flush()
            # From here on nothing new is sent: what the report says stays true.
            self._core.stopped = True
            self._writer.cut()
            self._jobs.cut()
            with anyio.move_on_after(hard_grace):
                await self._writer.idle()
            return self.finish(began, saved=len([t for t in before if t.clean]))

    async def _flush(self) -> None:
        await self._contributors.ask_quiet()
        while self._core.registry.unsaved:
            t = next(iter(self._core.registry.unsaved))
            await self._waiting.settled(t, t.version)

    def finish(self, began: float, *, saved: int) -> ShutdownReport:
        """Begin no save any more, account for everything, and let nobody wait in vain."""
        self._core.stopped = True
        self._core.intake.seal(None)
        if self.report is None:
            self.report = report_of(self._core, began=began, saved=saved, now=self._clock())
            self.report.log()
        self._timer.stop()
        self._waiting.make_room()
        for t in self._core.registry.sessions:
            self._waiting.wake(t.take_waiters())
        return self.report


# Waiting for autosave: for a version to become durable, for a session to settle, for room
#
# These are the only places where a caller's own task waits. Being cancelled here, in any way,
# takes the waiter away and changes nothing else.


# The doing of autosave: the core's decisions carried out on a running event loop
#
# `append` and what else is synchronous may be called from any task of the loop that the host runs
# on. Whatever takes time runs in the host's tasks: cancelling a caller, in whatever way, ends its
# wait and changes nothing else.
# There is one timer for all sessions, which sleeps until the first of them is due and is woken
# only when something becomes due earlier. Workers (`batcher`) bring batches to the store; a save
# that somebody waits for starts one at once, without a round through the timer.


Ts = TypeVarTuple("Ts")


@final
class Autosaver:
    """Save sessions by themselves, and at once when asked.

    Args:
        store: Where to.
        host: Where it works; running for as long as anything is appended.
        autosave: When sessions save that have no setting of their own; None for no timers.
        engine: The finer knobs.
        clock: The loop's, from ``loop_clock()``, or one of a test's.
        ticking: Whether it is the loop's; if not, `catch_up` each time that it was moved.
        seed: Makes jitter and backoff repeatable.
        on_event: Called with everything that happens, synchronously.

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
        self._append = core.intake.append
        self._idle = IdleWheel(engine.hibernate_after)
        self._reporter = Reporter(core.registry.events, on_event)
        self._contributors = StateCapture(core, host, clock, attend=self._attend)
        self._jobs = BackgroundJobs(core, host, clock, attend=self._attend)
        self._writer = Writer(
            core,
            store,
            host,
            clock,
            prepare=self._contributors.ask,
            settled=self._settled,
            watch=self._watch,
        )
        self._timer = Timer(
            core, self._idle, self._writer, host, clock, self._reporter, ticking=ticking
        )
        self._watchdog = Watchdog(
            core,
            self._timer,
            self._writer,
            self._contributors,
            self._reporter,
            clock,
            ticking=ticking,
        )
        self._waiting = SaveWaiters(core, clock)
        self._stopping = EngineShutdown(
            core,
            clock,
            timer=self._timer,
            writer=self._writer,
            jobs=self._jobs,
            contributors=self._contributors,
            waiting=self._waiting,
        )

        host.at_end(self._host_ended)

    # sessions come and go

    def track(
        self,
        key: SessionKey,
        *,
        epoch: int,
        head: int,
        autosave: Autosave | Inherit | None = INHERIT,
    ) -> Tracked:
        """Begin to look after a session whose log ends with ``head``, which is durable."""
        now = self._clock()
        t = self._core.track(key, epoch=epoch, head=head, autosave=autosave, now=now)
        self._idle.add(t, now)
        if self._host.running and not self._core.stopped:
            self._watch(self._idle.next_at)  # though nothing may ever be appended
        return t

    def untrack(self, t: Tracked) -> None:
        """Look after a session no more. It has to be clean, or not ours any more.

        Unsaved records of one that was lost stay in `lost` until they are discarded or settled.

        Raises:
            UnsavedChangesError: It has records that are not durable, and may still be saved.

        """
        ended = t.end in (State.LOST, State.CLOSED) or self._core.stopped
        if not (t.clean or ended):
            message = (
                f"session {t.key} has {t.version - t.durable} records that are not durable: "
                "save it first, or discard them"
            )
            raise UnsavedChangesError(message, key=t.key, version=t.version, durable=t.durable)
        self._drop(t, keep_lost=True)

    async def abandon(self, t: Tracked) -> None:
        """Look after a session no more, unsaved records and all, once no save of it runs."""
        await self._host.call(self._abandon, t)

    async def _abandon(self, t: Tracked) -> None:
        await self._jobs.alone(t)
        self._drop(t)

    def _drop(self, t: Tracked, *, keep_lost: bool = False) -> None:
        self._idle.forget(t)
        self._watchdog.forget(t)
        self._waiting.wake(self._core.drop(t, keep_lost=keep_lost))
        # Nothing of it happens any more: whoever has asked to hear of it need not be kept.
        t.before_capture = t.on_saved = t.on_idle = t.on_lost = None

    def tune(self, autosave: Autosave | None, t: Tracked | None = None) -> None:
        """Change when one session saves, or all those without a setting of their own."""
        self._core.tune(autosave, t)
        self._attend()

    def touch(self, t: Tracked) -> None:
        """Take note that a session was used: it is not idle."""
        t.idle_since = self._clock()

    async def contribute(self, t: Tracked) -> None:
        """Ask a session's contributors, though no save is due; in a task of the host only."""
        await self._contributors.capture(t)
        t.prepared = False  # a save that is due later asks again

    # records

    def append(self, t: Tracked, entries: tuple[Entry, ...]) -> int:
        """Accept entries as one group, all or none; return the version with them.

        Raises:
            LeaseLostError: Another process has the session.
            SessionClosedError: It is closed.
            SessionQuarantinedError: It is quarantined, and holds much already.
            StoreUnavailableError: Too much is unsaved.
            TooLargeError: A record is larger than the store takes.

        """
        version = self._append(t, entries, self._clock())
        if self._schedule.nudged:
            self._attend()
        return version

    def open_group(self, t: Tracked) -> None:
        """Make one group of what is appended until ``close_group``; none of it is saved before."""
        self._core.intake.open_group(t)

    def close_group(self, t: Tracked) -> None:
        """End the group that ``open_group`` began."""
        self._core.intake.close_group(t, self._clock())
        self._attend()

    def turn_ended(self, t: Tracked) -> None:
        """Save now, if the session saves at the end of a turn."""
        if t.options is None or t.options.on_turn_end:
            self._schedule.hasten(t, self._clock())
            self._attend()

    async def room(self, t: Tracked) -> None:
        """Wait while too much is unsaved; one append is let through then.

        Raises:
            StoreUnavailableError: It took too long, or the policy is to reject.

        """
        await self._waiting.room(t)

    # durability

    async def save(self, t: Tracked) -> int:
        """Make durable now what was appended until now; return the durable version.

        Raises:
            LeaseLostError: Another process has the session.
            SessionClosedError: The engine stopped before.
            SessionQuarantinedError: The store refuses a record for good.

        """
        if t.before_capture is not None and t.end is None and not self._core.stopped:
            tracked.require_outside(t, "to save it")
            await self._host.call(self._contributors.capture, t)
        version = t.version
        if t.durable < version:
            self._waiting.check(t)
            now = self._clock()
            self._schedule.urge(t, version, now)
            if t.before_capture is not None or not self._writer.begin(now):
                self._attend()
            await self._waiting.durable(t, version)
        return t.durable

    async def wait_durable(self, t: Tracked, version: int | None = None) -> int:
        """Wait until a version, or what was appended until now, is durable; do not hurry it.

        Raises: as ``save``.
        """
        await self._waiting.durable(t, t.version if version is None else version)
        return t.durable

    async def flush(self, deadline: float | None = None) -> None:
        """Save everything now; return when it is durable, or after ``deadline`` seconds."""
        tracked.require_outside(None, "to flush")
        with anyio.move_on_after(deadline):
            self._flush()
            await self._contributors.ask_quiet()
            self._flush()
            for t, version in [(t, t.version) for t in self._registry.unsaved]:
                await self._waiting.settled(t, version)

    def _flush(self) -> None:
        self._schedule.flush(self._registry.unsaved, self._clock())
        self._attend()

    # jobs and ways out

    async def exclusive(
        self, t: Tracked, job: Callable[[], Awaitable[T]], *, urgent: bool = False
    ) -> T | None:
        """Run a job while no save of the session is with the store, and none begins.

        It runs in the background, with all others in a queue of low priority. Returns None
        if it was refused: the queue is full, the store is not well, the engine drains.

        Args:
            t: The session.
            job: What to run; it must not wait for a save of the session.
            urgent: Do not wait in the queue, and go on while the engine drains.

        """
        return await self._jobs.run(t, job, urgent=urgent)

    @property
    def crowded(self) -> bool:
        """Whether the queue is full: `exclusive` would refuse what is not urgent."""
        return self._jobs.full

    def retry(self, t: Tracked) -> None:
        """Send a session's records again now: out of quarantine, or before its backoff ends."""
        self._core.retry(t, self._clock())
        self._attend()

    def discard(self, t: Tracked) -> int:
        """Forget the unsaved records of a quarantined or lost session; return how many.

        Raises:
            SessionError: It is neither.

        """
        if t.end not in (State.QUARANTINED, State.LOST):
            message = f"session {t.key} is {t.state.value}: only stuck sessions discard records"
            raise SessionError(message, key=t.key)
        return self._core.discard(t)

    def warn(self, reasons: tuple[str, ...]) -> None:
        """Take note of what is wrong with how the store is set up; nothing, if it is well again."""
        new = [reason for reason in reasons if reason not in self._registry.warnings]
        self._registry.warnings = reasons
        self._registry.events += [StoreWarned(reason=reason) for reason in new]
        if new:
            self._reporter.deliver()

    def settle_lost(self, t: Tracked) -> None:
        """Take note that a lost session's records are durable elsewhere."""
        self._core.settle_lost(t)

    @property
    def lost(self) -> list[Tracked]:
        """Lost sessions about whose records nobody has decided yet."""
        return [t for t in self._registry.stuck if t.undecided]

    def lose(self, t: Tracked) -> None:
        """Take note that another process has the session: nothing of it is sent any more."""
        if t.end in (State.LOST, State.CLOSED):
            return
        self._waiting.wake(self._core.lose(t))
        if t.on_lost is not None:
            t.on_lost()
        self._reporter.deliver()

    async def catch_up(self) -> float:
        """Do what is due by now, after a clock that does not tick was moved.

        Returns:
            When more will be due, with nothing under way until then.

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

    # how it stands

    def unsaved_age(self, t: Tracked) -> float:
        """Return for how long the session's oldest change has not been durable, in seconds."""
        return 0.0 if t.oldest_at is None else self._clock() - t.oldest_at

    def health(self) -> Health:
        """Say how it stands."""
        now = self._clock()
        return health_of(self._core, now, self._watchdog.reasons(now))

    # the end

    def begin_drain(self) -> None:
        """Save everything as it comes from now on, probe more often, fold no more."""
        self._stopping.drain()

    def seal(self, t: Tracked | None = None) -> None:
        """Accept no record any more, for one session or for all; contributors still may add."""
        self._core.intake.seal(t)

    def unseal(self, t: Tracked) -> None:
        """Accept records of one session again; the seal of all stays."""
        self._core.intake.unseal(t)

    def cut(self) -> None:
        """Stop waiting for the store: ``aclose`` goes on to its last step."""
        self._stopping.cut()

    async def aclose(self, *, deadline: float, hard_grace: float) -> ShutdownReport:
        """Save everything, stop, and say what became of it, within ``deadline + hard_grace``."""
        if not self._host.running:
            return self._stopping.finish(self._clock(), saved=0)
        return await self._host.call(self._stopping.stop, deadline, hard_grace)

    # what keeps it going

    def _attend(self) -> None:
        """See to what has become due: start a worker, or let the timer know."""
        if not self._core.stopped:
            self._watchdog.arm()
            self._start(self._timer.attend)

    def _watch(self, until: float) -> None:
        """Look at what is due at this time at the latest."""
        self._start(self._timer.look_at, until)

    def _start(self, call: Callable[[*Ts], None], *args: *Ts) -> None:
        """Call what may start a task; what was accepted stays accepted if that fails."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  # told by `health`, and tried again
            self._watchdog.failed(error)

    def _host_ended(self) -> None:
        """Accept nothing more: without a host nothing will be saved."""
        self._watchdog.stop()
        self._writer.cut()
        self._stopping.finish(self._clock(), saved=0)

    def _settled(self, saves: list[Save]) -> None:
        """Go on after a batch: with jobs that waited for it, with those who wait for room."""
        for save in saves:
            if save.t.holds:
                self._jobs.freed(save.t)
        self._reporter.deliver()
        self._waiting.make_room()
        if self._host.running:
            self._attend()
