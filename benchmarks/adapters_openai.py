"""Turns of the OpenAI Agents SDK: `PerdureSession` on SQLite over the SDK's own SQLiteSession.

A turn is what a run asks of a session: read the items, add the question, add the answer. What was
added is durable. One session alone, and many at once, each with its turns one after another, in one
database. Each round has new sessions, which have had a turn before. The two take turns, and a
figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.figures import Report, Row

__all__ = ["Options", "run"]

TEXT = "The tide is low at noon, and again after midnight. " * 4


class Options(NamedTuple):
    """How much to measure, and where."""

    measured: int = 200
    """Turns of one session in a round."""
    sessions: int = 200
    each: int = 5
    """Turns of each of many sessions in a round."""
    rounds: int = 5
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure in a folder that is removed afterwards."""
    rows, details = [], {}
    sizes = {"": (1, options.measured), "_many": (options.sessions, options.each)}
    for name, (sessions, turns) in sizes.items():
        with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
            ours, theirs = asyncio.run(_run(Path(folder), sessions, turns, options.rounds))
        ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
        meaning = f"turns/s over SQLiteSession, sessions at once: {sessions}"
        rows.append(Row(f"adapters.openai.turns{name}", ratio, meaning))
        details[f"sessions_{sessions}"] = {"perdure": ours, "sqlite": theirs}
    return Report(rows, {**options._replace(folder=None)._asdict(), "turns_per_second": details})


async def _run(
    folder: Path, sessions: int, turns: int, rounds: int
) -> tuple[list[float], list[float]]:
    from agents import SQLiteSession

    import perdure
    from perdure.adapters import PerdureSession

    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(perdure.connect(f"sqlite:///{folder}/perdure.db"))
        rates: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            names = [f"{number} {at}" for at in range(sessions)]
            rates[0].append(await _rate([PerdureSession(name, manager) for name in names], turns))
            theirs = [SQLiteSession(name, folder / "agents.db") for name in names]
            rates[1].append(await _rate(theirs, turns))
            for session in theirs:
                session.close()
    return rates


async def _rate(sessions: list[Any], turns: int) -> float:
    await _all(sessions, 1)
    start = perf_counter()
    await _all(sessions, turns)
    return len(sessions) * turns / (perf_counter() - start)


async def _all(sessions: list[Any], turns: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for session in sessions:
            tasks.create_task(_turns(session, turns))


async def _turns(session: Any, count: int) -> None:
    for number in range(count):
        await session.get_items()
        await session.add_items([{"role": "user", "content": f"{number} {TEXT}"}])
        part = {"type": "output_text", "text": TEXT, "annotations": []}
        about = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        await session.add_items([{**about, "status": "completed", "content": [part]}])
