"""The autosave settings that environment variables ask for.

They stand in for an argument that was not given: arguments come first, then the
environment, then the defaults. ``PERDURE_AUTOSAVE`` names a preset, the others change
single settings of it. A value that does not fit is an error that names its variable,
never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from perdure.autosave.options import Autosave
from perdure.errors import ConfigError

__all__ = ["PRESET", "VARIABLES", "autosave_from"]

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
"""Each variable with its setting, how its text is read, and what fits."""

_PRESETS: dict[str, Callable[[], Autosave | None]] = {
    "server": Autosave.server,
    "write_through": Autosave.write_through,
}


def autosave_from(
    environment: Mapping[str, str], declared: Autosave | None = _DEFAULT
) -> Autosave | None:
    """Return the settings that an environment asks for, None for off.

    An empty variable counts as not set. Off is off, whatever the other variables say. *declared*
    is what counts where the environment names no preset: what a file says, None for off.

    >>> autosave_from({"PERDURE_AUTOSAVE": "server", "PERDURE_AUTOSAVE_DEBOUNCE": "0.5"})
    Autosave(debounce=0.5, max_delay=10.0, on_turn_end=True, max_bytes=1048576, max_records=256)

    Raises:
        ConfigError: A variable has a value that does not fit.

    """
    name = environment.get(PRESET, "")
    if name == "off":
        return None
    preset = _PRESETS.get(name) if name else lambda: declared
    if preset is None:
        message = f"{PRESET}={name!r} does not fit: it must be off, server or write_through"
        raise ConfigError(message, variable=PRESET, value=name)
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
        message = f"{variable}={text!r} does not fit: it must be {fits}"
        raise ConfigError(message, variable=variable, value=text) from None


def _unfit(environment: Mapping[str, str], error: ConfigError) -> ConfigError:
    """Name the variables behind settings that do not fit, or not together."""
    given = {name: environment[name] for name in (PRESET, *VARIABLES) if environment.get(name)}
    said = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return ConfigError(f"the environment sets {said}, and so {error}", variables=given)
