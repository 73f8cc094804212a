"""Options of autosave and of shutdown, validated when they are created.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

import msgspec

from perdure._lib.options import Options
from perdure.errors import ConfigError, InvalidArgumentError

MIB = 1024 * 1024


class Inherit(enum.Enum):
    """Ways to treat a session's autosave setting instead of giving it one."""

    INHERIT = "inherit"
    """Follow the manager's setting from now on."""
    KEEP = "keep"
    """Leave it as it is: the manager's, unless the session was given one of its own."""


INHERIT: Final = Inherit.INHERIT
KEEP: Final = Inherit.KEEP

DEBOUNCE: Final = 2.0
"""The longest debounce where none was given."""


class Autosave(Options, frozen=True, kw_only=True):
    """Times at which a session saves itself.

    A change is saved ``debounce`` seconds after the last one, but a save starts at the
    latest ``max_delay`` seconds after the first change that it captures. What is given holds:
    nothing saves earlier but the end of a turn, a save or flush, the limits below, too much that is
    unsaved in all (``EngineOptions.dirty_soft``), and closing; and jitter, by a tenth of the delay.

    Args:
        debounce: Quiet time before a save; 0 saves every change at once. None: 2 s while the
            store is busy, and down to 0.1 s while it is not.
        max_delay: The longest time from a change to the start of its save.
        on_turn_end: Whether a turn that is cancelled is saved at once; any other is saved before it
            is left.
        max_bytes: Save at once when this much is unsaved in one session.
        max_records: The same, counted in records.

    Raises:
        ConfigError: A value is invalid.

    """

    debounce: float | None = None
    max_delay: float = 30.0
    on_turn_end: bool = True
    max_bytes: int = MIB
    max_records: int = 256

    def __post_init__(self) -> None:
        least = 0.0 if self.debounce is None else self.debounce
        _at_least("autosave: debounce", least, 0, "a number of seconds")
        _at_least("autosave: max_delay", self.max_delay, 0, "a number of seconds")
        if least > self.max_delay:
            raise InvalidArgumentError(
                f"autosave: invalid debounce={self.debounce!r} and max_delay={self.max_delay!r}: "
                "choose debounce <= max_delay",
                debounce=self.debounce,
                max_delay=self.max_delay,
            )
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


class AutosaveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The autosave setting of a manager or a session, and what is in force now."""

    setting: Autosave | None
    """As it was given; None: no timers."""
    in_force: Autosave | None
    """The same with the debounce in force where none was given. Both times are 0 while everything
    is saved at once: beyond ``dirty_soft``, and while the process stops."""
    inherited: bool = False
    """True if it is the manager's, and changes with it. False for a manager."""


class Shutdown(Options, frozen=True, kw_only=True):
    """Shutdown of a manager.

    Args:
        deadline: The time that shutdown may take in total, without ``hard_grace``.
        turn_grace: How long open turns may continue, within the deadline.
        hard_grace: Time after the deadline to collect the results of saves in flight, to release
            the leases and to close the store.
        signals: Whether SIGTERM drains (if the main thread has a manager; never in a notebook).
        spill: A local folder for what the store would not take. None: one in the user's own
            state folder, a folder a store. False: nowhere.

    Raises:
        ConfigError: A value is invalid.

    """

    deadline: float = 20.0
    turn_grace: float = 5.0
    hard_grace: float = 1.0
    signals: bool = True
    spill: str | Literal[False] | None = None

    def __post_init__(self) -> None:
        for name in ("deadline", "turn_grace", "hard_grace"):
            _at_least(f"shutdown: {name}", getattr(self, name), 0, "a number of seconds")
        if self.turn_grace > self.deadline:
            raise InvalidArgumentError(
                f"shutdown: turn_grace={self.turn_grace!r} is longer than "
                f"deadline={self.deadline!r}: turns end within it, so give a shorter turn_grace",
                turn_grace=self.turn_grace,
                deadline=self.deadline,
            )
        spill: Any = self.spill
        if not (spill is None or spill is False or (isinstance(spill, str) and spill)):
            raise InvalidArgumentError(
                f"shutdown: invalid spill={spill!r}: give the path of a folder, None or False",
                option="spill",
            )


class EngineOptions(Options, frozen=True, kw_only=True):
    """Finer options, which few programs need.

    ``batch_max``, ``batch_linger`` and ``max_concurrent_batches`` come from the store's
    capabilities where they are None. With ``max_concurrent_batches`` none waits in the store's
    own queue.
    """

    debounce_min: float = 0.1
    """Shortest debounce, in seconds, while the store has room and no debounce was given."""
    eager: bool = True
    """True if it becomes shorter at all. A debounce that was given never does."""
    jitter: float = 0.1
    """A due time is moved earlier by up to this share of its delay."""
    max_concurrent_batches: int | None = None
    batch_max: int | None = None
    batch_linger: float | None = None
    batch_bytes: int = MIB
    """A batch takes no further session beyond this, and a session no further group."""
    save_timeout: float = 10.0
    """Seconds after which a save is in doubt, and others get its place. The session itself is
    sent again when the store has answered, or failed."""
    backoff_base: float = 0.25
    backoff_cap: float = 15.0
    breaker_failures: int = 5
    breaker_reset: float = 5.0
    dirty_soft: int = 64 * MIB
    """Unsaved bytes, over all sessions, beyond which nothing waits for a debounce."""
    dirty_hard: int = 256 * MIB
    max_unsaved_age: float = 300.0
    outage_policy: str = "backpressure"
    """Effect on appends of dirty_hard and max_unsaved_age: backpressure, reject, continue."""
    backpressure_timeout: float = 30.0
    quarantine_bytes: int = MIB
    """Most bytes that a session holds in memory if the store refuses its records permanently."""
    capture_timeout: float = 5.0
    """Longest time, in seconds, that contributors may take before a save continues without them."""
    exclusive_timeout: float = 60.0
    """Longest time, in seconds, that a fold may keep its session from saving."""
    hibernate_after: float = 300.0
    """Idle time until an unpinned session is reported as idle; infinite for never."""
    loop_slice: float = 0.005
    """The longest that the scheduler runs without yielding to other tasks."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None:
                _at_least(f"engine: {name}", value, least)
        policies = ("backpressure", "reject", "continue")
        if self.outage_policy not in policies:
            raise InvalidArgumentError(
                f"engine: outage_policy={self.outage_policy!r} is unknown: "
                f"choose one of {', '.join(policies)}",
                outage_policy=self.outage_policy,
            )
        if self.dirty_soft > self.dirty_hard:
            raise InvalidArgumentError(
                f"engine: dirty_soft={self.dirty_soft} is above dirty_hard={self.dirty_hard}: "
                "choose dirty_soft <= dirty_hard",
                dirty_soft=self.dirty_soft,
                dirty_hard=self.dirty_hard,
            )
        if not 0 <= self.jitter < 1:
            raise InvalidArgumentError(
                f"engine: invalid jitter={self.jitter!r}: choose 0 <= jitter < 1",
                jitter=self.jitter,
            )
        if not self.hibernate_after > 0:
            raise InvalidArgumentError(
                f"engine: invalid hibernate_after={self.hibernate_after!r}: it must be above 0",
                hibernate_after=self.hibernate_after,
            )


_LEAST: Final = {
    "debounce_min": 0,
    "max_concurrent_batches": 1,
    "batch_max": 1,
    "batch_linger": 0,
    "batch_bytes": 1,
    "save_timeout": 0.001,
    "backoff_base": 0.001,
    "backoff_cap": 0.001,
    "breaker_failures": 1,
    "breaker_reset": 0.001,
    "dirty_soft": 1,
    "max_unsaved_age": 0,
    "backpressure_timeout": 0,
    "quarantine_bytes": 0,
    "capture_timeout": 0,
    "exclusive_timeout": 0.001,
    "loop_slice": 0,
}


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _at_least(what: str, value: float, least: float, unit: str = "a number") -> None:
    if not _are_numbers(value) or not least <= value < float("inf"):
        raise InvalidArgumentError(
            f"invalid {what}={value!r}: it must be {unit}, at least {least} and finite",
            option=what,
            value=value,
        )


# Environment variables replace an argument that was not given: arguments come first, then the
# environment, then the defaults. ``PERDURE_AUTOSAVE`` names a preset, the others change single
# settings of it. An invalid value is an error that names its variable, never ignored.


PRESET = "PERDURE_AUTOSAVE"
_DEFAULT = Autosave()


def _switch(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
        text.lower()
    ]


VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "PERDURE_AUTOSAVE_DEBOUNCE": ("debounce", float, "seconds, such as 2 or 0.5"),
    "PERDURE_AUTOSAVE_MAX_DELAY": ("max_delay", float, "seconds, such as 30"),
    "PERDURE_AUTOSAVE_ON_TURN_END": ("on_turn_end", _switch, "true or false"),
    "PERDURE_AUTOSAVE_MAX_BYTES": ("max_bytes", int, "a whole number of bytes from 1"),
    "PERDURE_AUTOSAVE_MAX_RECORDS": ("max_records", int, "a whole number from 1"),
}
"""Each variable with its setting, how its text is parsed, and what is valid."""

_PRESETS: dict[str, Callable[[], Autosave | None]] = {
    "server": Autosave.server,
    "write_through": Autosave.write_through,
}


def autosave_from(
    environment: Mapping[str, str], declared: Autosave | None = _DEFAULT
) -> Autosave | None:
    """Return the settings of an environment, None for off.

    An empty variable counts as not set. Off is off, for any other variables. *declared*
    is what counts where the environment names no preset: what a file says, None for off.

    >>> autosave_from({"PERDURE_AUTOSAVE": "server", "PERDURE_AUTOSAVE_DEBOUNCE": "0.5"})
    Autosave(debounce=0.5, max_delay=10.0, on_turn_end=True, max_bytes=1048576, max_records=256)

    Raises:
        ConfigError: A variable has an invalid value.

    """
    name = environment.get(PRESET, "")
    if name == "off":
        return None
    preset = _PRESETS.get(name) if name else lambda: declared
    if preset is None:
        raise ConfigError(
            f"invalid {PRESET}={name!r}: it must be off, server or write_through",
            variable=PRESET,
            value=name,
        )
    base = preset()
    if base is None:
        return None
    changes = {
        setting: _read(variable, environment[variable])
        for variable, (setting, _, _) in VARIABLES.items()
        if environment.get(variable)
    }
    try:
        return Autosave(**(msgspec.structs.asdict(base) | changes))
    except ConfigError as error:
        raise _unfit(environment, error) from error


def _read(variable: str, text: str) -> Any:
    _, read, fits = VARIABLES[variable]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise ConfigError(
            f"invalid {variable}={text!r}: it must be {fits}", variable=variable, value=text
        ) from None


def _unfit(environment: Mapping[str, str], error: ConfigError) -> ConfigError:
    """Return the error that names the variables of invalid settings."""
    given = {name: environment[name] for name in (PRESET, *VARIABLES) if environment.get(name)}
    assignments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ConfigError(f"the environment sets {assignments}, and so {error}", variables=given)
