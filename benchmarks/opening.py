"""What opening a session costs: over the floor on files, over another revision, and in calls.

The session is small, exists, and was closed; it is opened by a process that has just connected.

- **CPU on files** is that of ``sessions.open`` over that of `benchmarks.opening_floor`, which names
  each of its steps and checks. Both work in one process, by turns, each in its own copy of the same
  store: the same session is opened, and closed, by both. They swap the copies after each second
  session, since some folders lie where a new file costs a file system more. Afterwards perdure
  opens what both have left, and finds the same. A disk at work adds to both, so that the figure
  comes out too low: believe it where the floor took about what it took before. The same in memory
  (``/dev/shm``), where a sync costs nothing, is steady and has no target.
- **CPU on SQLite** is that of this checkout over that of another (``--base``), each in a process of
  its own over a store of its own. They are asked by turns.
- **Counts** are per open: ``os.open``, listings, syncs and hops (calls that are handed to a thread)
  on files; hops, statements and transactions on SQLite; round trips on PostgreSQL and Redis,
  requests on S3. A fact is read twice if an open reads the same lease, manifest, document, or file
  of the log more than once.
- **An agent** on files that is restored, with nothing to mend: from entering it to the first
  message that it could take, over an open of a session like its own; and how often its snapshot
  is read.

A figure of time is the median over blocks of the ratio of the blocks' 25th percentiles.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.counts import (
    Asked,
    Monitor,
    count_asked,
    facts_in_commands,
    facts_in_files,
    facts_in_requests,
    facts_in_statements,
)
from benchmarks.figures import Report, Row
from benchmarks.opening_floor import FloorOpened, close, take
from benchmarks.revisions import Worker
from benchmarks.stores.network import SERVERS, UNITS
from benchmarks.stores.wire import CountingProxy, PostgresStatements, redis_round_trips
from benchmarks.timing import quartile, ratio
from perdure import Autosave, LeaseOptions, Message, SessionManager, Shutdown
from perdure._lib.loop import Threads
from perdure.agent import Agent
from perdure.agent.llm.scripted import ScriptedModel
from perdure.memory.context import SNAPSHOT
from perdure.records.keys import SessionKey
from perdure.store import Store

__all__ = ["STORES", "Options", "run"]

STORES = ("file", "sqlite", "postgres", "redis", "s3")
ROOT = Path(__file__).parents[1]
TURNS = 3
WARM_UP = 5
BLOCK = 40
MEMORY = Path("/dev/shm")  # each store has a folder of its own there
"""A file system in memory, if there is one."""
COUNTED = 5
"""Opens whose calls are counted: the figure is their median."""

LATER = Autosave(debounce=3600, max_delay=3600)
RARE = LeaseOptions(heartbeat=300, ttl=1200)
"""So that nothing but the open does anything."""


class Options(NamedTuple):
    """How many sessions to open, on which stores, and what to compare with."""

    sessions: int = 200
    agents: int = 40
    context_kib: tuple[int, ...] = (1, 384)
    """Contexts of the agents."""
    stores: tuple[str, ...] = STORES
    base: Path | None = None
    """A checkout of the revision whose opens are the measure on SQLite."""
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure each store, then an agent."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as name:
        folder = Path(name)
        if "file" in options.stores:
            rows += anyio.run(_files, folder, options, details)
        if options.base is not None:
            rows += _over_base(folder, options, details)
        if "sqlite" in options.stores:
            rows += anyio.run(_sqlite_counts, folder)
        for server in filter(SERVERS.__contains__, options.stores):
            rows += _server_counts(server, folder, details)
        if "file" in options.stores:
            rows += anyio.run(_agents, folder, options, details)
    about = {**options._asdict(), "folder": None, "base": str(options.base)}
    return Report(rows, {**about, "taken": details})


def connected(place: str | Path | Store) -> SessionManager:
    """Return a manager that does nothing unasked."""
    quiet = Shutdown(signals=False, deadline=120)
    return perdure.connect(place, autosave=LATER, shutdown=quiet, lease=RARE)


async def fill(sessions: SessionManager, names: Sequence[str]) -> None:
    """Leave small sessions, closed."""
    for name in names:
        async with sessions.open(name) as session:
            for number in range(TURNS):
                async with session.turn():
                    session.append(Message.user(f"hi {number}"), Message.assistant("hello"))
        await session.aclose()


# Files


async def _files(folder: Path, options: Options, details: dict[str, Any]) -> list[Row]:
    taken = details["file"] = await _beside_floor(folder, options.sessions)
    rows = [
        _ratio("file.over_floor", taken["open"], taken["floor"], "CPU of an open over the floor"),
        _ratio("file.close", taken["close"], taken["floor_close"], "CPU of a close over the floor"),
    ]
    if MEMORY.is_dir():
        with tempfile.TemporaryDirectory(prefix="perdure-", dir=MEMORY) as name:
            taken = details["file.memory"] = await _beside_floor(Path(name), options.sessions)
        meaning = f"the same on {MEMORY}"
        rows.append(_ratio("file.in_memory", taken["open"], taken["floor"], meaning))
    asked = await _asked(folder / "files", lambda asked: facts_in_files(asked.read))
    least = await _asked_by_floor(folder / "copied")
    return [
        *rows,
        Row("opening.file.opens", asked["opens"], f"calls of os.open; the floor {least.opens}"),
        Row("opening.file.listings", asked["listings"], f"folders; the floor {least.listings}"),
        Row("opening.file.hops", asked["hops"], f"calls in a thread; the floor {least.hops}"),
        Row("opening.file.syncs", asked["syncs"], f"files and folders; the floor {least.syncs}"),
        _twice("file", asked),
    ]


async def _beside_floor(folder: Path, count: int) -> dict[str, list[float]]:
    """Open sessions, and have the floor open them; return the seconds of CPU, by what was done."""
    places = (folder / "files", folder / "copied")
    names = [f"a{number}" for number in range(WARM_UP + count)]
    async with connected(places[0]) as sessions:
        await fill(sessions, [*names, *_counted_names()])
    shutil.copytree(*places)
    taken: dict[str, list[float]] = {"open": [], "close": [], "floor": [], "floor_close": []}

    async def ours(sessions: SessionManager, name: str) -> None:
        began = process_time()
        session = await sessions.open(name)
        taken["open"].append(process_time() - began)
        began = process_time()
        await session.aclose()
        taken["close"].append(process_time() - began)

    async def floor(root: int, name: str) -> None:
        began = process_time()
        opened = await threads.run(take, root, SessionKey(name))
        taken["floor"].append(process_time() - began)
        began = process_time()
        await threads.run(close, opened)
        taken["floor_close"].append(process_time() - began)

    with ExitStack() as stack:
        threads = Threads(1, name="floor")
        stack.callback(threads.close)
        roots = [os.open(place, os.O_RDONLY | os.O_DIRECTORY) for place in places]
        for root in roots:
            stack.callback(os.close, root)
        async with connected(places[0]) as first, connected(places[1]) as second:
            for number, name in enumerate(names):
                one = number // 2 % 2
                gc.collect()
                if number % 2:
                    await ours((first, second)[one], name)
                    await floor(roots[1 - one], name)
                else:
                    await floor(roots[1 - one], name)
                    await ours((first, second)[one], name)
    for seconds in taken.values():
        del seconds[:WARM_UP]
    await _require_alike(*places, names)
    return taken


def _counted_names() -> list[str]:
    return [f"counted-{number}" for number in range(COUNTED + 1)]


async def _require_alike(place: Path, copied: Path, names: Sequence[str]) -> None:
    """Require that perdure finds the same, whoever opened the sessions before."""
    async with connected(place) as sessions, connected(copied) as others:
        for name in names[:: max(len(names) // 10, 1)]:
            found = []
            for manager in (sessions, others):
                session = await manager.open(name)
                found.append((session.version, session.context(), session.restore_report.damaged))
            assert found[0] == found[1], f"{name}: {found}"


async def _asked(place: str | Path, facts_in: Callable[[Asked], Counter[str]]) -> dict[str, float]:
    """Return the medians of what opens ask for."""
    found: list[dict[str, int]] = []
    with count_asked() as asked:
        async with connected(place) as sessions:
            for name in _counted_names():
                asked.take()
                session = await sessions.open(name)
                one = asked.take()
                found.append(
                    {
                        "opens": one.opens,
                        "listings": one.listings,
                        "syncs": one.syncs,
                        "hops": one.hops,
                        "statements": len(one.statements),
                        "transactions": one.transactions,
                        "twice": twice(facts_in(one)),
                    }
                )
                await session.aclose()
    return {name: median(one[name] for one in found[1:]) for name in found[0]}


async def _asked_by_floor(place: Path) -> Asked:
    threads, root = Threads(1, name="floor"), os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with count_asked() as asked:
            opened: FloorOpened = await threads.run(take, root, SessionKey(_counted_names()[0]))
            counted = asked.take()
        await threads.run(close, opened)
        return counted
    finally:
        threads.close()
        os.close(root)


def twice(facts: Counter[str]) -> int:
    """Return how many facts were read more than once."""
    return sum(count > 1 for count in facts.values())


def _twice(store: str, asked: dict[str, float]) -> Row:
    return Row(f"opening.{store}.twice", asked["twice"], "facts that were read more than once")


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float], meaning: str) -> Row:
    size = min(BLOCK, len(ours))
    starts = range(0, len(ours) - size + 1, size)
    blocks = [(ours[start : start + size], theirs[start : start + size]) for start in starts]
    took = " and ".join(f"{quartile(seconds) * 1e3:.2f}" for seconds in (ours, theirs))
    return Row(f"opening.{name}", ratio(blocks), f"{meaning} ({took} ms)")


# Another revision

WORKER = """
import asyncio, gc, json, sys
from time import process_time
import perdure
from perdure import LeaseOptions, Message, Shutdown

async def fill(sessions, name, turns):
    async with sessions.open(name) as session:
        for number in range(turns):
            async with session.turn():
                session.append(Message.user(f"hi {number}"), Message.assistant("hello"))
    await session.aclose()

async def main():
    options = {"autosave": None, "shutdown": Shutdown(signals=False)}
    options["lease"] = LeaseOptions(heartbeat=300, ttl=1200)
    async with perdure.connect(sys.argv[1], **options) as sessions:
        for line in sys.stdin:
            name, turns = json.loads(line)
            began = process_time()
            if turns:
                await fill(sessions, name, turns)
            else:
                gc.collect()
                began = process_time()
                session = await sessions.open(name)
            took = process_time() - began
            if not turns:
                await session.aclose()
            print(json.dumps(took), flush=True)

asyncio.run(main())
"""


def _over_base(folder: Path, options: Options, details: dict[str, Any]) -> list[Row]:
    assert options.base is not None
    urls = {"file": "{}/files", "sqlite": "sqlite:///{}/store.db"}
    rows: list[Row] = []
    names = [f"a{number}" for number in range(WARM_UP + options.sessions)]
    for store in filter(urls.__contains__, options.stores):
        with ExitStack() as stack:
            workers = []
            for number, checkout in enumerate((ROOT, options.base)):
                place = folder / f"{store}-{number}"
                place.mkdir()
                worker = Worker(checkout, WORKER, urls[store].format(place))
                stack.callback(worker.close)
                workers.append(worker)
            for name in names:
                for worker in workers:
                    worker.ask(name, TURNS)
            both: tuple[list[float], list[float]] = ([], [])
            for number, name in enumerate(names):
                for at in (0, 1) if number % 2 else (1, 0):
                    both[at].append(workers[at].ask(name, 0))
        ours, theirs = (seconds[WARM_UP:] for seconds in both)
        details[f"{store}.over_base"] = {"own": ours, "base": theirs}
        rows.append(_ratio(f"{store}.over_base", ours, theirs, "CPU of an open over the base's"))
    return rows


# Counts


async def _sqlite_counts(folder: Path) -> list[Row]:
    place = f"sqlite:///{folder}/counted.db"
    async with connected(place) as sessions:
        await fill(sessions, _counted_names())
    asked = await _asked(place, lambda asked: facts_in_statements(asked.statements))
    return [
        Row("opening.sqlite.hops", asked["hops"], "calls that were handed to a thread"),
        Row("opening.sqlite.statements", asked["statements"], "statements, BEGIN and its like too"),
        Row("opening.sqlite.transactions", asked["transactions"], "transactions"),
        _twice("sqlite", asked),
    ]


def _server_counts(server: str, folder: Path, details: dict[str, Any]) -> list[Row]:
    parser = redis_round_trips if server == "redis" else None
    with SERVERS[server](folder) as counted:
        if parser is not None:
            counted.proxy.count(parser)
        trips = anyio.run(_trips, counted.make, counted.proxy)
        facts = anyio.run(server_facts, server, counted.make, counted.proxy)
    details[server] = {"trips": trips, "facts": facts}
    unit = UNITS[server] if server == "s3" else "round_trips"
    words = unit.replace("_", " ")
    existing, new = (median(trips[kind]) for kind in ("existing", "new"))
    return [
        Row(f"opening.{server}.{unit}", existing, f"{words} of an open, counted by a proxy"),
        Row(f"opening.{server}.new_{unit}", new, f"{words} of an open of a new session"),
        _twice(server, {"twice": twice(facts)}),
    ]


async def _trips(make: Callable[[], Store], proxy: CountingProxy) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"new": [], "existing": []}
    async with connected(make()) as sessions:
        await fill(sessions, _counted_names())
        for number, name in enumerate(_counted_names()):
            for kind, which in (("existing", name), ("new", f"new-{number}")):
                proxy.take()
                session = await sessions.open(which)
                found[kind].append(len(proxy.take()))
                await session.aclose()
    return {kind: counts[1:] for kind, counts in found.items()}


async def server_facts(
    server: str, make: Callable[[], Store], proxy: CountingProxy
) -> Counter[str]:
    """Return how often one open of a session reads each of its facts from a server."""
    if server == "postgres":
        proxy.count(PostgresStatements())
    async with connected(make()) as sessions:
        await fill(sessions, ["other", "ada"])
        await (await sessions.open("other")).aclose()
        if server == "redis":
            with Monitor(proxy.server_port) as monitor:
                await sessions.open("ada")
                await anyio.sleep(0.2)  # the server tells of it when it likes
                return facts_in_commands(monitor.take())
        proxy.take()
        await sessions.open("ada")
        facts = facts_in_statements if server == "postgres" else facts_in_requests
        return facts(proxy.take())


# Agents


async def _agents(folder: Path, options: Options, details: dict[str, Any]) -> list[Row]:
    compared: list[Row] = []
    reads: list[int] = []
    for kib in options.context_kib:
        place = folder / f"agents-{kib}"
        names = [f"agent-{number}" for number in range(2 * (options.agents + 2))]
        async with connected(place) as sessions:
            for name in names:
                await _converse(sessions, name, kib)
        opened: list[float] = []
        entered: list[float] = []
        with count_asked() as asked:
            async with connected(place) as sessions:
                for ours, theirs in zip(names[::2], names[1::2], strict=True):
                    gc.collect()
                    began = process_time()
                    session = await sessions.open(theirs)
                    opened.append(process_time() - began)
                    await session.aclose()
                    creation = _agent(sessions, ours)
                    asked.take()
                    began = process_time()
                    agent = await creation.__aenter__()
                    entered.append(process_time() - began)
                    reads.append(asked.take().read.count(SNAPSHOT))
                    report = agent.restore_report
                    assert report is not None
                    assert {step.what for step in report.steps} == {"read"}, report
                    await creation.__aexit__(None, None, None)
        details[f"agent.{kib}"] = {"entered": entered, "opened": opened}
        meaning = f"CPU of an agent's restore over an open, {kib} KiB of context"
        compared.append(_ratio(f"agent.over_open_{kib}", entered[2:], opened[2:], meaning))
    worst = max(compared, key=lambda row: row.value)
    return [
        Row("opening.agent.over_open", worst.value, f"the worst: {worst.name}"),
        *compared,
        Row("opening.agent.snapshot_reads", max(reads), "reads of its snapshot, files"),
    ]


def _agent(sessions: SessionManager, name: str) -> Agent:
    model = ScriptedModel("hello")
    return Agent.create(name, model=model, sessions=sessions, persistent_session=True)


async def _converse(sessions: SessionManager, name: str, kib: int) -> None:
    async with _agent(sessions, name) as agent:
        await agent.ask("hello")
    async with sessions.open(name) as session:
        for number in range(kib):
            async with session.turn():
                session.append(
                    Message.user("q" * 512), Message.assistant(f"{number:04d}" + "a" * 508)
                )
    await session.aclose()
