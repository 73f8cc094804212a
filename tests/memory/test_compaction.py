"""The parts of a compaction that decide (S1-11, S1-14)."""

from __future__ import annotations

import pytest

from perdure import ConfigError, Message, ToolCall
from perdure.memory.compaction import (
    Compaction,
    CompactionPolicy,
    Compactor,
    ExtractiveSummarizer,
    Fact,
    TurnTrace,
)

TURNS = (
    TurnTrace(
        "turn_0001",
        (Message.user("My name is Ada. What is the tide?"), Message.assistant("High.")),
        7,
    ),
    TurnTrace(
        "turn_0002",
        (
            Message.user("And tomorrow?"),
            Message.assistant(tool_calls=[ToolCall("c", "tide")]),
            Message.tool("c", 3),
            Message.assistant("Low. " * 100),
        ),
        15,
    ),
)


@pytest.mark.parametrize(
    ("size", "tokens", "due"), [(100, None, False), (101, None, True), (1, 9, False), (1, 11, True)]
)
def test_the_budget_is_bytes_and_if_asked_for_tokens(
    size: int, tokens: int | None, due: bool
) -> None:
    assert CompactionPolicy(max_bytes=100, max_tokens=10).is_due(size, tokens) is due


def test_tokens_do_not_count_without_a_limit_for_them() -> None:
    assert not CompactionPolicy(max_bytes=100).is_due(1, 10**9)


@pytest.mark.parametrize(
    "bad", [{"max_bytes": 0}, {"keep_turns": -1}, {"episode_turns": 0}, {"max_summaries": 0}]
)
def test_an_option_that_does_not_fit_is_named(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        CompactionPolicy(**bad)


async def test_the_summary_quotes_and_does_not_invent() -> None:
    summary = await ExtractiveSummarizer(quote_chars=40).summarize(TURNS)
    assert "User: My name is Ada. What is the tide?" in summary.text
    assert "Assistant: High." in summary.text
    assert "Tools used: tide" in summary.text
    assert all(len(line) <= 60 for line in summary.text.splitlines())


async def test_facts_are_what_users_say_about_themselves() -> None:
    summary = await ExtractiveSummarizer().summarize(TURNS)
    assert summary.facts == (Fact("My name is Ada.", "durable_fact"),)


async def test_the_same_turns_give_the_same_items() -> None:
    first = await Compactor().compact(TURNS, now=5.0)
    assert await Compactor().compact(TURNS, now=5.0) == first
    (episode,) = first.episodic
    assert (episode.turn_ids, episode.as_of_seq) == (("turn_0001", "turn_0002"), 15)
    assert first.turn_ids == ("turn_0001", "turn_0002")


async def test_nothing_to_compact_makes_nothing() -> None:
    assert await Compactor().compact((), now=5.0) == Compaction()
