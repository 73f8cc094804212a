"""Several uvicorn workers on one store, clients that try again, and the count at the end.

Every request goes to whichever worker takes its connection, so sessions move all the time.
Each carries an id, is sent again after a 503 or a lost connection, and must stand in its
session's log exactly once, behind the one that was answered before it.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from perdure.memory.documents import TurnPayload
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.messages import decode_message
from perdure.records.records import MESSAGE, TURN
from perdure.stores.file import FileStore
from tests.servers import free_port, until_up

EXAMPLES = Path(__file__).parents[2] / "examples"
TRIES = 200


@dataclass
class Tally:
    """What the clients saw."""

    answered: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The ids that were answered, by session, in the order of their answers."""
    retries: int = 0
    replayed: int = 0
    took: list[float] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)
    killed: int = 0


class Fleet:
    """The example application under ``uvicorn --workers N``."""

    def __init__(self, store: Path, workers: int) -> None:
        self.store = store
        self.workers = workers
        self.port = free_port()
        command = [sys.executable, "-m", "uvicorn", "workers_app:app", "--port", str(self.port)]
        command += ["--workers", str(workers), "--timeout-graceful-shutdown", "10"]
        command += ["--log-level", "error", "--no-access-log"]
        env = {**os.environ, "PERDURE_URL": f"file:{store}"}
        self.process = subprocess.Popen(
            command, cwd=EXAMPLES, env=env, stderr=subprocess.PIPE, text=True
        )
        until_up(self.port, self.process)

    def kill_a_worker(self, pid: int) -> None:
        """Kill one of the workers with SIGKILL; uvicorn starts another one."""
        assert pid in {child.pid for child in psutil.Process(self.process.pid).children()}
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> str:
        """End it by SIGTERM; return what it had to complain about."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=240)[1]

    def close(self) -> None:
        """End it whatever it does, its workers too."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            for one in (*children, self.process):
                one.kill()
        self.process.communicate()


async def drive(
    fleet: Fleet,
    *,
    requests: int,
    sessions: int,
    clients: int,
    seed: int = 0,
    kills: int = 0,
) -> Tally:
    """Spread requests over the sessions, each session's one after another."""
    chance = random.Random(seed)
    plan: dict[str, list[str]] = {f"s{number:04d}": [] for number in range(sessions)}
    for number in range(requests):
        agent = f"s{number % sessions:04d}"
        plan[agent].append(f"{agent}-op{len(plan[agent]):04d}")
    left = [agent for agent, ops in plan.items() for _ in ops]
    chance.shuffle(left)
    tally, busy = Tally(), set[str]()
    done = 0
    await until_all_answer(fleet)

    async def work(send: Any) -> None:
        nonlocal done
        while left:
            place = next((n for n in range(len(left) - 1, -1, -1) if left[n] not in busy), None)
            if place is None:
                await anyio.sleep(0.001)
                continue
            agent = left.pop(place)
            busy.add(agent)
            op = plan[agent].pop(0)
            await _ask(send, agent, op, tally)
            busy.discard(agent)
            done += 1
            if kills and done % (requests // (kills + 1)) == 0 and done < requests:
                tally.killed += 1
                fleet.kill_a_worker(chance.choice(sorted(tally.workers & fleet_pids(fleet))))

    async with anyio.create_task_group() as group:
        for _ in range(clients):
            group.start_soon(_client, fleet.port, work)
    return tally


async def until_all_answer(fleet: Fleet) -> None:
    """Ask until each of the workers has answered: the first may be up long before the last."""
    warm, numbers = Tally(), itertools.count()

    async def work(send: Any) -> None:
        while len(warm.workers) < fleet.workers:
            number = next(numbers)
            await _ask(send, f"warm{number % 8}", f"warm-{number}", warm)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(_client, fleet.port, work)


def fleet_pids(fleet: Fleet) -> set[int]:
    """Return the workers that live."""
    return {child.pid for child in psutil.Process(fleet.process.pid).children()}


async def _client(port: int, work: Any) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        await work(client)


async def _ask(client: httpx.AsyncClient, agent: str, op: str, tally: Tally) -> None:
    """Send one request until it is answered."""
    began = time.perf_counter()
    for _ in range(TRIES):
        try:
            # A connection of its own: it may come to any worker.
            answer = await client.post(
                f"/sessions/{agent}",
                json={"op": op, "text": op},
                headers={"connection": "close"},
            )
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200:
            said = answer.json()
            tally.answered[agent].append(op)
            tally.took.append(time.perf_counter() - began)
            tally.workers.add(said["worker"])
            tally.replayed += said["replayed"]
            return
        assert answer is None or answer.status_code == 503, answer.text
        tally.retries += 1
        await anyio.sleep(0.01)
    raise AssertionError(f"{op} was never answered")


async def verify(store: Path, tally: Tally) -> dict[str, Any]:
    """Compare each session's log with what was answered; return what is wrong, and the hops.

    A hop is a change of the session's holder.
    """
    lost: list[str] = []
    doubled: list[str] = []
    disordered: list[str] = []
    hops = 0
    files = FileStore(store)
    await files.open()
    try:
        for agent, answered in sorted(tally.answered.items()):
            said, ended, epoch = await _log(files, agent)
            hops += epoch - 1
            for found in (said, ended):
                lost += set(answered) - set(found)
                doubled += [one for one, count in Counter(found).items() if count > 1]
            if said != answered or ended != answered:
                disordered.append(agent)
    finally:
        await files.aclose()
    return {"lost": lost, "doubled": doubled, "disordered": disordered, "hops": hops}


async def _log(files: FileStore, agent: str) -> tuple[list[str], list[str], int]:
    """Return what users said, which turns have ended, and the last epoch that wrote."""
    said, ended, epoch = [], [], 1
    async for chunk in files.read_log(SessionKey(agent)):
        for record in chunk.records:
            epoch = max(epoch, record.epoch)
            if record.kind == TURN:
                turned = decode(record.payload, TurnPayload)
                if turned.phase == "end":
                    ended.append(turned.turn)
            elif record.kind == MESSAGE:
                message = decode_message(record.payload)
                if message.role == "user":
                    said.append(message.text)
    return said, ended, epoch
