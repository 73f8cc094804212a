"""Kill a process at each call that changes the disk, one after the other, until none is left."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.crash.forks import Child, Report
from tests.crash.hooks import Act, Tripwire
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import SCENARIOS, Scenario, run


class Kill(NamedTuple):
    """One run that was killed, or that came to its end untouched."""

    at: int
    act: Act
    killed: bool
    ledger: Ledger
    calls: list[str]
    """What was called, if it came to its end."""


def kill_at(work: Scenario, at: int, act: Act) -> Kill:
    """Run a scenario on an empty root, kill it at a call, and judge what is left."""
    ledger = Ledger()
    with scratch() as top:

        def program(report: Report) -> None:
            wire = Tripwire(at, act)
            wire.install()
            run(top / "store", work, report)
            report("calls", wire.calls)

        child = Child(program)
        ledger.add(child.wait())
        if not child.was_killed and child.status:
            ledger.problems.append(f"the child ended with status {child.status}")
        verify(top / "store", ledger)
    calls = [name for event in child.events if event[0] == "calls" for name in event[1]]
    return Kill(at, act, child.was_killed, ledger, calls)


def every_call(work: Scenario) -> Iterator[Kill]:
    """Kill before call 1, 2, 3 … up to the first run that is through by then, and in each write."""
    for at in itertools.count(1):
        kill = kill_at(work, at, "kill")
        yield kill
        if not kill.killed:
            break
    for at, name in enumerate(kill.calls, 1):
        if name == "write":
            yield kill_at(work, at, "kill torn")


def steps(name: str) -> dict[str, object]:
    """Kill a scenario at every call, clean and in the middle of a write."""
    kills = list(every_call(SCENARIOS[name]))
    return {
        "scenario": name,
        "kills": sum(kill.killed for kill in kills),
        "torn": sum(kill.act == "kill torn" for kill in kills),
        "acknowledged": sum(kill.ledger.total for kill in kills),
        "problems": [
            f"{kill.act} at {kill.at}: {text}" for kill in kills for text in kill.ledger.problems
        ],
    }
