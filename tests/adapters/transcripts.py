"""``python -m tests.adapters.transcripts``: the cost of a long transcript of the Claude Agent SDK.

Prints the time of an append at its beginning, in its middle and at its end, and the CPU time of a
load as a multiple of what it takes to read a JSONL file of the same entries.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final
from uuid import UUID

from perdure.adapters import PerdureSessionStore

KEY: Final = {"project_key": "-home-ada-harbor", "session_id": "s"}
BATCH: Final = 20
WINDOW: Final = 100
"""Appends of which the median is taken."""
LOADS: Final = 9


def transcript(count: int) -> Iterator[dict[str, Any]]:
    """Entries of about a kilobyte: questions, answers, results of tools."""
    contents: list[Any] = [
        "When is low tide? " * 20,
        [{"type": "text", "text": "In Oosthaven at noon é. " * 20}],
        [{"type": "tool_result", "tool_use_id": "t", "content": "line of output\n" * 60}],
    ]
    parent = None
    for number in range(count):
        uuid = str(UUID(int=number + 1))
        role = "assistant" if number % 3 == 1 else "user"
        yield {
            "parentUuid": parent,
            "isSidechain": False,
            "userType": "external",
            "cwd": "/home/ada/harbor",
            "sessionId": "3c6fbad6-edc8-415d-95ec-78932ad963dd",
            "version": "2.0.0",
            "gitBranch": "main",
            "type": role,
            "message": {"role": role, "content": contents[number % 3]},
            "uuid": uuid,
            "timestamp": "2026-11-27T12:00:00.000Z",
        }
        parent = uuid


def read(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


async def in_file(path: Path) -> int:
    return len(read(path))


async def loaded_by(url: str) -> int:
    """Open the store, load the transcript, and close it."""
    async with PerdureSessionStore.from_url(url) as store:
        return len(await store.load(KEY) or ())


async def measure(name: str, url: str, entries: list[dict[str, Any]], path: Path) -> None:
    appends = []
    async with PerdureSessionStore.from_url(url) as store:
        for at in range(0, len(entries), BATCH):
            begin = perf_counter()
            await store.append(KEY, entries[at : at + BATCH])
            appends.append(perf_counter() - begin)
    middle = len(appends) // 2
    places = (appends[:WINDOW], appends[middle : middle + WINDOW], appends[-WINDOW:])
    first, amid, last = (1000 * median(each) for each in places)
    print(f"{name}: append of {BATCH}: {first:.2f} ms, {amid:.2f} ms, {last:.2f} ms")
    async with PerdureSessionStore.from_url(url) as store:
        assert await store.load(KEY) == read(path) == entries
    ratios = []
    for _ in range(LOADS):  # one after the other, so that other load meets both
        times = []
        for load in (lambda: loaded_by(url), lambda: in_file(path)):
            gc.collect()
            begin = process_time()
            await load()
            times.append(process_time() - begin)
        ratios.append(times[0] / times[1])
    ratios.sort()
    print(
        f"{name}: load: {median(ratios):.2f} times a file's CPU ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    )


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.transcripts")
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--url", help="the store (default: files, and SQLite)")
    given = parser.parse_args()
    entries = list(transcript(given.entries))
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        path = Path(folder, "transcript.jsonl")
        path.write_text("".join(f"{json.dumps(each)}\n" for each in entries), encoding="utf-8")
        urls = {"files": f"{folder}/store", "sqlite": f"sqlite:///{folder}/a.db"}
        for name, url in {"store": given.url}.items() if given.url else urls.items():
            asyncio.run(measure(name, url, entries, path))


if __name__ == "__main__":
    main()
