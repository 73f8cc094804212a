"""Summaries by a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from perdure import CompactionError, ConfigError, FormatError, Message, ToolCall
from perdure.agent import (
    AgentContext,
    AgentFactory,
    CompactionPolicy,
    Fact,
    ModelSummarizer,
    ScriptedModel,
    render_openai,
)
from perdure.agent.compaction import summary_of
from perdure.agent.llm.model import Chunk
from perdure.memory.compaction import Compactor
from tests.agent.conftest import Configure, World
from tests.memory.turns import said

ANSWER = """\
They met at the harbor.
It rained.

- [user_preference] Likes herring.
* [Critical_Issue]: The pump of the Sula leaks.
- No category here.
"""


async def test_lines_with_a_category_are_facts_and_the_rest_is_the_summary() -> None:
    """S1-14."""
    summarizer = ModelSummarizer(ScriptedModel(ANSWER))
    summary = await summarizer.summarize([said(1, Message.user("Hello"))])
    assert summary.facts == (
        Fact("Likes herring.", "user_preference"),
        Fact("The pump of the Sula leaks.", "critical_issue"),
    )
    assert summary.text == "They met at the harbor.\nIt rained.\n\n- No category here."


async def test_the_model_is_shown_what_was_said_called_and_answered() -> None:
    model = ScriptedModel(ANSWER)
    turn = said(
        7,
        Message.user("Where is the pump?"),
        Message.assistant(tool_calls=[ToolCall("c", "find", {"what": "pump"})]),
        Message.tool("c", name="find", error="no such thing"),
        Message.tool("d", {"deck": 2}, name="look"),
    )
    await ModelSummarizer(model).summarize([turn])
    instructions, shown = model.last_messages
    assert instructions.role == "system"
    assert "user_preference" in instructions.text
    assert shown.text.splitlines() == [
        "== turn_0007",
        "user: Where is the pump?",
        'assistant:  [calls find with {"what":"pump"}]',
        "tool find: failed: no such thing",
        'tool look: {"deck":2}',
    ]
    assert model.last_tools == ()


async def test_what_is_too_long_is_shown_in_part() -> None:
    model = ScriptedModel(ANSWER)
    turns = [said(number, Message.user("x" * 5_000)) for number in range(50)]
    await ModelSummarizer(model, max_chars=10_000).summarize(turns)
    shown = model.last_messages[-1].text
    assert len(shown) <= 10_500
    assert shown.count("user: ") == 50


async def test_of_very_many_messages_the_first_and_the_last_are_shown() -> None:
    model = ScriptedModel(ANSWER)
    said_often = [Message.user(f"number {number}") for number in range(2_000)]
    await ModelSummarizer(model, max_chars=1_000).summarize([said(1, *said_often)])
    shown = model.last_messages[-1].text
    assert len(shown) <= 1_003
    assert "number 0\n" in shown
    assert shown.endswith("number 1999")


def test_an_answer_that_is_nearly_all_white_space_is_read_in_no_time() -> None:
    """A model that repeats itself must not stop the loop."""
    blank = " " * 200_000
    summary = summary_of(f"{blank}\n- [durable_fact] It{blank}rained.{blank}\n- [{blank}x")
    assert [one.text.split() for one in summary.facts] == [["It", "rained."]]


async def test_a_renderer_makes_what_the_model_takes() -> None:
    model = ScriptedModel(lambda messages: messages[-1]["content"][-5:])  # type: ignore[index]
    summarizer = ModelSummarizer(model, renderer=render_openai)
    assert (await summarizer.summarize([said(1, Message.user("Hello"))])).text == "Hello"


async def test_an_answer_with_nothing_in_it_is_an_error() -> None:
    """S1-17: no turn leaves for nothing."""
    with pytest.raises(FormatError, match="nothing"):
        await ModelSummarizer(ScriptedModel(" \n")).summarize([said(1, Message.user("Hello"))])


@pytest.mark.parametrize("bad", ["message_chars", "max_chars"])
def test_a_limit_that_does_not_fit_is_named(bad: str) -> None:
    with pytest.raises(ConfigError, match=bad):
        ModelSummarizer(ScriptedModel("x"), **{bad: 10})  # type: ignore[arg-type]


def test_a_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="nobody:x"):
        ModelSummarizer("nobody:x")


class Client:
    """A model that has to be made ready, and can be closed."""

    def __init__(self) -> None:
        self.ready = self.closed = 0

    async def prewarm(self, context: AgentContext) -> None:
        self.ready += 1

    async def stream(self, messages: Sequence[Message], tools: object) -> AsyncIterator[Chunk]:
        try:
            yield Chunk(text="They met.")
            raise ConnectionError("the line is dead")
        finally:
            self.closed += 1


async def test_its_model_gets_ready_with_the_agent(
    memory_world: World, configured: Configure
) -> None:
    client = Client()
    config = configured(summarizer=ModelSummarizer(client))
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a"):
            assert client.ready == 1


async def test_a_model_that_fails_half_way_stops_the_compaction() -> None:
    """S1-17."""
    client = Client()
    with pytest.raises(CompactionError, match="ModelSummarizer raised ConnectionError"):
        await Compactor(ModelSummarizer(client)).compact([said(1, Message.user("x"))], now=1.0)
    assert client.closed == 1


async def test_an_agent_remembers_what_a_model_made_of_its_turns(
    world: World, configured: Configure
) -> None:
    """S1-14."""
    config = configured(
        model=ScriptedModel(lambda messages: "It is calm. " * 60),
        summarizer=ModelSummarizer(ScriptedModel(lambda messages: ANSWER)),
        compaction=CompactionPolicy(max_bytes=4000, keep_turns=1),
    )
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            for number in range(8):
                await agent.ask(f"Question {number}")
            memory = next(one for one in agent.session.context() if "perdure_memory" in one.extra)
            assert "They met at the harbor." in memory.text
            assert memory.text.count("Likes herring.") == 1
            first, second = await agent.memory.retriever.semantic()
            assert (first.category, first.salience) == ("critical_issue", 500)
            assert (second.category, second.salience) == ("user_preference", 300)
