"""The watchdog of autosave: notices that what is due is not done, says so, and has it tried again.

It runs by a timer of the event loop, and needs no task itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from perdure._lib.loop import loop_timer
from perdure.autosave.core import Core
from perdure.autosave.events import Reporter, Resumed, Stalled
from perdure.autosave.writer import Timer

log: logging.Logger = logging.getLogger("perdure.autosave")

PERIOD: Final = 5.0
"""Seconds between two checks."""


LATE: Final = 6 * PERIOD
"""A timer that is so late means that the event loop does not run."""


BLOCKED: Final = 1.0
"""A check that is so late itself says nothing about the timer."""


@final
class Watchdog:
    """Check that the timer of autosave serves what is due.

    While anything is unsaved it checks every `PERIOD` seconds, by a timer of the event loop and
    not by a task. The timer's own alarm is the judge: it is set to the time at which the next
    session is due, or a save to be given up. One that has passed with nothing done means that a
    task could not be started, or has died: then saving has stalled, `Autosaver.health` is failing
    and gives the reason, it is logged once, and the timer is started again at each check until it
    runs.

    Slow is not stalled: a save within its timeout, a store that is down or saturated, a job or a
    contributor within its own timeout.

    Args:
        core: Knows what is unsaved.
        timer: The timer that is to serve it.
        reporter: Delivers the events.
        clock: The loop's.
        serve_due: Called at each check: has everything done that is due.
        ticking: Whether the clock moves by itself; if not, nothing is checked.

    """

    def __init__(
        self,
        core: Core,
        timer: Timer,
        reporter: Reporter,
        clock: Callable[[], float],
        *,
        serve_due: Callable[[], None],
        ticking: bool,
    ) -> None:
        self._core = core
        self._timer = timer
        self._reporter = reporter
        self._clock = clock
        self._serve_due = serve_due
        self._later = loop_timer() if ticking else None
        self.armed: bool = False
        """Whether it will check; a caller that finds it so need not call `arm`."""
        self._disarm: Callable[[], None] = lambda: None
        self._looks_at = 0.0
        self._stalled: str | None = None
        self._error: Exception | None = None

    def arm(self) -> None:
        """Check from now on, until nothing is unsaved."""
        if not self.armed and self._later is not None:
            self._looks_at = self._clock() + PERIOD
            self._disarm = self._later(PERIOD, self._tick)
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
        late = self._timer.late(now)
        if self.armed and late > LATE:
            reasons.append(f"the event loop has not run the timer of autosave for {late:.0f} s")
        return reasons

    def _tick(self) -> None:
        self.armed = False
        if self._core.stopped:
            return
        now = self._clock()
        was_blocked = now - self._looks_at > BLOCKED
        if self._core.registry.unsaved or self._stalled is not None:
            self.arm()  # first: even if the check fails, there will be another
        if was_blocked:
            return  # all timers are late
        try:
            self._check(now)
        except Exception as error:
            self._error = error
            log.exception("the watchdog of autosave failed")

    def _check(self, now: float) -> None:
        error, self._error = self._error, None
        late = self._timer.late(now)
        # Its alarm passed about a check ago, and nothing has been done.
        if late >= PERIOD * 0.9 and self._core.registry.unsaved:
            self._tell(error, now)
            self._timer.restart()
        elif self._stalled is not None:
            self._stalled = None
            log.warning("autosave is being served again")
            self._core.registry.events.append(Resumed())
        if self._core.registry.unsaved:
            self._serve_due()
        self._reporter.deliver()

    def _tell(self, error: Exception | None, now: float) -> None:
        unsaved, first = self._core.registry.unsaved, self._stalled is None
        t = next(iter(unsaved))
        more = f" and {len(unsaved) - 1} more" if len(unsaved) > 1 else ""
        age = 0.0 if t.oldest_at is None else now - t.oldest_at
        cause = "" if error is None else f" ({error!r})"
        saying = f"due, unsaved for {age:.0f} s, and its timer has not fired"
        self._stalled = f"session {t.key}{more}: {saying}{cause}"
        if first:
            log.error("autosave has stalled, it is tried again: %s", self._stalled)
            event = Stalled(reason=self._stalled, sessions=len(unsaved), error=error)
            self._core.registry.events.append(event)
