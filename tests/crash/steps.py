"""Kill a process at each call that changes the disk, one after the other, until none is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.crash.forks import Child, Report
from tests.crash.hooks import Act, Tripwire
from tests.crash.oracle import Ledger, verify
from tests.crash.work import SCENARIOS, Scenario, run


class Cut(NamedTuple):
    """One run that was killed, or that came to its end untouched."""

    at: int
    act: Act
    killed: bool
    ledger: Ledger


def kill_at(root: Path, work: Scenario, at: int, act: Act) -> Cut:
    """Run a scenario on an empty root, kill it at a call, and judge what is left."""

    def program(report: Report) -> None:
        wire = Tripwire(at, act)
        wire.install()
        run(root, work, report)
        report("calls", wire.calls)

    ledger = Ledger()
    child = Child(program)
    ledger.add(child.wait())
    if not child.was_killed and child.status:
        ledger.problems.append(f"the child ended with status {child.status}")
    return Cut(at, act, child.was_killed, verify(root, ledger))


def every_step(work: Scenario, *, act: Act, stride: int = 1) -> Iterator[Cut]:
    """Kill at call 1, 2, 3 … (or every *stride*-th) up to the first run that none touches."""
    at = 1
    while True:
        root = Path(tempfile.mkdtemp(prefix="perdure-crash-"))
        try:
            cut = kill_at(root / "store", work, at, act)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        yield cut
        if not cut.killed:
            return
        at += stride


def steps(name: str, *, stride: int = 1) -> dict[str, object]:
    """Kill a scenario at every call, clean and in the middle of a write."""
    acts: tuple[Act, ...] = ("kill", "kill torn")
    cuts = [cut for act in acts for cut in every_step(SCENARIOS[name], act=act, stride=stride)]
    return {
        "scenario": name,
        "kills": sum(cut.killed for cut in cuts),
        "acknowledged": sum(cut.ledger.total for cut in cuts),
        "problems": [
            f"{cut.act} at {cut.at}: {text}" for cut in cuts for text in cut.ledger.problems
        ],
    }
