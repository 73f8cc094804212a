"""Kill a process with several sessions under load, at random, again and again on one root."""

from __future__ import annotations

import random
from pathlib import Path

import anyio

from perdure.records.keys import SessionKey
from perdure.store import Store
from tests.crash.forks import Child, Report
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import Writer, run

_FRESH_ROOT_EVERY = 10
"""Cycles; the log that is compared grows with each."""


async def load(store: Store, report: Report, *, sessions: int, seed: int) -> None:
    """Append to several sessions at once, and fold now and then, until killed."""

    async def one(agent: str) -> None:
        dice = random.Random(f"{seed}/{agent}")
        writer = await Writer.take(store, SessionKey(agent), report)
        while True:
            await writer.append(dice.randint(1, 4), padding=dice.choice((0, 200, 20_000)))
            if dice.random() < 0.2:
                await writer.fold()

    async with anyio.create_task_group() as tasks:
        for number in range(sessions):
            tasks.start_soon(one, f"agent-{number}")


def cycle(root: Path, ledger: Ledger, dice: random.Random, *, sessions: int) -> bool:
    """Run, kill after a random number of reports and a moment more, judge."""
    seed = dice.randrange(1 << 30)

    def program(report: Report) -> None:
        run(root, lambda store, tell: load(store, tell, sessions=sessions, seed=seed), report)

    child = Child(program)
    child.listen(60.0, events=dice.randint(sessions * 3, sessions * 25))
    child.listen(dice.uniform(0, 0.004))
    ledger.add(child.kill())
    verify(root, ledger)
    return child.was_killed


def kill(*, cycles: int, sessions: int = 4, seed: int = 0) -> dict[str, object]:
    """Kill a loaded process that many times."""
    dice = random.Random(seed)
    killed = acknowledged = 0
    problems: list[str] = []
    for start in range(0, cycles, _FRESH_ROOT_EVERY):
        ledger = Ledger()
        with scratch(on_disk=True) as top:  # To be hit within a sync, too.
            for number in range(start, min(start + _FRESH_ROOT_EVERY, cycles)):
                killed += cycle(top / "store", ledger, dice, sessions=sessions)
                problems += [f"cycle {number}: {text}" for text in ledger.problems]
                ledger.problems.clear()
        acknowledged += ledger.total
    return {
        "cycles": cycles,
        "kills": killed,
        "acknowledged": acknowledged,
        "lost": sum("lost an acknowledged" in text for text in problems),
        "problems": problems,
        "seed": seed,
    }
