"""The registers of autosave: which sessions there are, in which state, and how much is unsaved."""

from __future__ import annotations

from itertools import islice
from typing import Final, final

from perdure.autosave import errors
from perdure.autosave.events import Degraded, Event, Recovered
from perdure.autosave.options import EngineOptions
from perdure.autosave.tracked import Tracked
from perdure.errors import StoreUnavailableError

# How much is unsaved over all sessions, and what follows from it


EASED: Final = 0.5
"""Below this share of ``dirty_soft`` sessions wait for their debounce again."""


@final
class Pressure:
    """Unsaved bytes over all sessions, and what follows from them.

    Above ``dirty_soft`` nothing waits for a debounce any more. At ``dirty_hard``, or when a failing
    session's oldest change is older than ``max_unsaved_age``, the outage policy blocks appends.
    """

    __slots__ = ("_engine", "ceiling", "dirty_bytes", "overdue", "rising", "sealed")

    def __init__(self, engine: EngineOptions) -> None:
        self._engine = engine
        self.dirty_bytes: int = 0
        """Payloads that wait for the store, with what a record counts beyond its own."""
        self.ceiling: float = engine.dirty_soft
        """From this on an append needs a closer look."""
        self.rising: bool = False
        """Too much is unsaved to wait for debounces."""
        self.overdue: bool = False
        """A session has been failing for longer than ``max_unsaved_age``."""
        self.sealed: bool = False

    @property
    def blocking(self) -> bool:
        """Whether a limit is reached, and the policy is to keep it."""
        if self._engine.outage_policy == "continue":
            return False
        return self.overdue or self.dirty_bytes >= self._engine.dirty_hard

    def seal(self) -> None:
        """Accept nothing more."""
        self.sealed = True
        self._set_ceiling()

    def rises(self) -> bool:
        """Take note of a large number of bytes; return whether that is news."""
        news = not self.rising and self.dirty_bytes >= self._engine.dirty_soft
        self.rising = self.rising or news
        self._set_ceiling()
        return news

    def age(self, oldest: float | None, now: float) -> bool:
        """Take note of the oldest change of a failing session; return whether that is news."""
        before = self.overdue
        self.overdue = oldest is not None and now - oldest > self._engine.max_unsaved_age
        if self.rising and self.dirty_bytes < self._engine.dirty_soft * EASED:
            self.rising = False
        self._set_ceiling()
        return self.overdue and not before

    def _set_ceiling(self) -> None:
        if self.sealed or self.overdue:
            self.ceiling = -1
        else:
            self.ceiling = self._engine.dirty_hard if self.rising else self._engine.dirty_soft


# The registers of autosave: which sessions there are, and which of them are in which state


LOOKED_AT: Final = 256
"""Sessions among which the oldest change is looked for."""


@final
class SessionRegistry:
    """Hold what is known over all sessions of one store."""

    def __init__(self, engine: EngineOptions) -> None:
        self.sessions: set[Tracked] = set()
        self.unsaved: dict[Tracked, None] = {}
        """Sessions with changes that can still become durable, the longest waiting first."""
        self.failed: dict[Tracked, None] = {}
        """Those of them whose last save did not succeed, the longest failing first."""
        self.stuck: dict[Tracked, None] = {}
        """Quarantined sessions, and lost ones until somebody decides about their records."""
        self.warnings: tuple[str, ...] = ()
        """How the store is set up so that it may lose what it keeps."""
        self.pressure: Pressure = Pressure(engine)
        self.events: list[Event] = []
        """What has happened and was not reported yet."""

    def oldest_age(self, now: float) -> float:
        """Return for how long the oldest change has been unsaved.

        Those that wait longest are in front, give or take the length of a save, so that a
        few of them are enough to look at, however many wait.
        """
        since = [t.oldest_at for t in islice(self.unsaved, LOOKED_AT) if t.oldest_at is not None]
        return now - min(since, default=now)

    def overloaded(self, t: Tracked, now: float) -> StoreUnavailableError:
        """Return the error of an append while too much is unsaved."""
        failing = next(iter(self.failed), None)
        return errors.overloaded(
            t,
            dirty_bytes=self.pressure.dirty_bytes,
            oldest_age=self.oldest_age(now),
            cause=None if failing is None else failing.last_error,
        )

    def heal(self, t: Tracked) -> None:
        """Forget a session's failures."""
        t.attempt = 0
        t.retry_at = 0.0
        if t in self.failed:
            del self.failed[t]
            if not self.failed:
                self.events.append(Recovered())

    def note_age(self, now: float) -> None:
        """Compare the age of what fails with its limit."""
        oldest = next(iter(self.failed), None)
        if self.pressure.age(None if oldest is None else oldest.oldest_at, now):
            self.note_pressure(now)

    def note_pressure(self, now: float) -> None:
        """Report that much is unsaved."""
        self.events.append(
            Degraded(
                dirty_bytes=self.pressure.dirty_bytes,
                oldest_age=self.oldest_age(now),
                blocking=self.pressure.blocking,
            )
        )
