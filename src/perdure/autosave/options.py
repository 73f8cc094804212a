"""How often to save, and how to stop: the knobs, validated when they are made.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Self

import msgspec

from perdure.errors import ConfigError

MIB = 1024 * 1024


class Autosave(msgspec.Struct, frozen=True, kw_only=True):
    """When a session saves itself.

    A change is saved ``debounce`` seconds after the last one, but a save starts at the
    latest ``max_delay`` seconds after the first change that it captures.

    Args:
        debounce: Quiet time before a save; 0 saves every change at once.
        max_delay: The longest time from a change to the start of its save.
        on_turn_end: Whether the end of a turn saves at once.
        max_bytes: Save at once when this much is unsaved in one session.
        max_records: The same, counted in records.

    Raises:
        ConfigError: A value does not fit.

    """

    debounce: float = 2.0
    max_delay: float = 30.0
    on_turn_end: bool = True
    max_bytes: int = MIB
    max_records: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.debounce <= self.max_delay < float("inf"):
            message = (
                f"autosave: debounce={self.debounce!r} and max_delay={self.max_delay!r} "
                "do not fit: choose 0 <= debounce <= max_delay"
            )
            raise ConfigError(message, debounce=self.debounce, max_delay=self.max_delay)
        for name in ("max_bytes", "max_records"):
            _at_least(f"autosave: {name}", getattr(self, name), 1)

    @classmethod
    def server(cls) -> Self:
        """Return what suits a server with many sessions: 2 s of quiet, at most 10 s."""
        return cls(debounce=2.0, max_delay=10.0)

    @classmethod
    def write_through(cls) -> Self:
        """Return a setting that saves every change at once."""
        return cls(debounce=0.0, max_delay=0.0)


class Shutdown(msgspec.Struct, frozen=True, kw_only=True):
    """How a manager stops.

    Args:
        deadline: The time that stopping may take in all, ``hard_grace`` aside.
        turn_grace: How long open turns may go on, within the deadline.
        hard_grace: Time beyond the deadline to collect what became of running saves.
        signals: Whether SIGTERM drains (only from the main thread, never in a notebook).
        spill: A local file for what the store would not take; None for none.

    Raises:
        ConfigError: A value does not fit.

    """

    deadline: float = 20.0
    turn_grace: float = 5.0
    hard_grace: float = 1.0
    signals: bool = True
    spill: str | None = None

    def __post_init__(self) -> None:
        for name in ("deadline", "turn_grace", "hard_grace"):
            _at_least(f"shutdown: {name}", getattr(self, name), 0)
        if self.turn_grace > self.deadline:
            message = (
                f"shutdown: turn_grace={self.turn_grace!r} is longer than "
                f"deadline={self.deadline!r}: turns end within the deadline"
            )
            raise ConfigError(message, turn_grace=self.turn_grace, deadline=self.deadline)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs that few people need.

    ``batch_max``, ``batch_linger`` and ``max_concurrent_batches`` come from the store's
    capabilities where they are None.
    """

    debounce_min: float = 0.1
    """How far the effective debounce may shrink while the store has time to spare."""
    eager: bool = True
    jitter: float = 0.1
    """A due time is moved earlier by up to this share of its delay."""
    max_concurrent_batches: int | None = None
    batch_max: int | None = None
    batch_linger: float | None = None
    save_timeout: float = 10.0
    backoff_base: float = 0.25
    backoff_cap: float = 15.0
    breaker_failures: int = 5
    breaker_reset: float = 5.0
    dirty_soft: int = 64 * MIB
    dirty_hard: int = 256 * MIB
    max_unsaved_age: float = 300.0
    outage_policy: str = "backpressure"
    """What an append does beyond dirty_hard or max_unsaved_age: backpressure, reject, continue."""
    backpressure_timeout: float = 30.0
    hibernate_after: float = 300.0
    loop_slice: float = 0.005
    """The longest that the scheduler works without letting others run."""

    def __post_init__(self) -> None:
        policies = ("backpressure", "reject", "continue")
        if self.outage_policy not in policies:
            message = (
                f"outage_policy={self.outage_policy!r} is unknown: choose {', '.join(policies)}"
            )
            raise ConfigError(message, outage_policy=self.outage_policy)
        if self.dirty_soft > self.dirty_hard:
            message = f"dirty_soft={self.dirty_soft} is above dirty_hard={self.dirty_hard}"
            raise ConfigError(message)


def _at_least(what: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        message = f"{what}={value!r} does not fit: it must be at least {least} and finite"
        raise ConfigError(message, option=what, value=value)
