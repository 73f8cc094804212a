"""Messages between user, model and tools: as values, and as log records of a fixed format.

A message keeps what it does not understand: fields that a provider adds (signatures, ids,
opaque context) live in ``extra``, at the message, at each tool call and at the tool result,
as the very bytes that the provider sent, so that the next request can send them back. Only
line breaks between their tokens become spaces, because a record is one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite
from typing import Any, Final, Literal, Self, TypeVar, final

import msgspec

from perdure.errors import CorruptRecordError, FormatError, InvalidArgumentError, NotStorableError
from perdure.records import json
from perdure.records.json import (
    MAX_PAYLOAD_DEPTH,
    MAX_RECORD_BYTES,
    MAX_VALUE_DEPTH,
    check_depth,
    check_size,
    is_deeper,
    too_deep,
)
from perdure.records.keys import require_list
from perdure.records.records import MESSAGE, MESSAGE_KINDS, TOOL_CALL, TOOL_RESULT, Entry
from perdure.records.references import spelled
from perdure.records.values import NO_TYPES, Tags, Types, lift, lower

ROLES = ("system", "user", "assistant", "tool")

RESERVED: Final = "perdure_"
"""Prefix of perdure's own fields in messages, calls and results. It acts on no
other, and what came from elsewhere never has one (`perdure.providers.issued.fields_of`)."""
MADE_UP: Final = "perdure_repair"
"""The field of a result that perdure made up; its value is a deterministic id."""
CUT_OFF: Final = "perdure_interrupted"
"""The field of the part of an answer that came before it was cut off."""
REDACTED_AT: Final = "perdure_redacted"
"""The field of a call that says where its arguments lack credentials: JSON pointers."""
RESULT_REF: Final = "perdure_tool_result_ref"
"""The field of a result that is in a blob."""

CALL_FIELDS = frozenset({"id", "name", "arguments", "arguments_types"})
"""The stored names of a tool call's fields."""
CALLS_FIELDS = frozenset({"tool_calls", "tool_call_id"})
"""The stored names that say whether a tool payload holds calls or a result."""
RESULT_FIELDS = frozenset(
    {"tool_call_id", "tool_name", "tool_result", "tool_error", "tool_result_types"}
)
"""The stored names of a tool result's fields."""
MESSAGE_FIELDS = frozenset(
    {
        "role",
        "content",
        "reasoning_content",
        "tool_payload",
        "image_urls",
        "audio_urls",
        "video_urls",
        "created_at",
    }
)
"""The stored names of a message's fields."""

Extra = dict[str, msgspec.Raw]


class ToolCall(msgspec.Struct, frozen=True):
    """A model's request to call a tool."""

    id: str
    name: str
    arguments: Any = {}
    """Usually a dict; text if the model wrote something that is not JSON."""
    extra: Extra = {}
    """Further fields of the provider, byte for byte."""

    def __post_init__(self) -> None:
        if self.extra:
            _keep(self, "extra", CALL_FIELDS)


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a tool call."""

    call_id: str
    name: str | None = None
    result: Any = None
    error: str | None = None
    """Reason why there is no result."""
    extra: Extra = {}
    """Further fields, byte for byte."""

    def __post_init__(self) -> None:
        if self.extra:
            _keep(self, "extra", RESULT_FIELDS)


class _RoleAndContent(msgspec.Struct, frozen=True):
    """The fields of a message that may be given without their names."""

    role: str
    """system, user, assistant or tool."""
    content: str | list[Any] | None = None
    """Text, or a list of content parts as the provider shapes them: JSON."""


class Message(_RoleAndContent, frozen=True, kw_only=True):
    """One message of a conversation.

    `Message.system`, `Message.user`, `Message.assistant` and `Message.tool` create the usual ones.

    >>> Message.user("Where is the harbor?").text
    'Where is the harbor?'
    >>> Message("user", "Where is the harbor?").role
    'user'

    Raises:
        InvalidArgumentError: A field is invalid.
        NotStorableError: ``extra`` holds a field that the message has itself, or no raw JSON.

    """

    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_result: ToolResult | None = None
    image_urls: tuple[str, ...] = ()
    audio_urls: tuple[str, ...] = ()
    video_urls: tuple[str, ...] = ()
    created_at: float | None = None
    """Seconds since 1970."""
    extra: Extra = {}
    """Fields of the provider that perdure does not know, byte for byte."""
    payload_extra: Extra = {}
    """The same, next to the tool calls in the stored tool payload."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgumentError(
                f"invalid role={self.role!r}: choose {', '.join(ROLES)}", option="role"
            )
        content: Any = self.content
        if not (content is None or isinstance(content, str | list)):
            raise InvalidArgumentError(
                f"invalid content of type {type(content).__name__}: give text, or a list of "
                "content parts",
                option="content",
            )
        if self.created_at is not None and not isfinite(self.created_at):
            raise InvalidArgumentError(
                f"invalid created_at={self.created_at!r}: give seconds since 1970",
                option="created_at",
            )
        if self.tool_result is not None and (self.tool_calls or self.payload_extra):
            raise InvalidArgumentError(
                "a message holds tool calls or a tool result, not both: make it two messages",
                option="tool_result",
            )
        if type(self.tool_calls) is not tuple:
            _freeze(self, "tool_calls")
        if type(self.image_urls) is not tuple:
            _freeze(self, "image_urls")
        if type(self.audio_urls) is not tuple:
            _freeze(self, "audio_urls")
        if type(self.video_urls) is not tuple:
            _freeze(self, "video_urls")
        if self.extra:
            _keep(self, "extra", MESSAGE_FIELDS)
        if self.payload_extra:
            _keep(self, "payload_extra", CALLS_FIELDS)

    @classmethod
    def system(cls, content: str | list[Any]) -> Self:
        """Return a system message: instructions."""
        return cls(role="system", content=content)

    @classmethod
    def user(
        cls,
        content: str | list[Any] | None,
        *,
        image_urls: Sequence[str] = (),
        audio_urls: Sequence[str] = (),
        video_urls: Sequence[str] = (),
    ) -> Self:
        """Return a user message: text, content parts, media."""
        require_list("image_urls", image_urls)
        require_list("audio_urls", audio_urls)
        require_list("video_urls", video_urls)
        return cls(
            role="user",
            content=content,
            image_urls=tuple(image_urls),
            audio_urls=tuple(audio_urls),
            video_urls=tuple(video_urls),
        )

    @classmethod
    def assistant(
        cls,
        content: str | list[Any] | None = None,
        *,
        reasoning: str | None = None,
        tool_calls: Sequence[ToolCall] = (),
    ) -> Self:
        """Return a message of the model: text, reasoning, tool calls."""
        return cls(
            role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(tool_calls)
        )

    @classmethod
    def tool(
        cls, call_id: str, result: Any = None, *, name: str | None = None, error: str | None = None
    ) -> Self:
        """Return a message with the result of a tool call."""
        return cls(role="tool", tool_result=ToolResult(call_id, name, result, error))

    @property
    def text(self) -> str:
        """The content's text: all of it, or that of its text parts, joined."""
        if isinstance(self.content, list):
            texts = (part.get("text") for part in self.content if isinstance(part, dict))
            return "".join(text for text in texts if isinstance(text, str))
        return self.content or ""


def message_of(given: dict[str, Any]) -> Message:
    """Return ``{"role": …, "content": "text"}`` as a message: all formats mean the same by it.

    Raises:
        NotStorableError: It is any other dict, which only a format says how to read.

    """
    match given:
        case {"role": "system" | "user" | "assistant" as role, "content": str(content)}:
            if len(given) == 2:
                return Message(role, content)
    role, wrong = given.get("role"), ""
    if role is None:
        wrong = "the dict has no role: "
    elif not (isinstance(role, str) and role in ROLES):
        wrong = f"invalid role {role!r} in a dict: "
    raise NotStorableError(
        f'{wrong}of dicts only {{"role": …, "content": "text"}} with the role system, user or '
        "assistant is read the same by all providers: for any other use "
        'session.extend([…], "openai"), or which format it has: "openai-responses", "anthropic", '
        '"gemini"',
        path="$",
        type="dict",
    )


def _freeze(message: Message, name: str) -> None:
    value = getattr(message, name)
    if not isinstance(value, list):
        raise InvalidArgumentError(
            f"{name} must be a list or tuple, not {type(value).__name__}", option=name
        )
    msgspec.structs.force_setattr(message, name, tuple(value))


def _keep(owner: msgspec.Struct, name: str, known: frozenset[str]) -> None:
    """Check the unknown fields, and put each on one line."""
    extra: Extra = getattr(owner, name)
    for key, raw in extra.items():
        if key in known:
            raise NotStorableError(
                f"{name} holds {key!r}, which is a field of its own: leave it out there",
                path=f"$.{name}.{key}",
            )
        if not isinstance(raw, msgspec.Raw):
            raise NotStorableError(
                f"{name} holds a {type(raw).__name__} under {key!r}: give it as raw JSON, "
                "msgspec.Raw(msgspec.json.encode(value))",
                path=f"$.{name}.{key}",
                type=type(raw).__name__,
            )
    if any(b"\n" in bytes(raw) or b"\r" in bytes(raw) for raw in extra.values()):
        # In JSON a line break can only be between tokens: inside of text it is escaped.
        lines = {
            key: msgspec.Raw(bytes(raw).replace(b"\n", b" ").replace(b"\r", b" "))
            for key, raw in extra.items()
        }
        msgspec.structs.force_setattr(owner, name, lines)


Wire = dict[str, Any]


def kind_of(message: Message) -> str:
    """Return the kind of a message's record."""
    if message.tool_calls:
        return TOOL_CALL
    return MESSAGE if message.tool_result is None else TOOL_RESULT


def encode_message(
    message: Message,
    registry: Types = NO_TYPES,
    *,
    now: float | None = None,
) -> Entry:
    """Return a message as a record.

    Args:
        message: What to store.
        registry: The application's own types.
        now: The creation time if the message has none; None to store none.

    Raises:
        NotStorableError: Some part of it cannot be stored.
        TooLargeError: It nests too deep, or takes too many bytes.

    """
    wire: Wire = {"role": message.role}
    if message.content is not None:
        wire["content"] = _content(message.content)
    if message.reasoning is not None:
        wire["reasoning_content"] = _text(message.reasoning, "$.reasoning")
    if message.tool_calls or message.payload_extra:
        wire["tool_payload"] = _calls(message, registry)
    elif message.tool_result is not None:
        wire["tool_payload"] = _result(message.tool_result, registry)
    if message.image_urls or message.audio_urls or message.video_urls:
        _add_media(wire, message)
    created_at = now if message.created_at is None else message.created_at
    if created_at is not None:
        wire["created_at"] = created_at
    if message.extra:
        _add_extra(wire, message.extra, "$.extra")
    payload = spelled(json.encode(wire))
    if len(payload) > MAX_RECORD_BYTES:
        check_size(len(payload))
    return Entry(kind_of(message), payload)


def _text(value: Any, at: str) -> str:
    if type(value) is str:
        return value
    raise json.not_storable(at, value, "it must be text: use a plain str")


def _content(content: Any) -> Any:
    if type(content) is str:
        return content
    if type(content) is not list:
        reason = "content is text, a list of content parts, or None"
        raise json.not_storable("$.content", content, reason)
    lowered, tags = lower(content, at="$.content")
    if tags:
        place = min(tags)
        raise NotStorableError(
            f"the content part at $.content{place} holds a {tags[place]}: content parts are "
            "JSON, as the provider takes them: encode it first, for instance as base64",
            path=f"$.content{place}",
            type=tags[place],
        )
    return lowered


def _add_media(wire: Wire, message: Message) -> None:
    for name in ("image_urls", "audio_urls", "video_urls"):
        urls = getattr(message, name)
        if urls:
            wire[name] = [_text(url, f"$.{name}[{at}]") for at, url in enumerate(urls)]


def _calls(message: Message, registry: Types) -> Wire:
    wire: Wire = {}
    if message.tool_calls:
        wire["tool_calls"] = [
            _call(call, registry, f"$.tool_calls[{at}]")
            for at, call in enumerate(message.tool_calls)
        ]
    if message.payload_extra:
        _add_extra(wire, message.payload_extra, "$.payload_extra")
    return wire


def _call(call: ToolCall, registry: Types, at: str) -> Wire:
    if type(call) is not ToolCall:
        raise json.not_storable(at, call, "tool_calls holds ToolCall(id, name, arguments)")
    arguments, tags = lower(call.arguments, registry, at=f"{at}.arguments")
    wire: Wire = {"id": _text(call.id, f"{at}.id"), "name": _text(call.name, f"{at}.name")}
    wire["arguments"] = arguments
    if tags:
        wire["arguments_types"] = tags
    if call.extra:
        _add_extra(wire, call.extra, f"{at}.extra")
    return wire


def _result(result: ToolResult, registry: Types) -> Wire:
    at = "$.tool_result"
    if type(result) is not ToolResult:
        raise json.not_storable(at, result, "tool_result is a ToolResult(call_id, name, result)")
    value, tags = lower(result.result, registry, at=f"{at}.result")
    wire: Wire = {
        "tool_call_id": _text(result.call_id, f"{at}.call_id"),
        "tool_name": None if result.name is None else _text(result.name, f"{at}.name"),
        "tool_result": value,
        "tool_error": None if result.error is None else _text(result.error, f"{at}.error"),
    }
    if tags:
        wire["tool_result_types"] = tags
    if result.extra:
        _add_extra(wire, result.extra, f"{at}.extra")
    return wire


def _add_extra(wire: Wire, extra: Extra, at: str) -> None:
    for name, raw in extra.items():
        data, place = bytes(raw), f"{at}.{name}"
        if is_deeper(data, MAX_VALUE_DEPTH):
            raise too_deep(place, MAX_VALUE_DEPTH)
        try:
            json.decode(data)
        except CorruptRecordError as error:
            raise NotStorableError(
                f"the raw field at {place} is not JSON that can be read back: {error}",
                path=place,
                size=len(data),
            ) from None
        wire[name] = raw


# Nearly all messages have no further fields anywhere: those are decoded in one step.


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    image_urls: tuple[str, ...] | None = None
    audio_urls: tuple[str, ...] | None = None
    video_urls: tuple[str, ...] | None = None
    created_at: float | None = None


class _Message(_Fields):
    tool_payload: msgspec.Raw = msgspec.Raw(b"null")


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    name: str
    arguments: Any = msgspec.field(default_factory=dict)
    arguments_types: Tags | None = None


class _Result(msgspec.Struct, forbid_unknown_fields=True):
    tool_call_id: str
    tool_name: str | None = None
    tool_result: Any = None
    tool_error: str | None = None
    tool_result_types: Tags | None = None


class _PlainCalls(msgspec.Struct, forbid_unknown_fields=True):
    tool_calls: tuple[_Call, ...]


class _PlainMessage(_Fields):
    tool_payload: _PlainCalls | None = None


class _PlainResultMessage(_Fields, kw_only=True):
    tool_payload: _Result


T = TypeVar("T", bound=msgspec.Struct)
D = TypeVar("D")

_TOOL = b'{"role":"tool"'
_PLAIN = msgspec.json.Decoder(_PlainMessage)
_PLAIN_RESULT = msgspec.json.Decoder(_PlainResultMessage)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw] | None)


def _lenient(shape: type[T]) -> msgspec.json.Decoder[T]:
    """Return a decoder of a shape that passes unknown fields by."""
    lenient = msgspec.defstruct(shape.__name__, (), bases=(shape,), forbid_unknown_fields=False)
    return msgspec.json.Decoder(lenient)


_MESSAGE = _lenient(_Message)
_CALL = _lenient(_Call)
_RESULT = _lenient(_Result)


def _read(decoder: msgspec.json.Decoder[T], data: bytes, at: str) -> tuple[T, Extra]:
    """Return the known fields of a stored object by type, and the others as they are."""
    wire = _decode(decoder, data, at)
    known = wire.__struct_fields__
    fields = _decode(_FIELDS, data, at)
    return wire, {name: _copy(raw) for name, raw in fields.items() if name not in known}


def _decode(decoder: msgspec.json.Decoder[D], data: bytes, at: str) -> D:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json.corrupt(error, len(data), at) from None


def _copy(raw: msgspec.Raw) -> msgspec.Raw:
    return msgspec.Raw(bytes(raw))  # a slice would keep the whole record in memory


def decode_message(payload: bytes, registry: Types = NO_TYPES) -> Message:
    """Return the message that a record holds.

    Raises:
        CorruptRecordError: The payload is damaged, or not a message.

    """
    check_depth(payload)
    try:
        return _decode_message(payload, registry)
    except RecursionError:  # the depth is within the limit: the caller has no stack left
        raise FormatError(
            f"a message of {len(payload)} bytes cannot be decoded: the stack is too deep here",
            size=len(payload),
        ) from None


def _decode_message(payload: bytes, registry: Types) -> Message:
    calls: tuple[ToolCall, ...] = ()
    result: ToolResult | None = None
    wire: _Fields
    try:
        if payload.startswith(_TOOL):  # another one with a result is read as one with extras
            wire = _PLAIN_RESULT.decode(payload)
            result = _result_of(wire.tool_payload, registry)
        else:
            wire = _PLAIN.decode(payload)
            if wire.tool_payload is not None:
                calls = tuple([_call_of(call, registry) for call in wire.tool_payload.tool_calls])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_with_extra(payload, registry)
    return _message_of(wire, calls, result)


def _decode_with_extra(payload: bytes, registry: Types) -> Message:
    """Decode a message that may have further fields; or name what is damaged."""
    wire, extra = _read(_MESSAGE, payload, "$")
    calls: tuple[ToolCall, ...] = ()
    result: ToolResult | None = None
    payload_extra: Extra = {}
    tool_payload = bytes(wire.tool_payload)
    if tool_payload != b"null":
        calls, result, payload_extra = _decode_tools(tool_payload, registry)
    return _message_of(wire, calls, result, extra, payload_extra)


def _message_of(
    wire: _Fields,
    calls: tuple[ToolCall, ...],
    result: ToolResult | None,
    extra: Extra = {},  # noqa: B006  # never changed
    payload_extra: Extra = {},  # noqa: B006
) -> Message:
    return Message(
        role=wire.role,
        content=wire.content,
        reasoning=wire.reasoning_content,
        tool_calls=calls,
        tool_result=result,
        image_urls=wire.image_urls or (),
        audio_urls=wire.audio_urls or (),
        video_urls=wire.video_urls or (),
        created_at=wire.created_at,
        extra=extra,
        payload_extra=payload_extra,
    )


def _decode_tools(
    data: bytes, registry: Types
) -> tuple[tuple[ToolCall, ...], ToolResult | None, Extra]:
    at = "$.tool_payload"
    fields = _decode(_FIELDS, data, at)
    if "tool_call_id" in fields:
        wire, extra = _read(_RESULT, data, at)
        return (), _result_of(wire, registry, extra), {}
    listed = _decode(_LIST, bytes(fields.pop("tool_calls", _NONE)), f"{at}.tool_calls") or []
    calls: list[ToolCall] = []
    for index, raw in enumerate(listed):
        call, extra = _read(_CALL, bytes(raw), f"{at}.tool_calls[{index}]")
        calls.append(_call_of(call, registry, extra))
    return tuple(calls), None, {name: _copy(raw) for name, raw in fields.items()}


_NONE = msgspec.Raw(b"null")


def _call_of(wire: _Call, registry: Types, extra: Extra = {}) -> ToolCall:  # noqa: B006  # never changed
    return ToolCall(wire.id, wire.name, lift(wire.arguments, wire.arguments_types, registry), extra)


def _result_of(wire: _Result, registry: Types, extra: Extra = {}) -> ToolResult:  # noqa: B006  # never changed
    value = lift(wire.tool_result, wire.tool_result_types, registry)
    return ToolResult(wire.tool_call_id, wire.tool_name, value, wire.tool_error, extra)


RESERVED_KINDS = frozenset(
    {"base", "checkpoint", "checkpoints_pruned", "context", "effect", "ending", "epoch"}
    | {"event", "foreign", "fork", "gap", "item"}
    | {
        "memory_drop",
        "memory_set",
        "meta",
        "outside",
        "retract",
        "segment",
        "state",
        "taken",
        "turn",
    }
    | {"admitted", "approval", "usage"}
)
"""Kinds of records that perdure writes itself, now or in a later release."""

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_:.-]{0,63}")


@final
class EncodedRecord:
    """A record that the application has encoded, of a kind of its own; checked once, here.

    A payload is one JSON value on one line. Under a message's kind ("message", "tool_call",
    "tool_result") it must be a stored message. perdure returns other kinds in the
    history as they are.

    >>> EncodedRecord("app:rating", b'{"stars": 5}').kind
    'app:rating'

    Raises:
        NotStorableError: The kind or the payload is invalid.
        TooLargeError: The payload nests too deep, or takes too many bytes.

    """

    __slots__ = ("entry",)

    entry: Final[Entry]
    """The record as the log takes it."""

    def __init__(self, kind: str, payload: bytes) -> None:
        given: Any = kind
        if not isinstance(given, str) or not _KIND.fullmatch(given):
            raise NotStorableError(
                f"invalid kind={kind!r}: use 1 to 64 letters, digits, '_', ':', '.', '-', "
                "a letter first",
                option="kind",
            )
        if kind in RESERVED_KINDS or kind.startswith("x:"):
            raise NotStorableError(
                f"kind={kind!r} is perdure's own: choose another, such as 'app:{kind}' "
                "(an instance of a registered type is appended as it is)",
                option="kind",
                kind=kind,
            )
        _check_payload(payload)
        if kind in MESSAGE_KINDS:
            try:
                decode_message(payload)
            except CorruptRecordError as error:
                raise NotStorableError(
                    f"the payload is not a stored message: {error}; append a Message instead",
                    size=len(payload),
                ) from None
            payload = spelled(payload)
        self.entry = Entry(kind, payload)

    @property
    def kind(self) -> str:
        """The kind of the record."""
        return self.entry.kind

    @property
    def payload(self) -> bytes:
        """Its JSON."""
        return self.entry.payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedRecord) and self.entry == other.entry

    def __hash__(self) -> int:
        return hash(self.entry)

    def __repr__(self) -> str:
        return f"EncodedRecord({self.kind!r}, <{len(self.payload)} bytes>)"


def _check_payload(payload: Any) -> None:
    if type(payload) is not bytes:
        raise json.not_storable("payload", payload, "give it as bytes")
    check_size(len(payload), MAX_RECORD_BYTES, at="payload")
    if b"\n" in payload or b"\r" in payload:
        raise json.not_storable("payload", payload, "it has line breaks: encode it without indent")
    if is_deeper(payload, MAX_PAYLOAD_DEPTH):
        raise too_deep("payload", MAX_PAYLOAD_DEPTH)
    try:
        json.decode(payload)
    except CorruptRecordError as error:
        raise NotStorableError(
            f"the payload is not JSON that can be read back: {error}", size=len(payload)
        ) from None
