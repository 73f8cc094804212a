"""SIGTERM amid load, again and again: is everything that was accepted in the log?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import anyio

import perdure
from perdure import SessionManager, Shutdown

ROOT = Path(__file__).parents[2]
PROMISED = Shutdown()
FIRST = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


class Cycle(NamedTuple):
    """What one child did."""

    status: int
    seconds: float
    """From the first SIGTERM to the end."""
    accepted: list[str]
    said: str
    """Its stderr."""


def run_child(
    root: Path,
    runner: str,
    *,
    sessions: int,
    after: int,
    terms: int = 1,
    by: signal.Signals = signal.SIGTERM,
    program: str = "child",
    first: bool = False,
) -> Cycle:
    """Run a child, and end it once it has said this many lines.

    The first process of a namespace of its own, as in a container, needs `FIRST`.
    """
    command = [sys.executable, "-m", f"tests.sigterm.{program}", str(root), runner, str(sessions)]
    command = [*FIRST, *command] if first else command
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        lines = [child.stdout.readline() for _ in range(after)]
        start = time.monotonic()
        for _ in range(terms):
            os.kill(_only_child(child.pid) if first else child.pid, by)
        rest = child.stdout.read()
        status = child.wait()
        seconds = time.monotonic() - start
        said = child.stderr.read()
    whole = "".join(lines) + rest
    accepted = [line for line in whole.splitlines() if ":" in line]
    return Cycle(status, seconds, accepted, said)


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def lost(root: Path, accepted: list[str]) -> list[str]:
    """Return what was accepted and is not in its session's log, once and in order."""
    return anyio.run(_lost, root, accepted)


async def _lost(root: Path, accepted: list[str]) -> list[str]:
    wanted: dict[str, list[str]] = {}
    for text in accepted:
        wanted.setdefault(text.partition(":")[0], []).append(text)
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        missing: list[str] = []
        for session, texts in wanted.items():
            held = await stored(sessions, session)
            missing += sorted(set(texts) - set(held))
            assert [text for text in held if text in set(texts)] == texts or missing
    return missing


async def stored(sessions: SessionManager, id: str) -> list[str]:
    view = await sessions.load(id)
    items = [] if view is None else await view.history(limit=10**9)
    return [item.value.text for item in items]


def run_cycles(folder: Path, runner: str, *, cycles: int, sessions: int) -> dict[str, Any]:
    """Run many children, each on a store of its own, and sum up."""
    summary: dict[str, Any] = {"runner": runner, "cycles": cycles, "accepted": 0, "lost": []}
    statuses: dict[int, int] = {}
    longest = 0.0
    for number in range(cycles):
        root = folder / f"{runner}-{number}"
        # Each cycle ends at another moment: from the first steps to the thick of it.
        after = 1 + (number * 37) % 400
        cycle = run_child(root, runner, sessions=sessions, after=after, terms=1 + number % 2)
        statuses[cycle.status] = statuses.get(cycle.status, 0) + 1
        longest = max(longest, cycle.seconds)
        summary["accepted"] += len(cycle.accepted)
        if root.exists():
            summary["lost"] += lost(root, cycle.accepted)
    summary["statuses"] = statuses
    summary["longest_seconds"] = round(longest, 3)
    summary["in_time"] = longest <= PROMISED.deadline + PROMISED.hard_grace
    by_signal = statuses == {-signal.SIGTERM: cycles}
    summary["ok"] = by_signal and not summary["lost"] and summary["accepted"] > 0
    return summary
