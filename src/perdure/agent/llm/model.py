"""Models as an agent needs them: an answer to messages, in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import anyio
import msgspec
from msgspec.structs import replace

from perdure.providers.issued import STAMP
from perdure.records.messages import CUT_OFF, Extra, Message, ToolCall

_CLOSING: Final = 5.0
"""Seconds that a stream may take to close."""


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool as it is described to a model."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens that an answer took."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Tokens read from the provider's cache."""
    reasoning_tokens: int = 0
    """Tokens of reasoning among those that were written."""
    cache_write_tokens: int = 0
    """Tokens written to the provider's cache, where it says so."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Whole calls: who speaks a provider's protocol puts their parts together."""
    extra: Extra = {}
    """Fields of the provider for the message, byte for byte; a later chunk's count."""
    message: Message | None = None
    """The whole answer, in the last chunk of a model that knows more of it than its pieces say:
    it counts instead of them."""
    usage: Usage | None = None


class Model(Protocol):
    """A language model."""

    def stream(self, messages: Sequence[Any], tools: Sequence[ToolSpec]) -> AsyncIterator[Chunk]:
        """Answer messages, in chunks: ``async def`` with ``yield``.

        Args:
            messages: `Message` objects, or what the agent's renderer makes of them.
            tools: What may be called.

        """


class PrewarmContext(Protocol):
    """Context of a model's ``prewarm(context)``: an `AgentContext` has it."""

    at_stop: list[Callable[[], Awaitable[object]]]
    """Awaited when the agent has stopped, the last one first."""


@contextlib.asynccontextmanager
async def closing(stream: AsyncIterator[Chunk]) -> AsyncIterator[None]:
    """Close a stream that can be closed, also when its turn was cancelled."""
    try:
        yield
    finally:
        aclose = getattr(stream, "aclose", None)
        if aclose is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSING):
                await aclose()


class ReplyStream:
    """An answer that is coming in."""

    __slots__ = ("_calls", "_extra", "_reasoning", "_text", "_whole", "usage")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._extra: Extra = {}
        self._whole: Message | None = None
        self.usage: Usage | None = None

    def take(self, chunk: Chunk) -> None:
        """Add the next piece."""
        if chunk.text:
            self._text.append(chunk.text)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        self._calls.extend(chunk.tool_calls)
        if chunk.extra:
            self._extra = {**self._extra, **chunk.extra}
        self._whole = chunk.message or self._whole
        self.usage = chunk.usage or self.usage

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    def message(self) -> Message:
        """Return the whole answer; each of its calls has an id of its own."""
        return _told_apart(self._whole or self._message(tuple(self._calls), self._extra))

    def partial(self) -> Message | None:
        """Return what has come of an answer that was stopped, marked as such; None for nothing.

        Tool calls are left out: they were not run.
        """
        if not (self._text or self._reasoning):
            return None
        return self._message((), {**self._extra, CUT_OFF: msgspec.Raw(b"true")})

    def _message(self, calls: tuple[ToolCall, ...], extra: Extra) -> Message:
        return Message(
            role="assistant",
            content="".join(self._text) or (None if calls else ""),
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls,
            extra=extra,
        )


def _told_apart(message: Message) -> Message:
    """Return a message whose calls have distinct ids: not every server gives each an id."""
    calls: list[ToolCall] = []
    used: set[str] = set()
    for number, call in enumerate(message.tool_calls, 1):
        name = call.id
        while not name or name in used:
            name = f"{name or 'call'}_{number}"
        used.add(name)
        calls.append(call if name == call.id else replace(call, id=name))
    if tuple(calls) == message.tool_calls:
        return message
    # What the provider said of each call is found by an id that is not right any more.
    extra = {key: value for key, value in message.extra.items() if key != STAMP}
    return replace(message, tool_calls=tuple(calls), extra=extra)
