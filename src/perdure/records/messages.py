"""Messages: what user, model and tools say to each other, as values.

A message keeps what it does not understand: fields that a provider adds (signatures, ids,
opaque context) live in ``extra``, at the message, at each tool call and at the tool result,
as the very bytes that the provider sent, so that the next request can send them back. Only
line breaks between their tokens become spaces, because a record is one line.

Values only: nothing here encodes, reads a clock or checks how large a message is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Self

import msgspec

from perdure.errors import InvalidArgumentError, NotStorableError

ROLES = ("system", "user", "assistant", "tool")

MADE_UP = "perdure_repair"
"""The field of a result that perdure made up; its value is a deterministic id."""

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
    """A model's wish to call a tool."""

    id: str
    name: str
    arguments: Any = {}
    """Usually a dict; as text where a model wrote what is not JSON."""
    extra: Extra = {}
    """What the provider said beyond that, byte for byte."""

    def __post_init__(self) -> None:
        if self.extra:
            _keep(self, "extra", CALL_FIELDS)


class ToolResult(msgspec.Struct, frozen=True):
    """What came of a tool call."""

    call_id: str
    name: str | None = None
    result: Any = None
    error: str | None = None
    """Why there is no result."""
    extra: Extra = {}
    """What was said beyond that, byte for byte."""

    def __post_init__(self) -> None:
        if self.extra:
            _keep(self, "extra", RESULT_FIELDS)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation.

    `Message.system`, `Message.user`, `Message.assistant` and `Message.tool` make the usual ones.

    >>> Message.user("Where is the harbor?").text
    'Where is the harbor?'

    Raises:
        InvalidArgumentError: A field is invalid.
        NotStorableError: ``extra`` holds a field that the message has itself, or no raw JSON.

    """

    role: str
    """system, user, assistant or tool."""
    content: str | list[Any] | None = None
    """Text, or a list of content parts as the provider shapes them: JSON."""
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
    """The same, beside the tool calls in the stored tool payload."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            message = f"invalid role={self.role!r}: choose {', '.join(ROLES)}"
            raise InvalidArgumentError(message, option="role")
        if self.created_at is not None and not isfinite(self.created_at):
            message = f"invalid created_at={self.created_at!r}: give seconds since 1970"
            raise InvalidArgumentError(message, option="created_at")
        if self.tool_result is not None and (self.tool_calls or self.payload_extra):
            message = "a message holds tool calls or a tool result, not both: make it two messages"
            raise InvalidArgumentError(message, option="tool_result")
        for name in ("tool_calls", "image_urls", "audio_urls", "video_urls"):
            if type(getattr(self, name)) is not tuple:
                _freeze(self, name)
        if self.extra:
            _keep(self, "extra", MESSAGE_FIELDS)
        if self.payload_extra:
            _keep(self, "payload_extra", CALLS_FIELDS)

    @classmethod
    def system(cls, content: str | list[Any]) -> Self:
        """Return instructions."""
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
        """Return what the user said or showed."""
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
        """Return what the model said, and which tools it wants."""
        return cls(
            role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(tool_calls)
        )

    @classmethod
    def tool(
        cls, call_id: str, result: Any = None, *, name: str | None = None, error: str | None = None
    ) -> Self:
        """Return what came of a tool call."""
        return cls(role="tool", tool_result=ToolResult(call_id, name, result, error))

    @property
    def text(self) -> str:
        """The content's text: all of it, or that of its text parts, joined."""
        if isinstance(self.content, list):
            texts = (part.get("text") for part in self.content if isinstance(part, dict))
            return "".join(text for text in texts if isinstance(text, str))
        return self.content or ""


def _freeze(message: Message, name: str) -> None:
    value = getattr(message, name)
    if not isinstance(value, list):
        text = f"{name} must be a list or tuple, not {type(value).__name__}"
        raise InvalidArgumentError(text, option=name)
    msgspec.structs.force_setattr(message, name, tuple(value))


def _keep(owner: msgspec.Struct, name: str, known: frozenset[str]) -> None:
    """Check the unknown fields, and put each into one line."""
    extra: Extra = getattr(owner, name)
    for key, raw in extra.items():
        if key in known:
            message = f"{name} holds {key!r}, which is a field of its own: leave it out there"
            raise NotStorableError(message, path=f"$.{name}.{key}")
        if not isinstance(raw, msgspec.Raw):
            message = (
                f"{name} holds a {type(raw).__name__} under {key!r}: give it as raw JSON, "
                "msgspec.Raw(msgspec.json.encode(value))"
            )
            raise NotStorableError(message, path=f"$.{name}.{key}", type=type(raw).__name__)
    if any(b"\n" in bytes(raw) or b"\r" in bytes(raw) for raw in extra.values()):
        lines = {key: msgspec.Raw(_one_line(bytes(raw))) for key, raw in extra.items()}
        msgspec.structs.force_setattr(owner, name, lines)


def _one_line(data: bytes) -> bytes:
    # In JSON a line break can only stand between tokens: inside of text it is escaped.
    return data.replace(b"\n", b" ").replace(b"\r", b" ")
