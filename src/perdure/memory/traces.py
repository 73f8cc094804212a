"""Raw traces: the log's messages, turn by turn.

Reads the store only, and so sees durable records: save first to see the newest. Messages outside of
any turn form turns of their own, each begun by a user message.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from perdure.memory.context import MessageRole, Retractions
from perdure.memory.documents import TurnPayload
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.messages import Message
from perdure.records.records import CONTEXT, MESSAGE_KINDS, RETRACT, TURN, Record
from perdure.store import Store

BEGIN: Final = "begin"
"""The reason of a context that begins a new conversation: older messages do not count."""


class _Reason(msgspec.Struct):
    reason: str = ""


class RawTurn(msgspec.Struct, kw_only=True):
    """One turn's messages, still encoded."""

    id: str = ""
    """Empty for messages outside of any turn."""
    messages: list[bytes] = msgspec.field(default_factory=list)
    seqs: list[int] = msgspec.field(default_factory=list)
    """The record of each message."""
    last: int = 0
    """The seq of its last record."""
    phase: Literal["open", "end", "interrupted"] = "open"


class Turns:
    """Group records into turns, fed oldest first."""

    def __init__(self) -> None:
        self.unfinished: RawTurn | None = None
        self._is_within = True  # until a turn begins, records may be the rest of one

    def feed(self, record: Record) -> RawTurn | None:
        """Add the next record; return the turn that it ends, if any."""
        if record.kind == TURN:
            return self._boundary(record)
        if record.kind not in MESSAGE_KINDS:
            return None
        turn, over = self.unfinished, None
        if turn is None or (not turn.id and turn.messages and _opens(record)):
            turn, over = RawTurn(), turn
            self.unfinished = turn
        turn.messages.append(record.payload)
        turn.seqs.append(record.seq)
        turn.last = record.seq
        return over

    def _boundary(self, record: Record) -> RawTurn | None:
        turned, turn = decode(record.payload, TurnPayload), self.unfinished
        within, self._is_within = self._is_within, False
        if turned.phase == "begin":
            self.unfinished = RawTurn(id=turned.turn, last=record.seq)
            return turn  # a process was killed within it, or it has no end record
        self.unfinished = None
        if turn is not None and within:  # its beginning was not read
            turn.id = turned.turn
        if turn is None or turn.id != turned.turn:
            return turn
        turn.last = record.seq
        turn.phase = "end" if turned.phase == "end" else "interrupted"
        return turn


async def read_turns(
    store: Store, key: SessionKey, *, after: int = 0, upto: int | None = None
) -> AsyncGenerator[RawTurn, None]:
    """Read the turns after a record, oldest first; the last one may still be open.

    Without retracted messages, and those before a new conversation. With ``upto``, as if the log
    ended there.
    """
    turns, spans = Turns(), await _live_spans(store, key, after, upto)
    if not spans:
        return
    start = spans[-1][0]
    before = spans[0][1] + 1
    async with contextlib.aclosing(store.read_log(key, after=start, before=before)) as log:
        async for chunk in log:
            for record in chunk.records:
                if any(low < record.seq <= high for low, high in spans):
                    over = turns.feed(record)
                    if over is not None:
                        yield over
    if turns.unfinished is not None:
        yield turns.unfinished


async def newest_turns(
    store: Store, key: SessionKey, count: int, *, exclude: str | None = None
) -> list[RawTurn]:
    """Return the newest turns, oldest first, without the one of an id."""
    wanted = count + (exclude is not None)
    newest: deque[Record] = deque()
    begins = users = 0
    async with contextlib.aclosing(_newest_first(store, key)) as records:
        async for record, counts in records:
            if not counts:
                continue
            newest.appendleft(record)
            begins += begun_by(record) is not None
            users += record.kind in MESSAGE_KINDS and _opens(record)
            if begins >= wanted or (begins == 0 and users >= wanted):
                break
    turns_found = [
        turn for turn in _grouped(newest) if turn.messages and turn.id != (exclude or None)
    ]
    return turns_found[-count:] if count > 0 else []


async def find_turn(store: Store, key: SessionKey, turn_id: str) -> RawTurn | None:
    """Return the turn of an id, None if there is none."""
    newest: deque[Record] = deque()
    async with contextlib.aclosing(_newest_first(store, key)) as records:
        async for record, counts in records:
            if not counts:
                continue
            newest.appendleft(record)
            begun = begun_by(record)
            if begun == turn_id:
                return _grouped(newest)[0]
            if begun is not None:
                newest.clear()
    return None


async def _newest_first(
    store: Store, key: SessionKey, *, after: int = 0, upto: int | None = None
) -> AsyncGenerator[tuple[Record, bool], None]:
    """Yield the records of the current conversation, newest first, and whether each counts."""
    retractions = Retractions()
    before = None if upto is None else upto + 1
    chunks = store.read_log(key, after=after, before=before, reverse=True)
    async with contextlib.aclosing(chunks) as log:
        async for chunk in log:
            for record in chunk.records:
                counts = retractions.shows(record) and record.kind != RETRACT
                if counts and record.kind == CONTEXT and _begins(record):
                    return
                yield record, counts


async def _live_spans(
    store: Store, key: SessionKey, after: int, upto: int | None
) -> list[tuple[int, int]]:
    """Return the spans of records after one that still count, as (after, up to), newest first."""
    spans = list[tuple[int, int]]()
    high = last = 0
    async with contextlib.aclosing(_newest_first(store, key, after=after, upto=upto)) as records:
        async for record, counts in records:
            if counts:
                high = high or record.seq
                last = record.seq - 1
            elif high:
                spans.append((record.seq, high))
                high = 0
    if high:
        spans.append((last, high))
    return spans


def _begins(record: Record) -> bool:
    return decode(record.payload, _Reason).reason == BEGIN


def begun_by(record: Record) -> str | None:
    """Return the id of the turn that a record begins, None if it begins none."""
    if record.kind != TURN:
        return None
    turned = decode(record.payload, TurnPayload)
    return turned.turn if turned.phase == "begin" else None


def _grouped(records: Iterable[Record]) -> list[RawTurn]:
    turns = Turns()
    grouped = [turns.feed(record) for record in records]
    return [turn for turn in (*grouped, turns.unfinished) if turn is not None]


def _opens(record: Record) -> bool:
    return decode(record.payload, MessageRole).role == "user"


SOURCE: Final = "perdure_source_event"
"""The field of a message with the event that it came from, if not the usual one."""

TraceType = Literal[
    "system", "user", "assistant", "reasoning", "tool_call", "tool_result", "tool_continuation"
]


class RawTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message, call or result of a turn, as a view of the log; field names are the format.

    Nothing is stored twice. Its id is its record's number, which is never used twice.
    """

    id: str
    ts: float
    """Seconds since 1970, 0 if the message has no time."""
    turn_id: str
    seq: int
    """The record of its message: the same for all traces of one message."""
    trace_type: TraceType
    content: str = ""
    media: dict[str, list[str]] = {}
    tool_name: str | None = None
    tool_call_id: str | None = None
    tool_args: Any = None
    tool_result: Any = None
    tool_error: str | None = None
    source_event: str | None = None
    """The event that it came from; None for the usual one of its type."""


def traces_of(turn_id: str, messages: Iterable[tuple[int, Message]]) -> Iterator[RawTrace]:
    """Return a turn's traces, in order; a message may be several.

    Args:
        turn_id: The turn.
        messages: With the seqs of their records.

    """
    after_tools = False
    for seq, message in messages:
        parts = list(_parts(message))
        if after_tools and message.role == "assistant":
            parts.insert(0, ("tool_continuation", {}))
        after_tools = message.tool_result is not None
        given = message.extra.get(SOURCE)
        source = None if given is None else msgspec.json.decode(given, type=str)
        for at, (trace_type, fields) in enumerate(parts):
            yield RawTrace(
                id=f"rt_{seq}" if at == 0 else f"rt_{seq}_{at}",
                ts=message.created_at or 0.0,
                turn_id=turn_id,
                seq=seq,
                trace_type=trace_type,
                source_event=None if trace_type == "tool_continuation" else source,
                **fields,
            )


def _parts(message: Message) -> Iterator[tuple[TraceType, dict[str, Any]]]:
    result = message.tool_result
    if result is not None:
        yield (
            "tool_result",
            {
                "tool_name": result.name,
                "tool_call_id": result.call_id,
                "tool_result": result.result,
                "tool_error": result.error,
            },
        )
        return
    if message.reasoning:
        yield "reasoning", {"content": message.reasoning}
    for call in message.tool_calls:
        yield (
            "tool_call",
            {"tool_name": call.name, "tool_call_id": call.id, "tool_args": call.arguments},
        )
    if message.text or not message.tool_calls:
        role: Any = message.role
        yield role, {"content": message.text, "media": _media(message)}


def _media(message: Message) -> dict[str, list[str]]:
    urls = {
        "images": message.image_urls,
        "audio": message.audio_urls,
        "video": message.video_urls,
    }
    return {kind: list(some) for kind, some in urls.items() if some}
