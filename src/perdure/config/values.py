"""Values of an agent's config, from the declared keys and the saved values.

Pure: a change is a function of the saved values, so that a location can apply it under its own
lock, and apply it again after a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from perdure.config.schema import ConfigKey
from perdure.errors import CorruptRecordError, UnsupportedVersionError
from perdure.records.json import decode

DOCUMENT: Final = "_persistence"
"""The state, and the file, that holds the values; no other state may have this name."""
FORMAT: Final = 1


class StoredValues(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of an agent's config."""

    version: int = FORMAT
    values: dict[str, msgspec.Raw] = {}
    """JSON by key."""
    orphans: dict[str, msgspec.Raw] = {}
    """Values of keys that are declared no more: kept, and not shown."""
    session: str | None = None
    """The session that they were last begun for."""

    def value(self, key: str) -> Any:
        """Return a copy of a value, None where there is none."""
        raw = self.values.get(key)
        return None if raw is None else decode(bytes(raw))


class _StoredValuesFile(msgspec.Struct, omit_defaults=False):
    """A `StoredValues` as it is written: with its version."""

    version: int
    values: dict[str, msgspec.Raw]
    orphans: dict[str, msgspec.Raw]
    session: str | None


def saved_in(data: bytes | None, place: str) -> StoredValues:
    """Return what stored bytes hold; nothing for none.

    Raises:
        CorruptRecordError: They are damaged.
        UnsupportedVersionError: A newer release wrote them.

    """
    if data is None:
        return StoredValues()
    try:
        head = decode(data, _Head)
        if head.version <= FORMAT:
            return decode(data, StoredValues)
    except CorruptRecordError as error:
        message = f"{place} is damaged, and was left as it is: mend it, or move it away ({error})"
        raise CorruptRecordError(message, path=place) from None
    message = (
        f"{place} has version {head.version}, this release reads up to {FORMAT}: "
        "use a newer perdure"
    )
    raise UnsupportedVersionError(message, path=place, version=head.version)


class _Head(msgspec.Struct):
    version: int = FORMAT


def written(saved: StoredValues) -> Any:
    """Return what is to be written, as JSON values."""
    file = _StoredValuesFile(FORMAT, saved.values, saved.orphans, saved.session)
    return decode(msgspec.json.encode(file))


def shared(config: Mapping[str, ConfigKey]) -> dict[str, ConfigKey]:
    """Return the keys whose values all of an agent's sessions share."""
    return {name: key for name, key in config.items() if not key.is_regenerated}


def own(config: Mapping[str, ConfigKey]) -> dict[str, ConfigKey]:
    """Return the keys whose values each session has for itself."""
    return {name: key for name, key in config.items() if key.is_regenerated}


def begun(
    saved: StoredValues,
    config: Mapping[str, ConfigKey],
    *,
    is_new: bool,
    initial: Callable[[ConfigKey], Any],
    session: str | None = None,
    keep: Callable[[str], bool] = lambda _: False,
) -> StoredValues:
    """Return the values to save when a session begins or resumes; *saved* itself for no change.

    Args:
        saved: What is stored.
        config: The keys that are declared.
        is_new: Whether the session is a new one, and not resumed.
        initial: Returns the initial value of a key.
        session: What to note as the session.
        keep: Whether the value of a key that is not among those declared stays in use.

    """
    known = {**saved.orphans, **saved.values}
    values = {
        name: known[name]
        if name in known and not (is_new and key.is_regenerated)
        else msgspec.Raw(msgspec.json.encode(initial(key)))
        for name, key in config.items()
    }
    others = {name: raw for name, raw in known.items() if name not in config}
    retained = {name: raw for name, raw in others.items() if name in saved.values and keep(name)}
    orphans = {name: raw for name, raw in others.items() if name not in retained}
    new = StoredValues(FORMAT, values | retained, orphans, session)
    return saved if new == saved else new


def changed(saved: StoredValues, key: str, value: bytes) -> StoredValues:
    """Return what is to be saved once a key has a value."""
    return msgspec.structs.replace(saved, values={**saved.values, key: msgspec.Raw(value)})


class ConfigPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would change in one place."""

    added: tuple[str, ...] = ()
    """Keys that get their initial values."""
    orphaned: tuple[str, ...] = ()
    """Keys whose values would be put aside."""
    returned: tuple[str, ...] = ()
    """Keys whose values come back from there."""

    def __bool__(self) -> bool:
        return bool(self.added or self.orphaned or self.returned)


def plan(
    saved: StoredValues,
    config: Mapping[str, ConfigKey],
    keep: Callable[[str], bool] = lambda _: False,
) -> ConfigPlan:
    """Return what `begun` changes when a session resumes with these declarations."""
    return ConfigPlan(
        added=tuple(
            name for name in config if name not in saved.values and name not in saved.orphans
        ),
        orphaned=tuple(name for name in saved.values if name not in config and not keep(name)),
        returned=tuple(
            name for name in config if name in saved.orphans and name not in saved.values
        ),
    )
