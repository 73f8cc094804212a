"""``python -m tests.soak --minutes N``: a server under changing load, whose store goes down again and again.

Clients of one server of agents, as `perdure serve` runs it, have conversations on PostgreSQL,
Valkey or SQLite: they ask, hang up, come back, check what they got, and delete. Each cycle has a
busy time, a quiet one, and a fault: the store is killed and started again, or stands still; a
SQLite database is locked by somebody else. Then all is at rest, and memory, descriptors, threads,
tasks and disk are noted. Prints JSON; exits with 1 if anything was lost, or grows after the first
third of the cycles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import anyio
import httpx
import psutil

from perdure.agent import AgentConfig, ScriptedModel
from perdure.autosave.options import EngineOptions
from perdure.serve import AgentServer
from perdure.serve.server import serve
from tests.asgi.served import Served
from tests.serve.agents import words
from tests.serve.clients import Client
from tests.servers.postgres import Postgres
from tests.servers.valkey import Valkey, valkey

SERVE = "tests.soak --serve {port}".split()
AGENTS = 300
"""Ids of which each conversation takes one."""
SMALL_FILES = ("max_wal_size=64MB", "min_wal_size=32MB", "autovacuum_naptime=5s")
"""So that PostgreSQL's own files are as large as they get after minutes, not days."""
MAY_GROW = {"memory": 1.05, "disk": 1.1, "descriptors": 1.0, "threads": 1.0, "tasks": 1.0}
"""By how much the median of the last third may be above that of the second one."""
SPARE = {"memory": 3e6, "disk": 8e6, "descriptors": 3, "threads": 2, "tasks": 3}
"""And how much more than that it may be, in any case."""


def agent(id: str) -> AgentConfig:
    """Return an agent that answers, or for the id "probe" one that says how many tasks there are."""
    if id == "probe":
        tasks = ScriptedModel(lambda messages: str(len(asyncio.all_tasks())))
        return AgentConfig(name="probe", model=tasks)
    return AgentConfig(name="soaked", model=ScriptedModel(words, chunk_chars=4, delay=0.02))


def serve_agents(port: int) -> None:
    """Serve them, with sessions that leave memory after seconds and not minutes."""
    engine = EngineOptions(hibernate_after=5)
    server = AgentServer(agent, os.environ["PERDURE_URL"], keep=2, engine=engine)
    serve(server, host="127.0.0.1", port=port, grace=5)


class Database:
    """A SQLite database. No server ends under it, but others may keep it from being written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "soak.db"
        self.url = f"sqlite:///{self.path}"
        self._other: sqlite3.Connection

    def freeze(self) -> None:
        self._other = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        self._other.execute("BEGIN IMMEDIATE")

    def thaw(self) -> None:
        self._other.close()

    def kill(self) -> None:
        self.freeze()

    def start(self) -> None:
        self.thaw()


class Sample(NamedTuple):
    """What a server at rest has, after so many seconds."""

    at: float
    memory: int
    descriptors: int
    threads: int
    tasks: int
    disk: int


class Soak:
    """One server on a store, and its clients."""

    def __init__(self, server: Served, store: Postgres | Valkey | Database, folder: Path) -> None:
        self.server, self.store, self.folder = server, store, folder
        self.process = psutil.Process(server.process.pid)
        self.tally = {"disconnects": 0, "refused": 0, "conversations": 0, "turns": 0}
        self.faults: list[str] = []
        self.samples: list[Sample] = []
        self.free = [f"agent-{number}" for number in range(AGENTS)]
        self.clients: dict[str, Client] = {}
        self.began = time.monotonic()

    async def converse(self, http: httpx.AsyncClient, hurry: Callable[[], bool]) -> None:
        """Have conversations, each with an agent of its own, until there is no hurry any more."""
        while hurry():
            agent = self.free.pop(random.randrange(len(self.free)))
            client = self.clients.setdefault(
                agent, Client(lambda: self.server.url, agent, self.tally)
            )
            for _ in range(random.randint(1, 4)):
                await client.ask(http, hang_up=random.random() < 0.2)
                self.tally["turns"] += 1
            await self.check(http, client)
            self.tally["conversations"] += 1
            self.free.append(agent)

    async def check(self, http: httpx.AsyncClient, client: Client) -> None:
        """Compare what a client has with the store; end the conversation if it is long enough."""
        self.faults += client.faults()
        self.faults += await client.stored_faults(http)
        if len(client.turns) > random.randint(2, 20):
            url = f"{self.server.url}/agents/{client.agent}"
            while (await http.delete(url)).status_code not in {204, 404}:
                await anyio.sleep(0.5)
            del self.clients[client.agent]

    async def cycle(self, http: httpx.AsyncClient, number: int, seconds: float) -> None:
        """Be busy, have a fault, be quiet, and rest."""
        end = anyio.current_time() + seconds
        busy_until = end - seconds / 3
        async with anyio.create_task_group() as group:
            for place in range(24):
                until = busy_until if place % 4 else end
                group.start_soon(
                    self.converse, http, lambda until=until: anyio.current_time() < until
                )
            await anyio.sleep(seconds / 3)
            await anyio.to_thread.run_sync(self.break_store, number)
        await self.rest(http)

    def break_store(self, number: int) -> None:
        """Take the store away for some seconds: killed and started again, or standing still."""
        if number % 2:
            self.store.freeze()
            time.sleep(3)
            self.store.thaw()
        else:
            self.store.kill()
            time.sleep(2)
            self.store.start(*(SMALL_FILES if isinstance(self.store, Postgres) else ()))

    async def rest(self, http: httpx.AsyncClient) -> None:
        """Wait until nothing is unsaved and no agent is open, and note what the server has."""
        with anyio.move_on_after(60) as waited:
            while await self.figure(http, "open_sessions") or await self.figure(
                http, "unsaved_bytes"
            ):
                await anyio.sleep(0.5)
        if waited.cancelled_caught:
            self.faults.append("does not come to rest")
        answer = await http.post(f"{self.server.url}/agents/probe/messages", json={"text": "?"})
        tasks = int(answer.json()["text"])
        await http.delete(f"{self.server.url}/agents/probe")
        process = self.process
        memory, descriptors = process.memory_info().rss, process.num_fds()
        at = round(time.monotonic() - self.began)
        sample = Sample(at, memory, descriptors, process.num_threads(), tasks, used(self.folder))
        print(json.dumps(sample._asdict()), file=sys.stderr, flush=True)
        self.samples.append(sample)

    async def figure(self, http: httpx.AsyncClient, name: str) -> float:
        """Return one of the server's own figures."""
        text = (await http.get(f"{self.server.url}/metrics")).text
        return float(text.partition(f"\nperdure_{name} ")[2].split()[0])


def used(folder: Path) -> int:
    """Return the bytes of a folder's files, some of which may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Return the medians of the second and of the last third of the samples, by what they are of."""
    third = max(len(samples) // 3, 1)
    before, after = samples[third : 2 * third] or samples, samples[-third:]
    return {
        name: tuple(
            float(median(getattr(sample, name) for sample in part)) for part in (before, after)
        )
        for name in MAY_GROW
    }


def problems(samples: Sequence[Sample]) -> list[str]:
    """Return what has grown."""
    return [
        f"{name} grows from {before:.0f} to {after:.0f}"
        for name, (before, after) in growth(samples).items()
        if after > before * MAY_GROW[name] + SPARE[name]
    ]


async def run(soak: Soak, minutes: float, seconds: float) -> dict[str, Any]:
    """Run cycles for so long, and say what came of them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    end = time.monotonic() + 60 * minutes
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        while time.monotonic() < end or len(soak.samples) < 3:
            await soak.cycle(http, len(soak.samples), seconds)
        for agent in tuple(soak.clients):
            soak.faults += await soak.clients[agent].stored_faults(http)
    wrong = {fault: soak.faults.count(fault) for fault in set(soak.faults)}
    return {
        "minutes": round((time.monotonic() - soak.began) / 60, 1),
        "cycles": len(soak.samples),
        **soak.tally,
        "second_and_last_third": growth(soak.samples),
        "first": soak.samples[0]._asdict(),
        "last": soak.samples[-1]._asdict(),
        "problems": [*problems(soak.samples), *(f"{fault}: {wrong[fault]}" for fault in wrong)],
    }


@contextlib.contextmanager
def running(kind: str) -> Iterator[tuple[Postgres | Valkey | Database, Path]]:
    """Run a store, and yield it with the folder that it fills."""
    if kind == "postgres":
        with Postgres(fsync=True) as store:
            store.kill()
            store.start(*SMALL_FILES)
            yield store, store.base
    elif kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="perdure-soak-") as name:
            yield Database(Path(name)), Path(name)
    else:
        options = ("--appendonly", "yes", "--auto-aof-rewrite-min-size", "1mb")
        with valkey(*options) as server:
            yield server, server.folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cycle", type=float, default=30.0, help="seconds of one")
    parser.add_argument("--store", choices=("postgres", "valkey", "sqlite"), default="postgres")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_agents(given.serve)
        return 0
    with contextlib.ExitStack() as stack:
        store, folder = stack.enter_context(running(given.store))
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-soak-"))) / "log"
        server = Served(*SERVE, store=store.url, log=log)
        stack.callback(server.close)
        summary = anyio.run(run, Soak(server, store, folder), given.minutes, given.cycle)
        server.stop()
        summary["exit_status"] = server.process.returncode
        text = log.read_text()
        summary["problems"] += ["a traceback in the log"] if "Traceback" in text else []
        summary["log_lines"] = len(text.splitlines())
    print(json.dumps(summary, indent=2))
    return 1 if summary["problems"] or summary["exit_status"] else 0


if __name__ == "__main__":
    sys.exit(main())
