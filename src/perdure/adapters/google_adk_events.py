"""Events of Google ADK as messages of a session, and what is known of them in memory.

An event is one message, or several: one with the results of two tools has two. Their envelopes hold
what the messages alone do not give back, so that an event's JSON comes back byte for byte.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from perdure._lib.lazy import from_extra
from perdure.adapters.claims import Large, as_kept, encode_item
from perdure.adapters.envelopes import PartEnvelope, Piece, joined, read_parts
from perdure.adapters.exact import dumped, loaded, not_json_at, shown
from perdure.adapters.items import newest_messages
from perdure.adapters.versions import unreadable, warn_untested
from perdure.errors import NotStorableError
from perdure.memory.documents import SessionDocument
from perdure.records.json import MAX_VALUE_DEPTH, is_deeper, too_deep
from perdure.records.keys import SessionKey
from perdure.records.messages import Message, ToolCall
from perdure.records.records import Entry
from perdure.session.internals import LogPlace
from perdure.session.session import Session, SessionView

with from_extra(
    "google.adk", used_by="PerdureSessionService", name="Google ADK", extra="google-adk"
):
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
warn_untested("google-adk")

SDK: Final = "google-adk"
SHAPE: Final = 1
"""The version of what is stored here of an event."""
TAIL: Final = 64
"""Messages that are read to find the newest events."""


class EventEnvelope(PartEnvelope, frozen=True, omit_defaults=True):
    """Fields stored with a message that is an event, or a part of one."""

    is_posted: bool = False
    """Whether it came through the inbox, from outside of any run."""


class SessionOrigin(msgspec.Struct, frozen=True):
    """Labels of a session that belongs to the SDK."""

    v: int
    created_at: float
    """Seconds since 1970."""


class EventRange(NamedTuple):
    """Which of a session's events are asked for; all of them without any limit."""

    newest: int | None = None
    """So many of the newest."""
    after: float | None = None
    """Seconds since 1970: those after the last older one."""
    seq: int | None = None
    """From that record on."""


class Tail(msgspec.Struct, frozen=True):
    """Where a session's events begin that no summary of the SDK's stands for."""

    seq: int
    """The record of the first of them."""
    at: float
    """When the first event happened that is left out; seconds since 1970."""
    state: dict[str, Any]
    """Changes of the session's state by the events before it."""
    artifacts: dict[str, int]
    """The versions of the artifacts that they have made."""


@dataclass(slots=True)
class StoredEvent:
    """An event as it is stored."""

    id: str
    seq: int
    """Its last record."""
    at: float
    """Seconds since 1970."""
    data: bytes
    is_posted: bool
    given: Event | None = None
    """What `event` returned last."""

    def event(self) -> Event:
        """Return the event as it was stored: the same object each time, unless it was changed."""
        if self.given is None or not self._is_unchanged(self.given):
            self.given = event_of(self.data)
        return self.given

    def _is_unchanged(self, event: Event) -> bool:
        try:
            return as_json(event) == self.data
        except ValueError:  # a caller has put something into it that is not JSON
            return False


class EventLog:
    """Events of a session, as of one of its versions: all, or the newest."""

    __slots__ = ("as_of", "by_id", "created_at", "events", "is_all", "key", "size", "state")

    def __init__(
        self,
        key: SessionKey,
        as_of: LogPlace | None,
        events: list[StoredEvent],
        created_at: float,
        *,
        is_all: bool,
    ) -> None:
        self.key: SessionKey = key
        self.as_of: LogPlace | None = as_of
        self.events: list[StoredEvent] = events
        self.is_all: bool = is_all
        self.created_at: float = created_at
        self.state: dict[str, Any] | None = None
        """The session's own state at that version, once it was read."""
        self.by_id: dict[str, StoredEvent] = {stored.id: stored for stored in events}
        self.size: int = sum(len(stored.data) for stored in events)

    def add(self, stored: StoredEvent, as_of: LogPlace | None, delta: Mapping[str, Any]) -> None:
        """Take in an event that was appended, and what it has changed in the state."""
        if self.state is not None:
            self.state.update(copy.deepcopy(dict(delta)))
        self.events.append(stored)
        self.by_id[stored.id] = stored
        self.size += len(stored.data)
        self.as_of = as_of

    def named(self, id: str, data: bytes) -> StoredEvent | None:
        """Return an event of an id, if this is its JSON."""
        stored = self.by_id.get(id)
        return stored if stored is not None and stored.data == data else None

    @property
    def written(self) -> StoredEvent | None:
        """The newest event that a run has appended; what was posted makes no session stale."""
        return next((stored for stored in reversed(self.events) if not stored.is_posted), None)

    @property
    def marker(self) -> str:
        """The revision that a session object has to know to be continued."""
        written = self.written
        return f"created {self.created_at}" if written is None else f"{written.seq} {written.id}"

    @property
    def updated_at(self) -> float:
        """When something was added last; seconds since 1970."""
        return self.events[-1].at if self.events else self.created_at

    def has_enough(self, wanted: EventRange) -> bool:
        """Whether there is what was asked for, and the newest event that a run appended."""
        if self.is_all:
            return True
        if self.written is None:
            return False
        count, after, seq = wanted
        return (
            (count is not None and len(self.events) >= count)
            or (after is not None and any(stored.at < after for stored in self.events))
            or (seq is not None and self.events[0].seq <= seq)
        )

    def as_events(self, stored: Iterable[StoredEvent]) -> list[Event]:
        """Return some of them as the SDK's.

        Raises:
            FormatError: Another version of the SDK wrote one that the installed one cannot read.

        """
        events = []
        for each in stored:
            try:
                events.append(each.event())
            except ValueError as error:
                what = f"session {self.key}: event {each.id} in record {each.seq}"
                raise unreadable(what, "google-adk", error) from error
        return events

    def recent(self, wanted: EventRange) -> list[StoredEvent]:
        """Return what was asked for: so many, and of these those after the last older one."""
        count, after, seq = wanted
        events = self.events if count is None else self.events[max(len(self.events) - count, 0) :]
        if after is not None:
            older = [place for place, stored in enumerate(events) if stored.at < after]
            events = events[older[-1] + 1 :] if older else events
        return [stored for stored in events if seq is None or stored.seq >= seq]


# Events as messages


def encoded(data: bytes, *, is_posted: bool) -> list[Entry | Large]:
    """Return an event as records; one that is too large for that as a whole."""
    event = shown(data)

    def envelope(at: int, of: int, pieces: tuple[Piece, ...]) -> EventEnvelope:
        return EventEnvelope(
            SDK, SHAPE, event["id"], at=at, of=of, pieces=pieces, is_posted=is_posted
        )

    return encode_item(
        data,
        _shown(event),
        envelope,
        now=event["timestamp"],
        what=f"event {event['id']}",
        path=event["id"],
        cure="; keep large parts as artifacts",
    )


def _shown(event: Mapping[str, Any]) -> list[Message]:
    """Return what an event says, as perdure's messages; at least one."""
    compaction = event["actions"].get("compaction")
    content = compaction["compacted_content"] if compaction else event.get("content")
    parts = (content or {}).get("parts") or []
    results = [
        _result(part["function_response"])
        for part in parts
        if part.get("function_response", {}).get("id")
    ]
    calls = [
        ToolCall(call["id"], call.get("name", ""), call.get("args", {}))
        for call in (part.get("function_call", {}) for part in parts)
        if call.get("id")
    ]
    texts = [part["text"] for part in parts if part.get("text") and not part.get("thought")]
    thoughts = [part["text"] for part in parts if part.get("text") and part.get("thought")]
    if results and not (texts or thoughts or calls):
        return results
    said = Message(
        role="user" if event["author"] == "user" else "assistant",
        content="".join(texts) if texts else None,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
    )
    return [said, *results]


def _result(response: Mapping[str, Any]) -> Message:
    return Message.tool(response["id"], response.get("response"), name=response.get("name"))


def _events(messages: Iterable[tuple[int, Message]]) -> Iterator[StoredEvent]:
    """Yield the events that messages are; of one that began before these, nothing."""
    for seq, message, parts in read_parts(messages, EventEnvelope, sdk=SDK, newest=SHAPE):
        if parts:
            about, at = parts[0][1], message.created_at or 0.0
            yield StoredEvent(about.id, seq, at, joined(parts), about.is_posted)
        else:
            yield _foreign(seq, message)


def _foreign(seq: int, message: Message) -> StoredEvent:
    """Return a message that is not the SDK's as an event; so is what anybody posts."""
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"text": message.reasoning, "thought": True})
    if message.text:
        parts.append({"text": message.text})
    for call in message.tool_calls:
        arguments = call.arguments if isinstance(call.arguments, dict) else {"text": call.arguments}
        parts.append({"function_call": {"id": call.id, "name": call.name, "args": arguments}})
    result = message.tool_result
    if result is not None:
        given = result.result if result.error is None else {"error": result.error}
        response = given if isinstance(given, dict) else {"result": given}
        answer = {"id": result.call_id, "name": result.name, "response": response}
        parts.append({"function_response": answer})
    is_model = message.role == "assistant"
    event = Event.model_validate(
        {
            "id": f"perdure-{seq}",
            "invocation_id": f"perdure-{seq}",
            "author": "model" if is_model else "user",
            "timestamp": message.created_at or 0.0,
            "content": {"role": "model" if is_model else "user", "parts": parts},
        }
    )
    return StoredEvent(event.id, seq, event.timestamp, as_json(event), is_posted=True)


def as_json(event: Event) -> bytes:
    """Return an event as it is stored.

    Raises:
        ValueError: It holds something that is not JSON.

    """
    return dumped(
        event,
        lambda: event.model_dump_json(exclude_none=True).encode(),
        lambda mode: event.model_dump(mode=mode, exclude_none=True),
    )


def event_of(data: bytes) -> Event:
    """Return an event that was stored.

    Raises:
        ValueError: The SDK does not read it.

    """
    return loaded(data, Event.model_validate_json, Event.model_validate)


def state_delta_of(actions: EventActions) -> dict[str, Any]:
    """Return the changes of the state that an event makes, as JSON has them.

    Raises:
        ValueError: One is not JSON.

    """
    data = dumped(
        actions.state_delta,
        lambda: actions.model_dump_json(include={"state_delta"}).encode(),
        lambda mode: actions.model_dump(mode=mode, include={"state_delta"}),
    )
    if is_deeper(data, MAX_VALUE_DEPTH):
        raise too_deep("the state", MAX_VALUE_DEPTH)
    changed: dict[str, Any] = json.loads(data)["state_delta"]
    return changed


def not_json(what: str, value: Any, error: ValueError) -> NotStorableError:
    """Return the error for something of the SDK's that is not JSON."""
    place, part = not_json_at(value, "")
    path = place.removeprefix(".")
    message = (
        f"{what}: the {type(part).__name__} at {path or 'its top'} is not JSON ({error}): return "
        "JSON from tools, and keep it in the state"
    )
    return NotStorableError(message, path=path or what, type=type(part).__name__)


# Reading


def origin_of(source: Session | SessionView) -> SessionOrigin | None:
    """Return what is said about a session that is the SDK's; None for any other."""
    return origin_in(source.info)


def origin_in(info: SessionDocument) -> SessionOrigin | None:
    """Return the same from what a session says of itself."""
    said = info.metadata.extra.get(SDK)
    return None if said is None else msgspec.json.decode(said, type=SessionOrigin)


def as_of(source: Session | SessionView) -> LogPlace | None:
    """Return the end of the log of a session held here, where no other process adds to it."""
    return LogPlace(source.version, source.epoch) if isinstance(source, Session) else None


async def read_log(source: Session | SessionView, wanted: EventRange) -> EventLog:
    """Return as many events as are asked for, or more; read backwards from the newest."""
    origin = origin_of(source)
    created_at = 0.0 if origin is None else origin.created_at
    count = None if wanted == EventRange() else TAIL + 2 * (wanted.newest or 0)
    while True:
        version = as_of(source)
        messages, is_all = await newest_messages(source, count)
        events = [*_events(messages)]
        log = EventLog(source.key, version, events, created_at, is_all=is_all)
        if log.has_enough(wanted) or count is None:
            return log
        count *= 4


# Events that a summary stands for


def tail_behind(log: EventLog, summary: Event, before: Tail | None) -> Tail | None:
    """Return where the events begin that are needed next to a summary; None: all are.

    What is left out is in the summary's range, and nothing later can ask for it: no open call,
    nothing of another branch, nothing of the newest invocation.

    Args:
        log: All events, or those from the last such place on.
        summary: The event of the SDK's compaction.
        before: The last such place.

    """
    stored = log.recent(EventRange(seq=None if before is None else before.seq))
    events = log.as_events(stored)
    end = _closed_calls(events[: _covered(events, summary)])
    if end in (0, len(stored)):
        return None
    state = {} if before is None else dict(before.state)
    artifacts = {} if before is None else dict(before.artifacts)
    for event in events[:end]:
        for key, value in as_kept(state_delta_of(event.actions)).items():
            if not key.startswith(("app:", "user:")):
                state[key] = value
        artifacts.update(event.actions.artifact_delta)
    at = events[0].timestamp if before is None else before.at
    known = {key: value for key, value in state.items() if value is not None}
    return Tail(stored[end].seq, at, known, artifacts)


def _covered(events: Sequence[Event], summary: Event) -> int:
    """Return how many of the first events a summary stands for."""
    about = summary.actions.compaction
    if about is None:
        return 0
    newest = [event.invocation_id for event in events if event.actions.compaction is None][-1:]
    for place, event in enumerate(events):
        older = event.actions.compaction
        begin, end = (
            (event.timestamp, event.timestamp)
            if older is None
            else (older.start_timestamp, older.end_timestamp)
        )
        is_inside = about.start_timestamp <= begin <= end <= about.end_timestamp
        is_seen = (event.branch, event.isolation_scope) == (summary.branch, summary.isolation_scope)
        is_open = bool(event.long_running_tool_ids) or event.invocation_id in newest
        if not is_inside or not is_seen or is_open:
            return place
    return len(events)


def _closed_calls(events: Sequence[Event]) -> int:
    """Return how many of the first events have no call that a later one answers."""
    waiting: set[str | None] = set()
    closed = 0
    for place, event in enumerate(events, 1):
        waiting -= {response.id for response in event.get_function_responses()}
        waiting |= {call.id for call in event.get_function_calls()}
        if not waiting:
            closed = place
    return closed


def with_base(events: list[Event], tail: Tail) -> list[Event] | None:
    """Return the events of a tail after one that sums up the state; None if all are needed.

    A rewind may take the summary back, and then what it stands for is needed.
    """
    if any(event.actions.rewind_before_invocation_id for event in events):
        return None
    actions = {"state_delta": tail.state, "artifact_delta": tail.artifacts}
    base = {"id": f"{SDK}-{tail.seq}", "author": "user", "timestamp": tail.at, "actions": actions}
    return [Event.model_validate(base), *events]
