"""A whole state to the records of a new log, so that folding them gives the state again. Pure."""

from __future__ import annotations

import datetime
from typing import Any, Final

import msgspec

from perdure.codec.json import decode, encode
from perdure.codec.messages import decode_message, encode_message, kind_of
from perdure.codec.redaction import redact
from perdure.errors import FormatError
from perdure.interchange.carried import carried_of
from perdure.interchange.folding import (
    CONFIG,
    FOREIGN,
    IMPORTED_AS,
    PERMISSIONS,
    TOOLS,
    VERSIONS,
)
from perdure.interchange.opened import Fields, write_open
from perdure.interchange.own import entries_of, left_of, log_in
from perdure.interchange.reading import Finding
from perdure.interchange.state import (
    FullAgentState,
    PermissionState,
    SerializedMemoryEntry,
    ToolState,
)
from perdure.memory.context import WorkingContext
from perdure.memory.documents import MemoryEntry, Meta, StateSet
from perdure.model.messages import Message, ToolCall, ToolResult
from perdure.model.records import (
    CONTEXT,
    EPOCH,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE,
    MESSAGE_KINDS,
    META,
    RETRACT,
    STATE,
    TURN,
    Entry,
)

__all__ = ["Unfolded", "unfold"]

_FORMATS: Final = MESSAGE_KINDS | {
    *(CONTEXT, EPOCH, FOREIGN, MEMORY_DROP, MEMORY_SET, META, RETRACT, TURN),
}
"""The kinds whose records the formats have a place for, or that only number others."""


class Unfolded(msgspec.Struct, frozen=True):
    """The records for a new log, behind its epoch record."""

    entries: tuple[Entry, ...]
    """In groups as they were, or one group."""
    findings: tuple[Finding, ...] = ()


def unfold(state: FullAgentState, *, now: float) -> Unfolded:
    """Return the records that a state is made of.

    Args:
        state: Read by `read_state`.
        now: Seconds since 1970, for what does not say when it was.

    Raises:
        CorruptRecordError: perdure's own part of it is damaged.

    """
    log = log_in(state)
    if log is not None and log.agrees:
        return Unfolded(tuple(entries_of(log)))
    findings: list[Finding] = []
    entries = [_meta(state, now, findings), *_conversation(state, findings)]
    if state.memory is not None:
        entries += [_memory_entry(one) for one in state.memory.entries]
    versions = _versions(state)
    entries += [
        _plugin(name, raw, versions.get(name, 1)) for name, raw in _plugins(state, findings).items()
    ]
    if log is not None:
        entries += left_of(log, _FORMATS)
        detail = "it was changed by somebody else: its turns and retractions were left out"
        findings.append(Finding("mended", "perdure", detail))
    entries.append(carried_of(state))
    return Unfolded(_one_group(entries), tuple(findings))


def _one_group(entries: list[Entry]) -> tuple[Entry, ...]:
    last = len(entries) - 1
    return tuple(entry._replace(end=place == last) for place, entry in enumerate(entries))


def _meta(state: FullAgentState, now: float, findings: list[Finding]) -> Entry:
    metadata = state.metadata
    clean, where = _redacted(metadata.extra, "metadata", findings)
    owner = decode(bytes(clean["owner"])) if "owner" in clean else None
    if isinstance(owner, str):
        del clean["owner"]
    else:
        owner = None
    meta = Meta(
        title=metadata.title,
        tags=metadata.tags,
        owner=owner,
        metadata=clean,
        at=_seconds(state.last_active_at) or now,
        agent_type=state.agent_type,
        created_at=_seconds(state.created_at),
        redacted=where,
    )
    return Entry(META, encode(meta))


def _redacted(fields: Fields, what: str, findings: list[Finding]) -> tuple[Fields, list[str]]:
    """Return fields without credentials; what holds none stays as it was written."""
    plain = {name: decode(bytes(raw)) for name, raw in fields.items()}
    clean, where = redact(plain)
    if where:
        findings.append(Finding("redacted", what, ", ".join(where)))
    kept = {
        name: raw if clean[name] is plain[name] else msgspec.Raw(encode(clean[name]))
        for name, raw in fields.items()
    }
    return kept, list(where)


def _seconds(iso: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(iso).timestamp() if iso else None
    except ValueError:
        return None


# the conversation


def _conversation(state: FullAgentState, findings: list[Finding]) -> list[Entry]:
    core = state.context.core
    entries = [_item(bytes(raw)) for raw in core.history]
    foreign = sum(entry.kind == FOREIGN for entry in entries)
    if foreign:
        detail = f"{foreign} items are no messages: kept as they are, and not shown to a model"
        findings.append(Finding("kept", "context.core.history", detail))
    first = decode(entries[0].payload) if entries and entries[0].kind == MESSAGE else {}
    if core.system_prompt and first.get("role") != "system":
        context = WorkingContext(2**62)
        context.feed(0, MESSAGE, encode_message(Message.system(core.system_prompt)).payload)
        entries.insert(0, Entry(CONTEXT, context.as_record("import")))
    return entries


def _item(payload: bytes) -> Entry:
    try:
        message = decode_message(payload)
    except FormatError:
        return Entry(FOREIGN, payload)
    made = _from_chat(message, payload)
    return Entry(kind_of(message), payload) if made is None else encode_message(made)


def _from_chat(message: Message, payload: bytes) -> Message | None:
    """Return a message whose tool parts have the form of Chat Completions, None for others."""
    extra = {**message.extra, IMPORTED_AS: msgspec.Raw(payload)}
    if message.role == "tool" and message.tool_result is None and "tool_call_id" in extra:
        call_id = decode(bytes(extra.pop("tool_call_id")))
        name = decode(bytes(extra.pop("name"))) if "name" in extra else None
        result = ToolResult(str(call_id), name if isinstance(name, str) else None, message.content)
        return msgspec.structs.replace(message, content=None, tool_result=result, extra=extra)
    if message.role == "assistant" and not message.tool_calls and "tool_calls" in extra:
        calls = _calls(decode(bytes(extra.pop("tool_calls"))))
        if calls:
            return msgspec.structs.replace(message, tool_calls=calls, extra=extra)
    return None


def _calls(listed: Any) -> tuple[ToolCall, ...]:
    calls = []
    for one in listed if isinstance(listed, list) else ():
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return ()
        arguments = function.get("arguments", {})
        calls.append(ToolCall(str(one.get("id", "")), function["name"], _arguments(arguments)))
    return tuple(calls)


def _arguments(arguments: Any) -> Any:
    """Return a call's arguments; text that is no JSON object stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = decode(arguments.encode())
    except FormatError:
        return arguments
    return value if isinstance(value, dict) else arguments


# the rest


def _memory_entry(one: SerializedMemoryEntry) -> Entry:
    entry = MemoryEntry(
        key=one.key,
        description=one.description,
        value=one.value,
        scope=one.scope,
        size_bytes=one.size_bytes,
        base_priority=one.base_priority,
        pinned=one.pinned,
        created_at=one.created_at,
        last_accessed_at=one.last_accessed_at,
    )
    return Entry(MEMORY_SET, encode(entry))


def _plugins(state: FullAgentState, findings: list[Finding]) -> Fields:
    """Return the states of all contributors, those of the context included."""
    plugins, context = dict(state.plugins), state.context
    if context.tools != ToolState():
        plugins[TOOLS] = msgspec.Raw(write_open(context.tools))
    if context.permissions != PermissionState():
        plugins[PERMISSIONS] = msgspec.Raw(write_open(context.permissions))
    if context.config:
        config, where = _redacted(context.config, "context.config", findings)
        if where:
            config["redacted"] = msgspec.Raw(encode(where))
        plugins[CONFIG] = msgspec.Raw(encode(config))
    for name in [name for name in plugins if not all(name.split("/"))]:
        findings.append(
            Finding("left out", f"plugins.{name}", "nothing can be stored by this name")
        )
        del plugins[name]
    return plugins


def _versions(state: FullAgentState) -> dict[str, int]:
    raw = state.extra.get(VERSIONS)
    versions: dict[str, int] = {} if raw is None else decode(bytes(raw), dict[str, int])
    return versions


def _plugin(name: str, raw: msgspec.Raw, version: int) -> Entry:
    return Entry(STATE, encode(StateSet(f"plugins/{name}.json", raw, version=version)))
