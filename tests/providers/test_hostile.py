"""Replies as no provider should send them: refused by name, or stored, and shown to anybody."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from perdure import Message, ToolCall
from perdure.errors import FormatError, NotStorableError
from perdure.providers import FORMATS, Format, parse, render
from perdure.records.messages import decode_message, encode_message
from tests.providers import replies
from tests.providers.rules import wrongs

REPLIES: dict[Format, dict[str, Any]] = {
    "openai": replies.OPENROUTER,
    "openai-responses": replies.RESPONSES,
    "anthropic": replies.ANTHROPIC,
    "gemini": replies.GEMINI,
}
JUNK: list[Any] = [None, 1, "", {}, [], ["a"], [{"type": []}], "\ud800"]
formats = pytest.mark.parametrize("format", FORMATS)


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Give the place of everything in a reply."""
    within = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in within:
        yield (step,)
        if isinstance(inner, dict | list):
            yield from ((step, *rest) for rest in paths(inner))


def spoiled(reply: dict[str, Any], path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    found = copy.deepcopy(reply)
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = junk
    return found


@formats
def test_whatever_stands_in_a_reply_it_is_refused_or_can_be_shown(format: Format) -> None:
    """What is stored is rendered at each request: an error there would end the session."""
    refused = shown = 0
    for path in paths(REPLIES[format]):
        for junk in JUNK:
            try:
                message = parse(spoiled(REPLIES[format], path, junk), format)
                stored = decode_message(encode_message(message).payload)
            except (FormatError, NotStorableError):
                refused += 1
                continue
            shown += 1
            for other in FORMATS:
                assert "go" in str(render([Message.user("go"), stored], other).messages[0])
    assert refused > 0
    assert shown > 0


@formats
def test_half_a_surrogate_pair_is_kept_as_a_mark(format: Format) -> None:
    """A model that breaks off within an emoji: Python reads such JSON, and nobody can store it."""
    reply = {
        "openai": {"choices": [{"message": {"role": "assistant", "content": "Hi \ud83d"}}]},
        "openai-responses": {
            "output": [
                {"type": "message", "content": [{"type": "output_text", "text": "Hi \ud83d"}]}
            ]
        },
        "anthropic": {"content": [{"type": "text", "text": "Hi \ud83d"}]},
        "gemini": {"candidates": [{"content": {"parts": [{"text": "Hi \ud83d"}]}}]},
    }[format]
    message = parse(reply, format)
    assert message.text == "Hi \ufffd"
    assert decode_message(encode_message(message).payload) == message


@formats
def test_calls_without_an_id_are_answered_each(format: Format) -> None:
    calls = [ToolCall("", "look", {"at": "harbor"}), ToolCall("", "look", {"at": "tower"})]
    context = render([Message.user("go"), Message.assistant(tool_calls=calls)], format)
    assert wrongs(context) == []
