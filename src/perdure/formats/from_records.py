"""Conversion of a log's records to a whole state, history included. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final, TypeVar

import msgspec

from perdure.errors import FormatError
from perdure.formats.state import (
    CoreState,
    Fields,
    ForeignFields,
    FullAgentState,
    PermissionState,
    SerializedAgentContextState,
    SerializedMemoryEntry,
    SerializedMemoryState,
    SessionMetadata,
    Stats,
    ToolState,
    carried_by,
    compact,
    fields_of,
    read_open,
)
from perdure.memory.context import RetractionPayload, WorkingContext
from perdure.memory.documents import SessionDocument, StateSet, fold_session, fold_state, typed
from perdure.memory.index import MemoryIndex, changes_of
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.messages import decode_message
from perdure.records.records import (
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE_KINDS,
    RETRACT,
    STATE,
    TOOL_CALL,
    Record,
)

FOREIGN: Final = "foreign"
"""The kind of an item of somebody else's history that is no message."""
IMPORTED_AS: Final = "imported_as"
"""The field of a message that holds the item which it was made of."""

TOOLS: Final = "agent_tools"
PERMISSIONS: Final = "agent_permissions"
CONFIG: Final = "agent_config"
"""The contributors whose states have a place of their own in the context."""

T = TypeVar("T", bound=msgspec.Struct)

VERSIONS: Final = "pluginVersions"
"""The field of a state that says which plugins' states have a version other than 1."""
SPOKEN: Final = MESSAGE_KINDS | {FOREIGN}
"""The kinds of the history."""

_FOLDER: Final = "plugins/"


def state_of(key: SessionKey, records: Sequence[Record]) -> FullAgentState:
    """Return the state that a session's whole log folds to.

    Raises:
        CorruptRecordError: A record is damaged.

    """
    described = decode(fold_session(None, key, records), SessionDocument)
    carried = carried_by(records)
    spoken = [record for record in _visible(records) if record.kind in SPOKEN]
    history = [item_of(record) for record in spoken]
    plugins, versions = _plugins(records)
    state = FullAgentState(
        agent_id=key.agent,
        agent_type=described.agent_type,
        created_at=_same_time(carried.created_at, described.created_at),
        last_active_at=_iso(described.last_active_at),
        context=_context(plugins, carried),
        memory=_memory(records, carried),
        plugins=plugins,
        metadata=_metadata(described),
        extra={**carried.state, **versions},
    )
    if carried.seq and len(history) == carried.items and described.turns == 0:
        state.last_active_at = carried.last_active_at or state.last_active_at
    state.context.core = CoreState(
        system_prompt=_system_prompt(records) or carried.system_prompt,
        instructions=carried.instructions,
        history=history,
        tool_calls=[*carried.tool_calls, *_tool_calls(spoken, after=carried.seq)],
        extra=carried.core,
    )
    return state


def item_of(record: Record) -> msgspec.Raw:
    """Return a record of the history as an item: what it was made of, or what it is."""
    if IMPORTED_AS.encode() in record.payload:
        fields = fields_of(record.payload)
        if IMPORTED_AS in fields:
            return compact(bytes(fields[IMPORTED_AS]))
    return msgspec.Raw(record.payload)


def _visible(records: Sequence[Record]) -> list[Record]:
    """Return the records that were not taken back, oldest first."""
    newest, messages = inf, []
    for record in reversed(records):
        if record.seq <= newest:
            messages.append(record)
            if record.kind == RETRACT:
                newest = decode(record.payload, RetractionPayload).after
    return messages[::-1]


def _system_prompt(records: Iterable[Record]) -> str:
    context = WorkingContext(2**62)
    for record in records:
        context.feed(record.seq, record.kind, record.payload)
    first = next(context.messages(), b"null")
    prompt = decode(first)
    if not isinstance(prompt, dict) or prompt.get("role") != "system":
        return ""
    return decode_message(first).text


class _Call(msgspec.Struct):
    id: str
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _Calls(msgspec.Struct):
    tool_calls: list[_Call] = []


class _Calling(msgspec.Struct):
    tool_payload: _Calls


def _tool_calls(spoken: Iterable[Record], *, after: int) -> list[msgspec.Raw]:
    """Return the tool calls of messages after a record."""
    return [
        msgspec.Raw(encode(call))
        for record in spoken
        if record.kind == TOOL_CALL and record.seq > after
        for call in decode(record.payload, _Calling).tool_payload.tool_calls
    ]


def _plugins(records: Iterable[Record]) -> tuple[Fields, Fields]:
    """Return the states of all contributors by name, and the field of their versions."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == STATE:
            by_name.setdefault(decode(record.payload, StateSet).name, []).append(record)
    states: Fields = {}
    versions: dict[str, int] = {}
    for document, changes in by_name.items():
        if not document.startswith(_FOLDER):
            continue
        data = fold_state(document, None, changes)
        beside = fold_state(typed(document), None, changes)
        name = document[len(_FOLDER) : -len(".json")]
        if beside is not None:
            plugin_states = decode(beside, StateSet)
            data = bytes(plugin_states.value) if data is None else data
            if plugin_states.version != 1:
                versions[name] = plugin_states.version
        if data is not None:
            states[name] = compact(data)
    return states, {VERSIONS: msgspec.Raw(encode(versions))} if versions else {}


def _context(plugins: Fields, carried: ForeignFields) -> SerializedAgentContextState:
    return SerializedAgentContextState(
        version=carried.context_version,
        tools=_part(plugins, TOOLS, ToolState),
        permissions=_part(plugins, PERMISSIONS, PermissionState),
        config=fields_of(bytes(plugins.pop(CONFIG, b"{}"))),
        extra=carried.context,
    )


def _part(plugins: Fields, name: str, cls: type[T]) -> T:
    """Take a contributor's state out, if it has the form of its place in the context."""
    raw = plugins.get(name)
    if raw is None:
        return cls()
    try:
        part = read_open(fields_of(bytes(raw)), cls)
    except FormatError:  # another form: it stays among the plugins, as it is
        return cls()
    del plugins[name]
    return part


def _memory(records: Iterable[Record], carried: ForeignFields) -> SerializedMemoryState | None:
    changes = [record for record in records if record.kind in {MEMORY_SET, MEMORY_DROP}]
    if not changes and not carried.memory:
        return None
    index = changes_of(MemoryIndex(), changes)
    entries = [
        SerializedMemoryEntry(
            key=entry.key,
            description=entry.description,
            value=compact(bytes(entry.value)),
            scope=entry.scope,
            size_bytes=entry.size_bytes,
            base_priority=entry.base_priority,
            pinned=entry.pinned,
            created_at=entry.created_at,
            last_accessed_at=entry.last_accessed_at,
            extra=carried.entries.get(entry.key, {}),
        )
        for entry in index.entries.values()
    ]
    stats = Stats(
        total_entries=len(entries),
        total_size_bytes=sum(entry.size_bytes for entry in entries),
        extra=carried.stats,
    )
    return SerializedMemoryState(entries=entries, stats=stats, extra=carried.memory)


def _metadata(described: SessionDocument) -> SessionMetadata:
    labels = described.metadata
    extra = {name: compact(bytes(raw)) for name, raw in labels.extra.items()}
    if labels.owner is not None:
        extra["owner"] = msgspec.Raw(encode(labels.owner))
    return SessionMetadata(title=labels.title, tags=labels.tags, extra=extra)


def _same_time(written: str, iso: str) -> str:
    """Return a time as it was written, if it is still that time."""
    if not written:
        return _iso(iso)
    try:
        same = datetime.datetime.fromisoformat(written) == datetime.datetime.fromisoformat(iso)
    except (ValueError, TypeError):  # no time, or one without a zone: nothing to compare
        return written
    return written if same else _iso(iso)


def _iso(iso: str) -> str:
    if not iso:
        return ""
    time = datetime.datetime.fromisoformat(iso).astimezone(datetime.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
