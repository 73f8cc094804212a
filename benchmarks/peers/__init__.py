"""perdure beside what people use today: the same turns, each made durable, in the same run.

Each contender runs in a process of its own, all of them in each round, in another order each
time. A ratio is the median over rounds of the ratio within a round. Products that are not
installed (extra ``bench``) are left out, and the figures that need them as well. A product that
fails in a round, such as on a locked database, has no figures of that round; its error is in the
details.
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
    failures: dict[str, dict[str, list[str]]] = {}
    for sessions in options.sessions:
        prefix = "peers.one" if sessions == 1 else f"peers.many{sessions}"
        failed = failures[prefix] = {}
        rounds = [_round(names, sessions, options, at, failed) for at in range(options.rounds)]
        details[prefix] = rounds
        rows += _ratios(prefix, rounds) + _figures(prefix, rounds)
    return Report(rows, {"turns": options.turns, "rounds": details, "failed": failures})


def _is_installed(name: str) -> bool:
    module = NEEDS.get(name)
    try:
        return module is None or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _round(
    names: Sequence[str], sessions: int, options: Options, at: int, failed: dict[str, list[str]]
) -> Round:
    order = [*names[at % len(names) :], *names[: at % len(names)]]
    found: Round = {}
    for name in order:
        figures = _measure(name, sessions, options)
        if isinstance(figures, str):
            failed.setdefault(name, []).append(figures)
        else:
            found[name] = figures
    return found


def _measure(name: str, sessions: int, options: Options) -> Figures | str:
    """Return a contender's figures, or the error that another product ended with."""
    turns = max(1, options.turns // SLOW.get(name, 1) // sessions)
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        command = [sys.executable, "-m", "benchmarks.peers.worker", name, folder]
        command += ["--sessions", str(sessions), "--turns", str(turns)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 0:
        figures: Figures = json.loads(done.stdout)
        return figures
    if name not in NEEDS:
        raise SystemExit(done.stderr)
    lines = [line.strip(" |") for line in done.stderr.splitlines() if "Error" in line]
    return lines[0] if lines else f"exit code {done.returncode}"


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
        both = [one for one in rounds if {ours, theirs} <= one.keys()]
        values = [one[ours][figure] / max(one[theirs][figure], 1e-9) for one in both]
        if not values:
            continue
        spread = f"{min(values):.2f} to {max(values):.2f}"
        meaning = f"{MEANINGS[figure]}, {ours} over {theirs} ({spread})"
        rows.append(Row(f"{prefix}.{name}", median(values), meaning))
    return rows


def _figures(prefix: str, rounds: list[Round]) -> list[Row]:
    rows = []
    for name in NAMES:
        own = [one[name] for one in rounds if name in one]
        for figure in own[0] if own else ():
            values = [one[figure] for one in own]
            meaning = f"{min(values):,.2f} to {max(values):,.2f}"
            rows.append(Row(f"{prefix}.{name}.{figure}", median(values), meaning))
    return rows
