"""Stored bytes to a state: upgraded, mended where that is certain, and what was done is said.

Pure. Raises what cannot be mended; whoever reads files decides what becomes of those.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from perdure.errors import ConfigError
from perdure.interchange.migrations import MIGRATIONS, Migrations
from perdure.interchange.opened import Fields, compact, fields_of, read_open
from perdure.interchange.state import FullAgentState, SerializedMemoryState

__all__ = ["Finding", "Read", "read_memory", "read_state"]


class Finding(msgspec.Struct, frozen=True):
    """Something that was not as it should be, and what was done about it."""

    what: str
    """migrated, mended, quarantined, kept, moved, redacted or unread."""
    where: str
    """The file, or the part of the state."""
    detail: str


class Read(msgspec.Struct, frozen=True):
    """What was read."""

    state: FullAgentState | None
    """None where there is nothing."""
    findings: tuple[Finding, ...] = ()


def read_state(
    data: bytes, *, migrations: Migrations = MIGRATIONS, where: str = "session.json"
) -> Read:
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
    fields = _upgraded("session", fields_of(data), migrations, where, findings)
    memory = fields.pop("memory", None)
    state = read_open(fields, FullAgentState)
    if "history_source" in state.context.core.extra and not state.context.core.history:
        message = (
            f"{where} is a document of a perdure store, whose history is in its log: "
            "make a whole state of it with `perdure export`"
        )
        raise ConfigError(message, where=where)
    if memory is not None and bytes(memory) != b"null":
        found = read_memory(bytes(memory), migrations=migrations, where=f"{where}: memory")
        state.memory = found[0]
        findings += found[1]
    _unite_plugins(state, findings, where)
    return Read(state, tuple(findings))


def read_memory(
    data: bytes, *, migrations: Migrations = MIGRATIONS, where: str = "memory.json"
) -> tuple[SerializedMemoryState, list[Finding]]:
    """Read a working memory; its stats are made those of its entries.

    Raises: as `read_state`.
    """
    findings: list[Finding] = []
    if data.lstrip()[:1] == b"[":
        fields: Fields = {"entries": msgspec.Raw(data)}
    else:
        fields = fields_of(data)
    fields = _upgraded("memory", fields, migrations, where, findings)
    memory = read_open(fields, SerializedMemoryState)
    _mend_sizes(memory, findings, where)
    _mend_stats(memory, findings, where, given="stats" in fields)
    return memory, findings


def merge_plugins(
    state: FullAgentState, files: Mapping[str, bytes], findings: list[Finding]
) -> None:
    """Add the states that lie in files of their own; a file counts before what is elsewhere."""
    for name, data in files.items():
        raw = compact(data)
        if name in state.plugins and state.plugins[name] != raw:
            detail = "the file counts, session.json holds another state"
            findings.append(Finding("mended", f"plugins/{name}.json", detail))
        state.plugins[name] = raw


def _upgraded(
    kind: str, fields: Fields, migrations: Migrations, where: str, findings: list[Finding]
) -> Fields:
    upgraded = migrations.apply("memory" if kind == "memory" else "session", fields)
    if upgraded is not fields:
        findings.append(Finding("migrated", where, f"to format version {migrations.current}"))
    return dict(upgraded)


def _unite_plugins(state: FullAgentState, findings: list[Finding], where: str) -> None:
    """Put the plugins of the context beside those of the state, which count before them."""
    inner, state.context.plugins = state.context.plugins, {}
    for name, raw in inner.items():
        if state.plugins.setdefault(name, raw) != raw:
            detail = f"plugins.{name} counts, context.plugins.{name} is another state"
            findings.append(Finding("mended", where, detail))


def _mend_sizes(memory: SerializedMemoryState, findings: list[Finding], where: str) -> None:
    last = {entry.key: entry for entry in memory.entries}
    if len(last) < len(memory.entries):
        detail = f"{len(memory.entries) - len(last)} entries have the key of a later one"
        findings.append(Finding("mended", where, detail))
        memory.entries = list(last.values())
    for entry in memory.entries:
        if entry.size_bytes < 1:
            entry.size_bytes = len(bytes(entry.value))


def _mend_stats(
    memory: SerializedMemoryState, findings: list[Finding], where: str, *, given: bool
) -> None:
    stats = memory.stats
    said = (stats.total_entries, stats.total_size_bytes)
    true = (len(memory.entries), sum(entry.size_bytes for entry in memory.entries))
    if said == true:
        return
    stats.total_entries, stats.total_size_bytes = true
    if given:
        detail = (
            f"the stats said {said[0]} entries of {said[1]} bytes, there are {true[0]} of {true[1]}"
        )
        findings.append(Finding("mended", where, detail))
