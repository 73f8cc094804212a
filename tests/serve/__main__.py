"""``python -m tests.serve --agents 1000``, or ``--replicas 3 --minutes 5``: prints figures as JSON.

Clients stream answers while servers are stopped, killed and started again. Each client continues
with what it has, and at the end its events and the store are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import httpx

from tests.asgi.served import Served
from tests.serve.clients import Client
from tests.servers.postgres import Postgres

SERVE = "perdure serve tests.serve.agents:slow --port {port} --grace 1".split()


class Fleet:
    """Servers on one store; the one at a place may be stopped and started again."""

    def __init__(self, store: str, replicas: int) -> None:
        self.store = store
        self.servers = [Served(*SERVE, store=store) for _ in range(replicas)]
        self.statuses: list[int] = []
        self.restarts = self.tracebacks = 0
        self.stops: list[float] = []

    def restart(self, place: int, how: signal.Signals) -> None:
        server = self.servers[place]
        began = time.monotonic()
        said = server.stop(how)
        if how is signal.SIGTERM:
            self.stops.append(time.monotonic() - began)
            self.statuses.append(server.process.returncode)
            self.tracebacks += "Traceback" in said
        if "Traceback" in said:
            print(said[-6000:], file=sys.stderr)
        server.close()
        self.servers[place] = Served(*SERVE, store=self.store, port=server.port)
        self.restarts += 1

    def url(self) -> str:
        """Return where a request goes, which is any of them."""
        return random.choice(self.servers).url

    def close(self) -> None:
        for server in self.servers:
            server.close()


async def run(store: str, *, agents: int, replicas: int, minutes: float) -> dict[str, Any]:
    fleet = await anyio.to_thread.run_sync(Fleet, store, replicas)
    tally = {"disconnects": 0, "refused": 0, "kills": 0}
    clients = [Client(fleet.url, f"agent-{number}", tally) for number in range(agents)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    began = time.monotonic()
    try:
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            await drive(fleet, clients, http, began + 60 * minutes, tally)
            seconds = time.monotonic() - began
            wrong = [fault for client in clients for fault in client.faults()]
            for client in clients:
                wrong += await client.stored_faults(http)
    finally:
        fleet.close()
    turns = sum(len(client.turns) for client in clients)
    ok = not (wrong or fleet.tracebacks) and set(fleet.statuses) == {0}
    return {
        "ok": ok,
        "agents": agents,
        "turns": turns,
        "turns_s": round(turns / seconds, 1),
        "wrong": {fault: wrong.count(fault) for fault in set(wrong)},
        **tally,
        "sigterms": len(fleet.statuses),
        "exit_statuses": sorted(set(fleet.statuses)),
        "tracebacks": fleet.tracebacks,
        "sigterm_s_max": round(max(fleet.stops), 2),
        "seconds": round(seconds, 1),
    }


async def drive(
    fleet: Fleet, clients: list[Client], http: httpx.AsyncClient, end: float, tally: dict[str, int]
) -> None:
    """Have all clients ask until the end, and until two servers were restarted among them."""

    def ended_turns() -> int:
        return sum(client.ended for client in clients)

    async def talk(client: Client) -> None:
        while len(client.turns) < 2 or fleet.restarts < 2 or time.monotonic() < end:
            await client.ask(http)

    async def disturb() -> None:
        for number in range(10**6):
            ended = ended_turns()
            await anyio.sleep(2)
            # However slow the machine is, some turns end between two restarts.
            while ended_turns() < ended + len(clients) / 10:
                await anyio.sleep(0.2)
            how = signal.SIGKILL if number % 2 else signal.SIGTERM
            tally["kills"] += how is signal.SIGKILL
            place = number % len(fleet.servers)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(fleet.restart, place, how)

    async with anyio.create_task_group() as disturbance:
        disturbance.start_soon(disturb)
        async with anyio.create_task_group() as group:
            for client in clients:
                group.start_soon(talk, client)
        disturbance.cancel_scope.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve")
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0)
    given = vars(parser.parse_args())
    with contextlib.ExitStack() as stack:
        if given["replicas"] > 1:
            store = stack.enter_context(Postgres()).url
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-serve-"))
            store = f"file:{Path(folder) / 'store'}"
        summary = anyio.run(lambda: run(store, **given))
    print(json.dumps(summary, indent=2))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
