"""What clients see of a deploy: every worker of a chat server is replaced, one after another.

Workers of ``examples/chat_server.py`` under uvicorn share one PostgreSQL. Very many conversations
ask a turn now and then, each at a worker of its own as long as that takes requests, as behind a
load balancer that routes by id; a request that is refused, or answered by 503, goes to the next
worker with the same idempotency key. After a while of that, each worker gets SIGTERM, and once it
has ended, a new one takes its port.

A turn's time is from its first request until its last event, the model's half second included.
It counts as one of the deploy if it ended, or began, while workers were replaced, or in the same
time after that, in which sessions return to the workers that they came from; and as one of the
time before if it began once all conversations had.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

import perdure
from benchmarks.figures import Report, Row
from perdure import Shutdown

if TYPE_CHECKING:
    import httpx

    from tests.asgi.served import Served

__all__ = ["Options", "run"]

WORDS = "a b c d e f g h"
ANSWER = f"You said: {WORDS} "
COMMAND = [
    "uvicorn",
    "chat_server:app",
    "--port",
    "{port}",
    "--log-level",
    "warning",
    "--timeout-graceful-shutdown",
    "10",
]
LATER = 0.1
"""Seconds until a request that was not taken is sent again."""


class Options(NamedTuple):
    """How many workers and conversations, and how busy they are."""

    workers: int = 4
    conversations: int = 2_000
    every: float = 60.0
    """Seconds between two turns of a conversation, on average."""
    steady: float = 90.0
    """Seconds before the deploy."""


class Turn(NamedTuple):
    """One turn as its client saw it: when it began and ended, in seconds."""

    began: float
    ended: float


class Clients:
    """The conversations, and what became of their requests."""

    def __init__(self, workers: list[Served], options: Options) -> None:
        self.workers = workers
        self.options = options
        self.over = anyio.Event()
        self.turns: list[Turn] = []
        self.ended: Counter[str] = Counter()
        """Turns by conversation."""
        self.seen: Counter[str] = Counter()
        """What requests met besides an answer."""

    async def converse(self, http: httpx.AsyncClient, number: int) -> None:
        """Ask a turn now and then, each until its end has come."""
        chat, pick = f"chat-{number}", random.Random(number)
        await self._pause(pick.uniform(0, 1))
        while not self.over.is_set():
            began, worker = monotonic(), number
            while not await self._ask(http, chat, self.workers[worker % len(self.workers)].url):
                worker += 1
                await anyio.sleep(LATER)
            self.turns.append(Turn(began, monotonic()))
            self.ended[chat] += 1
            await self._pause(pick.uniform(0.5, 1.5))

    async def _pause(self, share: float) -> None:
        with anyio.move_on_after(share * self.options.every):
            await self.over.wait()

    async def _ask(self, http: httpx.AsyncClient, chat: str, url: str) -> bool:
        from httpx import ConnectError, HTTPError

        try:
            async with aclosing(self._events(http, chat, url)) as events:
                async for name in events:
                    if name == "end":
                        return True
        except ConnectError:
            self.seen["refused"] += 1
        except HTTPError:
            self.seen["cut"] += 1
        return False

    async def _events(
        self, http: httpx.AsyncClient, chat: str, url: str
    ) -> AsyncGenerator[str, None]:
        headers = {"authorization": "Bearer ada-token", "idempotency-key": str(self.ended[chat])}
        asked: Any = {"json": {"text": WORDS}, "headers": headers}
        async with http.stream("POST", f"{url}/chats/{chat}", **asked) as answer:
            if answer.status_code != 200:
                self.seen[str(answer.status_code)] += 1
                return
            async for line in answer.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    yield value


def run(options: Options) -> Report:
    """Measure on a PostgreSQL that is started for it."""
    from tests.asgi.served import Served
    from tests.servers.postgres import Postgres

    with ExitStack() as stack:
        url = stack.enter_context(Postgres()).url
        workers: list[Served] = []
        stack.callback(lambda: [worker.close() for worker in workers])
        workers += [Served(*COMMAND, store=url) for _ in range(options.workers)]
        clients = Clients(workers, options)
        began, ended, stops = anyio.run(_deploy, clients)
        said = [worker.stop() for worker in workers]
        wrong = anyio.run(_wrong, url, clients.ended)
    over = ended + (ended - began)
    parts: dict[str, list[float]] = {"steady": [], "deploy": []}
    for turn in clients.turns:
        if turn.ended >= began:
            if turn.began <= over:
                parts["deploy"].append(turn.ended - turn.began)
        elif turn.began >= began - options.steady:  # before, conversations were new
            parts["steady"].append(turn.ended - turn.began)
    seen = clients.seen
    failed = sum(seen.values()) - seen["503"] - seen["refused"]
    found = {name: [_share(times, share) for share in (0.5, 0.99)] for name, times in parts.items()}
    counts = {name: len(times) for name, times in parts.items()}
    rows = [
        Row("deploy.failed", failed, "requests that failed, but for 503 and refused connections"),
        Row("deploy.wrong", len(wrong), "conversations with a message lost, doubled or disordered"),
        Row("deploy.tracebacks", _tracebacks([*stops, *said]), "among what the workers said"),
        Row("deploy.retried_503", seen["503"], f"of {counts['deploy']:,} turns, sent again"),
        Row("deploy.refused", seen["refused"], "connections to a worker that had gone, the same"),
        Row("deploy.seconds", ended - began, f"to replace {options.workers} workers"),
        *(
            Row(f"deploy.{name}_p{percent}_ms", times[at] * 1e3, f"of {counts[name]:,} turns")
            for name, times in found.items()
            for at, percent in enumerate((50, 99))
        ),
        Row("deploy.worst_ms", max(parts["deploy"], default=0.0) * 1e3, "of the deploy's turns"),
    ]
    return Report(rows, {**options._asdict(), "seen": dict(seen), "turns": counts, "wrong": wrong})


async def _deploy(clients: Clients) -> tuple[float, float, list[str]]:
    """Replace all workers under load; return when that began and ended, and what they said."""
    import httpx

    from tests.asgi.served import Served

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    said: list[str] = []
    async with (
        httpx.AsyncClient(timeout=60, limits=limits) as http,
        anyio.create_task_group() as group,
    ):
        for number in range(clients.options.conversations):
            group.start_soon(clients.converse, http, number)
        await anyio.sleep(clients.options.every + clients.options.steady)
        began = monotonic()
        for place, old in enumerate([*clients.workers]):
            said.append(await anyio.to_thread.run_sync(old.stop))
            clients.workers[place] = await anyio.to_thread.run_sync(
                lambda old=old: Served(*COMMAND, store=old.store, port=old.port)
            )
            old.close()
        ended = monotonic()
        await anyio.sleep(max(ended - began, clients.options.every))
        clients.over.set()
    return began, ended, said


async def _wrong(url: str, ended: Counter[str]) -> list[str]:
    wrong = []
    async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
        for chat, turns in ended.items():
            view = await sessions.load(chat)
            texts = [] if view is None else [message.text for message in view.context()]
            if texts != [WORDS, ANSWER] * turns:
                wrong.append(chat)
    return wrong


def _tracebacks(said: list[str]) -> int:
    return sum("Traceback" in one for one in said)


def _share(times: list[float], share: float) -> float:
    ordered = sorted(times) or [0.0]
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
