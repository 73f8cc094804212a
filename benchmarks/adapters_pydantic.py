"""A turn of Pydantic AI through `PerdureConversationStore`, over a turn of perdure's own.

A turn is a question and an answer, which are durable afterwards: ``store.save(conversation)`` of a
conversation that is at hand, and a turn of a session that is open, on the file store. The two take
turns, and the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from benchmarks.figures import Report, Row

__all__ = ["Options", "run"]

TEXT = "The tide is low at noon, and again after midnight. " * 4


class Options(NamedTuple):
    """How much to measure, and where."""

    measured: int = 100
    """Turns in a round."""
    rounds: int = 7
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        adapter, own = asyncio.run(_run(options, Path(folder)))
    ratio = median(theirs / ours for theirs, ours in zip(adapter, own, strict=True))
    row = Row("adapters.pydantic_ai.overhead", ratio, "a turn's time, over a turn of perdure's own")
    seconds = {"adapter": adapter, "own": own}
    return Report([row], {**options._replace(folder=None)._asdict(), "seconds": seconds})


async def _run(options: Options, folder: Path) -> tuple[list[float], list[float]]:
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart

    import perdure
    from perdure.adapters import PerdureConversationStore

    async with perdure.connect(folder) as sessions, sessions.open("own") as session:
        store = PerdureConversationStore(sessions)
        conversation = Conversation(conversation_id="foreign")

        async def foreign() -> None:
            conversation.messages.append(ModelRequest(parts=[UserPromptPart(TEXT)]))
            conversation.messages.append(ModelResponse(parts=[TextPart(TEXT)]))
            await store.save(conversation)

        async def own() -> None:
            async with session.turn():
                session.append(perdure.Message(role="user", content=TEXT))
                session.append(perdure.Message(role="assistant", content=TEXT))

        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds + 1):
            for turn, measured in zip((foreign, own), times, strict=True):
                measured.append(await _seconds(turn, options.measured))
    return times[0][1:], times[1][1:]


async def _seconds(turn: Callable[[], Awaitable[None]], count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        await turn()
    return perf_counter() - start
