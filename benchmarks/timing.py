"""Small measures: quartiles, and what is handed to ``write``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio

__all__ = [
    "KERNEL",
    "Lag",
    "Written",
    "count_writes",
    "kernel_count",
    "percentile",
    "quartile",
    "ratio",
]

KERNEL = Path("/proc/self/io")


def quartile(values: Sequence[float]) -> float:
    """Return the 25th percentile: what something takes when nobody disturbs it."""
    return sorted(values)[len(values) // 4]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; 0 without values."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


class Lag:
    """How late the event loop serves a task that only sleeps, in seconds."""

    def __init__(self, tick: float = 0.002) -> None:
        self.late: list[float] = []
        self._tick = tick

    async def watch(self) -> None:
        while True:
            start = perf_counter()
            await anyio.sleep(self._tick)
            self.late.append(perf_counter() - start - self._tick)


def ratio(blocks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Return the median over blocks of the ratio of 25th percentiles, ours over theirs."""
    return median(quartile(ours) / quartile(theirs) for ours, theirs in blocks)


class Written:
    """How many bytes were handed to ``write``, and in how many calls."""

    def __init__(self) -> None:
        self.bytes = 0
        self.calls = 0


@contextmanager
def count_writes() -> Iterator[Written]:
    """Count every ``os.write`` of this process, whatever it is for.

    perdure writes files by nothing else; `kernel_count` would show it if it did.
    """
    written = Written()
    write = os.write

    def counted(fd: int, data: bytes, /) -> int:
        done = write(fd, data)
        written.bytes += done
        written.calls += 1
        return done

    os.write = counted
    try:
        yield written
    finally:
        os.write = write


def kernel_count() -> int | None:
    """Return what the kernel has counted of this process's writes; None where it does not.

    Includes what goes to pipes and wakes threads, so it is a little more.
    """
    if not KERNEL.exists():
        return None
    fields = dict(line.split(": ") for line in KERNEL.read_text().splitlines())
    return int(fields["wchar"])
