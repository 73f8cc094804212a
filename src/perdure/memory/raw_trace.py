"""Raw traces: a turn's messages one by one, in the form that others keep them in.

A view of the log, made anew whenever it is read: nothing is stored twice, so nothing can be
pruned from it, and each trace is known by its record's number, which is never used twice.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from perdure.model.messages import Message

__all__ = ["SOURCE", "RawTrace", "TraceType", "traces_of"]

SOURCE: Final = "perdure_source_event"
"""The field of a message that says which event brought it, where that is not the usual one."""

TraceType = Literal[
    "system", "user", "assistant", "reasoning", "tool_call", "tool_result", "tool_continuation"
]


class RawTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was said, called, or came of a call; the field names are the format."""

    id: str
    ts: float
    """Seconds since 1970, 0 where the message does not say."""
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
    """What brought it; None for the usual event of its type."""


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
        source = _source_of(message)
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


def _source_of(message: Message) -> str | None:
    raw = message.extra.get(SOURCE)
    return None if raw is None else msgspec.json.decode(raw, type=str)


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
