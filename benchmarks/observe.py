"""What metrics cost: a turn with them over one without, and a scrape.

Sessions have turns in a store in memory, so that nothing but perdure is measured: the share that
metrics have is smaller on any other store. Blocks with and without `Metrics` take turns; the
figure is the ratio of their median CPU times. The scrape is of sessions that all have a change
that is not saved, and its time is the loop's: nothing else runs in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import anyio

import perdure
from benchmarks.figures import Report, Row
from perdure import Message, SessionManager, Shutdown
from perdure.observe import Metrics

__all__ = ["Options", "run"]

SCRAPES = 20


class Options(NamedTuple):
    """How much of it."""

    sessions: int = 10_000
    """That one scrape is of."""
    turns: int = 400
    """In a block."""
    rounds: int = 41


def run(options: Options) -> Report:
    """Measure on asyncio."""
    overhead, scrape = anyio.run(_measure, options)
    rows = [
        Row("observe.overhead", overhead, "CPU time of a turn with metrics over one without"),
        Row(
            f"observe.scrape_{options.sessions}_ms",
            scrape,
            f"the longest of {SCRAPES} scrapes, in ms of the loop",
        ),
    ]
    return Report(rows, options._asdict())


async def _measure(options: Options) -> tuple[float, float]:
    quiet = Shutdown(signals=False)
    async with perdure.connect("memory:", shutdown=quiet) as sessions:
        overhead = await _overhead(sessions, options)
    async with perdure.connect("memory:", shutdown=quiet) as sessions:
        return overhead, await _scrape(sessions, options.sessions)


async def _overhead(sessions: SessionManager, options: Options) -> float:
    taken: dict[bool, list[float]] = {False: [], True: []}
    opened = [await sessions.open(str(number)) for number in range(20)]
    for at in range(2 * options.rounds + 2):
        is_on = bool(at % 2)
        metrics = Metrics(sessions) if is_on else None
        start = process_time()
        await _turns(opened, options.turns)
        if at >= 2:  # the first ones warm up
            taken[is_on].append(process_time() - start)
        if metrics is not None:
            metrics.close()
    return median(taken[True]) / median(taken[False])


async def _turns(opened: Sequence[perdure.Session], count: int) -> None:
    async def talk(session: perdure.Session) -> None:
        for _ in range(count // len(opened)):
            async with session.turn():
                session.append(Message.user("How deep is it?"), Message.assistant("Two fathoms."))

    async with anyio.create_task_group() as group:
        for session in opened:
            group.start_soon(talk, session)


async def _scrape(sessions: SessionManager, count: int) -> float:
    metrics = Metrics(sessions)
    for number in range(count):
        session = await sessions.open(str(number), autosave=None)
        session.append(Message.user("unsaved"))
    times: list[float] = []
    for _ in range(SCRAPES):
        start = perf_counter()
        text = metrics.render()
        times.append(perf_counter() - start)
    assert f'perdure_unsaved_sessions{{state="dirty"}} {count}' in text
    await sessions.flush()
    return max(times) * 1e3
