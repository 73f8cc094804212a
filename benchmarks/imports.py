"""What importing perdure costs, over importing what it stands on.

Each sample is a process of its own; the four kinds take turns, and figures are ratios of their
medians. Time counts from before the first import, in a Python that is up, to behind the last
one, or to where the manager of a new file store is connected, its event loop
included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.figures import Report, Row

__all__ = ["Options", "run"]


class Options(NamedTuple):
    """How long to measure, and where."""

    rounds: int = 21
    folder: Path | None = None


TIMED = """
from time import perf_counter
start = perf_counter()
{statement}
print(perf_counter() - start)
"""

CONNECTED = """
from os import _exit
from sys import argv
from time import perf_counter
start = perf_counter()
import asyncio, perdure
async def main():
    await perdure.connect(argv[1])
    print(perf_counter() - start, flush=True)
    _exit(0)
asyncio.run(main())
"""

SAMPLES = {
    "perdure": TIMED.format(statement="import perdure"),
    "names": TIMED.format(statement="from perdure import *"),
    "anyio_msgspec": TIMED.format(statement="import anyio, msgspec"),
    "first_open": CONNECTED,
    "asyncio_backend": TIMED.format(statement="import asyncio, anyio._backends._asyncio, msgspec"),
}


def run(options: Options) -> Report:
    """Measure, the first round aside, which only warms the disk's cache."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        rounds = [_round(Path(folder), number) for number in range(options.rounds + 1)][1:]
    took = {name: median(one[name] for one in rounds) for name in SAMPLES}
    rows = [
        Row(
            "imports.over_anyio_msgspec",
            took["perdure"] / took["anyio_msgspec"],
            "import perdure over import anyio, msgspec",
        ),
        Row(
            "imports.first_open",
            took["first_open"] / took["asyncio_backend"],
            "import and connect a file store over import asyncio, its anyio backend, msgspec",
        ),
        Row(
            "imports.all_names",
            took["names"] / took["anyio_msgspec"],
            "from perdure import * over import anyio, msgspec",
        ),
    ]
    about = {"rounds": options.rounds, "medians_ms": {k: v * 1e3 for k, v in took.items()}}
    return Report(rows, about)


def _round(folder: Path, number: int) -> dict[str, float]:
    return {name: _sample(code, folder / str(number)) for name, code in SAMPLES.items()}


def _sample(code: str, store: Path) -> float:
    command = [sys.executable, "-c", code, str(store)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)
