"""Two workers of the chat server on PostgreSQL, restarted in turn under load: nothing is lost.

Clients ask without a pause, each in a chat of its own, and send what has not ended again to the
other worker. Some go away in the middle of an answer and never come back.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import anyio
import httpx
import psutil
import pytest

import perdure
from perdure import Message, Shutdown
from tests.asgi.served import Served
from tests.examples.test_chat_server import ADA, UVICORN
from tests.servers.postgres import Postgres

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

CLIENTS = 8
RESTARTS = 6
STOPPED = -signal.SIGTERM
"""The status of a uvicorn that was stopped in order: it raises the signal again at its end."""
WORDS = "a b c d e f g h"
WHOLE = f"You said: {WORDS} "


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


class Load:
    """Clients of two workers, and what they were told."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.stopping = False
        self.ended: Counter[str] = Counter()
        """By chat, the turns whose last event has come."""
        self.tries: Counter[str] = Counter()
        self.left: list[str] = []
        """Chats whose client has gone away."""

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        """Ask turn after turn, each until it has ended."""
        chat = f"chat-{number}"
        turn = number
        while not self.stopping:
            key = f"{chat}-{self.ended[chat]}"
            while not await self._ask(http, chat, key, self.urls[turn % 2]):
                turn += 1
                await anyio.sleep(0.05)
            self.ended[chat] += 1
            turn += number % 3  # a few of them go from one worker to the other

    async def leaver(self, http: httpx.AsyncClient, url: str) -> None:
        """Leave in the middle of an answer, and never come back."""
        chat = f"left-{len(self.left)}"
        try:
            async for name, data in self._events(http, chat, "only", url):
                if name == "text" and "b" in data["text"]:
                    self.left.append(chat)
                    return
        except httpx.HTTPError:
            return

    async def _ask(self, http: httpx.AsyncClient, chat: str, key: str, url: str) -> bool:
        try:
            async for name, _ in self._events(http, chat, key, url):
                if name == "end":
                    return True
        except httpx.HTTPError:
            pass
        return False

    async def _events(
        self, http: httpx.AsyncClient, chat: str, key: str, url: str
    ) -> AsyncIterator[tuple[str, dict[str, str]]]:
        headers = {**ADA, "idempotency-key": key}
        sent = http.stream("POST", f"{url}/chats/{chat}", json={"text": WORDS}, headers=headers)
        async with sent as answer:
            self.tries[str(answer.status_code)] += 1
            if answer.status_code == 503:
                return
            assert answer.status_code == 200, await answer.aread()
            name = ""
            async for line in answer.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)


async def messages(url: str, chat: str) -> list[Message]:
    async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
        view = await sessions.load(chat)
        assert view is not None
        assert view.info.metadata.owner == "ada"
        return view.context()


async def wrong(url: str, load: Load) -> dict[str, list[str]]:
    """Return the chats where something was lost or doubled, or is out of order."""
    found = {}
    for chat, ended in load.ended.items():
        texts = [message.text for message in await messages(url, chat)]
        if texts != [WORDS, WHOLE] * ended:
            found[chat] = texts
    return found


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # of the clients; the workers are uvicorn's
async def test_a_rolling_restart_under_load_loses_and_doubles_nothing(
    postgres: Postgres, anyio_backend: str
) -> None:
    workers = [Served(*UVICORN, store=postgres.url) for _ in range(2)]
    load = Load([worker.url for worker in workers])
    try:
        async with httpx.AsyncClient(timeout=60) as http, anyio.create_task_group() as clients:
            for number in range(CLIENTS):
                clients.start_soon(load.client, http, number)
            for restart in range(RESTARTS):
                before = sum(load.ended.values())
                while sum(load.ended.values()) < before + CLIENTS:
                    await anyio.sleep(0.02)
                old = workers[restart % 2]
                for _ in range(3):
                    clients.start_soon(load.leaver, http, old.url)
                await anyio.sleep(0.3)
                log = await anyio.to_thread.run_sync(old.stop)
                assert (old.process.returncode, log) == (STOPPED, "")
                workers[restart % 2] = await anyio.to_thread.run_sync(
                    lambda port=old.port: Served(*UVICORN, store=postgres.url, port=port)
                )
            load.stopping = True
        shown = [worker.client.get("/metrics").text for worker in workers]
        for worker in workers:
            assert (worker.stop(), worker.process.returncode) == ("", STOPPED)
    finally:
        for worker in workers:
            worker.close()
    assert all('perdure_saves_total{outcome="ok"}' in text for text in shown)
    assert load.tries["503"] + load.tries["200"] > sum(load.ended.values())  # some were tried again
    assert await wrong(postgres.url, load) == {}
    assert len(load.left) >= RESTARTS
    for chat in load.left:
        question, answer = await messages(postgres.url, chat)
        assert question.text == WORDS
        assert "a b" in answer.text
        assert WHOLE.startswith(answer.text)


def workers_of(served: Served) -> set[int]:
    """Return the processes of its workers that have not ended."""
    workers: set[int] = set()
    for child in psutil.Process(served.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                workers.add(child.pid)
    return workers


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_uvicorn_replaces_its_workers_under_load_and_nothing_is_lost(
    postgres: Postgres, anyio_backend: str
) -> None:
    options = "--workers 2 --timeout-worker-healthcheck 30 --timeout-graceful-shutdown 10"
    served = Served(*UVICORN, *options.split(), store=postgres.url)
    load = Load([served.url, served.url])
    try:
        async with httpx.AsyncClient(timeout=60) as http, anyio.create_task_group() as clients:
            for number in range(CLIENTS):
                clients.start_soon(load.client, http, number)
            while sum(load.ended.values()) < CLIENTS:
                await anyio.sleep(0.02)
            old = workers_of(served)
            assert len(old) == 2
            served.process.send_signal(signal.SIGHUP)
            while len(new := workers_of(served) - old) < 2 or workers_of(served) != new:
                await anyio.sleep(0.05)
            before = sum(load.ended.values())
            while sum(load.ended.values()) < before + CLIENTS:
                await anyio.sleep(0.02)
            load.stopping = True
        assert served.stop() == ""
    finally:
        served.close()
    assert await wrong(postgres.url, load) == {}
