"""``python -m tests.integration.journeys.loss``: a store that is lost, and its backup restored.

A program in a process of its own saves in many sessions without a pause, and says what it was told
is durable. Beside it ``backup`` runs some times. Behind the last run the program is killed, the
store is destroyed, and the backup restored: every record that was durable when the last
backup began is there, none is doubled or out of order, and nothing is there that was never said.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message, Shutdown
from perdure.store import open_read_only
from perdure.transfer import backup, restore_backup, verify_backup
from tests.servers import postgres

KINDS = ("file", "sqlite", "postgres")
SESSIONS = 8
BETWEEN = 200
"""Records that the program saves between two backups, at least."""

WRITER = """
import asyncio, sys
import perdure
from perdure import Message, Shutdown

async def talk(sessions, id):
    async with sessions.open(id) as session:
        for number in range(10**9):
            async with session.turn():
                session.append(Message.user(str(number)), Message.assistant("yes"))
            await session.save()
            sys.stdout.write(id + chr(10))
            sys.stdout.flush()

async def main():
    async with perdure.connect(sys.argv[1], shutdown=Shutdown(signals=False)) as sessions:
        ids = [f"agent-{number}" for number in range(int(sys.argv[2]))]
        await asyncio.gather(*(talk(sessions, id) for id in ids))

asyncio.run(main())
"""


def place_of(kind: str, folder: Path) -> tuple[str, Callable[[], object]]:
    """Return where a store is, and how to destroy it."""
    if kind == "file":
        return str(folder / "store"), lambda: shutil.rmtree(folder / "store")
    if kind == "sqlite":

        def unlink() -> None:
            for path in folder.glob("store.db*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        return f"sqlite:///{folder / 'store.db'}", unlink
    server, schema = postgres.shared(), postgres.schema_of(folder)
    drop = f"DROP SCHEMA {schema} CASCADE"
    return f"{server.url}?schema={schema}", lambda: server.run(drop)


class Writer:
    """The program, and what it was told is durable."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", WRITER, url, str(SESSIONS)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said[line.strip()] += 1

    async def more(self, count: int) -> None:
        """Wait until it has saved so much more, in every session something."""
        before = self.said.total()
        with anyio.fail_after(300):
            while len(self.said) < SESSIONS or self.said.total() < before + count:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the program ended with status {self.process.returncode}")
                await anyio.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()


async def _backed_up(url: str, target: Path) -> Any:
    source, there = perdure.store_for(url), perdure.store_for(target)
    await open_read_only(source)
    await there.open()
    done = await backup(source, there)
    problems = (await verify_backup(there)).problems
    await there.aclose()
    await source.aclose()
    return done, problems


async def loss(kind: str, folder: Path, *, runs: int) -> dict[str, Any]:
    """Do it once; return the figures, and what was wrong."""
    url, destroy = place_of(kind, folder)
    writer = Writer(url)
    problems: list[str] = []
    seconds: list[float] = []
    written: list[int] = []
    durable: Counter[str] = Counter()
    try:
        for _ in range(runs):
            await writer.more(BETWEEN)
            durable = writer.said.copy()
            begun = time.monotonic()
            done, wrong = await _backed_up(url, folder / "backup")
            seconds.append(round(time.monotonic() - begun, 2))
            written.append(done.records)
            problems += [f"backup: {one}" for one in (*done.failed.items(), *wrong.items())]
        await writer.more(BETWEEN)
    finally:
        writer.kill()
    said = writer.said
    destroy()
    found = await _restored(url, folder / "backup", problems)
    for id, count in durable.items():
        if len(found[id]) < count:
            problems.append(f"{id}: {count} turns were durable, {len(found[id])} came back")
        if found[id] != [str(number) for number in range(len(found[id]))]:
            problems.append(f"{id}: doubled, or out of order")
        if len(found[id]) > said[id] + 1:  # the one that was durable, and not told any more
            problems.append(f"{id}: more than was ever said")
    return {
        "store": kind,
        "turns durable when the last backup began": durable.total(),
        "turns restored": sum(map(len, found.values())),
        "turns durable when the store was lost": said.total(),
        "records written by each backup": written,
        "seconds of each backup, verified": seconds,
        "problems": problems,
    }


async def _restored(url: str, target: Path, problems: list[str]) -> dict[str, list[str]]:
    here, new = perdure.store_for(target), perdure.store_for(url)
    await open_read_only(here)
    await new.open()
    done = await restore_backup(here, new)
    problems += [f"restore: {one}" for one in done.failed.items()]
    await new.aclose()
    await here.aclose()
    found: dict[str, list[str]] = {}
    async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
        for number in range(SESSIONS):
            view = await sessions.load(f"agent-{number}")
            items = [] if view is None else await view.history(limit=1_000_000)
            told = [one.value.text for one in items if isinstance(one.value, Message)]
            found[f"agent-{number}"] = [text for text in told if text != "yes"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", choices=KINDS, action="append")
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    failed = 0
    for kind in options.store or KINDS:
        with tempfile.TemporaryDirectory(prefix="pd-loss-") as folder:
            place = Path(folder)
            place.chmod(0o700)
            told = anyio.run(lambda: loss(kind, place, runs=options.runs))  # noqa: B023  # now
        print(json.dumps(told, indent=2), flush=True)
        failed += len(told["problems"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
