"""Code that type checkers must accept: how people use an agent's memory. It is never run."""

# pyright: strict
from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from perdure import CompactionError, Message, Session
from perdure.agent import (
    Agent,
    Compaction,
    CompactionPolicy,
    Compactor,
    EchoModel,
    EpisodicItem,
    ExtractiveSummarizer,
    Fact,
    FactLimits,
    MemoryBundle,
    MemoryManager,
    ModelSummarizer,
    RawTrace,
    RetrievedMemory,
    Retriever,
    SemanticItem,
    Summarizer,
    Summary,
    TurnTrace,
    TurnTracker,
    Weights,
    estimated_tokens,
)


class MySummarizer:
    """A summarizer of a user's own."""

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        """Count what was said."""
        said = [message.text for turn in turns for message in turn.messages]
        return Summary(f"{len(said)} things", (Fact(said[0], "user_preference"),))


def my_count(message: Message) -> int:
    """Count tokens."""
    return estimated_tokens(message) + 4


async def options() -> None:
    """Say how memory is kept."""
    summarizers: list[Summarizer] = [
        MySummarizer(),
        ExtractiveSummarizer(quote_chars=200),
        ModelSummarizer(EchoModel(), max_chars=10_000),
        ModelSummarizer("openai:gpt-5-mini"),
    ]
    policy = CompactionPolicy(max_tokens=100_000, count_tokens=my_count, keep_turns=6)
    async with Agent.create(
        "ada", model=EchoModel(), summarizer=summarizers[0], compaction=policy
    ) as agent:
        try:
            await agent.ask("Hello")
        except CompactionError as error:
            print(error.facts, error.__cause__)
        agent.memory.request_compaction()


async def parts(session: Session, tracker: TurnTracker) -> None:
    """Put a memory together."""

    async def embed(texts: Sequence[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]

    async def read(name: str) -> list[bytes]:
        return [name.encode()]

    retriever = Retriever(read, embed=embed, weights=Weights(recency=0.5))
    compactor = Compactor(MySummarizer(), limits=FactLimits(per_category=4))
    memory = MemoryManager(session, turn_tracker=tracker, compactor=compactor, retriever=retriever)
    done = await memory.compact("Be kind.", exclude_turn_id="turn_0007")
    assert_type(done, Compaction)
    assert_type(await memory.retriever.retrieve(3, 20), MemoryBundle)
    found = await memory.retriever.search("harbor", limit=3, kind="semantic")
    assert_type(found, list[RetrievedMemory])
    assert_type(found[0].item, EpisodicItem | SemanticItem)
    async for trace in memory.raw_traces():
        assert_type(trace, RawTrace)
    tokens = memory.budget.is_over(memory.get_working_context_messages())
    assert_type(tokens, bool)
