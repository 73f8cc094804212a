"""CPU of the Claude Agent SDK's and the Agent Framework's work, over that with other stores.

Each case gives the same work to two stores: perdure's on files, and one that comes with the SDK, or
JSON lines with a sync, as the Claude Agent SDK's program writes its own files. The two take turns;
a figure is the median of the rounds' ratios, with the lowest and the highest. It is CPU, of all
threads: time would be that of the disk, which only some of them wait for.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple
from uuid import uuid4
from warnings import catch_warnings

from benchmarks.figures import Report, Row

__all__ = ["Options", "run"]

TEXT = "The tide is low at noon, and again after midnight. " * 4
KEY: Any = {"project_key": "-harbor", "session_id": "tides"}
FLOW = "voyage"

Work = Callable[[int], Awaitable[None]]
"""One piece of work, by its number."""


class Options(NamedTuple):
    """How much to measure, and where."""

    before: int = 200
    """Pieces of work that a session has had before the first round."""
    measured: int = 40
    """Pieces in a round."""
    rounds: int = 9
    folder: Path | None = None


class Case(NamedTuple):
    """Two stores that are given the same work."""

    meaning: str
    ours: Callable[[Path], Any]
    theirs: Callable[[Path], Any]


def run(options: Options) -> Report:
    """Measure each case in a folder that is removed afterwards."""
    rows: list[Row] = []
    seconds: dict[str, Any] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
            ours, theirs = asyncio.run(_run(case, options, Path(folder)))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        rows.append(Row(name, median(ratios), case.meaning))
        ranges[name] = min(ratios), max(ratios)
        seconds[name] = {"perdure": ours, "theirs": theirs}
    about = options._replace(folder=None)._asdict()
    return Report(rows, {**about, "cpu_seconds": seconds, "ranges": ranges})


async def _run(case: Case, options: Options, folder: Path) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    async with AsyncExitStack() as stack:
        works: list[Work] = []
        for name, opened in (("ours", case.ours), ("theirs", case.theirs)):
            (folder / name).mkdir()
            works.append(await stack.enter_async_context(opened(folder / name)))
        done = 0
        for count in (options.before, *[options.measured] * options.rounds):
            for work, seconds in zip(works, found, strict=True):
                start = process_time()
                for number in range(done, done + count):
                    await work(number)
                seconds.append(process_time() - start)
            done += count
    return found[0][1:], found[1][1:]


# A turn of the Claude Agent SDK: its question and its answer, appended as they come


@asynccontextmanager
async def _claude(folder: Path) -> AsyncIterator[Work]:
    from perdure.adapters import PerdureSessionStore

    async with PerdureSessionStore.from_url(folder) as store:
        yield _mirror(store)


@asynccontextmanager
async def _claude_in_memory(folder: Path) -> AsyncIterator[Work]:  # noqa: ARG001
    from claude_agent_sdk import InMemorySessionStore

    yield _mirror(InMemorySessionStore())


@asynccontextmanager
async def _claude_lines(folder: Path) -> AsyncIterator[Work]:
    with (folder / "tides.jsonl").open("ab", buffering=0) as file:
        yield _mirror(Lines(file.fileno()))


class Lines:
    """A session store that only appends: a line of JSON an entry, synced."""

    def __init__(self, file: int) -> None:
        self._file = file

    async def append(self, key: Any, entries: Any) -> None:
        data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()

        def write() -> None:
            os.write(self._file, data)
            os.fsync(self._file)

        await asyncio.to_thread(write)


def _mirror(store: Any) -> Work:
    async def turn(number: int) -> None:
        for role in ("user", "assistant"):
            message = {"role": role, "content": [{"type": "text", "text": f"{number} {TEXT}"}]}
            about = {"sessionId": "tides", "cwd": "/harbor", "timestamp": "2026-11-01T12:00:00Z"}
            entry = {"type": role, "uuid": str(uuid4()), **about, "message": message}
            await store.append(KEY, [entry])

    return turn


# A run of the Agent Framework: read the history, add the question and the answer


@asynccontextmanager
async def _history(folder: Path) -> AsyncIterator[Work]:
    from perdure.adapters import PerdureHistoryProvider

    async with PerdureHistoryProvider.from_url(folder) as history:
        yield _talk(history)


@asynccontextmanager
async def _history_in_files(folder: Path) -> AsyncIterator[Work]:
    from agent_framework import FileHistoryProvider

    with catch_warnings(action="ignore"):  # it is experimental
        history = FileHistoryProvider(folder)
    yield _talk(history)


def _talk(history: Any) -> Work:
    from agent_framework import Message

    async def turn(number: int) -> None:
        await history.get_messages("ada")
        said = [Message(role, [f"{number} {TEXT}"]) for role in ("user", "assistant")]
        await history.save_messages("ada", said)

    return turn


# A step of a workflow, whose state grows: save a checkpoint


@asynccontextmanager
async def _checkpoints(folder: Path) -> AsyncIterator[Work]:
    from perdure.adapters import PerdureCheckpointStorage

    async with PerdureCheckpointStorage.from_url("ada", folder) as storage:
        yield _steps(storage)


@asynccontextmanager
async def _checkpoints_in_files(folder: Path) -> AsyncIterator[Work]:
    from agent_framework import FileCheckpointStorage

    yield _steps(FileCheckpointStorage(folder))


def _steps(storage: Any) -> Work:
    from agent_framework import WorkflowCheckpoint

    said: list[str] = []
    previous: list[str | None] = [None]

    async def step(number: int) -> None:
        said.append(f"{number} {TEXT}")
        checkpoint = WorkflowCheckpoint(
            FLOW,
            "hash",
            previous_checkpoint_id=previous[0],
            state={"said": list(said), "count": number},
            iteration_count=number,
        )
        previous[0] = await storage.save(checkpoint)

    return step


CASES = {
    "adapters.claude.cpu": Case(
        "CPU of a turn, over a JSON line an entry with a sync", _claude, _claude_lines
    ),
    "adapters.claude.cpu_over_memory": Case(
        "CPU of a turn, over InMemorySessionStore", _claude, _claude_in_memory
    ),
    "adapters.agent_framework.cpu": Case(
        "CPU of a run's reading and saving, over FileHistoryProvider", _history, _history_in_files
    ),
    "adapters.agent_framework.checkpoint_cpu": Case(
        "CPU of a checkpoint, over FileCheckpointStorage", _checkpoints, _checkpoints_in_files
    ),
}
