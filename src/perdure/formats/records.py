"""Conversion of a whole state to the records of a new log, and of a log to a state. Pure.

Folding the records of a state gives it again; a log's records give a state with all history.
"""

from __future__ import annotations

import datetime
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from perdure.errors import CorruptRecordError, FormatError, UnsupportedVersionError
from perdure.formats.migrations import Finding
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
    TraceMessage,
    carried_by,
    carried_of,
    compact,
    count_entries,
    fields_of,
    read_open,
    write_open,
    write_state,
)
from perdure.memory.compaction import EpisodicItem, SemanticItem, item_entry
from perdure.memory.context import Retractions, WorkingContext
from perdure.memory.documents import (
    MetadataPayload,
    SessionDocument,
    StateSet,
    fold_session,
    fold_state,
    typed,
)
from perdure.memory.index import MemoryEntry, MemoryIndex, changes_of
from perdure.providers.replies import arguments
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.messages import (
    Message,
    ToolCall,
    ToolResult,
    decode_message,
    encode_message,
    kind_of,
)
from perdure.records.records import (
    BASE,
    CONTEXT,
    ENDING,
    EPOCH,
    FORK,
    HOLDER_KINDS,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE,
    MESSAGE_KINDS,
    META,
    OUTSIDE,
    RETRACT,
    STATE,
    TOOL_CALL,
    TURN,
    Entry,
    Record,
)
from perdure.records.references import spelled
from perdure.records.values import redact

# A log's records as a whole state, history included


FOREIGN: Final = "foreign"
"""The kind of an item of somebody else's history that is no message."""
IMPORTED_AS: Final = "perdure_imported_as"
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
    shown = list(filter(Retractions().shows, reversed(records)))[::-1]  # not what was taken back
    spoken = [record for record in shown if record.kind in SPOKEN]
    calls = [
        msgspec.Raw(encode(call))
        for record in spoken
        if record.kind == TOOL_CALL and record.seq > carried.seq
        for call in decode(record.payload, _Calling).tool_payload.tool_calls
    ]
    core = CoreState(
        system_prompt=_system_prompt(records) or carried.system_prompt,
        instructions=carried.instructions,
        history=[item_of(record) for record in spoken],
        tool_calls=[*carried.tool_calls, *calls],
        extra=carried.core,
    )
    plugins, versions = _plugins_in(records)
    context = SerializedAgentContextState(
        version=carried.context_version,
        core=core,
        tools=_part(plugins, TOOLS, ToolState),
        permissions=_part(plugins, PERMISSIONS, PermissionState),
        config=fields_of(bytes(plugins.pop(CONFIG, b"{}"))),
        extra=carried.context,
    )
    last_active_at = described.last_active_at
    if carried.seq and len(core.history) == carried.items and described.turns == 0:
        last_active_at = carried.last_active_at or last_active_at
    return FullAgentState(
        agent_id=key.agent,
        agent_type=described.agent_type,
        created_at=_same_time(carried.created_at, described.created_at),
        last_active_at=last_active_at,
        context=context,
        memory=_memory(records, carried),
        plugins=plugins,
        metadata=_metadata(described),
        extra={**carried.state, **versions},
    )


def item_of(record: Record) -> msgspec.Raw:
    """Return a record of the history as an item: what it was made of, or what it is."""
    if IMPORTED_AS.encode() in record.payload:
        fields = fields_of(record.payload)
        if IMPORTED_AS in fields:
            return fields[IMPORTED_AS]
    return msgspec.Raw(record.payload)


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


def _plugins_in(records: Iterable[Record]) -> tuple[Fields, Fields]:
    """Return the states of all contributors by name, and the field of their versions."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == STATE:
            name = decode(record.payload, StateSet).name
            if name.startswith(_FOLDER):
                by_name.setdefault(name, []).append(record)
    states: Fields = {}
    versions: dict[str, int] = {}
    for document, changes in by_name.items():
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
    entries = msgspec.convert(
        list(index.entries.values()), list[SerializedMemoryEntry], from_attributes=True
    )
    for entry in entries:
        entry.value = compact(bytes(entry.value))
        entry.extra = carried.entries.get(entry.key, {})
    stats = Stats(extra=carried.stats)
    memory = SerializedMemoryState(entries=entries, stats=stats, extra=carried.memory)
    count_entries(memory)
    return memory


def _metadata(described: SessionDocument) -> SessionMetadata:
    labels = described.metadata
    extra = {name: compact(bytes(raw)) for name, raw in labels.extra.items()}
    if labels.owner is not None:
        extra["owner"] = msgspec.Raw(encode(labels.owner))
    return SessionMetadata(title=labels.title, tags=list(labels.tags), extra=extra)


def _same_time(written: str, iso: str) -> str:
    """Return a time as it was written, if it is still that time."""
    if not written:
        return iso
    try:
        same = datetime.datetime.fromisoformat(written) == datetime.datetime.fromisoformat(iso)
    except (ValueError, TypeError):  # no time, or one without a zone: nothing to compare
        return written
    return written if same else iso


# A whole state as the records of a new log


# The log inside a state, for an import that loses nothing


FIELD: Final = "perdure"
FORMAT: Final = 2


_AS_SPOKEN: Final = msgspec.Raw(b"")


class _Line(msgspec.Struct, omit_defaults=True):
    kind: str
    payload: msgspec.Raw = _AS_SPOKEN
    """Empty, and not written: the next item of the history, or what ``text`` says."""
    text: str = ""
    """A payload with whitespace between its tokens, which JSON within JSON may lose."""
    spoken: bool = False
    """True if the next item of the history was made of it, and reads otherwise."""
    end: bool = True
    epoch: int = 0
    """Number of an epoch, where one begins."""


class _Own(msgspec.Struct, kw_only=True):
    format: int = 1
    sha256: str
    """Of the rest of the state."""
    session: str
    tenant: str
    first: int | msgspec.UnsetType = msgspec.UNSET
    """The number of the log's first record, if that is not 1: then ``format`` is 2."""
    log: list[_Line]


_OF_ITS_STORE = HOLDER_KINDS | {BASE, ENDING, FORK}
"""Kinds that say how a log lies among the others of its store: elsewhere they mean nothing."""


class NativeLog(msgspec.Struct, frozen=True):
    """The records of a state, and whether the rest of it is what they fold to."""

    records: tuple[Record, ...]
    agrees: bool
    session: str
    tenant: str

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return self.records[-1].epoch if self.records else 0


def with_log(state: FullAgentState, key: SessionKey, records: Sequence[Record]) -> FullAgentState:
    """Return a state with the log that it was folded from."""
    spoken = iter(state.context.core.history)
    expected = next(spoken, None)
    lines = []
    for record in records:
        line = _line(record)
        if record.kind in SPOKEN and item_of(record) == expected:
            # One that was taken back may look like the one that stays: the bytes are the same.
            if expected == line.payload:
                line.payload = _AS_SPOKEN
            else:
                line.spoken = True
            expected = next(spoken, None)
        lines.append(line)
    own = _Own(sha256=_digest(state), session=key.session, tenant=key.tenant, log=lines)
    if records and records[0].seq != 1:
        own.format, own.first = FORMAT, records[0].seq
    extra = {**state.extra, FIELD: msgspec.Raw(encode(own))}
    return msgspec.structs.replace(state, extra=extra)


def _line(record: Record) -> _Line:
    line = _Line(record.kind, msgspec.Raw(record.payload), end=record.end)
    if compact(record.payload) != line.payload:
        line.payload, line.text = _AS_SPOKEN, record.payload.decode()
    if record.kind == EPOCH:
        line.epoch = record.epoch
    return line


def log_in(state: FullAgentState) -> NativeLog | None:
    """Return the log that a state carries, None if it carries none.

    Raises:
        CorruptRecordError: It is damaged.
        UnsupportedVersionError: A newer release wrote it.

    """
    raw = state.extra.get(FIELD)
    if raw is None:
        return None
    own = decode(bytes(raw), _Own)
    if own.format > FORMAT:
        raise UnsupportedVersionError(
            f"the log in the state of {state.agent_id!r} has format {own.format}, this release "
            f"reads up to {FORMAT}: use a newer release of perdure",
            agent=state.agent_id,
            format=own.format,
        )
    agrees = own.sha256 == _digest(state)
    return NativeLog(_records(state, own, agrees=agrees), agrees, own.session, own.tenant)


def _records(state: FullAgentState, own: _Own, *, agrees: bool) -> tuple[Record, ...]:
    spoken = iter(state.context.core.history)
    records, epoch = [], 0
    for seq, line in enumerate(own.log, own.first or 1):
        epoch = line.epoch or epoch
        payload = line.text.encode() or bytes(line.payload)
        if not payload:
            payload = bytes(next(spoken, b""))
        elif line.spoken:
            next(spoken, None)
        if not payload and agrees:
            raise CorruptRecordError(
                f"the log in the state of {state.agent_id!r} lacks the payload of {seq}",
                agent=state.agent_id,
                seq=seq,
            )
        records.append(Record(seq, epoch, line.kind, spelled(payload), line.end))
    return tuple(records)


def entries_of(log: NativeLog) -> list[Entry]:
    """Return the log's records for a new log, numbered as they were.

    Its first record is the epoch that the new log has itself; the places of later ones are kept.
    One more says since when the session is.
    """
    blank = Entry(META, encode(MetadataPayload()))  # says nothing, and has a number
    described = decode(fold_session(None, SessionKey("any"), log.records), SessionDocument)
    since = MetadataPayload(created_at=described.about.created_at)
    entries = [
        blank._replace(end=record.end)
        if record.kind in _OF_ITS_STORE
        else Entry(record.kind, record.payload, record.end)
        for record in log.records[1:]
    ]
    return [*entries, Entry(META, encode(since))]


def _is_plugin(record: Record) -> bool:
    if record.kind != STATE:
        return False
    try:
        return not decode(record.payload, StateSet).name.startswith("state/")
    except FormatError:
        return False


def _digest(state: FullAgentState) -> str:
    payload = {name: raw for name, raw in state.extra.items() if name != FIELD}
    data = write_state(msgspec.structs.replace(state, extra=payload))
    fields = msgspec.json.encode(decode(data), order="sorted")
    return hashlib.sha256(fields).hexdigest()


_FORMATS: Final = MESSAGE_KINDS | {
    *(CONTEXT, *HOLDER_KINDS, FOREIGN, MEMORY_DROP, MEMORY_SET, META, OUTSIDE, RETRACT),
    TURN,
}
"""The kinds whose records the formats have a place for, or that only number others."""


class NewLog(msgspec.Struct, frozen=True):
    """The records for a new log, after its epoch record."""

    entries: tuple[Entry, ...]
    """In groups as they were, or one group."""
    findings: tuple[Finding, ...] = ()


def unfold(state: FullAgentState, *, now: float) -> NewLog:
    """Return the records that a state is made of.

    Args:
        state: Read by `read_state`.
        now: Seconds since 1970, for what does not say when it was.

    Raises:
        CorruptRecordError: perdure's own part of it is damaged.

    """
    log = log_in(state)
    if log is not None and log.agrees:
        return NewLog(tuple(entries_of(log)))
    findings: list[Finding] = []
    entries = [_meta(state, now, findings), *_conversation(state, findings)]
    if state.memory is not None:
        for serialized in state.memory.entries:
            entry = msgspec.convert(serialized, MemoryEntry, from_attributes=True)
            entries.append(Entry(MEMORY_SET, encode(entry)))
    versions = decode(bytes(state.extra.get(VERSIONS, b"{}")), dict[str, int])
    for name, raw in _plugins(state, findings).items():
        change = StateSet(f"{_FOLDER}{name}.json", raw, version=versions.get(name, 1))
        entries.append(Entry(STATE, encode(change)))
    if log is not None:  # what it holds beyond the kinds that the formats have a place for
        entries += [
            Entry(record.kind, record.payload)
            for record in log.records
            if record.payload and record.kind not in _FORMATS and not _is_plugin(record)
        ]
        detail = "it was changed by somebody else: its turns and retractions were left out"
        findings.append(Finding("mended", "perdure", detail))
    entries.append(carried_of(state))
    return NewLog(_one_group(entries), tuple(findings))


def _one_group(entries: list[Entry]) -> tuple[Entry, ...]:
    last = len(entries) - 1
    return tuple(entry._replace(end=place == last) for place, entry in enumerate(entries))


def _meta(state: FullAgentState, now: float, findings: list[Finding]) -> Entry:
    metadata = state.metadata
    clean, source = _redacted(metadata.extra, "metadata", findings)
    owner = decode(bytes(clean["owner"])) if "owner" in clean else None
    if isinstance(owner, str):
        del clean["owner"]
    meta = MetadataPayload(
        title=metadata.title,
        tags=metadata.tags,
        owner=owner if isinstance(owner, str) else None,
        metadata=clean,
        at=_seconds(state.last_active_at) or now,
        agent_type=state.agent_type,
        created_at=_seconds(state.created_at),
        redacted=source,
    )
    return Entry(META, encode(meta))


def _redacted(fields: Fields, what: str, findings: list[Finding]) -> tuple[Fields, list[str]]:
    """Return fields without credentials; what holds none stays as it was written."""
    plain = {name: decode(bytes(raw)) for name, raw in fields.items()}
    clean, paths = redact(plain)
    if paths:
        findings.append(Finding("redacted", what, ", ".join(paths)))
    redacted = {
        name: raw if clean[name] is plain[name] else msgspec.Raw(encode(clean[name]))
        for name, raw in fields.items()
    }
    return redacted, list(paths)


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
    record = _from_chat(message, payload)
    return Entry(kind_of(message), spelled(payload)) if record is None else encode_message(record)


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
    for call in listed if isinstance(listed, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return ()
        given = arguments(function.get("arguments"))
        calls.append(ToolCall(str(call.get("id", "")), function["name"], given))
    return tuple(calls)


# the rest


def _plugins(state: FullAgentState, findings: list[Finding]) -> Fields:
    """Return the states of all contributors, those of the context included."""
    plugins, context = dict(state.plugins), state.context
    if context.tools != ToolState():
        plugins[TOOLS] = msgspec.Raw(write_open(context.tools))
    if context.permissions != PermissionState():
        plugins[PERMISSIONS] = msgspec.Raw(write_open(context.permissions))
    if context.config:
        config, source = _redacted(context.config, "context.config", findings)
        if source:
            config["redacted"] = msgspec.Raw(encode(source))
        plugins[CONFIG] = msgspec.Raw(encode(config))
    for name in [name for name in plugins if not all(name.split("/"))]:
        findings.append(
            Finding("left out", f"plugins.{name}", "nothing can be stored by this name")
        )
        del plugins[name]
    return plugins


# Memories as records after those of the state


_FIRST = 2
"""The seq of the first record of an `NewLog`: the epoch record comes before it."""


class StateMemories(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading."""

    archived: tuple[TraceMessage, ...] = ()
    """Messages before the last compaction, oldest first."""
    active: tuple[TraceMessage, ...] = ()
    """And since."""
    episodic: tuple[EpisodicItem, ...] = ()
    semantic: tuple[SemanticItem, ...] = ()
    context: WorkingContext | None = None
    agent_id: str = ""
    """Whose it is, as far as the files say."""
    findings: tuple[Finding, ...] = ()


def with_history(state: FullAgentState, read: StateMemories) -> FullAgentState:
    """Return a state whose history is what the traces say, if it has none of its own."""
    core = state.context.core
    if core.history:
        return state
    messages = [*read.archived, *read.active]
    history = [msgspec.Raw(encode_message(message.message).payload) for message in messages]
    core = msgspec.structs.replace(core, history=history)
    context = msgspec.structs.replace(state.context, core=core)
    return msgspec.structs.replace(state, context=context)


def with_memories(unfolded: NewLog, read: StateMemories, context: Sequence[Entry] = ()) -> NewLog:
    """Return the records followed by the memories, all of it one group.

    Args:
        unfolded: What the state was made into; it carried no log.
        read: What is remembered.
        context: What the working context is replaced by, if it is.

    """
    entries = unfolded.entries
    seqs = [_FIRST + at for at, entry in enumerate(entries) if entry.kind in MESSAGE_KINDS]
    memories = [
        *(item_entry(_placed(item, read, seqs)) for item in read.episodic),
        *(item_entry(item) for item in read.semantic),
        *context,
    ]
    return NewLog(_one_group([*entries, *memories]), (*unfolded.findings, *read.findings))


def _placed(item: EpisodicItem, read: StateMemories, seqs: Sequence[int]) -> EpisodicItem:
    """Return an item as of the record that the last message it sums up has here.

    Counted from the end: a state's own history may begin earlier than the traces.
    """
    later = len(read.active)
    if item.as_of_seq > 0:
        known = [entry.seq for entry in (*read.archived, *read.active)]
        later = len(known) - bisect_right(known, item.as_of_seq)
    upto = len(seqs) - later
    as_of = seqs[upto - 1] if upto > 0 and (read.archived or read.active) else 0
    return msgspec.structs.replace(item, as_of_seq=as_of)


def agrees(context: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Say whether a context ends with what was said last, so that nothing was said since."""
    return not messages or (bool(context) and _gist(context[-1]) == _gist(messages[-1]))


def _gist(message: Message) -> tuple[object, ...]:
    result = message.tool_result
    calls = tuple((call.id, call.name) for call in message.tool_calls)
    return message.role, message.text, calls, None if result is None else result.call_id
