"""perdure's own part of a state: the log itself, for a way back that loses nothing.

The formats have no place for turns, retractions, named states or long-term memory. So a
state may carry the records, in the field ``perdure`` that others ignore. What is in the
history is not repeated. The part counts as long as the rest is what it was written with:
if another program has changed that, its change counts. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from perdure.errors import CorruptRecordError, FormatError, UnsupportedVersionError
from perdure.formats.from_records import SPOKEN, item_of
from perdure.formats.state import FullAgentState, compact, write_state
from perdure.memory.documents import MetadataPayload, SessionDocument, fold_session
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.records import BASE, ENDING, EPOCH, FORK, META, STATE, Entry, Record

FIELD: Final = "perdure"
FORMAT: Final = 1


_AS_SPOKEN: Final = msgspec.Raw(b"")


class _Line(msgspec.Struct, omit_defaults=True):
    kind: str
    payload: msgspec.Raw = _AS_SPOKEN
    """Empty, and not written: the next item of the history, or what ``text`` says."""
    text: str = ""
    """A payload with whitespace between its tokens, which JSON within JSON may lose."""
    spoken: bool = False
    """Whether the next item of the history was made of it, and reads otherwise."""
    end: bool = True
    epoch: int = 0
    """Where an epoch begins, its number."""


class _Own(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    sha256: str
    """Of the rest of the state."""
    session: str
    tenant: str
    log: list[_Line]


_OF_ITS_STORE = frozenset({BASE, ENDING, EPOCH, FORK})
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
        message = (
            f"the log in the state of {state.agent_id!r} has format {own.format}, this release "
            f"reads up to {FORMAT}: use a newer release of perdure"
        )
        raise UnsupportedVersionError(message, agent=state.agent_id, format=own.format)
    agrees = own.sha256 == _digest(state)
    return NativeLog(_records(state, own, agrees=agrees), agrees, own.session, own.tenant)


def _records(state: FullAgentState, own: _Own, *, agrees: bool) -> tuple[Record, ...]:
    spoken = iter(state.context.core.history)
    records, epoch = [], 0
    for seq, line in enumerate(own.log, 1):
        epoch = line.epoch or epoch
        payload = line.text.encode() or bytes(line.payload)
        if not payload:
            payload = bytes(next(spoken, b""))
        elif line.spoken:
            next(spoken, None)
        if not payload and agrees:
            message = f"the log in the state of {state.agent_id!r} lacks the payload of {seq}"
            raise CorruptRecordError(message, agent=state.agent_id, seq=seq)
        records.append(Record(seq, epoch, line.kind, payload, line.end))
    return tuple(records)


def entries_of(log: NativeLog) -> list[Entry]:
    """Return the log's records for a new log, numbered as they were.

    Its first record is the epoch that the new log has itself; the places of later ones are kept.
    One more says since when the session is.
    """
    was = Entry(META, encode(MetadataPayload()))  # says nothing, and has a number
    since = Entry(META, encode(MetadataPayload(created_at=_created_at(log))))
    entries = [
        was._replace(end=record.end)
        if record.kind in _OF_ITS_STORE
        else Entry(record.kind, record.payload, record.end)
        for record in log.records[1:]
    ]
    return [*entries, since]


def _created_at(log: NativeLog) -> float | None:
    key = SessionKey("of no matter")
    described = decode(fold_session(None, key, log.records), SessionDocument)
    return described.about.created_at


def left_of(log: NativeLog, known: frozenset[str]) -> list[Entry]:
    """Return what a log holds beyond the kinds that the formats have a place for.

    For a state that another program has changed.
    """
    return [
        Entry(record.kind, record.payload)
        for record in log.records
        if record.payload and record.kind not in known and not _is_plugin(record)
    ]


def _is_plugin(record: Record) -> bool:
    if record.kind != STATE:
        return False
    try:
        name: str = decode(record.payload, _Name).name
    except FormatError:
        return False
    return not name.startswith("state/")


class _Name(msgspec.Struct):
    name: str


def _digest(state: FullAgentState) -> str:
    payload = {name: raw for name, raw in state.extra.items() if name != FIELD}
    data = write_state(msgspec.structs.replace(state, extra=payload))
    fields = msgspec.json.encode(msgspec.json.decode(data), order="sorted")
    return hashlib.sha256(fields).hexdigest()
