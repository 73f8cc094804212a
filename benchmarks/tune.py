"""What `perdure tune` predicts over what is measured: saves, and what a crash would cost.

Sessions of made-up agents, hurried on, have turns on three stores on files at once, each with a
setting of its own: the recommended one, the default, and the one that saves least often. After the
debounce has adapted to the stores' load, saves are counted, and for how long each record was
unsaved. The prediction is made as `perdure tune` makes it, from the first store's logs and speed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, final

import anyio

import perdure
from benchmarks.figures import Report, Row
from perdure import Autosave, Message, Session, SessionKey, Shutdown
from perdure.autosave.events import Saved
from perdure.store import Store
from perdure.tuning import (
    Advice,
    Requirements,
    Workload,
    WorkloadChange,
    advise,
    made_up,
    measure,
    observed,
    workload_of,
)

__all__ = ["Options", "run"]

HURRY = 8.0
"""How many times as fast as people the agents work."""


class Options(NamedTuple):
    """How much of it."""

    sessions: int = 60
    warm_up: float = 100.0
    """Seconds until saves are counted: autosave adapts the debounce in steps of 5 s."""
    seconds: float = 240.0
    """For which they are counted."""
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure on asyncio."""
    if options.folder is not None:
        return anyio.run(_measure, options, options.folder)
    with tempfile.TemporaryDirectory(prefix="perdure-tune-") as folder:
        return anyio.run(_measure, options, Path(folder))


async def _measure(options: Options, folder: Path) -> Report:
    script = made_up(sessions=options.sessions, seconds=HURRY * (options.warm_up + options.seconds))
    hurried = [
        tuple(change._replace(at=change.at / HURRY) for change in changes)
        for changes in script.sessions
    ]
    advice = await _advice(folder / "speed", workload_of(hurried, "the script"), options)
    settings = _chosen(advice)
    runs = [_Run(folder / str(number), setting) for number, setting in enumerate(settings)]
    async with anyio.create_task_group() as group:
        for live in runs:
            group.start_soon(live.play, hurried, options)
    async with _opened(runs[0].folder) as store:
        workload = await observed(store, most=10**6)
    predicted = await _advice(folder / "speed", workload, options)
    costs = {option.cost.autosave: option.cost for option in predicted.options}
    rows, details = [], {}
    for setting, live in zip(settings, runs, strict=True):
        debounce = "default" if setting.debounce is None else f"{setting.debounce:g}"
        name = f"tune.{debounce}_{setting.max_delay:g}"
        of_a_change = workload.seconds / workload.changes
        saves = costs[setting].saves * of_a_change / live.saves_of_a_change
        lost = costs[setting].lost * of_a_change / live.age
        rows += [
            Row(f"{name}.saves", saves, "predicted saves over those that were counted"),
            Row(f"{name}.lost", lost, "predicted records at risk over those that were"),
        ]
        details[name] = {"saves_of_a_change": live.saves_of_a_change, "age_s": live.age}
    error = max(abs(row.value - 1.0) for row in rows)
    rows.append(Row("tune.error", error, "the largest difference between the two"))
    return Report(rows, {**options._asdict(), "folder": str(folder), "runs": details})


@asynccontextmanager
async def _opened(folder: Path) -> AsyncGenerator[Store, None]:
    store = perdure.store_for(str(folder))
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


async def _advice(folder: Path, workload: Workload, options: Options) -> Advice:
    async with _opened(folder) as store:
        measured = await measure(store, size=workload.size)
    # Those that are active at once, as it counts: for a while after their last change, too.
    active = workload.seconds / (options.warm_up + options.seconds)
    return advise(workload, measured, Requirements(sessions=round(active)))


def _chosen(advice: Advice) -> list[Autosave]:
    """Return three settings: the recommended one, the default, and what saves least often."""
    fitting = [option for option in advice.options if not option.against]
    thrifty = sorted(fitting, key=lambda option: option.cost.saves)
    best = [] if advice.best is None else [advice.best.cost.autosave]
    settings = [*best, Autosave(), *(option.cost.autosave for option in thrifty)]
    return list(dict.fromkeys(settings))[:3]


@final
class _Run:
    """Sessions in a store with one setting, and what is counted of them."""

    def __init__(self, folder: Path, setting: Autosave) -> None:
        self.folder = folder
        self._setting = setting
        self._counts_from = math.inf
        self._waiting: dict[SessionKey, deque[tuple[int, float]]] = {}
        """By session, what is not durable: the number of a record, and when it was appended."""
        self._saves = 0
        self._ages: list[float] = []

    @property
    def saves_of_a_change(self) -> float:
        return self._saves / len(self._ages)

    @property
    def age(self) -> float:
        """For how long a record was unsaved, on average."""
        return fmean(self._ages)

    async def play(self, script: Sequence[Sequence[WorkloadChange]], options: Options) -> None:
        """Let the agents work, and count after the warm-up."""
        quiet = Shutdown(signals=False)
        async with perdure.connect(self.folder, autosave=self._setting, shutdown=quiet) as sessions:
            sessions.on("saved", self._saved)
            opened = [await sessions.open(f"agent-{number}") for number in range(len(script))]
            start = time.monotonic()
            self._counts_from = start + options.warm_up
            async with anyio.create_task_group() as group:
                for session, changes in zip(opened, script, strict=True):
                    self._waiting[session.key] = deque()
                    group.start_soon(self._talk, session, changes, start)

    async def _talk(
        self, session: Session, changes: Sequence[WorkloadChange], start: float
    ) -> None:
        waiting = self._waiting[session.key]
        for turn in _turns(changes):
            await anyio.sleep_until(start + turn[0].at)
            async with session.turn():
                waiting.append((session.version, time.monotonic()))  # its beginning
                for change in turn:
                    await anyio.sleep_until(start + change.at)
                    session.append(Message.user("x" * change.size))
                    waiting.append((session.version, time.monotonic()))
                waiting.append((session.version + 1, time.monotonic()))  # its end

    def _saved(self, event: Saved) -> None:
        now = time.monotonic()  # hooks are called outside of tasks
        waiting = self._waiting[event.key]
        while waiting and waiting[0][0] <= event.durable:
            since = waiting.popleft()[1]
            if now >= self._counts_from:
                self._ages.append(now - since)
        self._saves += now >= self._counts_from


def _turns(changes: Sequence[WorkloadChange]) -> Iterator[list[WorkloadChange]]:
    turn: list[WorkloadChange] = []
    for change in changes:
        turn.append(change)
        if change.ends_turn:
            yield turn
            turn = []
