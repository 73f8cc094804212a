"""How large messages are, and how much of a budget they take."""

from __future__ import annotations

import pytest

from perdure.memory.compaction import CompactionPolicy
from perdure.memory.context import bytes_of, estimated_tokens, tokens_of
from perdure.records.messages import Message, ToolCall, encode_message

MESSAGES = [
    Message.system("Be kind."),
    Message.user("Where is the harbor? " * 20),
    Message.user("Look", image_urls=["https://example.org/" + "a" * 200]),
    Message.user([{"type": "text", "text": "parts " * 50}]),
    Message.assistant(
        "So", reasoning="Hm. " * 50, tool_calls=[ToolCall("a", "look", {"x": "y" * 99})]
    ),
    Message.tool("a", {"deck": ["z" * 300]}, name="look"),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_estimate_is_near_a_quarter_of_what_is_stored(message: Message) -> None:
    """S1-11."""
    stored = len(encode_message(message).payload)
    assert abs(bytes_of(message) - stored) <= 80
    assert estimated_tokens(message) == -(-bytes_of(message) // 4)


def test_what_cannot_be_stored_can_be_counted() -> None:
    assert bytes_of(Message.tool("a", object())) > 20


@pytest.mark.parametrize(("limit", "share"), [(None, 0.1), (1_000, 0.1), (50, 0.2)])
def test_a_share_is_that_of_the_limit_which_it_takes_more_of(
    limit: int | None, share: float
) -> None:
    policy = CompactionPolicy(max_bytes=1_000, max_tokens=limit, count_tokens=lambda _: 10)
    assert policy.share_of(Message.user("x"), 100) == share


def test_tokens_are_what_the_counter_says() -> None:
    assert tokens_of(MESSAGES, lambda message: len(message.role)) == sum(
        len(one.role) for one in MESSAGES
    )
