"""The deadline of one close, which every station on its road is handed.

It is made once, where a close begins, and `until` alone divides its time. No station has a
limit of its own, so the sum of all of them is its end, however many of them hang. Spilling alone
may take longer: it continues while files come, and gives up a disk by `spill.PATIENCE`.
"""

from __future__ import annotations

from typing import Final, Literal, Self

import anyio
import msgspec

from perdure.autosave.options import Shutdown

Station = Literal["turns", "captures", "saves", "answers", "cuts", "folds", "releases", "store"]
"""Stations of a close, in this order."""

_STATIONS: Final[dict[Station, tuple[Literal["turns", "work", "end"], float]]] = {
    "turns": ("turns", 1.0),
    "captures": ("work", 0.5),  # the rest saves what was accepted, without contributors
    "saves": ("work", 1.0),
    "answers": ("end", 0.8),  # of saves in flight; the rest cuts them off, releases, closes
    "cuts": ("end", 0.5),
    "folds": ("work", 1.0),
    "releases": ("end", 0.5),
    "store": ("end", 1.0),
}
"""By which of the deadline's times a station ends, and its share of what is left until then."""


class Deadline(msgspec.Struct, frozen=True):
    """Time by which a close has to be over, by the clock that it was made with."""

    turns: float
    """Time after which turns may not continue."""
    work: float
    """Time after which nothing new begins."""
    end: float
    """Time when everything is over: answers that the store owes are collected until then."""

    @classmethod
    def of(cls, options: Shutdown, now: float, seconds: float | None = None) -> Self:
        """Return the deadline of a close that begins now.

        Args:
            options: The manager's.
            now: The time, by the event loop's clock.
            seconds: What the caller gives it; None for the options' ``deadline``.

        """
        total = options.deadline if seconds is None else max(seconds, 0.0)
        turns = min(options.turn_grace, total)
        return cls(now + turns, now + total, now + total + options.hard_grace)

    def until(self, station: Station, now: float) -> float:
        """Return when a station that begins now has to end.

        >>> deadline = Deadline.of(Shutdown(deadline=20, turn_grace=5, hard_grace=1), now=0)
        >>> deadline.until("turns", 0), deadline.until("captures", 4), deadline.until("saves", 12)
        (5, 12.0, 20)
        >>> deadline.until("releases", 20), deadline.until("store", 20.5)
        (20.5, 21)
        """
        by, share = _STATIONS[station]
        limit: float = getattr(self, by)
        return limit if share == 1.0 else now + max(limit - now, 0.0) * share

    def scope(self, station: Station) -> anyio.CancelScope:
        """Return a scope that ends with a station's time; for the loop whose clock it is."""
        return anyio.CancelScope(deadline=self.until(station, anyio.current_time()))
