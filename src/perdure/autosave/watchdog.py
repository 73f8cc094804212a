"""The watchdog of autosave: notices that due sessions make no progress, and starts fresh tasks.

It runs by a timer of the event loop, and needs no task itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple, final

from perdure._lib.loop import loop_timer
from perdure.autosave.core import Core
from perdure.autosave.events import Reporter, Resumed, Stalled
from perdure.autosave.jobs import StateCapture
from perdure.autosave.tracked import Tracked
from perdure.autosave.writer import Timer, Writer

log: logging.Logger = logging.getLogger("perdure.autosave")

PERIOD: Final = 5.0
"""Seconds between two checks."""


LATE: Final = 6 * PERIOD
"""A check that is so late means that the event loop does not run, or has lost the timer."""


LOOKED_AT: Final = 256
"""Sessions that are checked, of those that have waited longest."""


_CUT_OFF: Final = "its save was cut off: the records are sent again"


class _Due(NamedTuple):
    """A session that is due, and its numbers when it was first seen so."""

    durable: int
    attempt: int
    at: float
    """What its timer was set to: one that has run out, and was set again, was served."""
    since: float


@final
class Watchdog:
    """Check that due sessions make progress, and restart the tasks if they do not.

    Workers, the timer and contributors keep running by themselves. The watchdog is for the case
    that one does not: a task that could not be started, one that died, a callback that never came,
    a save that an interrupt has cut off before anything could give it up.
    While anything is unsaved it checks every `PERIOD` seconds, by a timer of the event loop and
    not by a task. A session whose timer has run out at two checks, with nothing done about it
    although the store would accept it, has stalled: `Autosaver.health` is failing and gives the
    reason, it is logged once, and new tasks are started at each check until it makes progress. When
    the timer runs out is the schedule's to say, and nothing is computed again here.

    Slow is not stalled: a save within its timeout, a store that is down or saturated, a job or a
    contributor within its own timeout.

    Args:
        core: Decides what is due.
        timer: Restarted when work has stalled.
        writer: Its workers are replaced then.
        contributors: Its runners are replaced then.
        reporter: Delivers the events.
        clock: The loop's.
        ticking: Whether the clock moves by itself; if not, nothing is checked.

    """

    def __init__(
        self,
        core: Core,
        timer: Timer,
        writer: Writer,
        contributors: StateCapture,
        reporter: Reporter,
        clock: Callable[[], float],
        *,
        ticking: bool,
    ) -> None:
        self._core = core
        self._timer = timer
        self._writer = writer
        self._contributors = contributors
        self._reporter = reporter
        self._clock = clock
        self._later = loop_timer() if ticking else None
        self.armed: bool = False
        """Whether it will check; a caller that finds it so need not call `arm`."""
        self._disarm: Callable[[], None] = lambda: None
        self._armed_at = 0.0
        self._due: dict[Tracked, _Due] = {}
        self._steps = 0
        self._stalled: str | None = None
        self._error: Exception | None = None

    def arm(self) -> None:
        """Check from now on, until nothing is unsaved."""
        if not self.armed and self._later is not None:
            self._armed_at = self._clock()
            self._disarm = self._later(PERIOD, self._tick)
            self.armed = True

    def failed(self, error: Exception) -> None:
        """Note that a task could not be started."""
        self._error = error

    def forget(self, t: Tracked) -> None:
        """Stop watching a session."""
        self._due.pop(t, None)

    def stop(self) -> None:
        """Stop checking."""
        self.armed = False
        self._disarm()
        self._due.clear()

    def reasons(self, now: float) -> list[str]:
        """Return why saving makes no progress; empty if it does."""
        if self._core.stopped:
            return []
        reasons = [] if self._stalled is None else [self._stalled]
        if self._stalled is None and self._error is not None:
            reasons.append(f"a background task could not be started: {self._error!r}")
        late = now - self._armed_at - PERIOD
        if self.armed and late > LATE:
            reasons.append(f"the event loop has not run the watchdog of autosave for {late:.0f} s")
        return reasons

    def _tick(self) -> None:
        self.armed = False
        if self._core.stopped:
            return
        if self._core.registry.unsaved or self._stalled is not None:
            self.arm()  # first: even if the check fails, there will be another
        try:
            self._check(self._clock())
        except Exception as error:
            self.failed(error)
            log.exception("the watchdog of autosave failed")

    def _check(self, now: float) -> None:
        self._due = self._still_due(now)
        self._steps = self._core.steps
        stalled = [t for t, due in self._due.items() if now - due.since >= self._patience(t)]
        if stalled or self._writer.next_timeout + PERIOD <= now:
            self._revive(stalled, now)
        elif self._stalled is not None or self._error is not None:
            self._resumed()

    def _still_due(self, now: float) -> dict[Tracked, _Due]:
        # A save in flight is answered or given up, which is the next step.
        served = self._core.steps != self._steps or self._core.in_flight > 0
        served = served or self._core.breaker.allowance(now, 0) <= 0
        due: dict[Tracked, _Due] = {}
        carried = self._writer.carried
        for t in islice(self._core.registry.unsaved, LOOKED_AT):
            at = self._due_at(t)
            if t in carried or at > now:
                continue
            seen = _Due(t.durable, t.attempt, at, now)
            before = self._due.get(t, seen)
            same = before._replace(since=now) == seen
            due[t] = before if same and not (served and t.ticket) else seen
        return due

    def _due_at(self, t: Tracked) -> float:
        if t.inflight is not None:
            return float("-inf")  # captured, and with nobody
        if t.first_at is None or t.end is not None:
            return float("inf")  # nothing to save, or not to be saved any more
        if t.groups and t.group_from <= t.durable:
            return float("inf")  # its group is not whole
        return self._core.schedule.looked_at(t)

    def _patience(self, t: Tracked) -> float:
        """Return for how long a session may be due without a save in flight."""
        engine = self._core.engine
        if t.inflight is not None:
            return engine.save_timeout + PERIOD
        if t.holds:
            return engine.exclusive_timeout + engine.save_timeout + PERIOD
        if t.preparing and self._contributors.is_busy:
            return engine.capture_timeout * len(self._due) + PERIOD
        return PERIOD * 0.9

    def _revive(self, stalled: list[Tracked], now: float) -> None:
        first = self._stalled is None
        self._stalled = self._describe(stalled, now)
        if first:
            log.error("autosave has stalled, fresh workers are started: %s", self._stalled)
            event = Stalled(reason=self._stalled, sessions=len(stalled), error=self._error)
            self._core.registry.events.append(event)
        for t in [t for t in stalled if t.inflight is not None]:
            self._writer.cut_off(t, _CUT_OFF)
        self._writer.give_up(now)
        for t in stalled:
            if not t.ticket:
                self._core.schedule.look_again(t, now)
                self._due[t] = self._due[t]._replace(at=self._due_at(t))  # set here: not progress
        self._contributors.replace_runners(t for t in stalled if t.preparing)
        self._writer.replace_workers(now)
        self._timer.restart()
        self._error = None
        self._reporter.deliver()

    def _describe(self, stalled: list[Tracked], now: float) -> str:
        cause = "" if self._error is None else f" ({self._error!r})"
        if not stalled:
            return f"a save has been with the store for longer than its timeout{cause}"
        t = max(stalled, key=lambda t: now - self._due[t].since)
        more = f" and {len(stalled) - 1} more" if len(stalled) > 1 else ""
        reason = "no worker has taken it" if t.ticket or t.preparing else "its timer has not fired"
        if t.holds:
            reason = "a job holds it"
        if t.inflight is not None:
            reason = _CUT_OFF
        age = 0.0 if t.oldest_at is None else now - t.oldest_at
        return f"session {t.key}{more}: due, unsaved for {age:.0f} s, and {reason}{cause}"

    def _resumed(self) -> None:
        if self._stalled is not None:
            log.warning("autosave is being served again")
            self._core.registry.events.append(Resumed())
        self._stalled = self._error = None
        self._reporter.deliver()
