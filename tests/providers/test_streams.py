"""Answers from the parts of streams, and events from lines: pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from perdure.agent.llm import gemini, openai
from perdure.agent.llm.model import Chunk, ReplyStream, Usage
from perdure.agent.llm.sdk import sent_events
from perdure.providers.streams import AnthropicAnswer, ChatAnswer, ResponsesAnswer, merged_delta
from perdure.records.messages import Message, ToolCall


def chunk(delta: object, reason: str | None = None, **fields: object) -> dict[str, object]:
    return {"id": "c", "choices": [{"delta": delta, "finish_reason": reason}], **fields}


def test_deltas_continue_text_and_repeat_names() -> None:
    whole: object = {}
    for part in (
        {"role": "assistant", "details": [{"index": 0, "type": "t", "text": "a"}]},
        {"role": "assistant", "details": [{"index": 0, "type": "t", "text": "b"}], "seen": None},
        {"details": [{"index": 1, "text": "c"}], "seen": 1, "unknown": {"deep": "x"}},
        {"seen": 2, "unknown": {"deep": "y"}},
    ):
        whole = merged_delta(whole, part)
    assert whole == {
        "role": "assistant",
        "details": [{"index": 0, "type": "t", "text": "ab"}, {"index": 1, "text": "c"}],
        "seen": 2,
        "unknown": {"deep": "xy"},
    }


def test_chat_chunks_become_the_reply_that_they_were() -> None:
    answer = ChatAnswer()
    function = {"name": "add", "arguments": ""}
    taken = [
        answer.take(chunk({"role": "assistant", "content": ""})),
        answer.take(chunk({"content": "He"})),
        answer.take(chunk({"content": "llo", "reasoning_content": "Hm."})),
        answer.take(chunk({"tool_calls": [{"index": 0, "id": "1", "function": function}]})),
        answer.take(chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]})),
        answer.take(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]})),
        answer.take(
            chunk({"tool_calls": [{"id": "2", "function": {"name": "b", "arguments": "{}"}}]})
        ),
    ]
    assert taken[1:3] == [("He", ""), ("llo", "Hm.")]
    assert not answer.complete
    answer.take(chunk({}, "tool_calls", mood="good"))
    answer.take({"id": "c", "choices": [], "usage": {"prompt_tokens": 1}})
    whole = answer.whole()
    assert whole["mood"] == "good"
    assert whole["usage"] == {"prompt_tokens": 1}
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello", "Hm.")
    assert message["tool_calls"] == [
        {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"type": "function", "id": "2", "function": {"name": "b", "arguments": "{}"}},
    ]


def test_responses_end_with_the_whole_or_with_an_error() -> None:
    answer = ResponsesAnswer()
    answer.take({"type": "response.output_item.done", "item": {"type": "message"}})
    assert not answer.complete
    answer.take({"type": "response.completed", "response": {"id": "r", "usage": {"x": 1}}})
    assert answer.complete
    assert answer.whole() == {"id": "r", "usage": {"x": 1}, "output": [{"type": "message"}]}
    failed = ResponsesAnswer()
    failed.take({"type": "response.failed", "response": {"error": {"message": "no"}}})
    assert failed.error == {"message": "no"}
    broken = ResponsesAnswer()
    broken.take({"type": "error", "message": "worse"})
    assert broken.error["message"] == "worse"


def test_messages_keep_blocks_signatures_and_what_is_unknown() -> None:
    answer = AnthropicAnswer()
    answer.take({"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 3}}})
    for index, (block, deltas) in enumerate(
        [
            (
                {"type": "thinking", "thinking": ""},
                [
                    {"type": "thinking_delta", "thinking": "Hm."},
                    {"type": "signature_delta", "signature": "signed"},
                ],
            ),
            ({"type": "redacted_thinking", "data": "sealed"}, []),
            ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "Hello"}]),
            (
                {"type": "tool_use", "id": "1", "name": "add", "input": {}},
                [
                    {"type": "input_json_delta", "partial_json": '{"a":'},
                    {"type": "input_json_delta", "partial_json": "1}"},
                ],
            ),
            (
                {"type": "tool_use", "id": "2", "name": "add", "input": {}},
                [
                    {"type": "input_json_delta", "partial_json": '{"a":'},
                ],
            ),
        ]
    ):
        answer.take({"type": "content_block_start", "index": index, "content_block": block})
        for delta in deltas:
            answer.take({"type": "content_block_delta", "index": index, "delta": delta})
    answer.take(
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens"},
            "usage": {"output_tokens": 2},
        }
    )
    assert not answer.complete
    answer.take({"type": "message_stop"})
    assert answer.complete
    assert answer.usage == {"input_tokens": 3, "output_tokens": 2}
    assert answer.whole()["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "signed"},
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "add", "input": '{"a":'},
    ]


async def test_events_are_put_together_from_lines() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in (": ping", "", "event: x", 'data: {"a":', "data: 1}", "", "data: [DONE]", ""):
            yield line

    assert [event async for event in sent_events(lines())] == [{"a": 1}]


def test_calls_of_one_answer_are_told_apart() -> None:
    """S1-13: by its id a call is known after a crash; some servers give none, or one for all."""
    calls = [ToolCall("", "look"), ToolCall("x", "pay"), ToolCall("x", "pay"), ToolCall("y", "pay")]
    reply = ReplyStream()
    reply.take(Chunk(message=Message.assistant(tool_calls=calls)))
    ids = [one.id for one in reply.message().tool_calls]
    assert ids == ["call_1", "x", "x_3", "y"]


def test_a_stopped_answer_of_which_only_the_reasoning_came_is_kept() -> None:
    reply = ReplyStream()
    assert reply.partial() is None
    reply.take(Chunk(reasoning="Let me see"))
    kept = reply.partial()
    assert kept is not None
    assert (kept.reasoning, kept.text) == ("Let me see", "")


def test_whole_calls_that_all_have_the_index_0_stay_apart() -> None:
    answer = ChatAnswer()
    for name in ("a", "b"):
        part = {"index": 0, "id": f"id-{name}", "function": {"name": name, "arguments": "{}"}}
        answer.take({"choices": [{"delta": {"tool_calls": [part]}}]})
    answer.take({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    calls = answer.whole()["choices"][0]["message"]["tool_calls"]
    assert [(one["id"], one["function"]["arguments"]) for one in calls] == [
        ("id-a", "{}"),
        ("id-b", "{}"),
    ]


def test_a_block_keeps_all_its_citations() -> None:
    answer = AnthropicAnswer()
    answer.take({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}})
    for number in (1, 2):
        delta = {"type": "citations_delta", "citation": {"n": number}}
        answer.take({"type": "content_block_delta", "index": 0, "delta": delta})
    answer.take({"type": "message_stop"})
    assert answer.whole()["content"][0]["citations"] == [{"n": 1}, {"n": 2}]


def test_a_later_count_that_is_null_replaces_nothing() -> None:
    answer = AnthropicAnswer()
    answer.take({"type": "message_start", "message": {"usage": {"input_tokens": 7}}})
    usage = {"input_tokens": None, "output_tokens": 3}
    answer.take({"type": "message_delta", "delta": {}, "usage": usage})
    answer.take({"type": "message_stop"})
    assert answer.whole()["usage"] == {"input_tokens": 7, "output_tokens": 3}


@pytest.mark.parametrize("usage_of", [gemini._usage, openai._usage])
def test_what_a_provider_does_not_count_is_none(
    usage_of: Callable[[Mapping[str, Any]], Usage],
) -> None:
    usage = usage_of({"promptTokenCount": 5, "prompt_tokens": 5})
    assert usage == Usage(input_tokens=5)
