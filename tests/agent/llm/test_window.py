"""A conversation that grows longer than its model's window goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from perdure import ContextOverflowError, Message, ModelError, ToolCall
from perdure.agent import Agent, CompactionPolicy
from perdure.agent.llm import AnthropicModel, OpenAIModel, ToolSpec
from perdure.agent.llm.failures import Overflow, overflow_in
from perdure.agent.llm.model import Chunk
from tests.servers.models import KEY, Server

ASKS = 9
WORDS = "word " * 150
TOO_LONG = "word " * 4000

Make = Callable[..., Any]


def chat(server: Server, style: str, **options: Any) -> OpenAIModel:
    name = f"window-2000-{style}"
    return OpenAIModel(name, base_url=server.openai_url, api_key=KEY, **options)


def responses(server: Server, style: str, **options: Any) -> OpenAIModel:
    return chat(server, style, api="responses", **options)


def anthropic(server: Server, style: str, **options: Any) -> AnthropicModel:
    name = f"window-2000-{style}"
    return AnthropicModel(name, base_url=server.url, api_key=KEY, **options)


EACH = pytest.mark.parametrize(
    ("make", "style"),
    [
        (chat, "openai"),
        (chat, "vllm"),
        (chat, "llama.cpp"),
        (responses, "responses"),
        (anthropic, "anthropic"),
        (anthropic, "anthropic-bytes"),
    ],
)


@EACH
async def test_a_conversation_outgrows_the_window_and_goes_on(
    make: Make, style: str, models: Server
) -> None:
    before = len(models.seen()["requests"])
    async with await Agent.create("ada", model=make(models, style)) as agent:
        for number in range(ASKS):
            answer = await agent.ask(f"{number} {WORDS}")
            assert answer == f"You said: {number} {WORDS}"
        history = await agent.session.history(limit=1000)
        said = [item.value.text for item in history if isinstance(item.value, Message)]
        assert [text for text in said if not text.startswith("You said")] == [
            f"{number} {WORDS}" for number in range(ASKS)
        ]
    asked = models.seen()["requests"][before:]
    assert ASKS < len(asked) <= 2 * ASKS  # never a third time
    assert models.seen()["broken"] == []


@EACH
async def test_what_does_not_fit_is_said_and_leaves_nothing_in_the_context(
    make: Make, style: str, models: Server
) -> None:
    async with await Agent.create("ada", model=make(models, style)) as agent:
        await agent.ask("Hello")
        sizes = []
        for _ in range(3):
            before = len(models.seen()["requests"])
            with pytest.raises(ContextOverflowError, match="does not fit into the model's window"):
                await agent.ask(TOO_LONG)
            assert len(models.seen()["requests"]) - before <= 2
            sizes.append(sum(len(message.text) for message in agent.session.context()))
        assert max(sizes) < len(TOO_LONG)
        assert len(set(sizes)) == 1
        assert await agent.ask("Still there?") == "You said: Still there?"


async def test_a_known_window_is_kept_before_the_model_refuses(models: Server) -> None:
    before = len(models.seen()["requests"])
    model = chat(models, "openai", context_window=1200)
    async with await Agent.create("ada", model=model) as agent:
        for number in range(ASKS):
            await agent.ask(f"{number} {WORDS}")
    assert len(models.seen()["requests"]) - before == ASKS


class Counting:
    """A model of one's own, which tells what it has read; its window is known."""

    context_window = 1000

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> AsyncIterator[Chunk]:
        from perdure.agent import Usage

        yield Chunk(text="ok", usage=Usage(input_tokens=self.tokens))


@pytest.mark.parametrize(("tokens", "warns"), [(700, False), (800, True)])
async def test_it_warns_before_the_window_is_full(
    tokens: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="perdure.agent"):
        async with await Agent.create("ada", model=Counting(tokens)) as agent:
            await agent.ask("one")
            await agent.ask("two")
    told = [record for record in caplog.records if "nears the model's window" in record.message]
    assert len(told) == warns
    if warns:
        assert (told[0].tokens, told[0].window) == (800, 1000)  # type: ignore[attr-defined]


class Own:
    """A model of one's own, whose client raises what Gemini says."""

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> AsyncIterator[Chunk]:
        size = sum(len(message.text) for message in messages) // 4
        if size > 900:
            said = f"The input token count ({size}) exceeds the maximum number of tokens allowed"
            raise ModelError(f"400 INVALID_ARGUMENT: {said} (900).")
        yield Chunk(text="ok")


@pytest.mark.parametrize("policy", [CompactionPolicy(), CompactionPolicy(max_tokens=100_000)])
async def test_a_model_of_ones_own_is_understood_too(policy: CompactionPolicy) -> None:
    async with await Agent.create("ada", model=Own(), compaction=policy) as agent:
        for number in range(ASKS):
            assert await agent.ask(f"{number} {WORDS}") == "ok"


@pytest.mark.parametrize("turns", [2, ASKS], ids=["never compacted", "compacted before"])
async def test_the_context_is_what_it_was_before_a_turn_that_does_not_fit(turns: int) -> None:
    async with await Agent.create("ada", model=Own()) as agent:
        for number in range(turns):
            await agent.ask(f"{number} {WORDS}")
        before = agent.session.context()
        assert before
        for _ in range(2):
            with pytest.raises(ContextOverflowError):
                await agent.ask(TOO_LONG)
            assert agent.session.context() == before
        assert await agent.ask("Still there?") == "ok"
        # The earlier turns are still to be read, not just in long-term memory.
        assert agent.session.context()[: len(before)] == before
        for number in range(ASKS):
            await agent.ask(f"more {number} {WORDS}")
        remembered = await agent.memory.retriever.episodic()
        ids = [id for item in remembered for id in item.turn_ids]
        assert sorted(set(ids)) == sorted(ids)  # none is summed up twice


class Calling:
    """A model that calls a tool, and then finds its window too small for the answer."""

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> AsyncIterator[Chunk]:
        if messages[-1].text == "Send it":
            yield Chunk(tool_calls=(ToolCall("c1", "send_mail"),))
        elif messages[-1].tool_result is not None:
            raise ModelError(
                "The input token count (950) exceeds the maximum number of tokens allowed (900)."
            )
        else:
            yield Chunk(text="ok")


async def test_what_a_tool_has_done_is_not_taken_back() -> None:
    sent = []

    async def send_mail() -> str:
        """Send it."""
        sent.append("mail")
        return "sent"

    async with await Agent.create("ada", model=Calling(), tools=[send_mail]) as agent:
        with pytest.raises(ContextOverflowError):
            await agent.ask("Send it")
        assert sent == ["mail"]
        assert "tool" in [message.role for message in agent.session.context()]
        assert await agent.ask("Did you send it?") == "ok"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Error code: 400 - {'error': {'code': 'context_length_exceeded'}}", Overflow()),
        ("prompt is too long: 208310 tokens > 200000 maximum", Overflow(208310, 200000)),
        (
            "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease",
            Overflow(178959, 136000),
        ),
        (
            "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576)",
            Overflow(1200293, 1048576),
        ),
        (
            "maximum context length is 4097 (1044 in your prompt; 3072 for the completion)",
            Overflow(1044, 1025),
        ),
        (
            "{'type': 'exceed_context_size_error', 'n_prompt_tokens': 1407, 'n_ctx': 256}",
            Overflow(1407, 256),
        ),
        (
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
            Overflow(5000, 4096),
        ),
        ("Requested tokens (757) exceed context window of 512", Overflow(757, 512)),
        ("Input is too long for requested model.", Overflow()),
        ("messages[1]: roles must alternate", None),
        ("the answer of m was cut on its way", None),
    ],
)
def test_what_providers_say_of_their_windows(text: str, told: Overflow | None) -> None:
    assert overflow_in(text) == told
