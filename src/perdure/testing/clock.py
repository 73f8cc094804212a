"""Autosave's time in the hands of a test: it stands still, and moves when the test says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

from perdure.errors import ConfigError

__all__ = ["ManualClock"]


@final
class ManualClock:
    """A clock for autosave that the test moves: ``await clock.advance(30)``.

    Debounce, ceiling, backoff and hibernation go by it. The event loop keeps its own time,
    so sleeps, timeouts, deadlines and leases are real, and no loop has to be a virtual one.

    Args:
        now: Where it begins.

    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._driven: list[Callable[[], Awaitable[float]]] = []

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def __repr__(self) -> str:
        return f"<ManualClock {self._now:g} s>"

    def drive(self, catch_up: Callable[[], Awaitable[float]]) -> None:
        """Await ``catch_up`` each time that the clock was moved; a manager asks for this."""
        self._driven.append(catch_up)

    async def advance(self, seconds: float) -> None:
        """Let time pass, and return when autosave has done what was due by then.

        Everything happens in its order and at its time: with the store down, ten seconds are
        as many attempts as they would be.

        Raises:
            ConfigError: The time is negative.

        """
        if not 0 <= seconds < float("inf"):
            message = f"advance({seconds!r}) does not fit: time only grows, by finite steps"
            raise ConfigError(message, seconds=seconds)
        end = self._now + seconds
        while (due := await self._catch_up()) <= end:
            self._now = max(self._now, due)
        self._now = max(self._now, end)  # somebody else may have gone further

    async def _catch_up(self) -> float:
        """Let everybody do what is due now, and return when there is more to do."""
        return min([await catch_up() for catch_up in tuple(self._driven)], default=float("inf"))
