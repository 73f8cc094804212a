"""How autosave stands, for people and for readiness checks; not for liveness checks.

A restart would destroy the only copy of what is unsaved.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple, final

import msgspec

from perdure._lib.display import card
from perdure._lib.loop import loop_timer
from perdure.autosave.breaker import BreakerState
from perdure.autosave.contributors import StateCapture
from perdure.autosave.core import Core
from perdure.autosave.events import Reporter, Resumed, Stalled
from perdure.autosave.registry import SessionRegistry
from perdure.autosave.timer import Timer
from perdure.autosave.tracked import State, Tracked
from perdure.autosave.writer import Writer

NAMED: Final = 3
"""Sessions that a reason names."""
_STUCK: Final = {
    State.QUARANTINED: "quarantined: the store refuses a record",
    State.LOST: "taken over by another process with records unsaved here: see sessions.lost",
}


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How autosave stands."""

    status: Literal["ok", "degraded", "failing"]
    """Degraded: saves fail, or much is unsaved. Failing: new records wait or are rejected."""
    oldest_unsaved_age: float
    """For how long the oldest change has not been durable, in seconds."""
    sessions: int
    unsaved: dict[str, int]
    """Sessions with changes that are not durable: dirty (some of them are being saved), failed
    (the last save did not succeed), quarantined, lost."""
    unsaved_bytes: int
    breaker: BreakerState
    reasons: tuple[str, ...] = ()
    """Why it is not ok, one sentence each, for people; empty while it is."""
    lost: dict[str, int] = {}
    """Sessions that another process has taken over, or of which the store has lost records, with
    how many records of each are not in the store. They stay until somebody forks or discards
    them: ``sessions.lost``."""
    undelivered: dict[str, str] = {}
    """Sessions that are open here and whose posts cannot be taken, with why. It is tried again."""
    dead_letters: dict[str, int] = {}
    """Posted items that were set aside here, by session, until they are retried or dropped here."""

    def _repr_html_(self) -> str:
        return card("Health", msgspec.structs.asdict(self))


def health_of(core: Core, now: float, stalled: Sequence[str] = ()) -> Health:
    """Return how it stands now; cheap, however many sessions are unsaved.

    Args:
        core: Knows it.
        now: The engine's time.
        stalled: Why work that is due is not being served.

    """
    registry = core.registry
    failing = [*stalled, *_failing(core)]
    degraded = _degraded(core)
    status: Literal["ok", "degraded", "failing"] = "degraded" if degraded else "ok"
    if failing:
        status = "failing"
    return Health(
        status=status,
        oldest_unsaved_age=registry.oldest_age(now),
        sessions=len(registry.sessions),
        unsaved=_states(registry),
        unsaved_bytes=registry.pressure.dirty_bytes,
        breaker=core.breaker.state,
        reasons=(*failing, *degraded),
        lost=_lost(registry),
    )


def _failing(core: Core) -> list[str]:
    if core.stopped:
        return ["autosave has stopped: connect again"]
    if core.registry.pressure.blocking:
        return [f"{core.registry.pressure.dirty_bytes} bytes are unsaved: new records wait or fail"]
    return []


def _degraded(core: Core) -> list[str]:
    registry = core.registry
    reasons: list[str] = []
    if core.breaker.state != "closed":
        reasons.append("the store does not answer, or has just begun to again")
    if registry.failed:
        t = next(iter(registry.failed))
        reasons.append(
            f"{_sessions(registry.failed)} could not be saved, last error: {t.last_error}"
        )
    reasons += registry.warnings
    records_lost = [t for t in registry.stuck if t.missing]
    if records_lost:
        reasons.append(
            f"{_sessions(records_lost)}: the store no longer has records that it had "
            "acknowledged: see sessions.lost"
        )
    for end in (State.QUARANTINED, State.LOST):
        stuck = [t for t in registry.stuck if t.end is end and not t.missing]
        reasons += [f"{_sessions(stuck)} {_STUCK[end]}"] if stuck else []
    if registry.pressure.rising and not registry.pressure.blocking:
        reasons.append(f"{registry.pressure.dirty_bytes} bytes are unsaved")
    return reasons


def _sessions(sessions: Collection[Tracked]) -> str:
    named = ", ".join(str(t.key) for t in islice(sessions, NAMED))
    more = len(sessions) - NAMED
    return f"session {named}" + (f" and {more} more" if more > 0 else "")


def _lost(registry: SessionRegistry) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for t in registry.stuck:
        if t.undecided:
            counts[str(t.key)] += t.version - t.durable + t.missing
    return dict(counts)


def _states(registry: SessionRegistry) -> dict[str, int]:
    states = Counter(
        t.end.value for t in registry.stuck if t.end and (t.version > t.durable or t.missing)
    )
    states[State.FAILED.value] = len(registry.failed)
    states[State.DIRTY.value] = len(registry.unsaved) - len(registry.failed)
    return {name: count for name, count in states.items() if count}


# A watchdog over autosave: what is due is served, or somebody hears of it
#
# Workers, the timer and contributors keep themselves going. This is for the case that they do not:
# a task that could not be started, one that died, a callback that never came. While anything is
# unsaved it looks every `PERIOD` seconds, by a timer of the event loop itself and not by a task.
# Whatever has been due at two looks, with nothing done about it although the store would take it,
# has stalled: `Autosaver.health` is failing and says why, it is logged once, and fresh tasks are
# started, at each look until it is served.
# What merely takes long has not stalled: a save that is within its time, a store that is down or
# saturated, a job or a contributor within its own timeout.


log: logging.Logger = logging.getLogger("perdure.autosave")

PERIOD: Final = 5.0
"""Seconds between two looks."""
LATE: Final = 6 * PERIOD
"""A look that is so late says that the event loop does not run, or has lost the timer."""
LOOKED_AT: Final = 256
"""Sessions that are looked at, of those that have waited longest."""


class _Due(NamedTuple):
    """A session that is due, and how far it was when it was first seen so."""

    durable: int
    attempt: int
    since: float


@final
class Watchdog:
    """Look whether what is due is served, and start again what does not serve it.

    Args:
        core: Knows what is due.
        timer: Started again when work has stalled.
        batcher: Its workers are replaced then.
        contributors: Those who ask them are replaced then.
        reporter: Told what has happened.
        clock: The loop's.
        ticking: Whether the clock moves by itself; if not, nothing looks.

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
        self._disarm: Callable[[], None] | None = None
        self._armed_at = 0.0
        self._due: dict[Tracked, _Due] = {}
        self._steps = 0
        self._stalled: str | None = None
        self._error: Exception | None = None

    def arm(self) -> None:
        """Look from now on, until nothing is unsaved."""
        if self._disarm is None and self._later is not None:
            self._armed_at = self._clock()
            self._disarm = self._later(PERIOD, self._tick)

    def failed(self, error: Exception) -> None:
        """Take note that the tasks which serve could not be started."""
        self._error = error

    def forget(self, t: Tracked) -> None:
        """Look after a session no more."""
        self._due.pop(t, None)

    def stop(self) -> None:
        """Look no more."""
        if self._disarm is not None:
            self._disarm()
            self._disarm = None
        self._due.clear()

    def reasons(self, now: float) -> list[str]:
        """Say why saving is not served; empty if it is."""
        if self._core.stopped:
            return []
        reasons = [] if self._stalled is None else [self._stalled]
        if self._stalled is None and self._error is not None:
            reasons.append(f"a background task could not be started: {self._error!r}")
        late = now - self._armed_at - PERIOD
        if self._disarm is not None and late > LATE:
            reasons.append(f"the event loop has not run the watchdog of autosave for {late:.0f} s")
        return reasons

    def _tick(self) -> None:
        self._disarm = None
        if self._core.stopped:
            return
        if self._core.registry.unsaved or self._stalled is not None:
            self.arm()  # first: whatever happens below, it will look again
        try:
            self._look(self._clock())
        except Exception as error:
            self.failed(error)
            log.exception("the watchdog of autosave failed")

    def _look(self, now: float) -> None:
        self._due = self._still_due(now)
        self._steps = self._core.steps
        stalled = [t for t, due in self._due.items() if now - due.since >= self._patience(t)]
        if stalled or self._writer.next_timeout + PERIOD <= now:
            self._revive(stalled, now)
        elif self._stalled is not None or self._error is not None:
            self._resumed()

    def _still_due(self, now: float) -> dict[Tracked, _Due]:
        # A save that is with the store is answered or given up, which is a step again.
        served = self._core.steps != self._steps or self._core.in_flight > 0
        served = served or self._core.breaker.allowance(now, 0) <= 0
        due: dict[Tracked, _Due] = {}
        for t in islice(self._core.registry.unsaved, LOOKED_AT):
            if not self._is_due(t, now):
                continue
            before = self._due.get(t)
            same = before is not None and (before.durable, before.attempt) == (t.durable, t.attempt)
            if before is None or not same or (served and t.ticket):
                before = _Due(t.durable, t.attempt, now)
            due[t] = before
        return due

    def _is_due(self, t: Tracked, now: float) -> bool:
        if t.first_at is None or t.inflight is not None or t.end is not None:
            return False  # with the store, or not to be saved any more
        if t.groups and t.group_from <= t.durable:
            return False  # its group is not whole
        return self._core.schedule.due_at(t, t.first_at, now) <= now

    def _patience(self, t: Tracked) -> float:
        """Return for how long a session may be due without being with the store."""
        engine = self._core.engine
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
        self._writer.give_up(now)
        for t in stalled:
            if not t.ticket:
                self._core.schedule.look_again(t, now)
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
        reason = "a job holds it" if t.holds else "no worker has taken it"
        age = now - (t.oldest_at or now)
        return f"session {t.key}{more}: due, unsaved for {age:.0f} s, and {reason}{cause}"

    def _resumed(self) -> None:
        if self._stalled is not None:
            log.warning("autosave is being served again")
            self._core.registry.events.append(Resumed())
        self._stalled = self._error = None
        self._reporter.deliver()
