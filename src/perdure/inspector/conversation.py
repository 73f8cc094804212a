"""A session's records as a page shows them: parts of messages, events with times, gaps.

Records in, values out; nothing is read here. A long text is cut, and says how long it is: its
part's number fetches the whole. Nothing here makes HTML: the templates escape texts.

A step of LangGraph's stores msgpack that names Python classes. It is decoded without LangGraph: no
class is imported, and nothing that is stored runs. An entry of the Claude Agent SDK is JSON.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from perdure.adapters.envelopes import ENVELOPE, SdkEnvelope, read_entry
from perdure.adapters.thread_log import SDK, Leaf, ThreadRecord, read_record
from perdure.errors import FormatError
from perdure.inspector.activity import Tokens, TurnShown, tokens_of
from perdure.inspector.threads import ThreadMessage, checkpoint_time, plain_value, role_of
from perdure.memory.documents import TurnPayload, time_of
from perdure.providers.issued import stamp_of
from perdure.records.json import decode
from perdure.records.media import decode_read
from perdure.records.messages import Message
from perdure.records.records import MESSAGE_KINDS, TURN, Record
from perdure.records.types import Registry
from perdure.session.contents import HistoryItem

SHORT: Final = 100
"""Characters of JSON that are shown in one line."""
LONGEST: Final = 4000
"""Characters of a part that a page shows at once."""
IDLE: Final = 60.0
"""Seconds without a record, from which on a timeline shows a gap instead of drawing it."""
_DATA_URL: Final = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,", re.IGNORECASE)


class ShownPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message: a text, reasoning, a call, a result, an image."""

    kind: str
    """text, reasoning, call, result, error, image, media or json."""
    text: str
    """At most `LONGEST` characters of it; for an image, what it is."""
    number: int
    """Its place in the record, by which the whole is asked for."""
    name: str = ""
    """The tool, of a call or a result."""
    size: int = 0
    """Characters of the whole."""
    is_embedded: bool = False
    """True if the record has the image's bytes."""

    @property
    def is_cut(self) -> bool:
        """True if there is more."""
        return self.size > len(self.text)


class ShownItem(msgspec.Struct, kw_only=True):
    """One item of a conversation, or one record."""

    seq: int
    kind: str
    role: str = ""
    at: float | None = None
    """Seconds since 1970."""
    source: str = ""
    """Whose SDK or provider it came from, if that is known."""
    parts: tuple[ShownPart, ...] = ()
    in_context: bool = False
    """True if the working context has it."""
    checkpoint: int | None = None
    """Of a thread's message: the record of the first checkpoint that has it."""
    place: int | None = None
    """Of a thread's message: its place among the thread's, from 0."""
    turn: TurnShown | None = None
    """The turn that it is the first message of, on its page."""
    tokens: Tokens = Tokens()


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record at its time."""

    item: ShownItem
    epoch: int
    ends_group: bool
    idle: float = 0.0
    """Seconds without a record before it, if that is a gap."""
    start: float = 0.0
    """Its place on the page's axis without the gaps, 0 to 100."""
    width: float = 0.0
    """The time since the record before, on that axis."""


class Blob(msgspec.Struct, frozen=True):
    """An image's bytes."""

    media_type: str
    data: bytes


def shown_item(item: HistoryItem, context: frozenset[int] = frozenset()) -> ShownItem:
    """Return an item of a session's history as a page shows it."""
    message = item.value
    if not isinstance(message, Message):
        part = ShownPart(kind="json", text=_json(message), number=0)
        return ShownItem(seq=item.seq, kind=item.kind, parts=(_cut(part),))
    return ShownItem(
        seq=item.seq,
        kind=item.kind,
        role=message.role,
        at=message.created_at,
        source=_source(message),
        parts=tuple(_cut(part) for part in parts_of(message)),
        in_context=item.seq in context,
        tokens=tokens_of(message),
    )


def shown_record(record: Record, registry: Registry) -> ShownItem:
    """Return a record of any kind as a page shows it; a damaged payload as it is."""
    if record.kind in MESSAGE_KINDS:
        try:
            message = decode_read(record.payload, registry)
            return shown_item(HistoryItem(record.seq, record.kind, message))
        except FormatError:
            pass
    step = shown_step(record)
    if step is not None:
        return step
    shown = raw_record(record)
    text = _turn_text(record) if record.kind == TURN else ""
    if not text:
        return shown
    part = ShownPart(kind="text", text=text, number=0, size=len(text))
    return msgspec.structs.replace(shown, parts=(part,))


def shown_step(record: Record, *, only_messages: bool = False) -> ShownItem | None:
    """Return a record of LangGraph's or the Claude Agent SDK's as a page shows it, or None.

    Args:
        record: The record.
        only_messages: None also for one that has said nothing, and for what a step wrote before.

    """
    step = step_of(record)
    if step is None or (only_messages and not (step.role and step.kind != "writes")):
        return None
    return ShownItem(
        seq=record.seq,
        kind=step.kind,
        role=step.role,
        at=step.at,
        source=step.sdk,
        parts=tuple(map(_cut, _step_parts(step))),
        in_context=True,
    )


def _step_parts(step: SdkStep) -> Iterator[ShownPart]:
    for number, (kind, name, value) in enumerate(step.parts):
        yield ShownPart(kind=kind, name=name, text=_json(value), number=number)


def raw_record(record: Record) -> ShownItem:
    """Return a record with its payload as it is stored."""
    part = ShownPart(kind="json", text=_payload(record), number=0)
    return ShownItem(seq=record.seq, kind=record.kind, at=_time(record), parts=(_cut(part),))


def whole_parts(record: Record, registry: Registry, *, raw: bool = False) -> list[ShownPart]:
    """Return a record's parts with their whole texts."""
    if record.kind in MESSAGE_KINDS and not raw:
        return list(parts_of(decode_read(record.payload, registry)))
    step = None if raw else step_of(record)
    if step is not None:
        return list(_step_parts(step))
    return [ShownPart(kind="json", text=_payload(record), number=0)]


def parts_of(message: Message) -> Iterator[ShownPart]:
    """Yield a message's parts, whole, in the order in which they are numbered."""
    for number, (kind, name, text) in enumerate(_parts(message) or _issued_parts(message)):
        embedded = kind == "image" and _DATA_URL.match(text) is not None
        yield ShownPart(kind=kind, text=text, number=number, name=name, is_embedded=embedded)


def image_in(message: Message, number: int) -> Blob | None:
    """Return the image that a message has as its part of a number; None if that is none."""
    parts = _parts(message)
    url = parts[number][2] if number < len(parts) and parts[number][0] == "image" else ""
    found = _DATA_URL.match(url)
    if found is None:
        return None
    try:
        return Blob(found[1].lower(), base64.b64decode(url[found.end() :]))
    except binascii.Error:
        return None


def timeline(
    records: Sequence[Record], registry: Registry, context: frozenset[int] = frozenset()
) -> list[LogRow]:
    """Return records as rows of a timeline, where long gaps take no room."""
    spans: list[tuple[float, float]] = []
    last: float | None = None
    axis = 0.0
    items = [shown_record(record, registry) for record in records]
    for item in items:
        gap = 0.0 if item.at is None or last is None else max(item.at - last, 0.0)
        width = 0.0 if gap >= IDLE else gap
        spans.append((gap if gap >= IDLE else 0.0, width))
        axis += width
        last = item.at if item.at is not None else last
    rows: list[LogRow] = []
    end = 0.0
    for record, item, (idle, width) in zip(records, items, spans, strict=True):
        rows.append(
            LogRow(
                item=msgspec.structs.replace(item, in_context=record.seq in context),
                epoch=record.epoch,
                ends_group=record.end,
                idle=idle,
                start=100 * end / (axis or 1),
                width=100 * width / (axis or 1),
            )
        )
        end += width
    return rows


_Part = tuple[str, str, str]
"""Kind, name, text."""


def _parts(message: Message) -> list[_Part]:
    parts: list[_Part] = []
    if message.reasoning:
        parts.append(("reasoning", "", message.reasoning))
    if isinstance(message.content, list):
        parts += map(_content_part, message.content)
    elif message.content:
        parts.append(("text", "", message.content))
    parts += [("call", call.name, _json(call.arguments)) for call in message.tool_calls]
    result = message.tool_result
    if result is not None:
        name = result.name or result.call_id
        failed = result.error is not None
        text = str(result.error) if failed else _json(result.result)
        parts.append(("error" if failed else "result", name, text))
    parts += [("image", "", url) for url in message.image_urls]
    parts += [("media", "", url) for url in (*message.audio_urls, *message.video_urls)]
    return parts


def _issued_parts(message: Message) -> list[_Part]:
    """Return what a message without parts of its own has of its provider's: a search, a thought."""
    stamp = stamp_of(message)
    items = () if stamp is None else stamp.items
    return [
        ("json", "", msgspec.json.format(bytes(item.block), indent=2).decode()) for item in items
    ]


def _content_part(part: Any) -> _Part:
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return "text", "", part["text"]
        image = _image_url(part)
        if image is not None:
            return "image", "", image
    return "json", "", _json(part)


def _image_url(part: dict[str, Any]) -> str | None:
    """Return the URL of a part that is an image in a provider's shape; None for any other part."""
    url = part.get("image_url")  # OpenAI: Responses, Chat Completions
    if isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str):
        return url
    source = part.get("source")  # Anthropic
    if part.get("type") == "image" and isinstance(source, dict):
        data = source.get("data")
        found = f"data:{source.get('media_type')};base64,{data}" if data else source.get("url")
        return found if isinstance(found, str) else None
    inline = part.get("inline_data") or part.get("inlineData")  # Gemini
    if isinstance(inline, dict):
        kind = inline.get("mime_type") or inline.get("mimeType")
        return f"data:{kind};base64,{inline.get('data')}"
    return None


def _source(message: Message) -> str:
    """Return whose SDK or provider a message came from."""
    envelope = message.extra.get(ENVELOPE)
    if envelope is not None:
        sdk = decode(bytes(envelope)).get("sdk")
        return sdk if isinstance(sdk, str) else ""
    stamp = stamp_of(message)
    return "" if stamp is None else stamp.provider


def _turn_text(record: Record) -> str:
    """Return what a turn's record says in words; "" if it cannot be read."""
    try:
        turned = decode(record.payload, TurnPayload)
    except FormatError:
        return ""
    named = f" ({turned.turn})" if turned.given else ""
    phase = {"begin": "begins", "end": "ends"}.get(turned.phase, turned.phase)
    return f"turn {turned.number}{named} {phase}" + (f": {turned.error}" if turned.error else "")


def _time(record: Record) -> float | None:
    try:
        return time_of(record)
    except FormatError:
        return None


def _payload(record: Record) -> str:
    text = record.payload.decode(errors="backslashreplace")
    try:
        return _formatted(text)
    except msgspec.DecodeError:
        return text


def _cut(part: ShownPart) -> ShownPart:
    text = part.text
    if part.kind == "image" and part.is_embedded:
        text = text[: text.index(",")]
        return msgspec.structs.replace(part, text=text, size=len(text))
    return msgspec.structs.replace(part, text=text[:LONGEST], size=len(text))


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    return _formatted(msgspec.json.encode(value, enc_hook=str).decode())


def _formatted(text: str) -> str:
    """Return JSON in one line if it is short, else in several."""
    line = msgspec.json.format(text, indent=0)
    return line if len(line) <= SHORT else msgspec.json.format(text, indent=2)


# Records of other SDKs: steps of LangGraph's, entries of the Claude Agent SDK's


_StepPart = tuple[str, str, Any]
"""Kind, name, value."""


class SdkStep(msgspec.Struct, frozen=True):
    """The content of one record of a graph's thread, or of a transcript."""

    role: str
    """Of its last message; "" if it has none."""
    at: float | None
    parts: list[_StepPart]
    kind: str
    """``checkpoint``, the state after a step; ``writes``, what a task has written before it; or
    ``entry``, of a transcript."""
    sdk: str = SDK
    names: list[str] = []
    """Of a thread: the value that each part is of."""


def step_of(record: Record) -> SdkStep | None:
    """Return what a record of an SDK's says; None for any other record, or an unreadable one."""
    try:
        step = read_record(record)
        if step is not None:
            return _graph_step(step)
        entry = read_entry(record, _EntryRecord, sdk=_TRANSCRIPT, newest=1)
        return None if entry is None else _entry_of(entry.entry)
    except (FormatError, ValueError, TypeError, RecursionError):
        return None


def _graph_step(stored: ThreadRecord) -> SdkStep:
    values = [
        (value.name, plain_value(value))
        for value in stored.values
        if isinstance(value, Leaf) and value.kind != "null"
    ]
    roles = [role for _, value in values if (role := role_of(value))]
    parts = [(name, part) for name, value in values for part in _graph_parts(value)]
    return SdkStep(
        role=roles[-1] if roles else "",
        at=None if stored.put is None else checkpoint_time(stored.put),
        parts=[part for _, part in parts],
        kind="writes" if stored.put is None else "checkpoint",
        names=[name for name, _ in parts],
    )


def thread_message(message: ThreadMessage, record: Record, *, in_state: bool) -> ShownItem:
    """Return a message of a thread as a page shows it, of the record that has it."""
    step = step_of(record)
    parts = () if step is None else zip(step.names, _step_parts(step), strict=True)
    return ShownItem(
        seq=message.seq,
        kind="message",
        role=message.role,
        at=message.at,
        source=SDK,
        parts=tuple(_cut(part) for name, part in parts if name == message.name),
        in_context=in_state,
        checkpoint=message.checkpoint,
    )


def _graph_parts(value: Any) -> list[_StepPart]:
    role = role_of(value)
    if not role:
        return [("json", "", value)]
    content = value["content"]
    if role == "tool":
        return [("result", str(value.get("name") or ""), content)]
    parts: list[_StepPart] = []
    if isinstance(content, list):
        parts += map(_content_part, content)
    elif content:
        parts.append(("text" if isinstance(content, str) else "json", "", content))
    calls = value.get("tool_calls") or ()
    parts += [("call", str(call.get("name")), call.get("args")) for call in calls]
    return parts


_TRANSCRIPT: Final = "claude-agent-sdk"


class _EntryRecord(SdkEnvelope, frozen=True):
    entry: dict[str, Any] | None = None


def _entry_of(entry: dict[str, Any] | None) -> SdkStep | None:
    """Return what an entry of a transcript says; None for one that is stored as text."""
    if entry is None:
        return None
    text = entry.get("timestamp")
    at = datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    message = entry.get("message")
    if not isinstance(message, dict):
        return SdkStep("", at, [("json", "", entry)], "entry", _TRANSCRIPT)
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    parts = [_block_part(block) for block in blocks]
    said_by_tools = {kind for kind, _, _ in parts} <= {"result", "error"}
    role = "tool" if parts and said_by_tools else str(message.get("role", ""))
    return SdkStep(role, at, parts, "entry", _TRANSCRIPT)


def _block_part(block: Any) -> _StepPart:
    """Return a block of a message's content, in Anthropic's shape."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return "text", "", block.get("text")
    if kind == "thinking":
        return "reasoning", "", block.get("thinking")
    if kind == "tool_use":
        return "call", str(block.get("name")), block.get("input")
    if kind == "tool_result":
        failed = block.get("is_error") is True
        return "error" if failed else "result", str(block.get("tool_use_id")), block.get("content")
    return "json", "", block
