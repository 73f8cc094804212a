"""From one version of a format to the next, step by step, until it is the present one.

A step takes an object's fields, and returns them in the form of the next version. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, final

import msgspec

from perdure.codec.json import decode, encode
from perdure.errors import ConfigError, CorruptRecordError, UnsupportedVersionError
from perdure.interchange.opened import Fields, fields_of

__all__ = ["MIGRATIONS", "PERSISTENCE_FORMAT_VERSION", "Kind", "Migrations", "migrate_from_v0"]

PERSISTENCE_FORMAT_VERSION: Final = 1
"""The version that this release writes."""

Kind = Literal["session", "memory"]
Step = Callable[[Fields], Fields]


@final
class Migrations:
    """The steps there are, by the kind of document.

    >>> steps = Migrations(2)
    >>> steps.add("memory", 0, lambda fields: fields)
    >>> steps.add("memory", 1, lambda fields: fields)
    """

    def __init__(self, current: int = PERSISTENCE_FORMAT_VERSION) -> None:
        self.current: int = current
        self._steps: dict[tuple[Kind, int], Step] = {}

    def add(self, kind: Kind, from_version: int, step: Step) -> None:
        """Say how fields of a version become those of the next.

        Raises:
            ConfigError: There is such a step, or the version is not below the present one.

        """
        if (kind, from_version) in self._steps or not 0 <= from_version < self.current:
            message = (
                f"a migration of {kind} from version {from_version} does not fit: there is one, or "
                f"it does not lead to version {self.current}"
            )
            raise ConfigError(message, kind=kind, version=from_version)
        self._steps[kind, from_version] = step

    def apply(self, kind: Kind, fields: Fields) -> Fields:
        """Return fields in their present form; no version is version 0.

        Raises:
            UnsupportedVersionError: They are newer, or a step is missing.
            CorruptRecordError: The version is no number.

        """
        version = _version_of(kind, fields)
        if version > self.current:
            message = (
                f"this {kind} has format version {version}, this release reads up to "
                f"{self.current}: use a newer release of perdure; it was left untouched"
            )
            raise UnsupportedVersionError(message, kind=kind, version=version)
        for at in range(version, self.current):
            step = self._steps.get((kind, at))
            if step is None:
                message = f"this {kind} has format version {at}, and there is no way on from it"
                raise UnsupportedVersionError(message, kind=kind, version=at)
            fields = {**step(fields), "version": msgspec.Raw(encode(at + 1))}
        return fields


def _version_of(kind: Kind, fields: Fields) -> int:
    raw = fields.get("version")
    if raw is None:
        return 0
    version = decode(bytes(raw))
    if version is None:
        return 0
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        message = f"the version of this {kind} is no whole number from 0"
        raise CorruptRecordError(message, kind=kind)
    return version


_CORE: Final = {
    "history": ("history", "messages", "conversation"),
    "systemPrompt": ("systemPrompt",),
    "instructions": ("instructions",),
    "toolCalls": ("toolCalls",),
}
_CONTEXT: Final = ("tools", "permissions", "config")
_TOP: Final = {"plugins": ("pluginStates",), "agentId": ("id",), "lastActiveAt": ("lastSavedAt",)}


def migrate_from_v0(fields: Fields) -> Fields:
    """Return the first version's form of what was written before there were versions.

    Then the parts of the context lay at the top, where they were not in a context already.
    """
    rest = dict(fields)
    rest.pop("version", None)
    context = fields_of(bytes(rest.pop("context", msgspec.Raw(b"{}"))))
    core = fields_of(bytes(context.get("core", msgspec.Raw(b"{}"))))
    for name, spellings in _CORE.items():
        _move(context, core, name, spellings)
        _move(rest, core, name, spellings)
    for name in _CONTEXT:
        _move(rest, context, name, (name,))
    for name, spellings in _TOP.items():
        _move(rest, rest, name, spellings)
    context["core"] = msgspec.Raw(encode(core))
    context.setdefault("version", msgspec.Raw(b"1"))
    return {**rest, "context": msgspec.Raw(encode(context))}


def _move(source: Fields, goal: Fields, name: str, spellings: tuple[str, ...]) -> None:
    for spelling in spellings:
        if spelling in source and name not in goal:
            goal[name] = source.pop(spelling)


def _memory_from_v0(fields: Fields) -> Fields:
    """Return the first version's form of a memory: entries were called items by some."""
    rest = dict(fields)
    _move(rest, rest, "entries", ("items",))
    return rest


MIGRATIONS: Final = Migrations()
"""The steps that `read_state` goes."""
MIGRATIONS.add("session", 0, migrate_from_v0)
MIGRATIONS.add("memory", 0, _memory_from_v0)
