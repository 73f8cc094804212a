"""Histories of programs that say things in their own way: nothing real is lost or acted on."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

import perdure
from perdure import Message, ToolCall
from perdure.agent import Agent, PersistentSession, ScriptedModel
from perdure.errors import FormatError
from perdure.providers import FORMATS, Format, parse, parse_history, render
from perdure.records.messages import decode_message, encode_message
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted

formats = pytest.mark.parametrize("format", FORMATS)


def stored(messages: list[Message]) -> list[Message]:
    return [decode_message(encode_message(one).payload) for one in messages]


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def asked(name: str, **beside: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **beside}, "thoughtSignature": "AAAA"}


def responses(*given: tuple[str, Any], **beside: Any) -> dict[str, Any]:
    parts = [
        {"functionResponse": {"name": name, "response": {"output": value}, **beside}}
        for name, value in given
    ]
    return {"role": "user", "parts": parts}


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def results_in(history: list[Any]) -> dict[str, Any]:
    """Return what came of each call of a Gemini history, by the call's number."""
    messages = parse_history(history, "gemini")
    calls = [call.id for message in messages for call in message.tool_calls]
    found = {one.tool_result.call_id: one.tool_result.result for one in messages if one.tool_result}
    return {str(at): found[call] for at, call in enumerate(calls) if call in found}


STREAMED = [
    said("How warm is Oslo?"),
    model({"text": "Let me look."}),
    model(asked("warmth")),
    model({"text": "", "thoughtSignature": "BBBB"}),  # how Gemini 3 ends a stream
    responses(("warmth", "14 C")),
    model({"text": "It is 14 "}),
    model({"text": "degrees."}),
]


@formats
def test_a_result_is_its_call_s_though_contents_without_calls_stand_between(format: Format) -> None:
    """google-genai's chat keeps one content for each chunk of a stream."""
    context = render(stored(parse_history(STREAMED, "gemini")), format)
    assert wrongs(context) == []
    assert_accepted(context)
    assert "14 C" in str(context.messages)
    assert "interrupted" not in str(context.messages)


def test_results_answer_the_calls_of_their_name_in_order() -> None:
    one_each = [model(asked("a")), model(asked("b")), model(asked("a"))]
    together = [*one_each, responses(("a", 1), ("b", 2), ("a", 3))]
    assert results_in(together) == {"0": 1, "1": 2, "2": 3}
    apart = [*one_each, responses(("a", 1)), responses(("a", 3)), responses(("b", 2))]
    assert results_in(apart) == {"0": 1, "1": 2, "2": 3}


def test_a_result_that_came_late_is_its_call_s() -> None:
    late = [model(asked("a")), said("Well?"), model({"text": "Wait."}), responses(("a", 1))]
    assert results_in(late) == {"0": 1}


def test_a_call_that_was_cut_off_does_not_get_another_s_result() -> None:
    again = [model(asked("a")), said("Again"), model(asked("a")), responses(("a", 2))]
    assert results_in(again) == {"1": 2}
    assert results_in([*again, responses(("a", 1))]) == {"0": 1, "1": 2}
    both = [model(asked("a")), said("Again"), model(asked("a")), responses(("a", 1), ("a", 2))]
    assert results_in(both) == {"0": 1, "1": 2}


def test_an_id_says_whose_result_it_is() -> None:
    named = [
        model(asked("a", id="x"), asked("a", id="y")),
        responses(("a", "y's"), id="y"),
        responses(("a", "x's"), id="x"),
    ]
    assert results_in(named) == {"0": "x's", "1": "y's"}


def test_functions_without_ids_are_answered_in_order() -> None:
    """Chat Completions, as it was before there were calls with ids."""
    call = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    history = [
        {**call, "content": None},
        {**call, "content": "And once more."},
        {"role": "function", "name": "look", "content": "one"},
        {"role": "function", "name": "look", "content": "two"},
    ]
    messages = parse_history(history, "openai")
    asked_for = [one.tool_calls[0].id for one in messages[:2]]
    assert [one.tool_result.call_id for one in messages[2:] if one.tool_result] == asked_for


# Marks of perdure's own

LIVEKIT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "The word is HERRING.", "interrupted": False, "id": "item_1"},
    {"role": "assistant", "content": "How can I help?", "interrupted": True},
    {"role": "user", "content": "Later.", "perdure_memory": True},
    {
        "role": "assistant",
        "content": None,
        "perdure_issued": {"provider": "openai"},
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "function": {"name": "look", "arguments": "{}"},
                "redacted": ["/password"],
                "perdure_redacted": ["/password"],
                "perdure_arguments": "indent-2",
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "seen", "perdure_repair": "interrupted:c"},
    {"role": "assistant", "content": "Fine.", "interrupted": True},
]


async def test_what_a_foreign_field_is_called_hides_no_message() -> None:
    async with perdure.connect("memory:") as sessions:
        async with sessions.open("ada") as session:
            await session.extend(LIVEKIT, "openai")
            assert session.context("openai") == LIVEKIT
        chat = ScriptedModel(lambda _: "ok")
        persistent = PersistentSession()
        async with await Agent.create(
            "ada", model=chat, sessions=sessions, persistent_session=persistent
        ) as agent:
            await agent.ask("What was the word?")
        seen = [one.text for one in chat.last_messages or () if one.text]
    assert seen == [
        *("Hello", "The word is HERRING.", "How can I help?", "Later.", "Fine."),
        "What was the word?",
    ]


@formats
def test_a_reply_s_field_is_never_a_mark_of_perdure_s(format: Format) -> None:
    mark = {"perdure_interrupted": True, "interrupted": True}
    text = {"type": "output_text", "text": "Hi", "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    reply: dict[str, Any] = {
        "openai": {"choices": [{"message": {"role": "assistant", "content": "Hi", **mark}}]},
        "openai-responses": {"output": [{**item, "content": [text]}], **mark},
        "anthropic": {"role": "assistant", "content": [{"type": "text", "text": "Hi"}], **mark},
        "gemini": {"candidates": [{"content": model({"text": "Hi"}), **mark}]},
    }[format]
    (message,) = stored([parse(reply, format)])
    assert "perdure_interrupted" not in message.extra


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@pytest.mark.parametrize("value", [True, False, None, "true", {"at": 1}, [True]])
def test_a_field_without_the_prefix_is_no_mark(value: Any) -> None:
    extra = {"interrupted": raw(value), "redacted": raw(value)}
    call = ToolCall("a", "login", {"password": "[redacted]"}, extra={"redacted": raw(value)})
    messages = [
        Message(role="assistant", content="He", extra=extra),
        Message(role="user", content="He", extra={"interrupted": raw(value=True)}),
        Message.assistant(tool_calls=[call]),
        Message.assistant(tool_calls=[ToolCall("a", "b", {}, {"redacted": raw(["/password"])})]),
    ]
    assert stored(messages) == messages


# Calls that are no functions

SHELL = {
    "type": "local_shell_call",
    "id": "lsh_1",
    "call_id": "call_1",
    "status": "completed",
    "action": {"type": "exec", "command": ["ls"], "env": {}},
}
OUTPUTS = [
    {"type": "function_call_output", "call_id": "call_1", "output": "REAL OUTPUT"},
    {"type": "local_shell_call_output", "call_id": "call_1", "output": "REAL OUTPUT"},
    {"type": "local_shell_call_output", "id": "lsh_1", "output": "REAL OUTPUT"},
    {"type": "local_shell_call_output", "id": "another", "output": "REAL OUTPUT"},
]
EXIT = {"stdout": "REAL OUTPUT", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
OTHERS = [
    (
        {"type": "shell_call", "call_id": "call_1", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "call_1", "output": [EXIT]},
    ),
    (
        {
            "type": "apply_patch_call",
            "call_id": "call_1",
            "status": "completed",
            "operation": {"type": "delete_file", "path": "a"},
        },
        {
            "type": "apply_patch_call_output",
            "call_id": "call_1",
            "status": "completed",
            "output": "REAL OUTPUT",
        },
    ),
]
CALLED = [*((SHELL, output) for output in OUTPUTS), *OTHERS]


@formats
@pytest.mark.parametrize(("call", "output"), CALLED)
def test_what_came_of_a_shell_is_shown_to_everybody(
    call: dict[str, Any], output: dict[str, Any], format: Format
) -> None:
    history = [{"role": "user", "content": "List"}, call, output, {"role": "user", "content": "?"}]
    context = render(stored(parse_history(history, "openai-responses")), format)
    assert "REAL OUTPUT" in str(context.messages)
    assert "interrupted" not in str(context.messages)
    if format == "openai-responses":
        assert context.messages == history
    else:
        assert wrongs(context) == []
        assert_accepted(context)


@pytest.mark.parametrize("call", [SHELL, *(call for call, _ in OTHERS)])
def test_a_shell_that_was_cut_off_says_so(call: dict[str, Any]) -> None:
    history = [{"role": "user", "content": "List"}, call]
    context = render(parse_history(history, "openai-responses"), "openai-responses")
    assert context.messages[:2] == history
    assert wrongs(context) == []
    assert "interrupted" in str(context.messages[2])
    assert_accepted(context)


def test_a_reply_s_local_shell_is_answered_as_any_tool() -> None:
    message = parse({"output": [SHELL]}, "openai-responses")
    assert message.tool_calls[0].name == "local_shell"
    log = [Message.user("List"), message, Message.tool("call_1", "a\nb")]
    assert render(stored(log), "openai-responses").messages[1:] == [
        SHELL,
        {"type": "function_call_output", "call_id": "call_1", "output": "a\nb"},
    ]


# Answers in pieces

WORDS = st.sampled_from(["First.", "Then B.", "x"])
DONE = "done"


@st.composite
def pieces(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An answer of Anthropic's in several messages, as Claude Code's files have it."""
    found = []
    for at in range(draw(st.integers(2, 4))):
        blocks: list[dict[str, Any]] = []
        if draw(st.booleans()):
            blocks.append({"type": "thinking", "thinking": f"p{at}", "signature": f"S{at}"})
        if draw(st.booleans()):
            blocks.append({"type": "text", "text": draw(WORDS)})
        blocks.append({"type": "tool_use", "id": f"t{at}", "name": "Read", "input": {}})
        found.append({"role": "assistant", "content": blocks})
    return found


@given(answer=pieces())
def test_an_answer_in_pieces_keeps_the_order_of_its_words_and_calls(
    answer: list[dict[str, Any]],
) -> None:
    blocks = [block for piece in answer for block in piece["content"]]
    done = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": DONE}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    history = [
        {"role": "user", "content": "Do it"},
        *answer,
        {"role": "user", "content": done},
        {"role": "user", "content": "Thanks"},
    ]
    messages = parse_history(history, "anthropic")
    context = render(messages, "anthropic")
    assert context.messages[1]["content"] == blocks
    for format in FORMATS:
        context = render(messages, format)
        assert wrongs(context) == []
        assert "p0" not in str(context.messages) or format == "anthropic"


def test_a_piece_of_another_s_keeps_its_place_without_its_signature() -> None:
    blocks = [{"type": "text", "text": "One."}, {"type": "tool_use", "id": "a", "name": "b"}]
    blocks[1]["input"] = {}  # type: ignore[assignment]
    blocks.insert(0, {"type": "thinking", "thinking": "Hm", "signature": "S"})
    signed = parse({"role": "assistant", "content": blocks}, "anthropic")
    plain = Message.assistant("Two.", reasoning="So", tool_calls=[ToolCall("c", "b")])
    done = [Message.tool("a", 1), Message.tool("c", 2)]
    for log, kinds in (
        ([signed, plain], ["thinking", "text", "tool_use", "text", "tool_use"]),
        ([plain, signed], ["text", "tool_use", "thinking", "text", "tool_use"]),
    ):
        context = render([Message.user("Go"), *log, *done], "anthropic")
        assert [block["type"] for block in context.messages[1]["content"]] == kinds
        assert "So" not in str(context.messages)


# Numbers that JSON lacks


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_a_number_that_json_lacks_is_refused_by_name(number: float) -> None:
    answer = {"role": "assistant", "content": "y", "logprobs": {"content": [{"logprob": number}]}}
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(FormatError) as refused:
            await session.extend([{"role": "user", "content": "x"}, answer], "openai")
        assert refused.value.facts["index"] == 1
        assert refused.value.facts["field"] == "logprobs.content[0].logprob"
        assert session.context() == []


def test_a_reply_with_a_number_that_json_lacks_keeps_it_as_text() -> None:
    """An answer is not refused for what a server says of its tokens."""
    tokens = {"content": [{"logprob": -math.inf, "top_logprobs": None}, {"logprob": math.nan}]}
    message = {"role": "assistant", "content": "y", "score": math.inf}
    reply = {"choices": [{"message": message, "logprobs": tokens}]}
    (kept,) = stored([parse(reply, "openai")])
    assert bytes(kept.extra["score"]) == b'"Infinity"'
    stamp = bytes(kept.extra["perdure_issued"])
    assert b'[{"logprob":"-Infinity","top_logprobs":null},{"logprob":"NaN"}]' in stamp
