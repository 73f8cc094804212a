"""The registers of autosave: which sessions there are, and which of them are how.

Decisions only. `intake` and `core` write them, in the same synchronous step as the
session's own fields, so they never disagree.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, final

from perdure.autosave import refusals
from perdure.autosave.events import Degraded, Event, Recovered
from perdure.autosave.options import Engine
from perdure.autosave.pressure import Pressure
from perdure.autosave.tracked import Tracked
from perdure.errors import StoreUnavailableError

__all__ = ["Books"]

LOOKED_AT: Final = 256
"""Sessions among which the oldest change is looked for."""


@final
class Books:
    """Hold what is known over all sessions of one store."""

    def __init__(self, engine: Engine) -> None:
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
        return refusals.overloaded(
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
