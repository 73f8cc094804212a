"""``python -m benchmarks.peers.worker``: one contender, in a process of its own, as JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
from argparse import ArgumentParser
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.chat import Chat
from benchmarks.peers.contenders import CONTENDERS, Contender, Plain
from benchmarks.timing import Lag, kernel_count, percentile

POOL = 64
"""Different turns; they are used again and again, so that making them costs nothing."""
WARM_UP = 5
"""Turns of each session before the clock runs, at most."""


async def measure(
    contender: Contender, folder: Path, sessions: int, turns: int
) -> dict[str, float]:
    """Let all sessions have their turns at once; return what that took."""
    chat = Chat(1)
    pool = [chat.turn().plain for _ in range(POOL)]
    await contender.open(folder, sessions)
    await _talk(contender, sessions, min(WARM_UP, turns), pool, [])
    gc.collect()
    lag, times = Lag(), list[float]()
    watch = asyncio.create_task(lag.watch())
    written, cpu, start = kernel_count() or 0, process_time(), perf_counter()
    await _talk(contender, sessions, turns, pool, times)
    took, cpu = perf_counter() - start, process_time() - cpu
    watch.cancel()
    written = (kernel_count() or 0) - written
    await contender.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    await contender.open(folder, sessions)
    newest = await contender.newest(0)
    restored = perf_counter() - start
    await contender.close()
    assert newest == min(50, 4 * (turns + min(WARM_UP, turns))), newest
    count = sessions * turns
    return {
        "turns_per_second": count / took,
        "cpu_us": cpu / count * 1e6,
        "bytes": written / count,
        "p99_ms": percentile(times, 0.99) * 1e3,
        "worst_ms": max(times) * 1e3,
        "lag_p99_ms": percentile(lag.late, 0.99) * 1e3,
        "lag_worst_ms": max(lag.late, default=0.0) * 1e3,
        "peak_mb": peak / 1024,
        "restore_ms": restored * 1e3,
    }


async def _talk(
    contender: Contender, sessions: int, turns: int, pool: list[Plain], times: list[float]
) -> None:
    async def one(number: int) -> None:
        for at in range(turns):
            start = perf_counter()
            await contender.turn(number, pool[(number + at) % POOL])
            times.append(perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(one(number))


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.peers.worker", description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True, help="of each session")
    given = parser.parse_args()
    contender = CONTENDERS[given.contender]()
    figures = asyncio.run(measure(contender, given.folder, given.sessions, given.turns))
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
