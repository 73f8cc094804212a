"""What opening, closing and idling cost on a server: round trips or requests, counted by a proxy.

A session is opened that is new, one that exists, and one that has to exist; the figure is the
largest of the three means. Many sessions are opened and closed at once, and 100 sessions are left
idle. Then processes of their own save to one PostgreSQL, each over its own connections.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.chat import Chat
from benchmarks.figures import Row
from benchmarks.stores.load import connected
from benchmarks.stores.wire import (
    CountingProxy,
    http_requests,
    postgres_round_trips,
    redis_commands,
)
from perdure import Autosave, Shutdown
from perdure.lease import LeaseOptions
from perdure.store import Store

__all__ = ["SERVERS", "network", "processes"]

OPENS = 12
"""Cycles of each kind that are counted, after as many that are not."""
MANY = 100
IDLE = 3.0
"""Seconds in which 100 sessions are idle."""
BEAT = 0.2
UNITS = {"postgres": "round_trips", "redis": "commands", "s3": "requests"}
PROCESSES = (1, 2, 4)


class Counted(NamedTuple):
    """A store behind a proxy, and the proxy."""

    make: Callable[[], Store]
    proxy: CountingProxy


@contextmanager
def _postgres(_folder: Path) -> Iterator[Counted]:
    from tests.servers.postgres import Postgres

    with Postgres() as server, CountingProxy(server.port, postgres_round_trips) as proxy:
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/") + "?sslmode=disable"
        yield Counted(lambda: perdure.store_for(url), proxy)


@contextmanager
def _redis(_folder: Path) -> Iterator[Counted]:
    from tests.servers.valkey import valkey

    with valkey() as server, CountingProxy(server.port, redis_commands) as proxy:
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        yield Counted(lambda: perdure.store_for(url), proxy)


@contextmanager
def _s3(folder: Path) -> Iterator[Counted]:
    from tests.servers.s3 import S3Server, store_on

    with S3Server() as server, CountingProxy(server.port, http_requests) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        yield Counted(lambda: store_on(server, folder, endpoint=endpoint), proxy)


SERVERS = {"postgres": _postgres, "redis": _redis, "s3": _s3}


def network(name: str, folder: Path, backend: str) -> list[Row]:
    """Return the figures of one store."""
    with SERVERS[name](folder) as counted:
        found = anyio.run(_measure, counted, backend=backend)
    unit = UNITS[name]
    opening = max(fmean(found[kind]) for kind in ("new", "existing", "known"))
    words = unit.replace("_", " ")
    return [
        Row(f"stores.{name}.open_{unit}", opening, f"{words} of an open, counted by a proxy"),
        Row(f"stores.{name}.close_{unit}", fmean(found["close"]), f"{words} of a close"),
        Row(f"stores.{name}.open_many", found["open_many"][0], f"{words} each, {MANY} at once"),
        Row(f"stores.{name}.close_many", found["close_many"][0], f"{words} each, {MANY} at once"),
        Row(f"stores.{name}.idle_beat", found["idle"][0], f"{words} in a beat of {MANY} sessions"),
    ]


async def _measure(counted: Counted) -> dict[str, list[float]]:
    shutdown = Shutdown(deadline=120, signals=False)
    found: dict[str, list[float]] = {}
    rare = LeaseOptions(heartbeat=300, ttl=1200)
    async with perdure.connect(
        counted.make(), autosave=Autosave(), shutdown=shutdown, lease=rare
    ) as sessions:
        for measured in (False, True):
            cycles = await _cycles(sessions, counted.proxy, measured)
        found |= cycles
        found |= await _many(sessions, counted.proxy)
    often = LeaseOptions(heartbeat=BEAT, ttl=30)
    async with perdure.connect(
        counted.make(), autosave=Autosave(), shutdown=shutdown, lease=often
    ) as sessions:
        for number in range(MANY):
            await sessions.open(f"many-{number}")
        counted.proxy.take()
        start = perf_counter()
        await anyio.sleep(IDLE)
        found["idle"] = [len(counted.proxy.take()) * BEAT / (perf_counter() - start)]
    return found


async def _cycles(sessions: Any, proxy: CountingProxy, measured: bool) -> dict[str, list[float]]:
    """Open, use and close sessions, one after another."""
    found: dict[str, list[float]] = {"new": [], "existing": [], "known": [], "close": []}
    chat = Chat(1)
    for cycle in range(OPENS):
        for kind in ("new", "existing", "known"):
            name = f"{measured}-{cycle}" if kind == "new" else f"{measured}-{kind}"
            if kind != "new" and cycle == 0:
                await (await sessions.open(name)).aclose()
            proxy.take()
            session = await sessions.open(name, create=kind != "known")
            found[kind].append(len(proxy.take()))
            for message in chat.turn().messages:
                session.append(message)
            await session.save()
            proxy.take()
            await session.aclose()
            found["close"].append(len(proxy.take()))
    return found


async def _many(sessions: Any, proxy: CountingProxy) -> dict[str, list[float]]:
    """Open and close many sessions at once."""
    opened: list[Any] = []

    async def open_one(number: int) -> None:
        opened.append(await sessions.open(f"many-{number}"))

    found = {}
    for _ in range(2):  # new ones, then those that exist
        opened.clear()
        proxy.take()
        async with anyio.create_task_group() as group:
            for number in range(MANY):
                group.start_soon(open_one, number)
        found["open_many"] = [len(proxy.take()) / MANY]
        for session in opened:
            for message in Chat(1).turn().messages:
                session.append(message)
        await sessions.flush()
        proxy.take()
        async with anyio.create_task_group() as group:
            for session in opened:
                group.start_soon(session.aclose)
        found["close_many"] = [len(proxy.take()) / MANY]
    return found


# Processes that share a server


async def _talk(url: str, number: int, sessions: int, turns: int) -> float:
    """Save turns in sessions of this process; wait for the word to begin; return the rate."""
    store = perdure.store_for(url)
    async with connected(store, sessions, prefix=f"process-{number}") as talk:
        await talk.round(turns)
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        took, _ = await talk.round(turns)
        return sessions * turns / took


def processes(sessions: int, turns: int, rounds: int) -> dict[int, float]:
    """Return the turns in a second of one, two and four processes on one PostgreSQL."""
    from tests.servers.postgres import Postgres

    rates: dict[int, list[float]] = {count: [] for count in PROCESSES}
    with Postgres(fsync=True) as server:
        for _ in range(rounds):
            for count in PROCESSES:
                rates[count].append(_together(server.url, count, sessions, turns))
    return {count: median(found) for count, found in rates.items()}


def _together(url: str, count: int, sessions: int, turns: int) -> float:
    program = "from benchmarks.stores.network import main; main()"
    command = [sys.executable, "-c", program, url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [*command, str(number), str(sessions), str(turns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=600)[0] for process in running]
    assert not any(process.returncode for process in running)
    return sum(map(float, answers))


def main() -> None:
    """Run as one of the processes."""
    url, *numbers = sys.argv[1:]
    print(anyio.run(_talk, url, *map(int, numbers)))
