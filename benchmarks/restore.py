"""What opening a long session costs over opening a short one, with the same context budget.

Both are one agent's chat, on the file store, and differ in their number of messages only. Each
is opened as it is found in two ways: after a clean close, and after a kill with a full tail:
as many turns behind the last fold as a session that never is at rest has before the next one.

Each sample is a process of its own, with a copy of the store, the page cache warm; all kinds
take turns. The clock runs from before the store is connected to behind the call that
returns the context for the model. Everything was imported before, by opening a session of another
store. Bytes are what the kernel counts as read meanwhile (``rchar`` of /proc/self/io); memory
is the process's peak (``VmHWM``) over that of one which opens an empty session. A figure is the
ratio, long over short, of the worse of the two ways: of 25th percentiles for time, so that a
busy neighbor disturbs both or neither, and of medians for the others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.chat import Chat
from benchmarks.figures import Report, Row
from benchmarks.timing import KERNEL, quartile
from perdure import Session, SessionManager, Shutdown
from perdure.session.fold import fold_due, phase_of
from perdure.session.lifecycle import LONG_TAIL

__all__ = ["Options", "fill", "full_tail", "run"]

TURN = 4
"""Messages of one turn."""
PAGE = 50
HOW = {"load": "load without the context", "view": "load with the context", "open": "open"}
"""How the last messages are read, by the name of the figure."""
WAYS = ("closed", "killed")
MEASURES = {"seconds": quartile, "context_seconds": quartile, "bytes": median, "peak_bytes": median}


class Options(NamedTuple):
    """How many messages, how often to measure, and where."""

    messages: int = 50_000
    few: int = 1_000
    rounds: int = 9
    folder: Path | None = None


SAMPLE = """
import asyncio, json, os, sys
from time import perf_counter, thread_time
import perdure

def read_so_far():
    fields = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return int(fields["rchar"])

def peak():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024

async def opened(root):
    sessions = await perdure.connect(root, shutdown=perdure.Shutdown(signals=False))
    session = await sessions.open("ada")
    began = thread_time()
    context = session.context()
    return session, context, thread_time() - began

async def main():
    await opened(sys.argv[2])
    before, began = read_so_far(), perf_counter()
    session, context, rendering = await opened(sys.argv[1])
    seconds, read = perf_counter() - began, read_so_far() - before
    print(json.dumps({
        "seconds": seconds, "bytes": read, "peak_bytes": peak(), "messages": len(context),
        "context_seconds": rendering,
        "version": session.version, "source": session.restore_report.source,
    }), flush=True)
    os._exit(0)

asyncio.run(main())
"""
"""Opens a session and ends without closing it: like the kill that comes next."""


def run(options: Options) -> Report:
    """Fill a long and a short session, leave each in both ways, and open them by turns."""
    if not KERNEL.exists():
        raise SystemExit("this benchmark reads /proc/self/io: run it on Linux")
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        places = prepare(Path(folder), options)
        warm_up = int(options.rounds > 1)
        rounds = [measure(Path(folder), places) for _ in range(options.rounds + warm_up)]
        samples = rounds[warm_up:]
        beside = anyio.run(_beside, Path(folder), options)
    found = {
        kind: {name: of([one[kind][name] for one in samples]) for name, of in MEASURES.items()}
        for kind in samples[0]
    }
    return _report(options, found, samples[-1], beside)


def prepare(folder: Path, options: Options) -> dict[str, Path]:
    """Make the stores that are opened; return where each kind lies."""
    places = {"empty": folder / "empty"}
    anyio.run(fill, places["empty"], 0)
    for length, messages in (("long", options.messages), ("short", options.few)):
        closed, killed = (folder / f"{length}-{way}" for way in WAYS)
        anyio.run(fill, closed, messages)
        shutil.copytree(closed, killed, copy_function=os.link)
        code = "import sys; from benchmarks.restore import full_tail; full_tail(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", code, killed], check=False)
        assert done.returncode < 0, "it kills itself"
        places |= {f"{length}-closed": closed, f"{length}-killed": killed}
    return places


def manager(root: Path) -> SessionManager:
    """Return a manager that saves when it is told to; it folds as any does."""
    return perdure.connect(root, autosave=None, shutdown=Shutdown(signals=False))


async def fill(root: Path, messages: int) -> None:
    """Leave a session with so many messages, in whole turns that have ids, closed."""
    chat = Chat(3)
    async with manager(root) as sessions, sessions.open("ada") as session:
        for number in range(messages // TURN):
            async with session.turn(f"request-{number}"):
                session.append(*chat.turn().messages)


def full_tail(root: str) -> None:
    """Append as much as a fold may be behind, make it durable, and die. Never returns."""

    async def main() -> None:
        async with manager(Path(root)) as sessions, sessions.open("ada") as session:
            chat = Chat(4)
            while not _is_due_after(session, turn := chat.turn().messages):
                async with session.turn():
                    session.append(*turn)
            os.kill(os.getpid(), 9)

    anyio.run(main)


def _is_due_after(session: Session, turn: tuple[Any, ...]) -> bool:
    """Say whether a fold would be due with one turn more; a record is about its message's size."""
    session._catch_up()
    return fold_due(
        tail_bytes=session._tail_bytes + 8_000,
        tail_records=session._tail_records + len(turn) + 2,
        rewrite_bytes=session._rewrite_bytes,
        limits=perdure.Limits(),
        phase=phase_of(session.key) * LONG_TAIL,
    )


def measure(folder: Path, places: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Open each kind once, in a process of its own."""
    found = {}
    for kind, place in places.items():
        copy, warm = folder / "copy", folder / "warm"
        shutil.copytree(place, copy, copy_function=os.link)
        command = [sys.executable, "-c", SAMPLE, str(copy), str(warm)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[kind] = json.loads(done.stdout)
        shutil.rmtree(copy)
        shutil.rmtree(warm)
    return found


async def _beside(folder: Path, options: Options) -> dict[str, float]:
    """Return CPU seconds to get the last messages of a stored chat; empty without their SDK.

    All are on SQLite and of one process that is connected already: perdure's `load` without the
    working context, as a view with it, and `open`, each with a page of history; and `get_items`
    of OpenAI Agents' SQLiteSession, which has nothing but the items.
    """
    if find_spec("agents") is None:
        return {}
    from agents import SQLiteSession

    chat, theirs = Chat(3), SQLiteSession("ada", str(folder / "openai.db"))
    url = f"sqlite:///{folder}/perdure.db"
    async with perdure.connect(url, autosave=None, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            turns = [chat.turn() for _ in range(options.few // TURN)]
            await theirs.add_items([item for turn in turns for item in turn.plain])  # type: ignore[misc]  # as they come
            for turn in turns:
                session.append(*turn.messages)
                await session.save()
            await session.aclose()
        taken: dict[str, list[float]] = {"openai": [], "load": [], "view": [], "open": []}
        for _ in range(3 * options.rounds):
            start = process_time()
            await theirs.get_items(limit=PAGE)
            theirs_end = process_time()
            view = await sessions.load("ada", context=False)
            assert view is not None
            await view.history(limit=PAGE)
            loaded = process_time()
            view = await sessions.load("ada")
            assert view is not None
            await view.history(limit=PAGE)
            viewed = process_time()
            session = await sessions.open("ada")
            await session.history(limit=PAGE)
            opened = process_time()
            await session.aclose()
            for name, seconds in (
                ("openai", theirs_end - start),
                ("load", loaded - theirs_end),
                ("view", viewed - loaded),
                ("open", opened - viewed),
            ):
                taken[name].append(seconds)
    theirs.close()
    return {name: quartile(seconds) for name, seconds in taken.items()}


def _report(
    options: Options,
    found: dict[str, dict[str, float]],
    last: dict[str, dict[str, Any]],
    beside: dict[str, float],
) -> Report:
    def growth(measure: str, *, over: float = 0.0) -> float:
        return max(
            (found[f"long-{way}"][measure] - over) / (found[f"short-{way}"][measure] - over)
            for way in WAYS
        )

    empty = found["empty"]["peak_bytes"]
    rows = [
        Row("restore.growth", growth("seconds"), "time to open, the long session over the short"),
        Row("restore.first_context", growth("context_seconds"), "the first context, the same"),
        Row("restore.bytes_growth", growth("bytes"), "bytes read, the same"),
        Row(
            "restore.memory_growth",
            growth("peak_bytes", over=empty),
            "peak memory over that of an empty session, the same",
        ),
        *(
            Row(
                f"restore.{way}_ms",
                found[f"long-{way}"]["seconds"] * 1e3,
                f"to connect, open and render {options.messages} messages that were {way}",
            )
            for way in WAYS
        ),
    ]
    for name, how in HOW.items() if beside else ():
        meaning = f"CPU to {how} and get the last {PAGE} messages, over OpenAI's SQLiteSession"
        rows.append(Row(f"restore.{name}_over_openai", beside[name] / beside["openai"], meaning))
    details = {**options._asdict(), "folder": None, "beside": beside, "taken": found, "last": last}
    return Report(rows, details)
