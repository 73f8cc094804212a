"""The documents that a log folds to, and the payloads of the records that change them.

Pure: old bytes and the records after them in, new bytes out. Each fold is a function of the records
alone, so a lost document can always be built again. The working context is in `context`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from perdure.errors import FormatError
from perdure.memory.context import replaced_in
from perdure.memory.index import (
    MEMORY,
)
from perdure.memory.ledger import LEDGER, LEDGER_KINDS
from perdure.records.checkpoints import CHECKPOINTS, TimestampPayload
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.records.records import (
    CHECKPOINT,
    CHECKPOINTS_PRUNED,
    EVENT,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE_KINDS,
    META,
    RETRACT,
    STATE,
    TAKEN,
    TURN,
    Record,
)

TIMED_KINDS = frozenset({EVENT, CHECKPOINT, CHECKPOINTS_PRUNED})
"""Kinds whose records have a time on the clock."""


def stamp_of(payload: bytes) -> int:
    """Return a record's time on the clock; 0 if it has none, as records of other programs.

    >>> stamp_of(b'{"timestamp":7,"kind":"custom"}')
    7
    """
    try:
        return decode(payload, TimestampPayload).timestamp
    except FormatError:
        return 0


SESSION = "session.json"
EPISODIC = "episodic.jsonl"
SEMANTIC = "semantic.jsonl"

TURN_IDS = 1000
"""Number of turns back that a retry is recognized by its id."""
TAKEN_IDS = 1000
"""Number of posts back that a retry is recognized by its key."""


class TurnPayload(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The payload of a turn's begin, end or interruption."""

    turn: str
    number: int
    phase: str
    """begin, end or interrupted."""
    at: float = 0.0
    """Seconds since 1970."""
    error: str | None = None
    """The type of the exception that interrupted it."""
    given: bool = False
    """True if the caller chose the id, so that it identifies a retry."""
    request: str | None = None
    """A fingerprint of what was asked, in the begin of a turn whose caller said it."""
    attempt: int = 0
    """Number of the attempt at a named turn that begins, from 1."""
    resumed: bool = False
    """True if it continues what that attempt had left."""
    input_tokens: int = 0
    """Tokens that its model calls read, in the record of its end; 0 where they were not counted."""
    output_tokens: int = 0
    """Tokens that they wrote."""


class InboxTakenPayload(msgspec.Struct):
    """The payload of the record that ends a group of posted items."""

    ops: list[str]
    """The op ids of the group's items."""
    at: float = 0.0
    """Seconds since 1970."""


class MetadataPayload(msgspec.Struct, omit_defaults=True):
    """The payload of a change to a session's title, tags, owner or metadata."""

    title: str | None = None
    tags: list[str] | None = None
    owner: str | None = None
    metadata: dict[str, msgspec.Raw] = {}
    at: float | None = None
    agent_type: str | None = None
    created_at: float | None = None
    """Seconds since 1970, if the session is older than its log."""
    redacted: list[str] = []
    """JSON pointers to credentials that were removed from the metadata."""


class StateSet(msgspec.Struct, omit_defaults=True):
    """The payload of a change to a named state."""

    name: str
    """The document: ``state/<key>.json`` or ``plugins/<name>.json``."""
    value: msgspec.Raw = msgspec.Raw(b"null")
    types: dict[str, str] | None = None
    dropped: bool = False
    version: int = 1
    """The version of a contributor's own format."""
    partial: bool = False
    """The value holds only the top-level keys that changed."""
    gone: list[str] = []
    """With ``partial``: the top-level keys that were removed."""


class ItemsRestoredPayload(msgspec.Struct):
    """The payload that restores an earlier long-term memory: its first items stay."""

    memory: str
    keep: int = -1
    """Number of items that stay; -1 if the payload adds one item."""
    items: list[msgspec.Raw] = []
    """The items after them."""


class _ItemPayload(ItemsRestoredPayload):
    """The same, or one that adds an item."""

    item: msgspec.Raw = msgspec.Raw(b"null")


class SessionLabels(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """Title, tags, owner and metadata of a session."""

    title: str | None = None
    tags: tuple[str, ...] = ()
    owner: str | None = None
    extra: dict[str, msgspec.Raw] = {}
    """The JSON of all other metadata; `custom` has its values."""

    @property
    def custom(self) -> dict[str, Any]:
        """Return a copy of the metadata that ``describe(**metadata)`` was given."""
        return {name: decode(bytes(value)) for name, value in self.extra.items()}


class HistorySource(msgspec.Struct, gc=False):
    """The place of the history: it is in the log once, and not here."""

    as_of_seq: int
    kind: str = "log"


class SessionCounters(msgspec.Struct, rename="camel", gc=False):
    """The conversation's part of session.json."""

    history_source: HistorySource = msgspec.field(name="history_source")
    history: tuple[msgspec.Raw, ...] = ()
    tool_calls: tuple[msgspec.Raw, ...] = ()


class ContextState(msgspec.Struct, gc=False):
    """The context's part of session.json."""

    core: SessionCounters
    version: int = 1


class SessionDocument(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """session.json without its agent, as an open session holds it: the smaller memory layout."""

    version: int = 1
    agent_id: str
    session_id: str = "default"
    tenant: str = ""
    agent_type: str = "agent"
    created_at: str = ""
    last_active_at: str = ""
    turns: int = 0
    messages: int = 0
    turn_ids: dict[str, int] = {}
    """The numbers of the newest ended turns whose ids their callers chose."""
    taken: dict[str, int] = {}
    """The op ids of the items received last, and the seqs of the records that note them."""
    clock: int | msgspec.UnsetType = msgspec.UNSET
    """The session's logical clock, if it was used."""
    context: ContextState
    metadata: SessionLabels = msgspec.field(default_factory=SessionLabels)

    @property
    def about(self) -> About:
        """The fields that a listing shows."""
        return About(
            title=self.metadata.title,
            tags=tuple(self.metadata.tags),
            owner=self.metadata.owner,
            created_at=_seconds(self.created_at),
            updated_at=_seconds(self.last_active_at),
        )


class _WholeCore(SessionCounters, rename="camel", kw_only=True):
    system_prompt: str | msgspec.UnsetType = msgspec.UNSET
    instructions: str | msgspec.UnsetType = msgspec.UNSET


class _WholeContext(ContextState, kw_only=True):
    core: _WholeCore
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    permissions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # Always empty: each has a document of its own.
    plugins: dict[str, msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    config: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class WholeSessionDocument(SessionDocument, rename="camel", kw_only=True):
    """session.json with the description of its agent, which an open session need not hold.

    In documents of an older release those fields are unset.
    """

    context: _WholeContext

    @property
    def describes_agent(self) -> bool:
        """True if it has a description of the agent."""
        return self.context.tools is not msgspec.UNSET


class AgentParts(msgspec.Struct, frozen=True):
    """The description of an agent in session.json; None for unchanged parts."""

    system_prompt: str
    instructions: str | None = None
    tools: bytes | None = None
    permissions: bytes | None = None
    config: bytes | None = None


_NO_TOOLS = b'{"enabled":{},"namespaces":{},"priorities":{}}'
_NO_PERMISSIONS = b'{"version":1,"approvals":{},"blocklist":[],"allowlist":[]}'


class _At(msgspec.Struct):
    at: float | None = None
    created_at: float | None = None


def names_of(record: Record) -> tuple[str, ...]:
    """Return the documents, session.json aside, that a record changes."""
    kind = record.kind
    if kind in {MEMORY_SET, MEMORY_DROP}:
        return (MEMORY,)
    if kind == STATE:
        name = decode(record.payload, StateSet).name
        return (name, typed(name))
    if kind == ITEM:
        memory = decode(record.payload, _ItemPayload).memory
        return (SEMANTIC,) if memory == "semantic" else (EPISODIC,)
    if kind in {CHECKPOINT, CHECKPOINTS_PRUNED}:
        return (CHECKPOINTS,)
    return (LEDGER,) if kind in LEDGER_KINDS else ()


class SessionCounts(msgspec.Struct, frozen=True):
    """Counts that an open session knows without reading its log."""

    seq: int
    """Of the newest record."""
    created_at: str
    """The time of the first record, if no fold has it."""
    last_active_at: str
    turns: int
    messages: int
    turn_ids: dict[str, int]
    taken: dict[str, int]
    clock: int


def session_document(key: SessionKey) -> SessionDocument:
    """Return the document of a session that has no records."""
    return SessionDocument(
        agent_id=key.agent,
        session_id=key.session,
        tenant=key.tenant,
        context=ContextState(SessionCounters(HistorySource(as_of_seq=0))),
    )


def fold_session(
    old: bytes | None,
    key: SessionKey,
    records: Sequence[Record],
    parts: AgentParts | None = None,
    counts: SessionCounts | None = None,
) -> bytes:
    """Return session.json after ``records``, with the given parts of the agent's description.

    With ``counts``, ``records`` may leave out what does not change the labels.
    """
    document = (
        WholeSessionDocument(
            agent_id=key.agent,
            session_id=key.session,
            tenant=key.tenant,
            context=_WholeContext(core=_WholeCore(history_source=HistorySource(as_of_seq=0))),
        )
        if old is None
        else decode(old, WholeSessionDocument)
    )
    in_one_form(document)
    if counts is None:
        note_times(document, records)
    else:
        document.created_at = document.created_at or counts.created_at
        document.last_active_at = counts.last_active_at
    for record in records:
        note_record(document, record)
        document.context.core.history_source.as_of_seq = record.seq
    if counts is not None:
        document.turns, document.messages = counts.turns, counts.messages
        document.turn_ids, document.taken = counts.turn_ids, counts.taken
        document.clock = counts.clock or msgspec.UNSET
        document.context.core.history_source.as_of_seq = counts.seq
    if parts is not None:
        _set_agent(document.context, parts)
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def _set_agent(context: _WholeContext, parts: AgentParts) -> None:
    core = context.core
    core.system_prompt = parts.system_prompt
    if parts.instructions is not None or core.instructions is msgspec.UNSET:
        core.instructions = parts.instructions or ""
    context.tools = _part(parts.tools, context.tools, _NO_TOOLS)
    context.permissions = _part(parts.permissions, context.permissions, _NO_PERMISSIONS)
    context.plugins = {}
    context.config = _part(parts.config, context.config, b"{}")


def _part(new: bytes | None, old: msgspec.Raw | msgspec.UnsetType, usual: bytes) -> msgspec.Raw:
    """Return a part with all its required fields; the default if it is no object."""
    given = bytes(old or b"") if new is None else new
    fields = decode(usual, dict[str, msgspec.Raw])
    if given.startswith(b"{"):
        fields |= decode(given, dict[str, msgspec.Raw])
    return msgspec.Raw(msgspec.json.encode(fields))


def note_times(document: SessionDocument, records: Sequence[Record]) -> None:
    """Set the times of the first and the last record; reads few payloads to find them."""
    if not document.created_at:
        document.created_at = _first_time(records) or document.created_at
    document.last_active_at = _first_time(reversed(records)) or document.last_active_at


def _first_time(records: Iterable[Record]) -> str | None:
    times = (at for record in records if (at := time_of(record)) is not None)
    return next(map(iso_of, times), None)


def note_record(document: SessionDocument, record: Record) -> None:
    """Apply a record to a session's counters and labels."""
    if record.kind in MESSAGE_KINDS:
        document.messages += 1
    elif record.kind == RETRACT:
        document.messages -= replaced_in(record.payload)
    elif record.kind == TURN:
        turned = decode(record.payload, TurnPayload)
        document.turns = max(document.turns, turned.number)
        note_turn(document.turn_ids, turned)
    elif record.kind == TAKEN:
        note_taken(document.taken, record.seq, record.payload)
    elif record.kind in TIMED_KINDS:
        document.clock = max(document.clock or 0, stamp_of(record.payload)) or msgspec.UNSET
    elif record.kind == META:
        meta = decode(record.payload, MetadataPayload)
        _describe(document.metadata, meta)
        document.agent_type = meta.agent_type or document.agent_type
        if meta.created_at is not None:
            document.created_at = iso_of(meta.created_at)


DATED_KINDS = MESSAGE_KINDS | {TURN, META}
"""Kinds whose records have the time of the wall clock, if any."""


def time_of(record: Record) -> float | None:
    """Return the time of a record, None for an epoch: a moved log has other epochs."""
    if record.kind in {TURN, META}:
        return decode(record.payload, _At).at
    if record.kind in MESSAGE_KINDS and record.payload[:1] == b"{":
        return decode(record.payload, _At).created_at
    return None


def note_turn(turn_ids: dict[str, int], turned: TurnPayload) -> None:
    """Note an ended turn, by the id that its caller chose."""
    if turned.given and turned.phase == "end":
        turn_ids[turned.turn] = turned.number
        if len(turn_ids) > TURN_IDS:
            del turn_ids[next(iter(turn_ids))]


def note_taken(received: dict[str, int], seq: int, payload: bytes) -> None:
    """Note posted items that are in the log."""
    received.update(dict.fromkeys(decode(payload, InboxTakenPayload).ops, seq))
    while len(received) > TAKEN_IDS:
        del received[next(iter(received))]


def described(about: About, meta: bytes) -> About:
    """Return what a listing shows after a change of the labels."""
    change = decode(meta, MetadataPayload)
    return About(
        title=about.title if change.title is None else change.title,
        tags=about.tags if change.tags is None else tuple(change.tags),
        owner=about.owner if change.owner is None else change.owner,
        created_at=about.created_at if change.created_at is None else change.created_at,
        updated_at=about.updated_at,
    )


def _describe(metadata: SessionLabels, meta: MetadataPayload) -> None:
    if meta.title is not None:
        metadata.title = meta.title
    if meta.tags is not None:
        metadata.tags = tuple(meta.tags)
    if meta.owner is not None:
        metadata.owner = meta.owner
    metadata.extra = {**metadata.extra, **meta.metadata}


D = TypeVar("D", bound=SessionDocument)


def in_one_form(document: D) -> D:
    """Return a document with its times as they are written now; an older release had others."""
    created, active = _seconds(document.created_at), _seconds(document.last_active_at)
    document.created_at = "" if created is None else iso_of(created)
    document.last_active_at = "" if active is None else iso_of(active)
    return document


def _seconds(iso: str) -> float | None:
    return datetime.datetime.fromisoformat(iso).timestamp() if iso else None


def iso_of(at: float) -> str:
    """Return a time as session.json has it.

    >>> iso_of(1769853600.0)
    '2026-01-31T10:00:00.000Z'
    """
    time = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fold_items(old: bytes | None, records: Iterable[Record]) -> bytes:
    """Return episodic.jsonl or semantic.jsonl after ``records``: one line per item."""
    parts = [old or b""]
    for record in records:
        back = decode(record.payload, _ItemPayload)
        if back.keep < 0:
            parts.append(bytes(back.item) + b"\n")
        else:
            retained = b"".join(parts).splitlines(keepends=True)[: back.keep]
            parts = retained + [bytes(item) + b"\n" for item in back.items]
    return b"".join(parts)


def typed(name: str) -> str:
    """Return the name of the document with a state's types, next to the state's own."""
    return f"typed/{name}"


def fold_state(name: str, old: bytes | None, records: Iterable[Record]) -> bytes | None:
    """Return a state's document after ``records``, None if there is none.

    A plain JSON value is stored bare under its name, so that people can read it. Under
    ``typed(name)`` is a value with types, in the form of its record; or the version of a bare
    value, if not 1.
    """
    for record in records:
        change = decode(record.payload, StateSet)
        if name == change.name:
            old = _bare(change, old)
        elif name == typed(change.name):
            old = _typed_value(change, record.payload)
    return old


def _bare(change: StateSet, old: bytes | None) -> bytes | None:
    if change.dropped or change.types:
        return None
    if not change.partial:
        return msgspec.json.format(bytes(change.value), indent=2)
    fields = decode(old or b"{}", dict[str, msgspec.Raw])
    for key in change.gone:
        fields.pop(key, None)
    fields.update(decode(bytes(change.value), dict[str, msgspec.Raw]))
    return msgspec.json.format(msgspec.json.encode(fields), indent=2)


def _typed_value(change: StateSet, payload: bytes) -> bytes | None:
    if change.dropped:
        return None
    if change.types:
        return payload
    version = change.version
    return None if version == 1 else msgspec.json.encode(StateSet(change.name, version=version))
