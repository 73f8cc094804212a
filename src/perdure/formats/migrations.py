"""From one version of a format to the next, step by step, until it is the present one.

A step takes an object's fields, and returns them in the form of the next version. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, final

import msgspec

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    InvalidArgumentError,
    UnsupportedVersionError,
)
from perdure.formats.state import (
    Fields,
    FullAgentState,
    SerializedMemoryState,
    compact,
    count_entries,
    fields_of,
    read_open,
)
from perdure.records.json import as_utf8, decode, encode

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
            raise InvalidArgumentError(
                f"a migration of {kind} from version {from_version} does not fit: there is one, or "
                f"it does not lead to version {self.current}",
                kind=kind,
                version=from_version,
            )
        self._steps[kind, from_version] = step

    def apply(self, kind: Kind, fields: Fields) -> Fields:
        """Return fields in their present form; no version is version 0.

        Raises:
            UnsupportedVersionError: They are newer, or a step is missing.
            CorruptRecordError: The version is no number.

        """
        version = _version_of(kind, fields)
        if version > self.current:
            raise UnsupportedVersionError(
                f"this {kind} has format version {version}, this release reads up to "
                f"{self.current}: use a newer release of perdure; it was left untouched",
                kind=kind,
                version=version,
            )
        for at in range(version, self.current):
            step = self._steps.get((kind, at))
            if step is None:
                raise UnsupportedVersionError(
                    f"this {kind} has format version {at}, and there is no way on from it",
                    kind=kind,
                    version=at,
                )
            fields = {**step(fields), "version": msgspec.Raw(encode(at + 1))}
        return fields


def _version_of(kind: Kind, fields: Fields) -> int:
    version = decode(bytes(fields.get("version", b"null")))
    if version is None:
        return 0
    if type(version) is not int or version < 0:
        raise CorruptRecordError(f"the version of this {kind} is no whole number from 0", kind=kind)
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
    other_fields = dict(fields)
    other_fields.pop("version", None)
    context = fields_of(bytes(other_fields.pop("context", msgspec.Raw(b"{}"))))
    core = fields_of(bytes(context.get("core", msgspec.Raw(b"{}"))))
    for name, spellings in _CORE.items():
        _move(context, core, name, spellings)
        _move(other_fields, core, name, spellings)
    for name in _CONTEXT:
        _move(other_fields, context, name, (name,))
    for name, spellings in _TOP.items():
        _move(other_fields, other_fields, name, spellings)
    context["core"] = msgspec.Raw(encode(core))
    context.setdefault("version", msgspec.Raw(b"1"))
    return {**other_fields, "context": msgspec.Raw(encode(context))}


def _move(source: Fields, goal: Fields, name: str, spellings: tuple[str, ...]) -> None:
    for spelling in spellings:
        if spelling in source and name not in goal:
            goal[name] = source.pop(spelling)


def _memory_from_v0(fields: Fields) -> Fields:
    """Return the first version's form of a memory: entries were called items by some."""
    other_fields = dict(fields)
    _move(other_fields, other_fields, "entries", ("items",))
    return other_fields


MIGRATIONS: Final = Migrations()
"""The steps that `read_state` goes."""
MIGRATIONS.add("session", 0, migrate_from_v0)
MIGRATIONS.add("memory", 0, _memory_from_v0)


# Stored bytes to a state: upgraded, mended where that is certain, and what was done is said
#
# Pure. Raises what cannot be mended; whoever reads files decides what becomes of those.


class Finding(msgspec.Struct, frozen=True):
    """Something that was not as it should be, and what was done about it."""

    what: str
    """migrated, mended, quarantined, kept, moved, redacted or unread."""
    where: str
    """The file, or the part of the state."""
    detail: str


class MigratedState(msgspec.Struct, frozen=True):
    """Result of reading."""

    state: FullAgentState | None
    """None where there is nothing."""
    findings: tuple[Finding, ...] = ()


def read_state(
    data: bytes, *, migrations: Migrations = MIGRATIONS, where: str = "session.json"
) -> MigratedState:
    """Read a state in whichever version it was written.

    Args:
        data: Its JSON.
        migrations: The steps from older versions.
        where: What findings call it.

    Raises:
        CorruptRecordError: It is damaged.
        UnsupportedVersionError: A newer release wrote it.
        ConfigError: It is a document of a perdure store, and not a whole state.

    """
    findings: list[Finding] = []
    fields = _upgraded("session", fields_of(as_utf8(data)), migrations, where, findings)
    memory = fields.pop("memory", None)
    state = read_open(fields, FullAgentState)
    if "history_source" in state.context.core.extra and not state.context.core.history:
        raise ConfigError(
            f"{where} is a document of a perdure store, whose history is in its log: "
            "make a whole state of it with `perdure export`",
            where=where,
        )
    if memory is not None and bytes(memory) != b"null":
        document = read_memory(bytes(memory), migrations=migrations, where=f"{where}: memory")
        state.memory = document[0]
        findings += document[1]
    _unite_plugins(state, findings, where)
    return MigratedState(state, tuple(findings))


def read_memory(
    data: bytes, *, migrations: Migrations = MIGRATIONS, where: str = "memory.json"
) -> tuple[SerializedMemoryState, list[Finding]]:
    """Read a working memory; its stats are made those of its entries.

    Raises: as `read_state`.
    """
    findings: list[Finding] = []
    data = as_utf8(data)
    if data.lstrip()[:1] == b"[":
        data = b'{"entries":' + data + b"}"
    fields = _upgraded("memory", fields_of(data), migrations, where, findings)
    memory = read_open(fields, SerializedMemoryState)
    _mend_memory(memory, findings, where, has_stats="stats" in fields)
    return memory, findings


def merge_plugins(
    state: FullAgentState, files: Mapping[str, bytes], findings: list[Finding]
) -> None:
    """Add the states that lie in files of their own; a file counts before what is elsewhere."""
    for name, data in files.items():
        raw = compact(data)
        if state.plugins.get(name, raw) != raw:
            detail = "the file counts, session.json holds another state"
            findings.append(Finding("mended", f"plugins/{name}.json", detail))
        state.plugins[name] = raw


def _upgraded(
    kind: Kind, fields: Fields, migrations: Migrations, source: str, findings: list[Finding]
) -> Fields:
    upgraded = migrations.apply(kind, fields)
    if upgraded is not fields:
        findings.append(Finding("migrated", source, f"to format version {migrations.current}"))
    return dict(upgraded)


def _unite_plugins(state: FullAgentState, findings: list[Finding], source: str) -> None:
    """Merge the plugins of the context into those of the state, which take precedence."""
    inner, state.context.plugins = state.context.plugins, {}
    for name, raw in inner.items():
        if state.plugins.setdefault(name, raw) != raw:
            detail = f"plugins.{name} counts, context.plugins.{name} is another state"
            findings.append(Finding("mended", source, detail))


def _mend_memory(
    memory: SerializedMemoryState, findings: list[Finding], source: str, *, has_stats: bool
) -> None:
    """Keep the last of entries with one key, and make the sizes and stats those of the entries."""
    last = {entry.key: entry for entry in memory.entries}
    if len(last) < len(memory.entries):
        detail = f"{len(memory.entries) - len(last)} entries have the key of a later one"
        findings.append(Finding("mended", source, detail))
        memory.entries = list(last.values())
    for entry in memory.entries:
        if entry.size_bytes < 1:
            entry.size_bytes = len(bytes(entry.value))
    stats = memory.stats
    said = (stats.total_entries, stats.total_size_bytes)
    count_entries(memory)
    counted = (stats.total_entries, stats.total_size_bytes)
    if has_stats and said != counted:
        detail = (
            f"the stats said {said[0]} entries of {said[1]} bytes, there are "
            f"{counted[0]} of {counted[1]}"
        )
        findings.append(Finding("mended", source, detail))
