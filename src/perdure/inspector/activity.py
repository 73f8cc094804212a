"""Activity of a session: its turns with their times and tokens, and whether work goes on in it.

Records in, values out; nothing is read here. A session of an SDK's adapter has no records of turns:
there a turn is a user's message and what follows it, up to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from perdure.adapters.envelopes import ENVELOPE, PartEnvelope, joined
from perdure.errors import FormatError
from perdure.memory.documents import TurnPayload
from perdure.records.json import decode
from perdure.records.manifest import LeaseState
from perdure.records.messages import Message
from perdure.records.records import MESSAGE_KINDS, TURN, Record

TAIL: Final = 64
"""Records at a log's end that tell whether work goes on."""
CANCELED: Final = frozenset(
    {"CancelledError", "Cancelled", "KeyboardInterrupt", "SystemExit", "GeneratorExit"}
)
"""Exceptions that end a turn because its program stopped, not because it failed."""

StatusName = Literal["running", "interrupted", "failed", "idle"]


class SessionStatus(msgspec.Struct, frozen=True):
    """Whether work goes on in a session, and how the newest ended."""

    name: StatusName
    """Running: unfinished, and a process holds the session. Interrupted: unfinished, and none does,
    or it was canceled, or it waits for a person. Failed: an exception ended it, or saves fail."""
    detail: str = ""


class Tokens(msgspec.Struct, frozen=True):
    """Tokens that model calls took, as far as the log has them."""

    input: int = 0
    output: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.input + other.input, self.output + other.output)


class TurnShown(msgspec.Struct, kw_only=True):
    """One turn."""

    first: int
    """Its first record."""
    last: int | None = None
    """Its last record; None if that is not known."""
    number: int = 0
    """0 where the log does not number turns."""
    name: str = ""
    """The id that its caller gave."""
    status: Literal["running", "interrupted", "failed", "done", ""] = ""
    """Empty where the log does not say: such a turn ends where the next one begins."""
    is_outside: bool = False
    """True for what was appended between the turns of a session that has records of them."""
    error: str = ""
    at: float | None = None
    """Its begin, in seconds since 1970."""
    took: float | None = None
    """Seconds; None while it is unfinished."""
    tokens: Tokens = Tokens()


def is_held(holder: LeaseState | None) -> bool:
    """Return whether a process holds a session, as far as the store knows."""
    return holder is not None and not holder.released and holder.alive is not False


def unfinished(what: str, *, held: bool) -> SessionStatus:
    """Return the status of a session whose newest work has no end."""
    if held:
        return SessionStatus("running", what)
    return SessionStatus("interrupted", f"{what}: no process goes on with it")


def status_of(newest_first: Iterable[Record], *, held: bool) -> SessionStatus:
    """Return the status that the newest records of a log tell."""
    newest: Record | None = None
    for record in newest_first:
        if record.kind == TURN:
            status = _turn_status(record, held=held)
            if status is not None:
                return status
            break
        if newest is None and record.kind in MESSAGE_KINDS:
            newest = record
    if newest is None or not _wants_answer(newest):
        return SessionStatus("idle")
    return unfinished("the last message has no answer", held=held)


class _Said(msgspec.Struct):
    role: str = ""
    tool_payload: dict[str, Any] | None = None


def _wants_answer(record: Record) -> bool:
    try:
        said = decode(record.payload, _Said)
    except FormatError:
        return False
    return said.role != "assistant" or bool((said.tool_payload or {}).get("tool_calls"))


def _turn_status(record: Record, *, held: bool) -> SessionStatus | None:
    """Return what a turn's newest record says; None if its messages have to be looked at."""
    try:
        turned = decode(record.payload, TurnPayload)
    except FormatError:
        return None
    if _is_open_ended(record, turned):
        return None
    named = f"turn {turned.number}"
    if turned.phase == "begin":
        return unfinished(named, held=held)
    if turned.phase == "interrupted":
        return SessionStatus(
            _cut_off_by(turned.error), f"{named} ended with {turned.error or 'no answer'}"
        )
    return SessionStatus("idle")


def _is_open_ended(record: Record, turned: TurnPayload) -> bool:
    """Return whether it begins a turn of an SDK, in one group with the turn's first message."""
    return turned.phase == "begin" and not (record.end or turned.resumed)


def _cut_off_by(error: str | None) -> Literal["interrupted", "failed"]:
    return "failed" if error and error not in CANCELED else "interrupted"


def turns_in(records: Iterable[Record], *, held: bool) -> list[TurnShown]:
    """Return the turns that begin or end in a run of records, oldest first.

    Args:
        records: Records of a log, oldest first; only those of turns count.
        held: Whether a process holds the session: then the newest turn may be running.

    """
    turns: list[TurnShown] = []
    open_turn: TurnShown | None = None
    is_open_ended = False
    for record in records:
        if record.kind != TURN:
            continue
        try:
            turned = decode(record.payload, TurnPayload)
        except FormatError:
            continue
        if turned.phase == "begin":
            if open_turn is not None:
                open_turn.last = record.seq - 1
                if not is_open_ended:  # its process ended in it
                    open_turn.status = "interrupted"
            is_open_ended = _is_open_ended(record, turned)
            open_turn = TurnShown(
                first=record.seq,
                number=turned.number,
                name=turned.turn if turned.given else "",
                at=turned.at or None,
            )
            turns.append(open_turn)
            continue
        if open_turn is None:  # it began before these records
            open_turn = TurnShown(first=0, number=turned.number)
            turns.append(open_turn)
        open_turn.last, open_turn.error = record.seq, turned.error or ""
        open_turn.status = "done" if turned.phase == "end" else _cut_off_by(turned.error)
        if open_turn.at is not None and turned.at:
            open_turn.took = max(turned.at - open_turn.at, 0.0)
        open_turn.tokens = Tokens(turned.input_tokens, turned.output_tokens)
        open_turn = None
    if open_turn is not None and not is_open_ended:
        open_turn.status = "running" if held else "interrupted"
    return turns


class Heading(msgspec.Struct):
    """A message's place and the facts that its turn's heading needs."""

    seq: int
    role: str
    at: float | None
    tokens: Tokens


def headings(messages: Sequence[Heading], recorded: Sequence[TurnShown]) -> dict[int, TurnShown]:
    """Return the turns of messages, each by the first message of it that is among these.

    Where no record of a turn covers a message, turns begin with users' messages.
    """
    found: dict[int, TurnShown] = {}
    turn: TurnShown | None = None
    is_recorded = False
    counted = [one for one in recorded if one.tokens != Tokens()]  # its end has the sum
    role = ""
    for message in messages:
        known = next((one for one in recorded if _covers(one, message.seq)), None)
        if known is not None:
            if known is not turn:
                turn, is_recorded = known, True
                found[message.seq] = turn
        elif turn is None or is_recorded or (message.role == "user" != role):
            turn = TurnShown(first=message.seq, at=message.at, is_outside=bool(recorded))
            is_recorded = False
            found[message.seq] = turn
        assert turn is not None
        if not any(one is turn for one in counted):
            turn.tokens += message.tokens
        if not is_recorded:
            turn.last = message.seq
        if not (turn.status or turn.is_outside) and turn.at is not None and message.at is not None:
            turn.took = max(message.at - turn.at, 0.0)
        role = message.role
    return found


def _covers(turn: TurnShown, seq: int) -> bool:
    return turn.first <= seq and (turn.last is None or seq <= turn.last)


# Tokens


class _Usage(msgspec.Struct):
    usage: Any = None
    usage_metadata: Any = None
    camel: Any = msgspec.field(default=None, name="usageMetadata")


_INPUT: Final = ("input_tokens", "prompt_tokens", "prompt_token_count", "promptTokenCount")
_OUTPUT: Final = (
    *("output_tokens", "completion_tokens"),
    *("candidates_token_count", "candidatesTokenCount"),
)


def tokens_in(usage: Any) -> Tokens:
    """Return the tokens that a provider's or an SDK's account of an answer names."""
    if not isinstance(usage, dict):
        return Tokens()
    return Tokens(_count(usage, _INPUT), _count(usage, _OUTPUT))


def _count(usage: dict[str, Any], names: Sequence[str]) -> int:
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)


def tokens_of(message: Message) -> Tokens:
    """Return the tokens that a message's SDK has kept with it."""
    field = message.extra.get(ENVELOPE)
    try:
        if field is not None:
            envelope = decode(bytes(field), PartEnvelope)
            if envelope.of > 1:
                return Tokens()
            usage = decode(joined([(message, envelope)]), _Usage)
        else:
            usage = _Usage(
                *(
                    None if (raw := message.extra.get(name)) is None else decode(bytes(raw))
                    for name in ("usage", "usage_metadata", "usageMetadata")
                )
            )
    except (FormatError, ValueError, TypeError, AttributeError):
        return Tokens()
    return tokens_in(usage.usage or usage.usage_metadata or usage.camel)
