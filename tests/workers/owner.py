"""What it costs to open the sessions of a worker that died, or hangs.

    python -m tests.workers.owner --sessions 300 --store postgres
    python -m tests.workers.owner --sessions 300 --store file --stop

Two workers under plain ``asyncio.run``. The first opens all sessions and saves a record in
each; then it is killed, or stopped, and after a while of quiet the second, which was up all the
time, opens them one by one. A worker that was stopped is woken up in the end and goes on to
write: nothing that it is told was saved may be missing, and it must find out that it holds nothing.

The status is 1 if it took longer than it may, or anything was lost or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sniffio  # noqa: F401  # as most programs have it, by their model's client

from perdure import LeaseLostError, Message, Shutdown, connect

ROOT = Path(__file__).parents[2]
QUIET, ALL, EACH = 12.0, 10.0, 0.5
"""Seconds between the death and the first open; for all opens; for each."""
PLAIN = Shutdown(signals=False)
STORES = ("file", "sqlite", "postgres", "redis", "s3")


async def hold(url: str, sessions: int) -> None:
    """Open sessions and save a record in each; once told to, do so again in each."""
    async with connect(url, shutdown=PLAIN) as manager:
        mine = [await manager.open(f"s{place}") for place in range(sessions)]
        for place, session in enumerate(mine):
            session.append(Message.user(f"first {place}"))
            await session.save()
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # here it is killed, or stopped
        saved = []
        for place, session in enumerate(mine):
            with contextlib.suppress(LeaseLostError):
                session.append(Message.user(f"late {place}"))
                await session.save()
                saved.append(place)
        print(json.dumps(saved), flush=True)


async def take(url: str, sessions: int) -> None:
    """Once told to, open all sessions one by one and save a record in each."""
    async with connect(url, shutdown=PLAIN) as manager:
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        times = []
        for place in range(sessions):
            begun = time.monotonic()
            session = await manager.open(f"s{place}")
            times.append(time.monotonic() - begun)
            session.append(Message.user(f"second {place}"))
        await manager.flush()
        print(json.dumps(times), flush=True)


async def found(url: str, sessions: int) -> list[list[str]]:
    """Return what each session says."""
    said = []
    async with connect(url, shutdown=PLAIN) as manager:
        for place in range(sessions):
            view = await manager.load(f"s{place}")
            history = [] if view is None else await view.history(limit=100)
            said.append([item.value.text for item in history if item.kind == "message"])
    return said


class Worker:
    """A process of this program's, and what it says."""

    def __init__(self, role: str, url: str, sessions: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.owner", "--role", role, "--url", url]
            + ["--sessions", str(sessions)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        """Return its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a worker ended early"
        return line.strip()

    def go(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Have it end, however it is."""
        self._process.kill()
        self._process.communicate()


def measured(url: str, sessions: int, *, stop: bool, quiet: float = QUIET) -> dict[str, Any]:
    """Have a worker die that holds sessions, and another one open them."""
    holder, taker = Worker("hold", url, sessions), Worker("take", url, sessions)
    try:
        assert holder.hear() == "held"
        assert taker.hear() == "up"
        holder.send(signal.SIGSTOP if stop else signal.SIGKILL)
        time.sleep(quiet)
        taker.go()
        times = json.loads(taker.hear())
        late = []
        if stop:
            holder.send(signal.SIGCONT)
            holder.go()
            late = json.loads(holder.hear())
    finally:
        holder.end()
        taker.end()
    problems = []
    for place, said in enumerate(asyncio.run(found(url, sessions))):
        wanted = [f"first {place}", f"second {place}"]
        if place in late:
            wanted.append(f"late {place}")
        if sorted(said) != sorted(wanted):
            problems.append(f"s{place} says {said}, not {wanted}")
    return {
        "sessions": sessions,
        "longest": round(max(times), 3),
        "total": round(sum(times), 3),
        "problems": problems,
    }


@contextlib.contextmanager
def url_of(store: str) -> Iterator[str]:
    """Give the URL of an empty store of a kind."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if store == "file":
            yield f"file:{folder / 'data'}"
        elif store == "sqlite":
            yield f"sqlite:///{folder / 'data.db'}"
        elif store == "postgres":
            from tests.servers.postgres import Postgres

            yield stack.enter_context(Postgres()).url
        elif store == "redis":
            from tests.servers.valkey import valkey

            yield stack.enter_context(valkey()).url
        else:
            from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

            server = S3Server()
            stack.callback(server.close)
            server.start()
            os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
            yield server.url("owner")


def main() -> int:
    logging.getLogger("perdure").setLevel(logging.CRITICAL)  # of what is lost, it is told here
    parser = argparse.ArgumentParser(prog="tests.workers.owner", description=__doc__)
    parser.add_argument("--store", choices=STORES, default="postgres")
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--quiet", type=float, default=QUIET, help="seconds before the opens")
    parser.add_argument("--json", type=Path, help="a file for the result")
    parser.add_argument("--role", choices=("hold", "take"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        asyncio.run({"hold": hold, "take": take}[given.role](given.url, given.sessions))
        return 0
    with url_of(given.store) as url:
        result = measured(url, given.sessions, stop=given.stop, quiet=given.quiet)
    result = {"store": given.store, "stopped": given.stop, **result}
    print(json.dumps(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result))
    late = result["longest"] > EACH or result["total"] > ALL
    return int(late or bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
