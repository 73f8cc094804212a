"""Cut the power after every call, in every way, and open what is left."""

from __future__ import annotations

import copy
import os
import random

from tests.crash.disk import Disk, Recorder, Tree
from tests.crash.forks import Child, Event, Report
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import SCENARIOS, Scenario, run


def record(work: Scenario, *, lie: str | None = None) -> list[Event]:
    """Run a scenario, and return its reports with every change of the disk among them.

    ``lie`` names a sync that does nothing, to see that the judge finds out.
    """
    with scratch() as top:

        def program(report: Report) -> None:
            Recorder(top, report).install()
            if lie:
                setattr(os, lie, lambda _fd: None)
            run(top / "store", work, report)

        child = Child(program)
        events = child.wait()
    if child.status:
        message = f"the recorded run failed: {[e for e in events if e[0] == 'problem']}"
        raise RuntimeError(message)
    return events


def states(events: list[Event]) -> list[tuple[Tree, Ledger]]:
    """Return each disk that a cut could leave, with the most that was promised for it."""
    disk, ledger = Disk(), Ledger()
    found: dict[Tree, Ledger] = {}
    for event in events:
        if disk.replay(event):
            promised = copy.deepcopy(ledger)
            for tree in disk.cuts():
                found[tree] = promised
        else:
            ledger.add([event])
            # The same disk, but more was promised: what may be left did not change.
            promised = copy.deepcopy(ledger)
            for tree in disk.cuts():
                found[tree] = promised
    return list(found.items())


def open_again(tree: Tree, promised: Ledger) -> list[str]:
    """Put a disk state into a folder, open it, and return what is wrong."""
    with scratch() as top:
        tree.write(top)
        return verify(top / "store", copy.deepcopy(promised)).problems


def cuts(
    name: str, *, limit: int | None = None, seed: int = 0, lie: str | None = None
) -> dict[str, object]:
    """Judge the states of one scenario, all of them or a sample."""
    found = states(record(SCENARIOS[name], lie=lie))
    chosen = found
    if limit is not None and limit < len(found):
        chosen = random.Random(seed).sample(found, limit)
    problems = [
        f"state {number}: {text}"
        for number, (tree, promised) in enumerate(chosen)
        for text in open_again(tree, promised)
    ]
    return {
        "scenario": name,
        "states": len(found),
        "opened": len(chosen),
        "with_promises": sum(bool(promised.total) for _, promised in chosen),
        "problems": problems,
    }
