"""A model that says what a script says: for tests, demos and examples, without any key.

Deterministic: the same script and the same messages give the same chunks, and the same ids
of tool calls. It streams, calls tools, reasons and fails as a real one does.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, final

import anyio.lowlevel
import msgspec

from perdure.agent.llm.model import Chunk, ToolSpec, Usage
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.records.messages import Message, ToolCall

ScriptedReply = str | ToolCall | Message | Exception | Sequence[ToolCall | Chunk]
"""Text; one tool call or several; a whole message; chunks as they are; an error to raise."""

Answer = Callable[[Sequence[Message]], ScriptedReply]


def call(name: str, **arguments: Any) -> ToolCall:
    """Return a tool call for a script; the model gives it an id.

    >>> call("add", a=1, b=2).arguments
    {'a': 1, 'b': 2}
    """
    return ToolCall("", name, arguments)


@final
class ScriptedModel:
    """Answer by a script: each reply once, in order, or as a function of the messages.

        ScriptedModel("Hello.", call("clock"), "It is noon.")
        ScriptedModel(lambda messages: f"You said: {messages[-1].text}")

    A function may be among the replies; one that is alone, or last, answers
    everything that comes after.

    Args:
        chunk_chars: How many characters a chunk has.
        delay: Seconds before each chunk; 0 lets others run, and does not wait.

    Raises:
        ConfigError: The script is empty, or has come to its end.

    """

    def __init__(
        self, *script: ScriptedReply | Answer, chunk_chars: int = 16, delay: float = 0.0
    ) -> None:
        if not script:
            raise InvalidArgumentError("ScriptedModel has no script: give it at least one reply")
        for reply in script:
            if inspect.iscoroutinefunction(reply):
                raise InvalidArgumentError(
                    f"ScriptedModel got the coroutine function {reply.__name__!r}: give a plain "
                    "function; a model that awaits is an object with an async `stream`",
                    option="script",
                )
        self._script = deque(script)
        self._chunk_chars = max(chunk_chars, 1)
        self._delay = delay
        self.calls: int = 0
        """Number of requests."""
        self.last_messages: tuple[Message, ...] = ()
        """Messages of the last request."""
        self.last_tools: tuple[ToolSpec, ...] = ()

    def __repr__(self) -> str:
        return f"<ScriptedModel {self.calls} calls, {len(self._script)} replies left>"

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> AsyncIterator[Chunk]:
        """Answer, in chunks."""
        self.calls += 1
        self.last_messages, self.last_tools = tuple(messages), tuple(tools)
        reply = self._next(messages)
        for chunk in self._chunks(reply, len(messages)):
            if self._delay:
                await anyio.sleep(self._delay)
            else:
                await anyio.lowlevel.checkpoint()
            yield chunk
        if isinstance(reply, Exception):
            raise reply

    def _next(self, messages: Sequence[Message]) -> ScriptedReply:
        if not self._script:
            raise ConfigError(
                f"the script of a ScriptedModel is at its end after {self.calls - 1} answers: "
                "add replies, or end it with a function",
                calls=self.calls,
            )
        stays = len(self._script) == 1 and callable(self._script[0])
        reply = self._script[0] if stays else self._script.popleft()
        return reply(messages) if callable(reply) else reply

    def _chunks(self, reply: ScriptedReply, calls_before: int) -> Iterator[Chunk]:
        if isinstance(reply, Exception):
            return
        if isinstance(reply, str):
            yield from self._text(reply)
        elif isinstance(reply, Message):
            yield from self._message(reply, calls_before)
        else:
            parts = (reply,) if isinstance(reply, ToolCall) else tuple(reply)
            calls = [part for part in parts if isinstance(part, ToolCall)]
            yield from (part for part in parts if isinstance(part, Chunk))
            if calls:
                yield Chunk(tool_calls=_numbered(calls, calls_before))
        yield Chunk(usage=Usage(input_tokens=calls_before))

    def _message(self, message: Message, calls_before: int) -> Iterator[Chunk]:
        if message.reasoning:
            yield Chunk(reasoning=message.reasoning)
        yield from self._text(message.text)
        if message.tool_calls or message.extra:
            yield Chunk(tool_calls=_numbered(message.tool_calls, calls_before), extra=message.extra)

    def _text(self, text: str) -> Iterator[Chunk]:
        for start in range(0, len(text), self._chunk_chars):
            yield Chunk(text=text[start : start + self._chunk_chars])


def _numbered(calls: Sequence[ToolCall], calls_before: int) -> tuple[ToolCall, ...]:
    """Give calls without an id one that follows from the conversation so far."""
    return tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{calls_before}_{at}")
        for at, call in enumerate(calls)
    )


def EchoModel(*, chunk_chars: int = 16) -> ScriptedModel:  # noqa: N802  # makes a model
    """Return a model that repeats what the user said: to try things without a key."""

    def answer(messages: Sequence[Message]) -> str:
        texts = [message.text for message in messages if message.role == "user"]
        return f"You said: {texts[-1]}" if texts else "Say something."

    return ScriptedModel(answer, chunk_chars=chunk_chars)
