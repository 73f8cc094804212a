"""One process with very many sessions: what an append costs, and how long others must wait.

The sessions are opened and collected once. Then each gets a mark, in the order in which they
were opened: an append of the application's own bytes. Its floor is to append the same bytes to a
list, in a dict that has one for each session. One session takes in a chat as well, next to
`msgspec.json.encode` of dicts that say the same. Both are ratios of 25th percentiles over blocks
of 1,000, in CPU time of this thread.

Then a stream of appends goes to them at random for a while, at a rate of which saving does not
make a backlog. The store is in memory, so that nothing but perdure is measured. With many
sessions nearly every append is the first one since its session was saved, and finds nothing of it
in the processor's caches.

Half of the appends are records of the application's own kind, which is what `EncodedRecord` is for;
the others are encoded messages, which go into the working context too, and have a figure
without a target. They take turns to come first in a burst, which finds the code itself cold.
A figure of CPU time is the 25th percentile over bursts of appends.

With ``closed``, sessions are opened, filled and closed instead, one after the other, in files:
what the process holds afterwards should be what it held before.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import anyio
import msgspec
import psutil

import perdure
from benchmarks.chat import Chat
from benchmarks.figures import Report, Row
from benchmarks.steps import Steps, living, watch
from benchmarks.timing import quartile
from perdure import Autosave, EncodedRecord, Message, Session, SessionManager, Shutdown

__all__ = ["Options", "run"]

TICK = 0.01
"""Seconds between bursts of the stream."""
CLOSED_BYTES = 200_000
"""Of each session that is opened and closed."""
WARM_UP = 20
BLOCK = 1000
MESSAGES = 20_000
"""Of a chat that one session takes in."""
TEXT = "x" * 270
ITEMS = {
    "mark_us": EncodedRecord("app:event", f'{{"event":"seen","what":"{TEXT}"}}'.encode()),
    "mark_message_us": EncodedRecord("message", f'{{"role":"user","content":"{TEXT}"}}'.encode()),
}
"""What is appended, by the name of its figure."""

FOUND = {
    "mark_over_floor": "a mark over appending its bytes to a list in a dict, sessions in order",
    "append_over_msgspec": "append of a message over msgspec.json.encode of the same dict",
    "bytes_per_session": "resident memory of an idle session",
}


class Options(NamedTuple):
    """What to measure."""

    sessions: int = 100_000
    seconds: float = 60.0
    rate: float = 8_000.0
    """Appends in a second, over all sessions."""
    backend: str = "asyncio"
    closed: int = 0
    """Sessions to open and close, instead of all else."""
    folder: Path | None = None
    """Where closed ones lie; None for a temporary folder."""


class Stream:
    """Appends at random, in bursts, with an empty call for each to compare."""

    def __init__(self, sessions: list[Session]) -> None:
        self._sessions = sessions
        self._random = Random(7)
        self._items = list(ITEMS.items())
        self.appends = 0
        self.cpu: dict[str, list[float]] = {name: [] for name in ITEMS}
        """CPU seconds of one append less one empty call, by burst."""
        self.most_tasks = self.most_timers = 0

    def burst(self, count: int) -> None:
        """Append to ``count`` sessions, and do nothing as often."""
        self._items.reverse()
        for name, item in self._items:
            chosen = self._random.choices(self._sessions, k=count // len(ITEMS) + 1)
            empty = _spend(_nothing, chosen, item)
            used = _spend(Session.append, chosen, item)
            self.appends += len(chosen)
            self.cpu[name].append((used - empty) / len(chosen))

    async def flow(self, options: Options) -> None:
        """Go on for the given time, and keep to the rate even after a delay."""
        start = perf_counter()
        while (passed := perf_counter() - start) < options.seconds:
            missing = int(passed * options.rate) - self.appends
            if missing > 0:
                self.burst(missing)
            await anyio.sleep(TICK)
            tasks, timers = living(options.backend)
            self.most_tasks = max(self.most_tasks, tasks)
            self.most_timers = max(self.most_timers, timers)


def _nothing(_session: Session, *_items: EncodedRecord) -> int:
    """Stand for a call that does nothing."""
    return 0


def _spend(
    call: Callable[[Session, EncodedRecord], int], chosen: list[Session], item: EncodedRecord
) -> float:
    start = thread_time()
    for session in chosen:
        call(session, item)
    return thread_time() - start


async def _ratios(opened: list[Session]) -> dict[str, float]:
    """Compare marks with their floor, and messages with their encoding, block by block."""
    record = ITEMS["mark_us"]
    payload = record.entry.payload
    lists: dict[str, list[bytes]] = {session.id: [] for session in opened}
    taken: dict[str, list[float]] = {"mark": [], "floor": [], "append": [], "encode": []}
    for first in range(0, len(opened), BLOCK):
        block = opened[first : first + BLOCK]
        names = [session.id for session in block]
        start = thread_time()
        for session in block:
            session.append(record)
        marked = thread_time()
        for name in names:
            lists[name].append(payload)
        floor = thread_time()
        taken["mark"].append((marked - start) / len(block))
        taken["floor"].append((floor - marked) / len(block))
        await anyio.sleep(0)  # what is due is saved
    chat = Chat(3)
    for _ in range(MESSAGES // BLOCK):
        turns = [chat.turn() for _ in range(BLOCK // 4)]
        start = thread_time()
        for turn in turns:
            for message in turn.messages:
                opened[0].append(message)
        appended = thread_time()
        for turn in turns:
            for plain in turn.plain:
                msgspec.json.encode(plain)
        encoded = thread_time()
        taken["append"].append(appended - start)
        taken["encode"].append(encoded - appended)
        await opened[0].save()
    found = {name: quartile(seconds) for name, seconds in taken.items()}
    return {
        "mark_over_floor": found["mark"] / found["floor"],
        "append_over_msgspec": found["append"] / found["encode"],
    }


class Collections:
    """How often the garbage collector ran, and the longest that it took."""

    def __init__(self) -> None:
        self.count = [0, 0, 0]
        self.longest = [0.0, 0.0, 0.0]
        self._start = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = thread_time()
            return
        generation = info["generation"]
        self.count[generation] += 1
        took = thread_time() - self._start
        self.longest[generation] = max(self.longest[generation], took)


def run(options: Options) -> Report:
    """Measure on one event loop."""
    if options.closed:
        return anyio.run(_measure_closed, options, backend=options.backend)
    return anyio.run(_measure, options, backend=options.backend)


async def _measure(options: Options) -> Report:
    shutdown = Shutdown(deadline=600)
    async with perdure.connect(
        "memory:", autosave=Autosave.server(), shutdown=shutdown
    ) as sessions:
        before = _memory()
        start = perf_counter()
        opened = [await sessions.open(f"agent-{n}") for n in range(options.sessions)]
        opening = perf_counter() - start
        each = (_memory() - before) / options.sessions
        collections = Collections()
        ratios = await _ratios(opened)
        await sessions.flush()
        gc.callbacks.append(collections)
        stream = Stream(opened)
        try:
            with watch(options.backend) as steps:
                await stream.flow(options)
        finally:
            gc.callbacks.remove(collections)
        unsaved = await _settle(sessions, opened)
    details = _details(options, stream, steps, collections)
    rows = _rows(stream, steps, {**ratios, "bytes_per_session": each})
    return Report(rows, {**details, "opening_s": opening, "unsaved": unsaved})


async def _measure_closed(options: Options) -> Report:
    """Open and close sessions; a few first, so that what is loaded lazily does not count."""
    text = "x" * CLOSED_BYTES
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        async with perdure.connect(f"file:{folder}/store") as sessions:
            most = 0
            for n in range(-WARM_UP, options.closed):
                if n == 0:
                    before = _memory()
                async with sessions.open(f"agent-{n}") as session:
                    session.append(Message.user(text))
                    await session.aclose()
                most = max(most, psutil.Process().memory_info().rss)
            del session
            after = _memory()
    rows = [
        Row(
            "closed.held_mb",
            max(0.0, (after - before) / 1e6),
            "memory held more than before the first",
        ),
        Row("closed.most_mb", (most - before) / 1e6, "the same at most, between collections"),
    ]
    return Report(rows, {**options._asdict(), "folder": str(options.folder), "bytes": CLOSED_BYTES})


def _memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


async def _settle(sessions: SessionManager, opened: list[Session]) -> int:
    """Save everything, and return how many sessions are not saved all the same."""
    await sessions.flush()
    return sum(session.version != session.durable_version for session in opened)


def _rows(stream: Stream, steps: Steps, found: dict[str, float]) -> list[Row]:
    return [
        Row(
            "live.mark_us",
            quartile(stream.cpu["mark_us"]) * 1e6,
            "CPU of append of an Encoded item less an empty call",
        ),
        Row(
            "live.mark_message_us",
            quartile(stream.cpu["mark_message_us"]) * 1e6,
            "the same of an encoded message, for the working context too",
        ),
        Row("live.worst_slice_ms", steps.longest * 1e3, "longest step of perdure's tasks, CPU"),
        Row("live.tasks", stream.most_tasks, "tasks of the process, at most"),
        Row("live.timers", stream.most_timers, "timers of its event loop, at most"),
        *(Row(f"live.{name}", found[name], meaning) for name, meaning in FOUND.items()),
    ]


def _details(
    options: Options, stream: Stream, steps: Steps, collections: Collections
) -> dict[str, Any]:
    return {
        **options._asdict(),
        "appends": stream.appends,
        "medians_us": {name: median(cpu) * 1e6 for name, cpu in stream.cpu.items()},
        "means_us": {name: fmean(cpu) * 1e6 for name, cpu in stream.cpu.items()},
        "steps": steps.count,
        "steps_cpu_s": steps.total,
        "worst_slice_in": steps.where,
        "collections": collections.count,
        "longest_collection_ms": [round(one * 1e3, 3) for one in collections.longest],
    }
