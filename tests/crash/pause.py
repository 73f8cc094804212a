"""Stop a holder at a random moment under load, let others take over, then let it go on.

For stores whose work is done where no hook reaches: in C, or on a server. A holder that is
stopped inside a transaction may keep a lock of the store's, so that nobody can write until
it goes on: that is counted as blocked, and must end with the stop. Who has learned it says "waits".
"""

from __future__ import annotations

import random
from pathlib import Path

import anyio

from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.store import Store
from tests.crash.forks import Child, Report
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import AGENT, Writer, run

_APPENDS = 60


async def _take(store: Store, report: Report) -> Writer:
    while True:
        try:
            return await Writer.take(store, AGENT, report)
        except (StoreUnavailableError, LeaseHeldError):
            report("waits")
            await anyio.sleep(0.01)


async def hold(store: Store, report: Report) -> None:
    """Append and fold until it is done, or learns that it lost."""
    writer = await _take(store, report)
    for number in range(_APPENDS):
        await writer.append(1 + number % 3, padding=3000 * (number % 2))
        if number % 10 == 9:
            await writer.fold()


async def succeed(store: Store, report: Report) -> None:
    """Take over, write, and let go."""
    writer = await _take(store, report)
    await writer.append(2)
    await writer.fold()
    await writer.append(1)
    await writer.release()


class Round:
    """One round, and what came of it."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        self.ledger = Ledger()
        holder = Child(lambda report: run(root, hold, report))
        holder.listen(60.0, events=dice.randint(4, 2 * _APPENDS))
        holder.listen(dice.uniform(0, 0.003))
        self.stopped = holder.stop()
        successor = Child(lambda report: run(root, succeed, report))
        self.blocked = not successor.ends_before("waits")
        holder.go_on()
        for child in (successor, holder):
            self.ledger.add(child.wait())
            if child.status:
                self.ledger.problems.append(f"a child ended with status {child.status}")
        self.lost = sum(event[0] == "lost" for event in holder.events)
        verify(root, self.ledger, damage=True)


def pause(*, cycles: int = 20, seed: int = 0) -> dict[str, object]:
    """Stop, take over and go on that many times, and until somebody was replaced.

    A holder may be through before it is stopped: that counts for nothing.
    """
    dice = random.Random(seed)
    number = stopped = blocked = lost = acknowledged = 0
    problems: list[str] = []
    while (stopped < cycles or not lost) and (number := number + 1) <= 5 * cycles:
        with scratch(on_disk=True) as top:
            round_ = Round(top / "store", dice)
        stopped += round_.stopped
        blocked += round_.blocked
        lost += round_.lost
        acknowledged += round_.ledger.total
        problems += [f"cycle {number}: {text}" for text in round_.ledger.problems]
    return {
        "cycles": number,
        "stopped": stopped,
        "blocked": blocked,
        "replaced": lost,
        "acknowledged": acknowledged,
        "problems": problems,
        "seed": seed,
    }
