"""A method of the store hangs while a process ends; ``python -m tests.sigterm.hanging`` tries all.

``… ROOT RUNNER WAY METHOD`` is one such process: it says what it accepted, and when it begins to
stop. However it ends, it has ended in time, and what it accepted is in the store, or is taken
from the spill files by the next open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio

import perdure
import perdure.sync
from perdure import Message, SessionManager, Shutdown, store_for
from tests.hanging import METHODS, Hanging
from tests.runners import run
from tests.sigterm.child import tell
from tests.sigterm.cycles import ROOT, stored

WAYS = {
    "aclose": 0,
    "sigterm": -signal.SIGTERM,
    "loop": 0,
    "exit": 0,
    "sync close": 0,
    "sync sigterm": -signal.SIGTERM,
    "sync exit": 0,
}
"""Ways to end, with the status of each."""
SESSIONS = ("saved", "unsaved")
MARGIN = 4.0
"""Seconds that a busy machine may take beside: to spill, and to end an interpreter."""


def options(root: str) -> Shutdown:
    return Shutdown(deadline=1.0, turn_grace=0.2, hard_grace=0.5, spill=f"{root}-spill")


async def fill(sessions: SessionManager, store: Hanging) -> None:
    for id in SESSIONS:
        session = await sessions.open(id)
        session.append(Message.user(f"{id}:1"))
        await session.save()
        if id == "unsaved":
            session.append(Message.user(f"{id}:2"))
    stopping(store)


def fill_blocking(sessions: perdure.sync.SessionManager, store: Hanging) -> None:
    for id in SESSIONS:
        session = sessions.open(id)
        session.append(Message.user(f"{id}:1"))
        session.save()
        if id == "unsaved":
            session.append(Message.user(f"{id}:2"))
    stopping(store)


def stopping(store: Hanging) -> None:
    for line in ("saved:1", "unsaved:1", "unsaved:2", "stopping"):
        tell(line)
    store.hangs = True


async def end(root: str, way: str, store: Hanging) -> None:
    if way == "sigterm":
        async with perdure.connect(store, autosave=None, shutdown=options(root)) as sessions:
            await fill(sessions, store)
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep_forever()
    sessions = await perdure.connect(store, autosave=None, shutdown=options(root))
    await fill(sessions, store)
    if way == "aclose":
        await sessions.aclose()


def end_blocking(root: str, way: str, store: Hanging) -> None:
    if way == "sync sigterm":
        with perdure.sync.connect(store, autosave=None, shutdown=options(root)) as sessions:
            fill_blocking(sessions, store)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    sessions = perdure.sync.connect(store, autosave=None, shutdown=options(root))
    fill_blocking(sessions, store)
    if way == "sync close":
        sessions.close()


def child(root: str, runner: str, way: str, method: str) -> None:
    store = Hanging(store_for(root), method)
    if way.startswith("sync"):
        end_blocking(root, way, store)
    elif way == "exit":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(end(root, way, store))
        globals()["left"] = loop  # as in a module of a program: it is never closed
    else:
        run(runner, partial(end, root, way, store))


def wrong(root: Path, runner: str, way: str, method: str) -> str:
    """Run one process; return what is wrong with its end, if anything is."""
    command = [sys.executable, "-m", "tests.sigterm.hanging", str(root), runner, way, method]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        accepted = [line.strip() for line in iter(process.stdout.readline, "stopping\n")]
        began = time.monotonic()
        said = process.stderr.read()
        status = process.wait()
        seconds = time.monotonic() - began
    limit = options("").deadline + options("").hard_grace
    problems = [] if seconds <= limit + MARGIN else [f"it took {seconds:.1f} s"]
    if status != WAYS[way]:
        problems.append(f"its status is {status}")
    missing = set(accepted) - set(anyio.run(kept, root))
    if missing or len(accepted) != 3:
        problems.append(f"of {accepted} it lost {missing}")
    return f"{runner}, {way}, {method}: {problems}: {said}" if problems else ""


async def kept(root: Path) -> list[str]:
    shutdown = Shutdown(signals=False, spill=f"{root}-spill")
    async with perdure.connect(root, shutdown=shutdown) as sessions:
        for id in SESSIONS:
            await sessions.open(id)  # which takes what was spilled
        await sessions.flush()
        return [text for id in SESSIONS for text in await stored(sessions, id)]


def runs(methods: list[str], runners: list[str]) -> list[tuple[str, str, str]]:
    """Return which processes to run."""
    ways = [(runners[0] if way[:4] in ("sync", "exit") else None, way) for way in WAYS]
    return [
        (runner, way, method)
        for only, way in ways
        for runner in ([only] if only else runners)
        for method in methods
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sigterm.hanging", description=__doc__)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--runner", action="append", choices=["asyncio", "trio", "uvloop"])
    given = parser.parse_args()
    problems = []
    wanted = runs(given.method or METHODS, given.runner or ["asyncio", "trio"])
    with tempfile.TemporaryDirectory(prefix="perdure-hanging-") as folder:
        for number, one in enumerate(wanted):
            problems.append(wrong(Path(folder, str(number)), *one))
    problems = [problem for problem in problems if problem]
    print(json.dumps({"runs": len(wanted), "problems": problems}, indent=2))
    return 1 if problems else 0


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[3] in WAYS:
        child(*sys.argv[1:])
    else:
        sys.exit(main())
