"""The one timer of autosave: it sleeps until a session may be due.

Runs in the host, begun when it is first needed. It is woken only when something becomes
due before it would look anyway; a session that is due right now needs no timer but a
worker. While something goes on it looks every slot, so that it is hardly ever woken; while
nothing does, it sleeps. If it is ended from outside, whoever needs it next begins it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import anyio
from anyio.lowlevel import checkpoint

from perdure._lib.host import Host
from perdure.autosave.core import Core
from perdure.autosave.events import Idle, LoopBlocked, Reporter
from perdure.autosave.schedule import SLOT, IdleWheel
from perdure.autosave.writer import Writer

CHUNK: Final = 128
"""Sessions between two looks at the clock."""
CONTROL_PERIOD: Final = 5.0
"""How often the debounce is fitted to what the store has to do."""
BLOCKED_AFTER: Final = 1.0
"""A wake-up that comes so late was kept from coming."""


@final
class Timer:
    """Look at what is due, when it is due.

    Args:
        core: Knows what is due when.
        idle: Knows which sessions may be idle.
        batcher: Gets what is due.
        host: Where the timer runs.
        clock: The loop's, or one that others move.
        ticking: Whether it is the loop's; if not, `wake` says that it was moved.
        reporter: Gets what has happened.

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
        self._running: object | None = None
        """Stands for the task that sleeps, as long as there is one."""
        self._alarm = float("inf")
        """When it will look next; minus infinity while it is awake."""
        self._woken = anyio.Event()
        self._attended = False
        """Whether anything has gone on since it last looked."""
        self._blocked = False
        self._controlled_at = clock()

    def attend(self) -> None:
        """Start a worker for what is due, and wake up for what is due before the alarm."""
        self._schedule.nudged = False
        self._attended = True
        now = self._clock()
        if len(self._schedule.ready):
            self._writer.launch(now)
        if self._next_at(now) < self._alarm:
            self._wake()

    def look_at(self, at: float) -> None:
        """Look at this time at the latest."""
        if at < self._alarm:
            self._wake()

    def stop(self) -> None:
        """Sleep no more."""
        self._woken.set()

    @property
    def alarm(self) -> float:
        """When it will look next; minus infinity for as soon as it gets to run."""
        return float("-inf") if self._running is not None and self._woken.is_set() else self._alarm

    def wake(self) -> None:
        """Look now, if there is anything to look after."""
        if self._running is not None:
            self._woken.set()

    def _wake(self) -> None:
        if self._running is None:
            self.restart()
        else:
            self._woken.set()

    def restart(self) -> None:
        """Count on the task that sleeps no more, and start a fresh one, which looks at once."""
        self._running = run = object()
        self._alarm = float("-inf")
        self._woken.set()
        try:
            self._host.spawn(self._run, run)
        except BaseException:
            # It does not come: leave it to whoever needs it next.
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
                more = self._look()
                await (checkpoint() if more else self._sleep())
        finally:
            if self._running is run:
                self._running = None
                self._alarm = float("inf")

    async def _sleep(self) -> None:
        self._schedule.nudged = False
        now = self._clock()
        due = at = max(self._next_at(now), now)
        if self._attended and self._ticking:
            # Looking again soon is cheaper than being woken for each change meanwhile.
            at = min(at, now + SLOT)
        self._attended = False
        self._alarm = at
        self._woken = anyio.Event()
        with anyio.CancelScope(deadline=at if self._ticking else _moved(at, now)):
            await self._woken.wait()
        late = self._clock() - due
        if late > BLOCKED_AFTER and not self._woken.is_set() and not self._blocked:
            self._blocked = True
            self._core.registry.events.append(LoopBlocked(delay=late))

    def _look(self) -> bool:
        """See to what is due, for one time slice; return whether there is more."""
        begun = now = self._clock()
        more = self._schedule.advance(now, CHUNK)
        while more and now - begun < self._core.engine.loop_slice:
            now = self._clock()
            more = self._schedule.advance(now, CHUNK)
        self._writer.give_up(now)
        self._writer.launch(now)
        self._look_for_idle(now)
        self._control(now)
        self._reporter.deliver()
        return more

    def _look_for_idle(self, now: float) -> None:
        if self._schedule.draining or self._idle.next_at > now:
            return
        for t in self._idle.advance(now, CHUNK):
            if t.on_idle is not None:
                t.on_idle()
            self._core.registry.events.append(Idle(key=t.key))

    def _control(self, now: float) -> None:
        period = now - self._controlled_at
        if self._core.engine.eager and period >= CONTROL_PERIOD:
            self._schedule.control(self._writer.utilization(period))
            self._controlled_at = now


def _moved(at: float, now: float) -> float:
    """Return how long to sleep by a clock that others move: until woken, or not at all."""
    return float("inf") if at > now else float("-inf")
