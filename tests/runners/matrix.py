"""The matrix of runners: which cells there are, how one is run, and what must hold in it."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.runners import LOOPS, SERVERS

ROOT = Path(__file__).parents[2]
HANG: Final = 240.0
"""Seconds after which a program hangs, on the slowest machine."""
STORES: Final = ("file", "sqlite")
NEEDS_SNIFFIO: Final = ("trio", "anyio-trio")
"""Trio does not work without it."""
SNIFFIO_OF_ITS_OWN: Final = "4.12"
"""From this version on anyio works without it."""


@dataclass(frozen=True)
class Cell:
    """One way in which people run perdure."""

    runner: str
    sniffio: bool
    anyio: str
    """``newest``, which is the one that is installed, or a version."""
    store: str

    @property
    def possible(self) -> bool:
        """Whether the dependencies allow it."""
        if self.sniffio:
            return True
        old = self.anyio != "newest" and _numbers(self.anyio) < _numbers(SNIFFIO_OF_ITS_OWN)
        return not old and self.runner not in NEEDS_SNIFFIO

    def __str__(self) -> str:
        sniffio = "sniffio" if self.sniffio else "no-sniffio"
        return f"{self.runner}/{sniffio}/anyio-{self.anyio}/{self.store}"


@dataclass
class Result:
    """What came of a cell."""

    cell: Cell
    passed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def lowest_anyio() -> str:
    """Return the lowest version of anyio that the project allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (spec,) = [one for one in project["dependencies"] if one.startswith("anyio")]
    match = re.fullmatch(r"anyio>=([\d.]+)", spec)
    assert match, spec
    return match[1]


def cells(anyios: tuple[str, ...]) -> list[Cell]:
    """Return all cells that are possible."""
    runners = (*LOOPS, *SERVERS)
    every = itertools.starmap(Cell, itertools.product(runners, (True, False), anyios, STORES))
    return [cell for cell in every if cell.possible]


def installed(version: str, folder: Path) -> Path | None:
    """Install a version of anyio into a folder of its own; None for the one that is there."""
    if version == "newest":
        return None
    target = folder / f"anyio-{version}"
    if not target.exists():
        spec = f"anyio=={version}" if version.count(".") > 1 else f"anyio=={version}.*"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, spec], check=True)
    return target


def run_cell(cell: Cell, folder: Path) -> Result:
    """Run a cell's programs, and judge them."""
    result = Result(cell)
    environment = _environment(cell, folder)
    for name, judge in (("scenarios", _scenarios), ("sigterm", _sigterm), ("stubborn", _stubborn)):
        if name == "stubborn" and (cell.runner in SERVERS or cell.runner == "notebook"):
            continue  # who owns the signals ends the process
        place = folder / f"{str(cell).replace('/', '-')}-{name}"
        url = f"file:{place}" if cell.store == "file" else f"sqlite:///{place}.db"
        before = len(result.problems)
        judge(cell, url, environment, result)
        if len(result.problems) == before:
            result.passed.append(name)
    return result


def _environment(cell: Cell, folder: Path) -> dict[str, str]:
    target = installed(cell.anyio, folder)
    paths = [str(target)] if target else []
    paths += [str(ROOT / "src"), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("WITHOUT_SNIFFIO", None)
    if not cell.sniffio:
        environment["WITHOUT_SNIFFIO"] = "1"
    return environment


def _command(cell: Cell, work: str, url: str) -> list[str]:
    return [sys.executable, "-m", "tests.runners.program", cell.runner, work, url]


def _scenarios(cell: Cell, url: str, environment: dict[str, str], result: Result) -> None:
    from tests.runners.program import SCENARIOS

    try:
        ended = subprocess.run(
            _command(cell, "scenarios", url),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
    except subprocess.TimeoutExpired as error:
        result.problems.append(f"{cell}: scenarios hang: {error.stdout!r}")
        return
    said = list(map(json.loads, ended.stdout.splitlines()))
    well = [one["scenario"] for one in said if one.get("ok")]
    missing = [one.__name__ for one in SCENARIOS if one.__name__ not in well]
    if missing or ended.returncode or not any(one.get("closed") for one in said):
        tail = "\n".join(ended.stderr.splitlines()[-12:])
        result.problems.append(f"{cell}: status {ended.returncode}, missing {missing}: {tail}")
    result.passed += well


def _told_to_end(cell: Cell, work: str, url: str, environment: dict[str, str], after: str) -> Any:
    """Start a program, send SIGTERM once it has said a word, and return what it said."""
    child = subprocess.Popen(
        _command(cell, work, url),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said: list[dict[str, Any]] = []
    for line in child.stdout:
        said.append(json.loads(line))
        if sum(after in one for one in said) >= (5 if work == "sigterm" else 1):
            break
    child.send_signal(signal.SIGTERM)
    try:
        out, error = child.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return None, said, "it did not end"
    said += map(json.loads, out.splitlines())
    return child.returncode, said, error


def _sigterm(cell: Cell, url: str, environment: dict[str, str], result: Result) -> None:
    status, said, error = _told_to_end(cell, "sigterm", url, environment, "durable")
    _judge_end(cell, "sigterm", url, result, status, said, error)


def _stubborn(cell: Cell, url: str, environment: dict[str, str], result: Result) -> None:
    status, said, error = _told_to_end(cell, "stubborn", url, environment, "durable")
    _judge_end(cell, "stubborn", url, result, status, said, error)


def _judge_end(
    cell: Cell,
    work: str,
    url: str,
    result: Result,
    status: int | None,
    said: list[dict[str, Any]],
    error: str,
) -> None:
    problems = []
    if status != -signal.SIGTERM:
        problems.append(f"ended with {status}: {error[-800:]}")
    stored = _stored(url)
    sent = [one["sending"] for one in said if "sending" in one]
    durable = [one["durable"] for one in said if "durable" in one]
    if stored != list(map(str, range(len(stored)))):
        problems.append(f"stored out of order: {stored[:20]}")
    if not durable or len(stored) <= durable[-1]:
        problems.append(f"{durable[-1:]} was durable, {len(stored)} are stored")
    if cell.runner != "notebook":  # where the signal's default action ends it
        # What it was about to append when it ended may be there or not.
        if len(stored) < len(sent) - 1:
            problems.append(f"{len(sent)} were accepted, {len(stored)} are stored")
        if not any(one.get("drained") for one in said):
            problems.append("the async drain hook was not called")
    result.problems += [f"{cell}: {work}: {problem}" for problem in problems]


def _stored(url: str) -> list[str]:
    """Return what a new process finds."""
    program = """
import asyncio, json, sys, perdure
async def main():
    async with perdure.connect(sys.argv[1]) as sessions:
        view = await sessions.load("talk")
        print(json.dumps([m.text for m in view.context()] if view else []))
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ended = subprocess.run(
        [sys.executable, "-c", program, url], env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        return [f"unreadable: {ended.stderr[-500:]}"]
    return list(json.loads(ended.stdout))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
