"""perdure beside what people use today: the same turns, each made durable, in the same run.

Each contender runs in a process of its own, all of them in each round, in another order each
time. A ratio is the median over rounds of the ratio within a round. Products that are not
installed (extra ``bench``) are left out, and the figures that need them as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.figures import Report, Row

__all__ = ["NAMES", "Options", "run"]

NEEDS = {"openai": "agents", "langgraph": "langgraph.checkpoint.sqlite", "adk": "google.adk"}
NAMES = ("file", "sqlite", "openai", "langgraph", "adk", "jsonl", "limit")
SLOW = {"langgraph": 8, "adk": 8}
"""Contenders that get this much fewer turns, since theirs take so much longer."""

Figures = dict[str, float]
Round = dict[str, Figures]
"""What each contender showed, by its name."""


class Options(NamedTuple):
    """What to measure, and where."""

    sessions: tuple[int, ...] = (1, 200)
    turns: int = 3000
    """Turns of all sessions together."""
    rounds: int = 5
    contenders: tuple[str, ...] = NAMES
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure all contenders with each number of sessions."""
    names = [name for name in options.contenders if _is_installed(name)]
    rows: list[Row] = []
    details: dict[str, list[Round]] = {}
    for sessions in options.sessions:
        rounds = [_round(names, sessions, options, at) for at in range(options.rounds)]
        prefix = "peers.one" if sessions == 1 else f"peers.many{sessions}"
        details[prefix] = rounds
        rows += _ratios(prefix, rounds) + _figures(prefix, rounds)
    return Report(rows, {"turns": options.turns, "rounds": details})


def _is_installed(name: str) -> bool:
    module = NEEDS.get(name)
    try:
        return module is None or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _round(names: Sequence[str], sessions: int, options: Options, at: int) -> Round:
    order = [*names[at % len(names) :], *names[: at % len(names)]]
    return {name: _measure(name, sessions, options) for name in order}


def _measure(name: str, sessions: int, options: Options) -> Figures:
    turns = max(1, options.turns // SLOW.get(name, 1) // sessions)
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        command = [sys.executable, "-m", "benchmarks.peers.worker", name, folder]
        command += ["--sessions", str(sessions), "--turns", str(turns)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(done.stdout)
    return figures


RATIOS = (
    ("sqlite_over_openai", "turns_per_second", "sqlite", "openai"),
    ("sqlite_over_limit", "turns_per_second", "sqlite", "limit"),
    ("file_over_jsonl", "turns_per_second", "file", "jsonl"),
    ("sqlite_cpu_over_openai", "cpu_us", "sqlite", "openai"),
    ("sqlite_cpu_over_limit", "cpu_us", "sqlite", "limit"),
    ("file_cpu_over_openai", "cpu_us", "file", "openai"),
    ("sqlite_p99_over_jsonl", "p99_ms", "sqlite", "jsonl"),
    ("file_p99_over_jsonl", "p99_ms", "file", "jsonl"),
    ("sqlite_bytes_over_openai", "bytes", "sqlite", "openai"),
    ("file_bytes_over_openai", "bytes", "file", "openai"),
    ("sqlite_lag_over_openai", "lag_p99_ms", "sqlite", "openai"),
    ("sqlite_peak_over_openai", "peak_mb", "sqlite", "openai"),
)
MEANINGS = {
    "turns_per_second": "turns a second",
    "cpu_us": "CPU of a turn",
    "p99_ms": "99th percentile of a turn's time",
    "bytes": "bytes written a turn",
    "lag_p99_ms": "99th percentile of the loop's lag",
    "peak_mb": "peak memory",
}


def _ratios(prefix: str, rounds: list[Round]) -> list[Row]:
    rows = []
    for name, figure, ours, theirs in RATIOS:
        if not {ours, theirs} <= rounds[0].keys():
            continue
        values = [one[ours][figure] / max(one[theirs][figure], 1e-9) for one in rounds]
        spread = f"{min(values):.2f} to {max(values):.2f}"
        meaning = f"{MEANINGS[figure]}, {ours} over {theirs} ({spread})"
        rows.append(Row(f"{prefix}.{name}", median(values), meaning))
    return rows


def _figures(prefix: str, rounds: list[Round]) -> list[Row]:
    rows = []
    for name in NAMES:
        for figure in rounds[0].get(name, {}):
            values = [one[name][figure] for one in rounds]
            meaning = f"{min(values):,.2f} to {max(values):,.2f}"
            rows.append(Row(f"{prefix}.{name}.{figure}", median(values), meaning))
    return rows
