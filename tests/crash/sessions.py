"""Kill a program that keeps sessions as users do: a manager, turns, saves, autosave, folds.

Several tasks write to each session. What each is about to append is said first, and then
what became durable: everything that was acknowledged must be there afterwards, once, in
order, and nothing that was never said.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import anyio

from perdure import Autosave, Limits, Message, Session, SessionManager, Shutdown, connect
from tests.crash import places
from tests.crash.forks import Child, Report
from tests.crash.scratch import scratch
from tests.runners import run

FRESH_ROOT_EVERY = 10
"""Cycles; the sessions that are compared grow with each."""
WRITERS = 3
OFTEN = Autosave(debounce=0.02, max_delay=0.05)
FOLDED_OFTEN = Limits(fold_records=30, fold_ratio=0.1)


def _manager(root: Path) -> SessionManager:
    return connect(
        places.make(root, None),
        autosave=OFTEN,
        limits=FOLDED_OFTEN,
        shutdown=Shutdown(signals=False),
    )


async def texts(session: Any) -> list[str]:
    """Return every message of a session."""
    pages: list[list[str]] = []
    before = None
    while items := await session.history(before=before, limit=500):
        pages.append([item.value.text for item in items if isinstance(item.value, Message)])
        before = items[0].seq
    return [text for page in reversed(pages) for text in page]


class _Writer:
    """One session, written by several tasks."""

    def __init__(self, session: Session, report: Report, seed: str) -> None:
        self._session = session
        self._report = report
        self._seed = seed
        self._sent = 0

    def _append(self, dice: random.Random) -> None:
        text = f"{self._seed} {self._sent}{'.' * dice.choice((0, 200, 20_000))}"
        self._report("sent", self._session.id, text)
        self._session.append(Message.user(text))
        self._sent += 1

    def _durable(self, sent: int) -> None:
        self._report("ok", self._session.id, sent)

    async def write(self, task: int) -> None:
        """Append without end: in turns, with a save, or for autosave."""
        dice = random.Random(f"{self._seed}/{task}")
        while True:
            how = dice.choice(("turn", "save", "save", "leave"))
            if how == "turn":
                async with self._session.turn():
                    for _ in range(dice.randint(1, 4)):
                        self._append(dice)
                    sent = self._sent
                self._durable(sent)
            else:
                self._append(dice)
                sent = self._sent
                if how == "save":
                    await self._session.save()
                    self._durable(sent)
            await anyio.sleep(dice.choice((0, 0, 0.001)))


async def load(root: Path, report: Report, *, sessions: int, seed: int) -> None:
    """Write to several sessions until killed."""
    async with _manager(root) as manager, anyio.create_task_group() as tasks:
        for number in range(sessions):
            session = await manager.open(f"agent-{number}")
            report("opened", session.id, await texts(session))
            writer = _Writer(session, report, f"{seed}/{number}")
            for task in range(WRITERS):
                tasks.start_soon(writer.write, task)


async def look(root: Path, report: Report, names: list[str]) -> None:
    """Open every session anew, say what is there, and write on."""
    async with _manager(root) as manager:
        for name in names:
            async with manager.open(name) as session:
                report("stored", name, await texts(session))


class _Ledger:
    """What was said in one root, by session."""

    def __init__(self) -> None:
        self.stored: dict[str, list[str]] = defaultdict(list)
        """What the last look found."""
        self.sent: dict[str, list[str]] = defaultdict(list)
        self.durable: dict[str, int] = defaultdict(int)
        self.acknowledged = 0
        self.problems: list[str] = []

    def add(self, events: list[Any]) -> None:
        self.sent.clear()
        self.durable.clear()
        for what, *rest in events:
            if what == "sent":
                self.sent[rest[0]].append(rest[1])
            elif what == "ok":
                self.durable[rest[0]] = max(self.durable[rest[0]], rest[1])
            elif what == "opened" and rest[1] != self.stored[rest[0]]:
                self.problems.append(f"{rest[0]}: opened with other records than were stored")
            elif what == "problem":
                self.problems.append(rest[0])
        self.acknowledged += sum(self.durable.values())

    def judge(self, events: list[Any]) -> None:
        """Compare with what a new process finds."""
        looked = set()
        for what, *rest in events:
            if what == "problem":
                self.problems.append(rest[0])
            if what != "stored":
                continue
            name, found = rest
            looked.add(name)
            self._compare(name, found)
            self.stored[name] = found
        if missing := set(self.sent) - looked:
            self.problems.append(f"nobody could look at {sorted(missing)}")

    def _compare(self, name: str, found: list[str]) -> None:
        before, sent = self.stored[name], self.sent[name]
        if len(found) < len(before) + self.durable[name]:
            short = len(before) + self.durable[name] - len(found)
            self.problems.append(f"{name}: lost {short} acknowledged messages")
        if len(set(found)) != len(found):
            self.problems.append(f"{name}: {len(found) - len(set(found))} messages are doubled")
        elif found != (before + sent)[: len(found)]:
            self.problems.append(f"{name}: what is stored is no prefix of what was appended")


def _cycle(runner: str, root: Path, ledger: _Ledger, dice: random.Random, sessions: int) -> bool:
    seed = dice.randrange(1 << 30)

    def program(report: Report) -> None:
        run(runner, lambda: load(root, report, sessions=sessions, seed=seed))

    child = Child(program)
    child.listen(60.0, events=dice.randint(sessions * 8, sessions * 60))
    child.listen(dice.uniform(0, 0.01))
    ledger.add(child.kill())
    names = [f"agent-{number}" for number in range(sessions)]
    judge = Child(lambda report: run(runner, lambda: look(root, report, names)))
    ledger.judge(judge.wait())
    return child.was_killed


def kill_sessions(
    *, runner: str, cycles: int, sessions: int = 4, seed: int = 0
) -> dict[str, object]:
    """Kill such a program that many times."""
    dice = random.Random(seed)
    killed = acknowledged = 0
    problems: list[str] = []
    for start in range(0, cycles, FRESH_ROOT_EVERY):
        ledger = _Ledger()
        with scratch(on_disk=True) as top:  # To be hit within a sync, too.
            for number in range(start, min(start + FRESH_ROOT_EVERY, cycles)):
                killed += _cycle(runner, top / "store", ledger, dice, sessions)
                problems += [f"cycle {number}: {text}" for text in ledger.problems]
                ledger.problems.clear()
        acknowledged += ledger.acknowledged
    return {
        "runner": runner,
        "cycles": cycles,
        "kills": killed,
        "acknowledged": acknowledged,
        "lost": sum("lost" in text for text in problems),
        "doubled": sum("doubled" in text for text in problems),
        "problems": problems,
        "seed": seed,
    }
