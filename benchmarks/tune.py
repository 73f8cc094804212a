"""What `perdure tune` predicts over what is counted: saves, and the records at risk.

Sessions of made-up agents, hurried on, have turns on several stores at once, each with a setting
of its own: the recommended one, the default, the one for servers, and the one that saves least
often. Other agents work there first, until the debounce has adapted to the load. Then saves are
counted, and for how long each record was unsaved, up to the end of a short recording and of a long
one. For each, the prediction is made as `perdure tune` makes it: from the first store's log up to
there, for as many sessions, and from the store's speed. Records at risk for less than half a second
are reported and not judged: there the machine's other work counts as much as the setting.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple, final

import anyio

import perdure
from benchmarks.figures import Report, Row
from perdure import Autosave, Message, Session, SessionKey, SessionManager, Shutdown
from perdure._lib.tasks import each
from perdure.autosave.events import Saved
from perdure.store import Store
from perdure.tuning import (
    Advice,
    Requirements,
    StoreMeasurement,
    Workload,
    WorkloadChange,
    advise,
    made_up,
    measure,
    observed,
    workload_of,
)
from perdure.tuning.measure import TENANT

__all__ = ["STORES", "Options", "run"]

Script = Sequence[Sequence[WorkloadChange]]

STORES = ("file", "sqlite", "postgres", "s3")
BRIEF = 0.5
"""Seconds that records wait on average up to which what else the machine does counts as much as
the setting: their risk is reported, and not judged."""
SOME = 200
"""Sessions of the script by which the settings are chosen."""
AT_ONCE = 20
"""Sessions that are opened at once."""


class Options(NamedTuple):
    """How much of it."""

    sessions: int = 60
    warm_up: float = 100.0
    """Seconds until saves are counted: autosave adapts the debounce in steps of 5 s."""
    recordings: tuple[float, ...] = (45.0, 240.0)
    """After so many seconds the log is read, and what was counted is compared."""
    hurry: float = 8.0
    """How many times as fast as people the agents work."""
    settings: int = 4
    """How many of the settings, the recommended one first."""
    price: float = 0.0
    """Of a million saves."""
    store: str = "file"
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure on asyncio."""
    with (
        tempfile.TemporaryDirectory(prefix="perdure-tune-", dir=options.folder) as folder,
        _places(options.store, Path(folder)) as place,
    ):
        return anyio.run(_measure, options, place)


@contextmanager
def _places(kind: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """Yield what returns the address of a store by its name."""
    if kind == "postgres":
        from tests.servers.postgres import Postgres

        with Postgres(fsync=True) as server:
            yield lambda name: f"{server.url}?sslmode=disable&schema={name}"
    elif kind == "s3":
        from tests.servers.s3 import CREDENTIALS, S3Server

        os.environ["AWS_ACCESS_KEY_ID"] = CREDENTIALS["access_key_id"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = CREDENTIALS["secret_access_key"]
        with S3Server() as server:
            yield server.url
    elif kind == "sqlite":
        yield lambda name: f"sqlite:///{folder}/{name}.db"
    else:
        yield lambda name: str(folder / name)


async def _measure(options: Options, place: Callable[[str], str]) -> Report:
    length = max(options.recordings)
    script = _script(options, length, seed=0)
    expected = workload_of(script[:SOME], "the script")
    async with _opened(place("speed")) as store:
        measured = await measure(store, size=expected.size)
    settings = _chosen(_advice(expected, measured, options), options)
    runs = [_Run(place(f"run{number}"), setting) for number, setting in enumerate(settings)]
    warm_up = _script(options, options.warm_up, seed=1)
    async with anyio.create_task_group() as group:
        for live in runs:
            group.start_soon(live.play, warm_up, script)
        for live in runs:
            await live.ready.wait()
        start = time.monotonic() + 0.5
        for live in runs:
            live.start_at(start)
        recorded: list[tuple[float, list[_Count], Workload]] = []
        for seconds in sorted(options.recordings):
            await anyio.sleep_until(start + seconds)
            counts = [live.count() for live in runs]
            async with _opened(runs[0].place) as store:
                recorded.append((seconds, counts, await observed(store)))
        group.cancel_scope.cancel()
    rows: list[Row] = []
    details: dict[str, object] = {}
    for seconds, counts, workload in recorded:  # a replay would have kept the loop from saving
        predicted = _advice(workload, measured, options)
        found, facts = _compared(predicted, settings, counts, seconds, options)
        rows += found
        details |= facts
    error = max(abs(row.value - 1.0) for row in rows if not row.name.endswith("brief"))
    rows.append(
        Row("tune.error", error, "the largest difference, but for records that wait briefly")
    )
    return Report(rows, {**options._asdict(), "folder": str(options.folder), "counted": details})


def _compared(
    predicted: Advice,
    settings: Sequence[Autosave],
    counts: Sequence[_Count],
    seconds: float,
    options: Options,
) -> tuple[list[Row], dict[str, object]]:
    costs = {option.cost.autosave: option.cost for option in predicted.options}
    rows: list[Row] = []
    facts: dict[str, object] = {}
    for setting, count in zip(settings, counts, strict=True):
        debounce = "default" if setting.debounce is None else f"{setting.debounce:g}"
        name = f"tune.{seconds:g}s.{debounce}_{setting.max_delay:g}"
        saves = costs[setting].saves * options.sessions
        lost = costs[setting].lost * options.sessions
        counted_saves, counted_lost = count.saves / seconds, count.unsaved / seconds
        risk = "brief" if count.unsaved < BRIEF * count.records else "lost"
        rows += [
            Row(f"{name}.saves", saves / counted_saves, "predicted saves over those counted"),
            Row(f"{name}.{risk}", lost / counted_lost, "predicted records at risk over those"),
        ]
        facts[name] = {
            "saves_per_s": counted_saves,
            "predicted_saves_per_s": saves,
            "unsaved_records": counted_lost,
            "predicted_unsaved_records": lost,
            "wait_s": count.unsaved / count.records,
            "worst_s": count.worst,
        }
    return rows, facts


def _script(options: Options, seconds: float, seed: int) -> Script:
    """Return changes of made-up agents who begin turns for so many seconds."""
    made = made_up(sessions=options.sessions, seconds=options.hurry * seconds, seed=seed)
    return [[it._replace(at=it.at / options.hurry) for it in one] for one in made.sessions]


@asynccontextmanager
async def _opened(place: str) -> AsyncGenerator[Store, None]:
    store = perdure.store_for(place)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


def _advice(workload: Workload, measured: StoreMeasurement, options: Options) -> Advice:
    needs = Requirements(sessions=options.sessions, price=options.price)
    return advise(workload, measured, needs)


def _chosen(advice: Advice, options: Options) -> list[Autosave]:
    """Return the recommended one, the default, a server's, and what saves least often."""
    least = min(advice.options, key=lambda option: option.cost.saves).cost.autosave
    best = [] if advice.best is None else [advice.best.cost.autosave]
    settings = [*best, Autosave(), Autosave.server(), least]
    return list(dict.fromkeys(settings))[: options.settings]


class _Count(NamedTuple):
    """What was counted up to a moment."""

    saves: int
    records: int
    unsaved: float
    """For how long records were unsaved, all together, in seconds."""
    worst: float


@final
class _Run:
    """Sessions in a store with one setting, and what is counted of them."""

    def __init__(self, place: str, setting: Autosave) -> None:
        self.place = place
        self._setting = setting
        self.ready = anyio.Event()
        """Set when the sessions that are counted are open."""
        self._start = 0.0
        self._started = anyio.Event()
        self._waiting: dict[SessionKey, deque[tuple[int, float]]] = {}
        """By session, what is not durable: the number of a record, and when it was appended."""
        self._saves = self._records = 0
        self._unsaved = self._worst = 0.0

    def start_at(self, moment: float) -> None:
        """Begin the sessions that are counted."""
        self._start = moment
        self._started.set()

    def count(self) -> _Count:
        """Return what was counted up to now."""
        now = time.monotonic()
        rest = sum(now - since for waiting in self._waiting.values() for _, since in waiting)
        records = self._records + sum(map(len, self._waiting.values()))
        return _Count(self._saves, records, self._unsaved + rest, self._worst)

    async def play(self, warm_up: Script, script: Script) -> None:
        """Let the agents of the warm-up work, then, from the start on, those that are counted."""
        quiet = Shutdown(signals=False)
        async with perdure.connect(self.place, autosave=self._setting, shutdown=quiet) as sessions:
            sessions.on("saved", self._saved)
            warming = await self._opened(sessions, warm_up, TENANT)  # no recording has it
            self._start = time.monotonic()
            await self._talks(warming, warm_up)
            for session in warming:
                await session.aclose()
            counted = await self._opened(sessions, script, "")
            self.ready.set()
            await self._started.wait()
            await self._talks(counted, script)

    async def _opened(self, sessions: SessionManager, script: Script, tenant: str) -> list[Session]:
        opened: dict[int, Session] = {}

        async def open_one(number: int) -> None:
            opened[number] = await sessions.open(f"agent-{number}", tenant=tenant)

        await each(range(len(script)), open_one, at_once=AT_ONCE)
        self._waiting = {session.key: deque() for session in opened.values()}
        return [opened[number] for number in range(len(script))]

    async def _talks(self, opened: Sequence[Session], script: Script) -> None:
        async with anyio.create_task_group() as group:
            for session, changes in zip(opened, script, strict=True):
                group.start_soon(self._talk, session, changes)

    async def _talk(self, session: Session, changes: Sequence[WorkloadChange]) -> None:
        waiting = self._waiting[session.key]
        for turn in _turns(changes):
            await anyio.sleep_until(self._start + turn[0].at)
            async with session.turn():
                waiting.append((session.version, time.monotonic()))  # its beginning
                for change in turn:
                    await anyio.sleep_until(self._start + change.at)
                    session.append(Message.user("x" * change.size))
                    waiting.append((session.version, time.monotonic()))
                waiting.append((session.version + 1, time.monotonic()))  # its end

    def _saved(self, event: Saved) -> None:
        if event.key.tenant == TENANT:
            return
        now = time.monotonic()  # hooks are called outside of tasks
        waiting = self._waiting[event.key]
        while waiting and waiting[0][0] <= event.durable:
            age = now - waiting.popleft()[1]
            self._records += 1
            self._unsaved += age
            self._worst = max(self._worst, age)
        self._saves += 1


def _turns(changes: Sequence[WorkloadChange]) -> Iterator[list[WorkloadChange]]:
    turn: list[WorkloadChange] = []
    for change in changes:
        turn.append(change)
        if change.ends_turn:
            yield turn
            turn = []
