"""Several processes want one session at the same moment, round after round."""

from __future__ import annotations

import os

import anyio

from perdure.errors import LeaseHeldError
from perdure.store import Store
from tests.crash.forks import Child, Report
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import AGENT, Lost, Writer, run


async def want(store: Store, report: Report, *, rounds: int) -> None:
    """Take the session from whoever has it, write, and lose it, until others are through."""
    while True:
        holder = await store.holder(AGENT)
        if holder is not None and holder.epoch >= rounds:
            return
        try:
            writer = await Writer.take(store, AGENT, report)
            await writer.append(2)
            await anyio.sleep(0)
            await writer.append(1)
        except LeaseHeldError:
            report("beaten")
        except Lost:
            continue


def race(*, rounds: int, racers: int = 8) -> dict[str, object]:
    """Let processes race for every epoch up to a number of them; again if they never met."""
    for _ in range(5):
        summary = _race(rounds, racers)
        if summary["beaten"] or summary["problems"]:
            break
    return summary


def _race(rounds: int, racers: int) -> dict[str, object]:
    ledger = Ledger()
    waiting, begin = os.pipe()

    def program(report: Report) -> None:
        os.close(begin)
        os.read(waiting, 1)  # until all of them are there
        run(place, lambda s, r: want(s, r, rounds=rounds), report)

    with scratch() as top:
        place = top / "store"
        children = [Child(program) for _ in range(racers)]
        os.close(begin)
        os.close(waiting)
        talking = children
        while talking:  # Together: none may wait with its pipe full until the others are through.
            talking = [child for child in talking if child.listen_on()]
        for child in children:
            ledger.add(child.wait())
            if child.status:
                ledger.problems.append(f"a racer ended with status {child.status}")
        verify(place, ledger)
    return {
        "racers": racers,
        "epochs": len(ledger.granted[AGENT.agent]),
        "beaten": sum(event[0] == "beaten" for child in children for event in child.events),
        "acknowledged": ledger.total,
        "problems": ledger.problems,
    }
