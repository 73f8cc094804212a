"""The timer of autosave, which starts what is due, and checks that it was started.

It sleeps in a task. The check runs by a timer of the event loop, and needs no task itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

import anyio
from anyio.lowlevel import checkpoint

from perdure._lib.logs import log_facts
from perdure._lib.loop import loop_timer
from perdure._lib.tasks import Host
from perdure.autosave.core import Core
from perdure.autosave.events import LoopBlocked, Reporter, Resumed, Stalled
from perdure.autosave.schedule import SLOT, IdleWheel
from perdure.autosave.writer import Writer

log: logging.Logger = logging.getLogger("perdure.autosave")

PERIOD: Final = 5.0
"""Seconds between two checks, and between two looks at the store's load."""
LATE: Final = 6 * PERIOD
"""A timer that is so late means that the event loop does not run."""

DUE_CHUNK: Final = 128
"""Sessions armed between two readings of the clock."""
BLOCKED: Final = 1.0
"""A wake-up, or a check, that is so late means that the event loop was blocked."""


@final
class Timer:
    """The one timer of autosave: sleeps until a session may be due.

    Its task starts when it is first needed. It is woken only when something becomes due before
    its alarm; a session that is due right now needs no timer. While sessions change it wakes every
    slot, so that it hardly ever needs waking; otherwise it sleeps. If the task is ended from
    outside, the next caller that needs it starts it again.

    While anything is unsaved, a watchdog checks every `PERIOD` seconds that the alarm was served.
    It is set to the time at which the next session is due, or a save to be given up. One that has
    passed with nothing done means that a task could not be started, or has died: then saving has
    stalled, `Autosaver.health` is failing and gives the reason, it is logged once, and the task is
    started again at each check until it runs.

    Slow is not stalled: a save within its timeout, a store that is down or saturated, a job or a
    contributor within its own timeout.

    Args:
        core: Decides what is due when.
        idle: The sessions that may be idle.
        writer: Saves what is due.
        host: Where the timer runs.
        clock: The loop's, or one that a test moves.
        reporter: Delivers the events.
        serve_all: Starts everything that is due; called at each check.
        ticking: True for the loop's clock; after another one was moved, `wake` has to be called,
            and nothing is checked.

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
        serve_all: Callable[[], None],
        ticking: bool,
    ) -> None:
        self._core = core
        self._schedule = core.schedule
        self._idle = idle
        self._writer = writer
        self._host = host
        self._clock = clock
        self._reporter = reporter
        # Identifies the task that sleeps; None while there is none.
        self._running: object | None = None
        # When it will wake next; minus infinity while it is awake.
        self._alarm = float("inf")
        self._woken = anyio.Event()
        # Whether `serve_due` was called since the last wake-up.
        self._was_used = False
        # When it was last woken.
        self._woken_at = 0.0
        self._blocked = False
        self._controlled_at = clock()
        self._serve_all = serve_all
        # Calls later, if the clock is the loop's.
        self._later = loop_timer() if ticking else None
        self.armed: bool = False
        """True if it will check, so that callers need not call `arm`."""
        self._disarm: Callable[[], None] = lambda: None
        self._looks_at = 0.0
        # Whether the alarm was late at the last check, which is looked at once more.
        self._doubts = False
        self._stalled: str | None = None
        # Why a task could not be started.
        self._error: Exception | None = None

    def serve_due(self) -> None:
        """Send what is due, and wake the timer for what is due before its alarm."""
        self._schedule.nudged = False
        self._was_used = True
        now = self._clock()
        if len(self._schedule.ready):
            self._writer.begin(now)
        if self._next_at(now) < self._alarm:
            self.wake_or_start()

    def _late(self, now: float) -> float:
        """Return for how long it should have done something, and has not, in seconds."""
        if self._running is None:
            return now - self._next_at(now)
        # Woken and not run since then, or asleep beyond its alarm.
        return now - (self._woken_at if self._woken.is_set() else self._alarm)

    @property
    def alarm(self) -> float:
        """Time of the next wake-up; minus infinity once it was woken and has not run yet."""
        return float("-inf") if self._running is not None and self._woken.is_set() else self._alarm

    def wake(self) -> None:
        """Wake now, if the task runs."""
        if self._running is not None and not self._woken.is_set():
            self._woken_at = self._clock()
            self._woken.set()

    def wake_or_start(self) -> None:
        """Wake now; start the task if there is none."""
        if self._running is None:
            self._restart()
        else:
            self.wake()

    def _restart(self) -> None:
        """Discard the task that sleeps, and start a new one, which wakes at once."""
        # An earlier task that still lives sees that it is not this one, and ends.
        self._running = run = object()
        self._alarm = float("-inf")
        self._woken_at = self._clock()
        self._woken.set()
        try:
            self._host.spawn(self._run, run)
        except BaseException:
            # The task could not be started: leave it to the next caller.
            self._running, self._alarm = None, float("inf")
            raise

    def _next_at(self, now: float) -> float:
        at = self._schedule.next_at(now)
        # Due sessions wait for an answer, which begins the next batch; without one, for the probe.
        if len(self._schedule.ready) and not self._core.in_flight:
            at = min(at, self._core.breaker.probe_at)
        if not self._schedule.draining:
            at = min(at, self._idle.next_at)
        return min(at, self._writer.next_at)

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
        if self._was_used and self._later is not None:
            # Waking again soon is cheaper than being woken for each change meanwhile.
            at = min(at, now + SLOT)
        self._was_used = False
        self._alarm = at
        # No await since the schedule was asked: no change can come between and wake nothing.
        self._woken = anyio.Event()
        if self._later is None:  # by a clock that a test moves: sleep until woken, or not at all
            at = float("inf") if at > now else float("-inf")
        with anyio.CancelScope(deadline=at):
            await self._woken.wait()
        late = self._clock() - due
        if late > BLOCKED and not self._woken.is_set() and not self._blocked:
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
        self._writer.begin(now)
        self._report_idle(now)
        self._control(now)
        if self._core.registry.events:
            self._reporter.deliver()
        return more

    def _report_idle(self, now: float) -> None:
        if self._schedule.draining or self._idle.next_at > now:
            return
        for t in self._idle.advance(now, DUE_CHUNK):
            if t.heard_by is not None:
                t.heard_by.unused(t.of)

    def _control(self, now: float) -> None:
        period = now - self._controlled_at
        if self._core.engine.eager and period >= PERIOD:
            self._schedule.control(self._writer.utilization(period))
            self._controlled_at = now

    # The watchdog.

    def arm(self) -> None:
        """Check from now on, until nothing is unsaved."""
        if not self.armed:
            self._look_in(PERIOD)

    def _look_in(self, seconds: float) -> None:
        if self._later is not None:
            self._looks_at = self._clock() + seconds
            self._disarm = self._later(seconds, self._tick)
            self.armed = True

    def failed(self, error: Exception) -> None:
        """Note that a task could not be started."""
        self._error = error

    def stop(self) -> None:
        """Stop checking."""
        self.armed = False
        self._disarm()

    def reasons(self, now: float) -> list[str]:
        """Return why saving makes no progress; empty if it does."""
        if self._core.stopped:
            return []
        if self._stalled is not None:
            return [self._stalled]
        reasons = []
        if self._error is not None:
            reasons.append(f"a background task could not be started: {self._error!r}")
        late = self._late(now)
        if self.armed and late > LATE:
            reasons.append(f"the event loop has not run the timer of autosave for {late:.0f} s")
        return reasons

    def _tick(self) -> None:
        self.armed = False
        if self._core.stopped:
            return
        now = self._clock()
        was_blocked = now - self._looks_at > BLOCKED
        # A loop that was blocked until now has not served the alarm yet: it gets the time to.
        self._doubts = not self._doubts and self._stalled is None and self._is_late(now)
        if self._core.registry.unsaved or self._stalled is not None:
            # First: even if the check fails, there will be another.
            self._look_in(SLOT if self._doubts else PERIOD)
        if was_blocked or self._doubts:
            return
        try:
            self._look(now)
        except Exception as error:
            self._error = error
            log.exception("the watchdog of autosave failed")

    def _look(self, now: float) -> None:
        error, self._error = self._error, None
        if self._is_late(now):
            self._tell(error, now)
            self._restart()
        elif self._stalled is not None:
            self._stalled = None
            log.warning("autosave is being served again")
            self._core.registry.events.append(Resumed())
        if self._core.registry.unsaved:
            self._serve_all()
        self._reporter.deliver()

    def _is_late(self, now: float) -> bool:
        """Return whether the alarm passed about a check ago, and nothing has been done."""
        return bool(self._core.registry.unsaved) and self._late(now) >= PERIOD * 0.9

    def _tell(self, error: Exception | None, now: float) -> None:
        unsaved, first = self._core.registry.unsaved, self._stalled is None
        t = next(iter(unsaved))
        more = f" and {len(unsaved) - 1} more" if len(unsaved) > 1 else ""
        age = 0.0 if t.oldest_at is None else now - t.oldest_at
        cause = "" if error is None else f" ({error!r})"
        saying = f"due, unsaved for {age:.0f} s, and its timer has not fired"
        self._stalled = f"session {t.key}{more}: {saying}{cause}"
        if first:
            message = "autosave has stalled, it is tried again: %(reason)s"
            log_facts(log, logging.ERROR, message, reason=self._stalled)
            event = Stalled(reason=self._stalled, sessions=len(unsaved), error=error)
            self._core.registry.events.append(event)
