"""What a large working memory costs to open, and to touch, on the file store.

A session is filled with entries and closed; a manager of its own opens it again. Bytes are
what the kernel counts as read by this process (``rchar`` of /proc/self/io), whatever reads them:
a little more than the files' own, since waking a thread is a read of 8 bytes. Everything was
imported before. Each touch is the first of its entry, none of which is in the log's tail.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import NamedTuple

import anyio

import perdure
from benchmarks.figures import Report, Row
from benchmarks.timing import KERNEL
from perdure import Shutdown

__all__ = ["Options", "run"]

AT_ONCE = 200
"""How many entries one save has, while the memory is filled."""


class Options(NamedTuple):
    """How much to remember, and where."""

    entries: int = 10_000
    value_bytes: int = 10_240
    touches: int = 50
    folder: Path | None = None


class Measured(NamedTuple):
    """Bytes and seconds of one fresh manager."""

    opened: int
    open_seconds: float
    indexed: int
    index_seconds: float
    touched: list[int]
    touch_seconds: list[float]


def run(options: Options) -> Report:
    """Fill a memory, open it again, and touch some of it."""
    if not KERNEL.exists():
        raise SystemExit("this benchmark reads /proc/self/io: run it on Linux")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        filled = anyio.run(_fill, options, folder)
        measured = anyio.run(_measure, options, folder)
    return _report(options, filled, measured)


def _manager(folder: str) -> perdure.SessionManager:
    return perdure.connect(Path(folder) / "data", shutdown=Shutdown(signals=False))


async def _fill(options: Options, folder: str) -> float:
    """Remember everything; return how many seconds that took, the closing fold included."""
    random, began = Random(5), perf_counter()
    async with _manager(folder) as sessions, sessions.open("ada") as session:
        for number in range(options.entries):
            text = random.randbytes((options.value_bytes - 2) // 2 + 1).hex()
            value = text[: options.value_bytes - 2]  # with its quotes it has the size
            session.memory.set(f"note-{number:05}", value, description=f"note {number}")
            if number % AT_ONCE == AT_ONCE - 1:
                await session.save()
    return perf_counter() - began


async def _measure(options: Options, folder: str) -> Measured:
    before, began = read_so_far(), perf_counter()
    async with _manager(folder) as sessions:
        session = await sessions.open("ada")
        opened, open_seconds = read_so_far() - before, perf_counter() - began
        before, began = read_so_far(), perf_counter()
        keys = await session.memory.keys()
        indexed, index_seconds = read_so_far() - before, perf_counter() - began
        assert len(keys) == options.entries, len(keys)
        touched, touch_seconds = [], []
        for key in Random(7).sample(keys, min(options.touches, len(keys))):
            before, began = read_so_far(), perf_counter()
            value = await session.memory.get(key)
            touch_seconds.append(perf_counter() - began)
            touched.append(read_so_far() - before)
            assert len(value) == options.value_bytes - 2
    return Measured(opened, open_seconds, indexed, index_seconds, touched, touch_seconds)


def read_so_far() -> int:
    """Return how many bytes the kernel has given to this process's reads."""
    fields = dict(line.split(": ") for line in KERNEL.read_text().splitlines())
    return int(fields["rchar"])


def _report(options: Options, filled: float, measured: Measured) -> Report:
    total = options.entries * options.value_bytes
    rows = [
        Row(
            "memory.open_bytes_share",
            measured.opened / total,
            "bytes read to open the session, over the bytes of all values",
        ),
        Row(
            "memory.touch_bytes_over_value",
            max(measured.touched) / options.value_bytes,
            "bytes read by the first touch of a value, at most, over its size",
        ),
        Row(
            "memory.open_with_index_bytes_share",
            (measured.opened + measured.indexed) / total,
            "the same as the first, the index included, which is read at its first touch",
        ),
        Row("memory.open_ms", measured.open_seconds * 1000, "to connect and open the session"),
        Row("memory.index_ms", measured.index_seconds * 1000, "the first touch of the index"),
        Row("memory.touch_ms", median(measured.touch_seconds) * 1000, "the first touch of a value"),
    ]
    details = {
        "entries": options.entries,
        "value_bytes": options.value_bytes,
        "touches": len(measured.touched),
        "counted": "rchar of /proc/self/io",
        "open_bytes": measured.opened,
        "index_bytes": measured.indexed,
        "touch_bytes": {"median": median(measured.touched), "most": max(measured.touched)},
        "fill_seconds": filled,
    }
    return Report(rows, details)
