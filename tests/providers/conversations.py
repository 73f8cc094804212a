"""Conversations as logs hold them after anything has happened to them, for Hypothesis.

A conversation is played between a user, models of several providers and tools, and then
spoiled: results go missing, come late, come twice; replies are stored in pieces or only in
part; it is cut anywhere.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from perdure import Message, ToolCall
from perdure.providers import FORMATS, parse
from tests.providers import replies

NAMES = st.sampled_from(["look", "server.tool", "multi_tool_use.parallel", "ü", "x" * 80])
IDS = st.sampled_from(["a", "b", "call 1", "toolu_01", "fc_" + "9" * 70, "é"])
ARGUMENTS = st.sampled_from([{}, {"at": "harbor"}, '{"at": "har', "[1, 2]", None, [1], "text"])
TEXTS = st.sampled_from([None, "", "  ", "said ", "\n\nLine one.\nLine two."])


@st.composite
def plain_answers(draw: st.DrawFn) -> list[Message]:
    """An answer that no provider stamped, whole or in pieces."""
    calls = [
        ToolCall(draw(IDS), draw(NAMES), draw(ARGUMENTS)) for _ in range(draw(st.integers(0, 3)))
    ]
    text, reasoning = draw(TEXTS), draw(st.sampled_from([None, "", "hm"]))
    if len(calls) > 1 and draw(st.booleans()):
        return [Message.assistant(None, tool_calls=[one]) for one in calls] + [
            Message.assistant(text)
        ]
    return [Message.assistant(text, reasoning=reasoning, tool_calls=calls)]


@st.composite
def stamped_answers(draw: st.DrawFn) -> list[Message]:
    """A reply of some provider's, with parts of it gone as after a cut-off stream."""
    format = draw(st.sampled_from(FORMATS))
    reply = copy.deepcopy(draw(st.sampled_from(REPLIES[format])))
    parts = PARTS_IN[format](reply)
    for _ in range(draw(st.integers(0, len(parts)))):
        del parts[draw(st.integers(0, len(parts) - 1))]
    if format == "anthropic" and draw(st.booleans()):
        for block in parts:
            block.pop("signature", None)
    return [parse(reply, format)]


REPLIES: dict[str, list[dict[str, Any]]] = {
    "openai": [replies.CHAT],
    "openai-responses": [replies.RESPONSES, replies.LOOKED_UP],
    "anthropic": [replies.ANTHROPIC, replies.SEARCHING, replies.PAUSED, replies.FOUND],
    "gemini": [replies.GEMINI],
}
PARTS_IN: dict[str, Any] = {
    "openai": lambda reply: reply["choices"][0]["message"]["tool_calls"],
    "openai-responses": lambda reply: reply["output"],
    "anthropic": lambda reply: reply["content"],
    "gemini": lambda reply: reply["candidates"][0]["content"]["parts"],
}

RESULTS = st.sampled_from(["done", "", None, {"stdout": "x"}, [1, 2], b"\x00", 1.5])


@st.composite
def results(draw: st.DrawFn, call: ToolCall, number: int) -> list[Message]:
    """What came of a call: a result (numbered, to be known again), an error, or nothing."""
    how = draw(st.sampled_from(["done", "done", "failed", "failed blankly", "cancelled", "twice"]))
    done = Message.tool(call.id, {"number": f"result#{number}#"}, name=call.name)
    return {
        "done": [done],
        "twice": [done, Message.tool(call.id, "again")],
        "failed": [Message.tool(call.id, error=f"result#{number}#")],
        "failed blankly": [Message.tool(call.id, error="")],
        "cancelled": [],
    }[how]


USERS = st.sampled_from(
    [
        Message.user("Hello"),
        Message.user(""),
        Message.user(None),
        Message.user([{"type": "text", "text": " "}]),
        Message.user("See", image_urls=["https://example.org/a.png", "data:image/png;base64,AA=="]),
        Message.user([{"type": "image_url", "image_url": {"url": "https://example.org/b.jpg"}}]),
        Message.user([{"text": "Hm"}, {"inlineData": {"mimeType": "audio/wav", "data": "AA=="}}]),
        Message.user(
            [
                {
                    "type": "document",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
                }
            ]
        ),
        Message.user("Listen", audio_urls=["/tmp/a.wav"], video_urls=["https://example.org/v.mp4"]),
        Message.system("Be kind."),
        Message.system("  "),
    ]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A conversation with everything that may happen to one, cut anywhere."""
    log: list[Message] = []
    late: list[Message] = []
    for _ in range(draw(st.integers(1, 6))):
        log += draw(st.lists(USERS, max_size=2))
        answer = draw(st.one_of(plain_answers(), stamped_answers()))
        log += answer
        came: list[Message] = []
        for call in [call for one in answer for call in one.tool_calls]:
            came += draw(results(call, len(log) + len(came)))
        came = draw(st.permutations(came))
        held_back = draw(st.integers(0, len(came))) if draw(st.booleans()) else len(came)
        log += came[:held_back]
        late += came[held_back:]
        if late and draw(st.booleans()):
            log.append(late.pop(0))
    end = len(log) - draw(st.integers(0, len(log) // 2))
    start = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    return log[start:end]
