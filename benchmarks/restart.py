"""What a restart costs: opening very many sessions again, and closing them unchanged.

The sessions are small, were closed, and are opened in batches by a process that has just
connected; each batch is closed by ``aclose`` of its sessions before the next one is opened. The
CPU is that of this checkout over that of another (``--base``), each in a process of its own over
a store of its own. They take turns, batch by batch. A figure is the median over blocks of the
ratio of the blocks' 25th percentiles. That of a server is not in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Report, Row
from benchmarks.revisions import Worker
from benchmarks.timing import quartile, ratio

__all__ = ["STORES", "Options", "run"]

STORES = ("sqlite", "postgres", "valkey")

ROOT = Path(__file__).parents[1]
TURNS = 3
BLOCK = 10
"""Batches whose 25th percentiles are compared."""


class Options(NamedTuple):
    """How many sessions, and how many at a time."""

    base: Path
    """A checkout of the revision whose CPU is the measure."""
    sessions: int = 10_000
    batch: int = 100
    store: str = STORES[0]
    folder: Path | None = None


WORKER = """
import asyncio, gc, json, sys
from time import process_time
import perdure
from perdure import LeaseOptions, Message, Shutdown

opened = []

async def fill(sessions, name, turns):
    async with sessions.open(name) as session:
        for number in range(turns):
            async with session.turn():
                session.append(Message.user(f"hi {number}"), Message.assistant("hello"))
    await session.aclose()

async def opening(sessions, name):
    opened.append(await sessions.open(name))

async def main():
    options = {"autosave": None, "shutdown": Shutdown(signals=False)}
    options["lease"] = LeaseOptions(heartbeat=300, ttl=1200)
    sessions = await perdure.connect(sys.argv[1], **options)
    for line in sys.stdin:
        act, first, count, turns = json.loads(line)
        names = [f"a{number}" for number in range(first, first + count)]
        if act == "restart":
            await sessions.aclose()
            sessions = await perdure.connect(sys.argv[1], **options)
        if act != "close":
            gc.collect()
        began = process_time()
        if act == "fill":
            await asyncio.gather(*(fill(sessions, name, turns) for name in names))
        elif act == "open":
            await asyncio.gather(*(opening(sessions, name) for name in names))
        elif act == "close":
            await asyncio.gather(*(session.aclose() for session in opened))
            opened.clear()
        print(json.dumps(process_time() - began), flush=True)
    await sessions.aclose()

asyncio.run(main())
"""


@contextmanager
def _url(store: str, place: Path) -> Iterator[str]:
    if store == "sqlite":
        yield f"sqlite:///{place}/store.db"
    elif store == "postgres":
        from tests.servers.postgres import Postgres

        with Postgres() as server:
            yield server.url
    else:
        from tests.servers.valkey import valkey

        with valkey() as cache:
            yield cache.url


def run(options: Options) -> Report:
    """Fill both stores, restart, and open and close the sessions in batches, by turns."""
    starts = range(0, options.sessions, options.batch)
    taken: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in ("open", "close", "both")
    }
    with (
        tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder,
        ExitStack() as stack,
    ):
        workers = []
        for number, checkout in enumerate((ROOT, options.base)):
            place = Path(folder) / f"store-{number}"
            place.mkdir()
            worker = Worker(checkout, WORKER, stack.enter_context(_url(options.store, place)))
            stack.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            for start in starts:
                worker.ask("fill", start, options.batch, TURNS)
            worker.ask("restart", 0, 0, 0)
        for number, start in enumerate(starts):
            for at in (0, 1) if number % 2 else (1, 0):
                opening = workers[at].ask("open", start, options.batch, 0)
                closing = workers[at].ask("close", start, options.batch, 0)
                taken["open"][at].append(opening)
                taken["close"][at].append(closing)
                taken["both"][at].append(opening + closing)
    meanings = {
        "open": "CPU of opening sessions again over the base's",
        "close": "the same of closing them unchanged",
        "both": "the same of both",
    }
    rows = [_row(name, meanings[name], *both, options) for name, both in taken.items()]
    about = {**options._asdict(), "folder": None, "base": str(options.base), "taken": taken}
    return Report(rows, about)


def _row(name: str, meaning: str, ours: list[float], theirs: list[float], options: Options) -> Row:
    size = min(BLOCK, len(ours))
    starts = range(0, len(ours) - size + 1, size)
    blocks = [(ours[start : start + size], theirs[start : start + size]) for start in starts]
    took = " and ".join(
        f"{quartile(seconds) / options.batch * 1e6:.0f}" for seconds in (ours, theirs)
    )
    of = "restart" if options.store == STORES[0] else f"restart.{options.store}"
    return Row(f"{of}.{name}_over_base", ratio(blocks), f"{meaning} ({took} µs a session)")
