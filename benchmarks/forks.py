"""What a fork takes of the processor: over a copy, an open, and a read of the same point.

A full fork writes what its history is. It is set against ``copy``: that of another checkout
(``--base``), else its own. Each revision has a store of its own with the same sessions, and a
process that waits to be asked; they are asked by turns, so that a busy neighbor disturbs both. A
figure is the median over rounds of the ratio within a round, with the least and the most.

A fork that leaves the history behind is set against an ``open`` of the session, with contexts of
several sizes; at an old point, against reading a checkpoint of the session that was made there.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.figures import Report, Row
from benchmarks.revisions import Worker

__all__ = ["Options", "run"]

STORES = {"file": "{folder}/files", "sqlite": "sqlite:///{folder}/store.db"}
ROOT = Path(__file__).parents[1]


class Options(NamedTuple):
    """How long the sessions are, how often they were opened anew, and how often to measure."""

    records: tuple[int, ...] = (1_000, 10_000, 100_000)
    restarts: tuple[int, ...] = (1, 100, 1_000)
    context_kib: tuple[int, ...] = (8, 64, 512)
    rounds: int = 15
    base: Path | None = None
    """A checkout of the revision whose copies are the measure."""
    folder: Path | None = None


WORKER = """
import asyncio, gc, json, sys
from time import process_time
import perdure
from perdure import EncodedRecord, Limits, Message, Shutdown

BLOCK = 10

async def fill(sessions, id, records, restarts):
    session = None
    text = '"content":"' + "m" * 170 + ' %07d"}'
    every = max(records // restarts, 1)
    for number in range(1, records + 1):
        if session is None:
            session = await sessions.open(id)
        role = '{"role":"user",' if number % 2 else '{"role":"assistant",'
        session.append(EncodedRecord("message", (role + text % number).encode()))
        if number % BLOCK == 0:
            await session.save()
        if number % every == 0 and number < records:
            await session.aclose()
            session = None
    await session.aclose()

async def talk(sessions, id, kib):
    # A context of so many bytes, with a checkpoint amid it.
    session = await sessions.open(id)
    half = kib * 1024 // 2
    for number in range(2):
        size = 0
        while size < half:
            async with session.turn():
                session.append(Message.user("q" * 400), Message.assistant("a" * 400))
            size += 900
        if not number:
            await session.checkpoints.create("here")
    await session.aclose()

async def main():
    url, limits = sys.argv[1], Limits(context_bytes=1 << 20)
    quiet = Shutdown(signals=False)
    async with perdure.connect(url, autosave=None, shutdown=quiet, limits=limits) as sessions:
        number = 0
        for line in sys.stdin:
            act, id, *rest = json.loads(line)
            if act in ("fill", "talk"):
                await (fill if act == "fill" else talk)(sessions, id, *rest)
                print(json.dumps(0.0), flush=True)
                continue
            number += 1
            new, options = f"{id} {number}", {}
            if act == "context":
                options = {"history": "context"}
            elif act == "old":
                view = await sessions.load(id)
                found = await view.checkpoints.get(1)
                options = {"history": "context", "at": found}
            elif act == "read":
                view = await sessions.load(id)
            gc.collect()
            began = process_time()
            if act == "copy":
                await sessions.copy(id, new)
            elif act == "open":
                session = await sessions.open(id)
            elif act == "read":
                view = await sessions.load(id)
                await view.checkpoints.restore(1)
            else:
                await sessions.fork(id, new, **options)
            print(json.dumps(process_time() - began), flush=True)
            if act == "open":
                await session.aclose()
            elif act != "read":
                await sessions.forget(new) if number % 4 == 0 else await sessions.delete(new)

asyncio.run(main())
"""


def run(options: Options) -> Report:
    """Measure full forks, then those without history."""
    rows: list[Row] = []
    taken: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        for store, url in STORES.items():
            rows += _full(options, Path(folder), store, url, taken)
            rows += _context(options, Path(folder), store, url, taken)
    details = {**options._asdict(), "folder": None, "base": str(options.base), "seconds": taken}
    return Report(rows, details)


def _full(options: Options, folder: Path, store: str, url: str, taken: dict[str, Any]) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        workers = {}
        for name, checkout in (("base", options.base or ROOT), ("own", ROOT)):
            place = folder / f"{store}-{name}"
            place.mkdir()
            workers[name] = Worker(checkout, WORKER, url.format(folder=place))
            stack.callback(workers[name].close)
        for records in options.records:
            for restarts in options.restarts:
                name = f"session-{records}-{restarts}"
                for worker in workers.values():
                    worker.ask("fill", name, records, restarts)
                rounds = max(3, options.rounds // (4 if records >= 100_000 else 1))
                both = [
                    (workers["own"].ask("fork", name), workers["base"].ask("copy", name))
                    for _ in range(rounds + 1)
                ][1:]
                figure = f"forks.{store}.full_{records}_{restarts}"
                meaning = f"CPU of a fork of {records} records, {restarts} restarts, over a copy"
                rows.append(_ratio(figure, both, meaning, taken))
    worst = max(rows, key=lambda row: row.value)
    return [Row(f"forks.{store}.full_over_copy", worst.value, f"the worst: {worst.name}"), *rows]


def _context(
    options: Options, folder: Path, store: str, url: str, taken: dict[str, Any]
) -> list[Row]:
    place = folder / f"{store}-context"
    place.mkdir()
    worker = Worker(ROOT, WORKER, url.format(folder=place))
    found: dict[str, list[Row]] = {"context_over_open": [], "old_over_read": []}
    try:
        for kib in options.context_kib:
            session = f"session-{kib}"
            worker.ask("talk", session, kib)
            for figure, act, other, meaning in (
                ("context_over_open", "context", "open", "a fork of the context over an open"),
                ("old_over_read", "old", "read", "the same at an old point over reading that"),
            ):
                both = [
                    (worker.ask(act, session), worker.ask(other, session))
                    for _ in range(options.rounds + 2)
                ][2:]
                name = f"forks.{store}.{figure}_{kib}"
                found[figure].append(_ratio(name, both, f"CPU of {meaning}, {kib} KiB", taken))
    finally:
        worker.close()
    rows = []
    for figure, those in found.items():
        worst = max(those, key=lambda row: row.value)
        rows += [Row(f"forks.{store}.{figure}", worst.value, f"the worst: {worst.name}"), *those]
    return rows


def _ratio(name: str, both: list[tuple[float, float]], meaning: str, taken: dict[str, Any]) -> Row:
    ratios = [ours / theirs for ours, theirs in both]
    ours, theirs = (median(seconds) * 1e3 for seconds in zip(*both, strict=True))
    taken[name] = both
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}; {ours:.2f} and {theirs:.2f} ms"
    return Row(name, median(ratios), f"{meaning} ({spread})")
