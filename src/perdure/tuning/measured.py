"""What a store has shown, as values. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["Level", "Measured"]


class Level(msgspec.Struct, frozen=True):
    """So many sessions that are due at once."""

    sessions: int
    seconds: float
    """Until all of them were durable: the median."""
    rounds: int

    @property
    def rate(self) -> float:
        """Saves in a second."""
        return self.sessions / self.seconds


class Measured(msgspec.Struct, frozen=True):
    """What a store has shown."""

    levels: tuple[Level, ...]
    size: int
    """Bytes of each save's record."""

    @property
    def rate(self) -> float:
        """The most saves in a second."""
        return max(level.rate for level in self.levels)

    @property
    def save_time(self) -> float:
        """Seconds that the save of one session takes when nothing else goes on."""
        return self.levels[0].seconds
