"""How much is unsaved over all sessions, and what follows from it.

Decisions only. Above ``dirty_soft`` nothing waits for a debounce any more; at
``dirty_hard``, or when a failing session's oldest change is older than
``max_unsaved_age``, the outage policy blocks what would add more.
"""

from __future__ import annotations

from typing import Final, final

from perdure.autosave.options import Engine

__all__ = ["Pressure"]

EASED: Final = 0.5
"""Below this share of ``dirty_soft`` sessions wait for their debounce again."""


@final
class Pressure:
    """Count unsaved bytes, and compare."""

    __slots__ = ("_engine", "ceiling", "dirty_bytes", "overdue", "rising", "sealed")

    def __init__(self, engine: Engine) -> None:
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
