"""Raw traces as they are in files, one a line, and the messages that such lines amount to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import msgspec

from perdure.memory.traces import RawTrace, traces_of
from perdure.records.json import encode
from perdure.records.messages import Message, ToolCall, ToolResult
from perdure.records.values import lower

_SOURCES: Final = {
    "user": "LLMUserMessageReadyEvent",
    "assistant": "LLMCompleteResponseReceivedEvent",
    "reasoning": "LLMCompleteResponseReceivedEvent",
    "tool_call": "PendingToolInvocationEvent",
    "tool_result": "ToolResultEvent",
    "tool_continuation": "ToolContinuationReadyEvent",
}
"""What is written as ``source_event``, for readers that ask for one."""


class SavedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it is read."""

    trace_type: str
    id: str = ""
    ts: float = 0.0
    turn_id: str | None = None
    seq: int = 0
    content: str | None = None
    media: dict[str, list[str]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    tool_args: Any = None
    tool_result: Any = None
    tool_error: str | None = None


class TraceLine(msgspec.Struct, frozen=True):
    """A line as it is written, and what an archive says of it."""

    id: str
    ts: float
    seq: int
    data: bytes


def trace_lines(turn_id: str, messages: Iterable[tuple[int, Message]]) -> Iterator[TraceLine]:
    """Return a turn's traces as lines; values that JSON cannot hold as what they are stored as.

    Args:
        turn_id: The turn.
        messages: With the seqs of their records.

    """
    for trace in traces_of(turn_id, messages):
        yield TraceLine(trace.id, trace.ts, trace.seq, _line(trace))


def _line(trace: RawTrace) -> bytes:
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(trace).items()
        if value is not None and value != {}
    }
    for name in ("tool_args", "tool_result"):
        if name in fields:
            fields[name] = lower(fields[name])[0]
    usual = _SOURCES.get(trace.trace_type)
    if usual is not None:
        fields.setdefault("source_event", usual)
    return encode(fields) + b"\n"


class TraceMessage(msgspec.Struct, frozen=True):
    """A message that traces amount to."""

    seq: int
    """That of its first trace."""
    message: Message


@final
class TraceMessages:
    """Put traces together to messages, fed in the order in which they lie."""

    def __init__(self) -> None:
        self._answer: list[SavedTrace] = []
        self._known: set[str] = set()

    def feed(self, trace: SavedTrace) -> Iterator[TraceMessage]:
        """Take in the next trace; return the messages that are complete by it."""
        if trace.id and trace.id in self._known:
            return
        self._known.add(trace.id)
        if trace.trace_type in _ANSWER:
            if not self._continues(trace):
                yield from self.rest()
            self._answer.append(trace)
            return
        yield from self.rest()
        message = _other(trace)
        if message is not None:
            yield TraceMessage(trace.seq, message)

    def rest(self) -> Iterator[TraceMessage]:
        """Return the answer that no other trace belongs to."""
        answer, self._answer = self._answer, []
        if answer:
            yield TraceMessage(answer[0].seq, _answered(answer))

    def _continues(self, trace: SavedTrace) -> bool:
        """Say whether a trace is a part of the same answer as those before it."""
        if not self._answer or self._answer[-1].turn_id != trace.turn_id:
            return False
        kinds = {call.trace_type for call in self._answer}
        return "assistant" not in kinds and not (trace.trace_type == "reasoning" and kinds)


_ANSWER: Final = frozenset({"assistant", "reasoning", "tool_call"})


def _answered(traces: list[SavedTrace]) -> Message:
    answer = [trace for trace in traces if trace.trace_type == "assistant"]
    thought = [
        trace.content for trace in traces if trace.trace_type == "reasoning" and trace.content
    ]
    return Message(
        role="assistant",
        content=answer[0].content if answer else None,
        reasoning=thought[0] if thought else None,
        tool_calls=tuple(
            ToolCall(trace.tool_call_id or "", trace.tool_name or "", _arguments(trace))
            for trace in traces
            if trace.trace_type == "tool_call"
        ),
        created_at=traces[0].ts or None,
        **_media(answer[0] if answer else traces[0]),
    )


def _arguments(trace: SavedTrace) -> Any:
    return {} if trace.tool_args is None else trace.tool_args


def _other(trace: SavedTrace) -> Message | None:
    """Return the message that one trace is by itself; None for one that is none."""
    at = trace.ts or None
    if trace.trace_type in {"user", "system"}:
        content = trace.content or ""
        return Message(role=trace.trace_type, content=content, created_at=at, **_media(trace))
    if trace.trace_type == "tool_result":
        result = ToolResult(
            trace.tool_call_id or "", trace.tool_name, trace.tool_result, trace.tool_error
        )
        return Message(role="tool", tool_result=result, created_at=at)
    return None


def _media(trace: SavedTrace) -> dict[str, Any]:
    urls = trace.media or {}
    return {
        "image_urls": tuple(urls.get("images", ())),
        "audio_urls": tuple(urls.get("audio", ())),
        "video_urls": tuple(urls.get("video", ())),
    }
