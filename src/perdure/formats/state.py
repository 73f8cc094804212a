"""Whole state of an agent as values: ``session.json``, ``memory.json``, raw traces, own fields.

The written names are in camel case, as the format has them. ``Raw`` is JSON as it was written:
``msgspec.json.decode(raw)`` reads it. Unknown fields lie in ``extra``, at each level.
Values only, and pure.
"""

from __future__ import annotations

import datetime
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final, Protocol, TypeVar, final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.memory.documents import StateSet
from perdure.memory.traces import RawTrace, traces_of
from perdure.records.json import decode, encode, require_utf8
from perdure.records.messages import Message, ToolCall, ToolResult
from perdure.records.records import STATE, Entry, Record
from perdure.records.values import lower

# Structs that preserve unknown fields byte for byte


T = TypeVar("T", bound=msgspec.Struct)

Fields = dict[str, msgspec.Raw]
"""A JSON object, its values as they are written."""

_EXTRA = "extra"
_NULL = msgspec.Raw(b"null")


def compact(data: bytes) -> msgspec.Raw:
    """Return JSON without the whitespace between its tokens; the tokens stay as they are."""
    return msgspec.Raw(msgspec.json.format(data, indent=-1))


def fields_of(data: bytes) -> Fields:
    """Return an object's fields, their values without the whitespace between tokens.

    Raises:
        CorruptRecordError: It is no object, or no UTF-8.

    """
    require_utf8(data)
    fields: Fields = decode(data, Fields)
    return {name: compact(bytes(raw)) for name, raw in fields.items()}


def read_open(fields: Fields, cls: type[T], at: str = "$") -> T:
    """Return a struct of an object's fields. What is null where that does not fit is absent.

    Raises:
        CorruptRecordError: A known field has another type than it should, or is missing.

    """
    extra = dict(fields)
    value: dict[str, Any] = {}
    for name, written, kind in _known(cls):
        raw = extra.pop(written, _NULL)
        if raw != _NULL:
            value[name] = _read(raw, kind, f"{at}.{written}")
    try:
        return cls(**value, extra=extra)
    except TypeError as error:
        raise CorruptRecordError(f"the value at {at} cannot be read: {error}", path=at) from None


def write_open(value: msgspec.Struct) -> bytes:
    """Return a struct as JSON in one line; None is left out."""
    return encode(_written(value))


def _written(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {
            written: _written(getattr(value, name))
            for name, written, _ in _known(type(value))
            if getattr(value, name) is not None
        }
        return fields | getattr(value, _EXTRA)
    return [_written(member) for member in value] if isinstance(value, list) else value


def _read(raw: msgspec.Raw, kind: Any, at: str) -> Any:
    if _is_open(kind):
        return read_open(_decode(raw, Fields, at), kind, at)
    if typing.get_origin(kind) is list and _is_open(typing.get_args(kind)[0]):
        (item,) = typing.get_args(kind)
        listed = _decode(raw, list[msgspec.Raw], at)
        return [_read(member, item, f"{at}[{place}]") for place, member in enumerate(listed)]
    return _decode(raw, kind, at)


def _is_open(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _decode(raw: msgspec.Raw, kind: Any, at: str) -> Any:
    try:
        return decode(bytes(raw), kind)
    except CorruptRecordError as error:
        raise CorruptRecordError(
            f"the field at {at} cannot be read: {error}", path=at, size=len(bytes(raw))
        ) from None


@cache
def _known(cls: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Return each known field's name, its written name, and its type."""
    return tuple(
        (field.name, field.encode_name, field.type)
        for field in msgspec.structs.fields(cls)
        if field.name != _EXTRA
    )


Raws = dict[str, msgspec.Raw]


class SessionMetadata(msgspec.Struct, rename="camel", kw_only=True):
    """Labels of a session."""

    title: str | None = None
    tags: list[str] = []
    extra: Raws = {}


class CoreState(msgspec.Struct, rename="camel", kw_only=True):
    """The conversation."""

    system_prompt: str = ""
    instructions: str = ""
    history: list[msgspec.Raw] = []
    """Messages, oldest first."""
    tool_calls: list[msgspec.Raw] = []
    extra: Raws = {}


class ToolState(msgspec.Struct, rename="camel", kw_only=True):
    """Tools that are offered, the place of each, and their order."""

    enabled: Raws = {}
    namespaces: Raws = {}
    priorities: Raws = {}
    extra: Raws = {}


class PermissionState(msgspec.Struct, rename="camel", kw_only=True):
    """Permissions of tools to run."""

    version: int = 1
    approvals: Raws = {}
    blocklist: list[str] = []
    allowlist: list[str] = []
    extra: Raws = {}


class SerializedAgentContextState(msgspec.Struct, rename="camel", kw_only=True):
    """The context: conversation, tools, permissions, configuration."""

    version: int = 1
    core: CoreState = msgspec.field(default_factory=CoreState)
    tools: ToolState = msgspec.field(default_factory=ToolState)
    permissions: PermissionState = msgspec.field(default_factory=PermissionState)
    plugins: Raws = {}
    """Read, and put beside those of the state itself; not written."""
    config: Raws = {}
    """model, maxContextTokens, strategy, and whatever else was configured."""
    extra: Raws = {}


class SerializedMemoryEntry(msgspec.Struct, rename="camel", kw_only=True):
    """One entry of the working memory."""

    key: str
    description: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    scope: str = "session"
    size_bytes: int = 0
    base_priority: str = "normal"
    pinned: bool = False
    created_at: int = 0
    """Milliseconds since 1970."""
    last_accessed_at: int = 0
    extra: Raws = {}


class Stats(msgspec.Struct, rename="camel", kw_only=True):
    """Sum of the entries."""

    total_entries: int = 0
    total_size_bytes: int = 0
    extra: Raws = {}


class SerializedMemoryState(msgspec.Struct, rename="camel", kw_only=True):
    """The working memory."""

    version: int = 1
    entries: list[SerializedMemoryEntry] = []
    stats: Stats = msgspec.field(default_factory=Stats)
    extra: Raws = {}


def count_entries(memory: SerializedMemoryState) -> None:
    """Make the stats of a memory those of its entries."""
    memory.stats.total_entries = len(memory.entries)
    memory.stats.total_size_bytes = sum(entry.size_bytes for entry in memory.entries)


class FullAgentState(msgspec.Struct, rename="camel", kw_only=True):
    """Everything that an agent's session needs to continue."""

    version: int = 1
    agent_id: str = ""
    agent_type: str = "agent"
    created_at: str = ""
    """ISO 8601."""
    last_active_at: str = ""
    context: SerializedAgentContextState = msgspec.field(
        default_factory=SerializedAgentContextState
    )
    memory: SerializedMemoryState | None = None
    """None where it was not loaded, or there is none."""
    plugins: Raws = {}
    """The states of plugins by name."""
    metadata: SessionMetadata = msgspec.field(default_factory=SessionMetadata)
    extra: Raws = {}


def write_state(state: FullAgentState) -> bytes:
    """Return a state as JSON, in one line; `perdure.formats.read_state` reads it."""
    return write_open(state)


# Storage of whole states, to be implemented by an application
#
# `perdure.stores.StateStore` makes a store of it.


class StateStorage(Protocol):
    """Keep one agent's state: in a database, a bucket, a file."""

    async def save(self, state: FullAgentState) -> None:
        """Replace the stored state, in one step; return when it is durable.

        ``perdure.formats.write_state`` makes bytes of it.
        """
        ...

    async def load(self) -> FullAgentState | None:
        """Return the stored state, None if there is none.

        ``perdure.formats.read_state`` makes it of bytes.
        """
        ...

    async def exists(self) -> bool:
        """Say whether there is one."""
        ...

    async def delete(self) -> None:
        """Remove it; no error if there is none."""
        ...

    def get_path(self) -> str:
        """Say where it is kept, for people: a path, a URL, a name; never a password."""
        ...

    async def get_last_modified(self) -> datetime.datetime | None:
        """Return when it was last saved; None if there is none, or if that is not known.

        It has to differ after each save, for another writer to be noticed.
        """
        ...


# Fields of foreign states that a log has no place for


CARRIED = "interchange.json"
"""The document."""


_OURS = ("perdure", "pluginVersions")


class ForeignFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The parts, and how far the session was when it was filled."""

    system_prompt: str = ""
    instructions: str = ""
    tool_calls: list[msgspec.Raw] = []
    created_at: str = ""
    last_active_at: str = ""
    context_version: int = 1
    items: int = 0
    """Length of the history."""
    state: Fields = {}
    context: Fields = {}
    core: Fields = {}
    memory: Fields = {}
    stats: Fields = {}
    entries: dict[str, Fields] = {}
    """By the key of the memory entry."""
    seq: int = 0
    """The record that it lies in; not written."""


def carried_of(state: FullAgentState) -> Entry:
    """Return the record that carries what a state has beyond the log."""
    core, memory = state.context.core, state.memory
    carried = ForeignFields(
        system_prompt=core.system_prompt,
        instructions=core.instructions,
        tool_calls=core.tool_calls,
        created_at=state.created_at,
        last_active_at=state.last_active_at,
        context_version=state.context.version,
        items=len(core.history),
        state={name: raw for name, raw in state.extra.items() if name not in _OURS},
        context=state.context.extra,
        core=core.extra,
    )
    if memory is not None:
        carried.memory = memory.extra
        carried.stats = memory.stats.extra
        carried.entries = {entry.key: entry.extra for entry in memory.entries if entry.extra}
    return Entry(STATE, encode(StateSet(CARRIED, msgspec.Raw(encode(carried)))))


def carried_by(records: Iterable[Record]) -> ForeignFields:
    """Return what a log carries; nothing for a log that was not filled from elsewhere."""
    carried = ForeignFields()
    for record in records:
        if record.kind == STATE and CARRIED.encode() in record.payload:
            change = decode(record.payload, StateSet)
            if change.name == CARRIED:
                carried = decode(bytes(change.value), ForeignFields)
                carried.seq = record.seq
    return carried


# Raw traces, one a line, and the messages that they fold to


_SOURCES: Final = {
    "user": "LLMUserMessageReadyEvent",
    "assistant": "LLMCompleteResponseReceivedEvent",
    "reasoning": "LLMCompleteResponseReceivedEvent",
    "tool_call": "PendingToolInvocationEvent",
    "tool_result": "ToolResultEvent",
    "tool_continuation": "ToolContinuationReadyEvent",
}
"""Value written as ``source_event``, for readers that ask for one."""


class SavedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it is read."""

    trace_type: str
    id: str = ""
    ts: float = 0.0
    turn_id: str | None = None
    seq: int = 0
    content: str | None = None
    media: dict[str, list[str]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    tool_args: Any = None
    tool_result: Any = None
    tool_error: str | None = None


class TraceLine(msgspec.Struct, frozen=True):
    """A line as it is written, and what an archive says of it."""

    id: str
    ts: float
    seq: int
    data: bytes


def trace_lines(turn_id: str, messages: Iterable[tuple[int, Message]]) -> Iterator[TraceLine]:
    """Return a turn's traces as lines; values that JSON cannot hold as what they are stored as.

    Args:
        turn_id: The turn.
        messages: With the seqs of their records.

    """
    for trace in traces_of(turn_id, messages):
        yield TraceLine(trace.id, trace.ts, trace.seq, _line(trace))


def _line(trace: RawTrace) -> bytes:
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(trace).items()
        if value is not None and value != {}
    }
    for name in ("tool_args", "tool_result"):
        if name in fields:
            fields[name] = lower(fields[name])[0]
    usual = _SOURCES.get(trace.trace_type)
    if usual is not None:
        fields.setdefault("source_event", usual)
    return encode(fields) + b"\n"


class TraceMessage(msgspec.Struct, frozen=True):
    """A message that traces fold to."""

    seq: int
    """That of its first trace."""
    message: Message


@final
class TraceMessages:
    """Put traces together to messages, fed in the order in which they lie."""

    def __init__(self) -> None:
        self._answer: list[SavedTrace] = []
        self._known: set[str] = set()

    def feed(self, trace: SavedTrace) -> Iterator[TraceMessage]:
        """Take in the next trace; return the messages that are complete by it."""
        if trace.id and trace.id in self._known:
            return
        self._known.add(trace.id)
        if trace.trace_type in _ANSWER:
            if not self._continues(trace):
                yield from self.rest()
            self._answer.append(trace)
            return
        yield from self.rest()
        message = _other(trace)
        if message is not None:
            yield TraceMessage(trace.seq, message)

    def rest(self) -> Iterator[TraceMessage]:
        """Return the answer that no other trace belongs to."""
        answer, self._answer = self._answer, []
        if answer:
            yield TraceMessage(answer[0].seq, _answered(answer))

    def _continues(self, trace: SavedTrace) -> bool:
        """Say whether a trace is a part of the same answer as those before it."""
        if not self._answer or self._answer[-1].turn_id != trace.turn_id:
            return False
        kinds = {call.trace_type for call in self._answer}
        return "assistant" not in kinds and not (trace.trace_type == "reasoning" and kinds)


_ANSWER: Final = frozenset({"assistant", "reasoning", "tool_call"})


def _answered(traces: list[SavedTrace]) -> Message:
    answer = [trace for trace in traces if trace.trace_type == "assistant"]
    thought = [
        trace.content for trace in traces if trace.trace_type == "reasoning" and trace.content
    ]
    return Message(
        role="assistant",
        content=answer[0].content if answer else None,
        reasoning=thought[0] if thought else None,
        tool_calls=tuple(
            ToolCall(
                trace.tool_call_id or "",
                trace.tool_name or "",
                {} if trace.tool_args is None else trace.tool_args,
            )
            for trace in traces
            if trace.trace_type == "tool_call"
        ),
        created_at=traces[0].ts or None,
        **_media(answer[0] if answer else traces[0]),
    )


def _other(trace: SavedTrace) -> Message | None:
    """Return the message that one trace is by itself; None for one that is none."""
    at = trace.ts or None
    if trace.trace_type in {"user", "system"}:
        content = trace.content or ""
        return Message(role=trace.trace_type, content=content, created_at=at, **_media(trace))
    if trace.trace_type == "tool_result":
        result = ToolResult(
            trace.tool_call_id or "", trace.tool_name, trace.tool_result, trace.tool_error
        )
        return Message(role="tool", tool_result=result, created_at=at)
    return None


def _media(trace: SavedTrace) -> dict[str, Any]:
    urls = trace.media or {}
    return {
        "image_urls": tuple(urls.get("images", ())),
        "audio_urls": tuple(urls.get("audio", ())),
        "video_urls": tuple(urls.get("video", ())),
    }
