"""Stop a holder at any call, let others take over, then let it go on.

SIGSTOP is what a paused machine, a suspended laptop or a long collection looks like from
outside: the process is alive, holds its locks and its open files, and believes afterwards
that no time has passed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perdure.errors import LeaseHeldError
from perdure.store import Store
from perdure.stores.file.leases import Fence
from tests.crash.forks import Child, Report
from tests.crash.hooks import Tripwire
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import AGENT, Lost, Writer, run


async def hold(store: Store, report: Report) -> None:
    """Be a holder that appends and folds until it is done, or learns that it lost."""
    try:
        writer = await Writer.take(store, AGENT, report)
    except LeaseHeldError:
        report("lost", AGENT.agent, 0)
        raise Lost from None
    for size in (2, 1):
        await writer.append(size)
    await writer.fold()
    for size in (1, 2):
        await writer.append(size)
    await writer.release()


class Outcome(NamedTuple):
    """One round of stopping and going on."""

    stopped: int
    """How many holders were stopped before their work was done."""
    lost: int
    """How many learned that they had been replaced."""
    ledger: Ledger


def _stopping(root: Path, at: int, *, unfenced: bool) -> Child:
    def program(report: Report) -> None:
        if unfenced:
            Fence.is_valid = lambda _fence, _folder: True  # type: ignore[method-assign]
        Tripwire(at, "stop", looking=True).install()
        run(root, hold, report)

    return Child(program)


def round_(root: Path, stops: list[int], *, unfenced: bool = False) -> Outcome:
    """Stop one holder after the other at a call each, take over once more, let all go on."""
    ledger = Ledger()
    children: list[Child] = []
    stopped = 0
    for at in stops:
        child = _stopping(root, at, unfenced=unfenced)
        stopped += child.wait_stopped()
        children.append(child)
    successor = Child(lambda report: run(root, hold, report))
    successor.wait()
    for child in reversed(children):  # The oldest last: it is the farthest behind.
        child.go_on()
        child.wait()
    lost = sum(event[0] == "lost" for child in children for event in child.events)
    for child in [*children, successor]:
        ledger.add(child.events)
        if child.status:
            ledger.problems.append(f"a child ended with status {child.status}")
    return Outcome(stopped, lost, verify(root, ledger, damage=True))


def each_call() -> Iterator[list[int]]:
    """Stop one holder at call 1, 2, 3 …; the caller ends it when none was stopped."""
    at = 0
    while True:
        at += 1
        yield [at]


def stop(*, cycles: int | None = None, seed: int = 0, unfenced: bool = False) -> dict[str, object]:
    """Stop at every call once, or that many times at random with up to three holders.

    ``unfenced`` takes the proof of the epoch away, to see that the judge finds out.
    """
    dice = random.Random(seed)
    rounds = stopped = lost = acknowledged = 0
    problems: list[str] = []
    calls = each_call()
    while cycles is None or rounds < cycles:
        stops = (
            next(calls)
            if cycles is None
            else [dice.randint(1, 140) for _ in range(dice.randint(1, 3))]
        )
        with scratch() as top:
            outcome = round_(top / "store", stops, unfenced=unfenced)
        rounds += 1
        stopped += outcome.stopped
        lost += outcome.lost
        acknowledged += outcome.ledger.total
        problems += [f"stopped at {stops}: {text}" for text in outcome.ledger.problems]
        if cycles is None and not outcome.stopped:
            break
    return {
        "cycles": rounds,
        "stopped": stopped,
        "replaced": lost,
        "acknowledged": acknowledged,
        "problems": problems,
        "seed": seed,
    }
