"""Sessions in an application of Litestar: lifespan, middleware, probes, turns and streams."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

pytest.importorskip("litestar")

from litestar import Litestar, Request, Response as LitestarResponse, asgi, post
from litestar.testing import TestClient
from starlette.responses import Response

from perdure import Message, Session, Shutdown
from perdure.asgi import AppSessions, problem_of
from perdure.errors import LeaseHeldError, PerdureError
from perdure.session.base import Turn
from tests.asgi.served import Served, contents, preview
from tests.serve.clients import ANSWER, QUESTION, Client


def answer_problem(_: Request[Any, Any, Any], error: PerdureError) -> LitestarResponse[bytes]:
    problem = problem_of(error)
    return LitestarResponse(problem.body, status_code=problem.status, headers=problem.headers)


def application(sessions: AppSessions) -> Litestar:
    @post("/agents/{id:str}/{key:str}")
    async def stream(id: str, key: str, text: str) -> Response:
        async def answer(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
            session.append(Message.user(text))
            for word in ("low ", "at ", "noon"):
                yield word

        return sessions.stream(id, answer, turn_id=key)

    @post("/whole/{id:str}/{key:str}")
    async def whole(id: str, key: str, text: str) -> dict[str, Any]:
        async with sessions.turn(id, key) as (session, turn):
            if not turn.replayed:
                session.append(Message.user(text), Message.assistant("noon"))
        return {"replayed": turn.replayed, "messages": len(session.context())}

    @post("/held")
    async def held() -> None:
        raise LeaseHeldError("another process has it")

    @asgi("/health", is_mount=True)
    async def probes(scope: Any, receive: Any, send: Any) -> None:
        await sessions.probes(scope, receive, send)

    return Litestar(
        [stream, whole, held, probes],
        lifespan=[sessions.lifespan],
        middleware=[sessions.middleware],
        exception_handlers={PerdureError: answer_problem},
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how a route names its parameters
def test_turns_streams_probes_and_problems() -> None:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    with TestClient(application(sessions)) as client:
        for _ in range(2):  # a retry gets the stored answer
            answer = client.post("/agents/ada/1", params={"text": "When is low tide?"})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.text.count('"content":"low at noon"') == 1
            assert answer.text.rstrip().splitlines()[-2] == "event: end"
        for replayed in (False, True):
            whole = client.post("/whole/bob/1", params={"text": "And tomorrow?"})
            assert whole.json() == {"replayed": replayed, "messages": 2}
        assert client.get("/health/readyz").json()["ready"] is True
        problem = client.post("/held")
        assert problem.status_code == 503
        assert problem.headers["content-type"] == "application/problem+json"
        assert problem.json()["code"] == "LeaseHeldError"
        assert "retry-after" in problem.headers


UVICORN = (
    "uvicorn tests.asgi.litestar_app:app --port {port} --log-level warning"
    " --timeout-graceful-shutdown 10"
).split()


@pytest.mark.deep
def test_a_disconnect_keeps_the_half_answer_and_a_client_continues(tmp_path: Path) -> None:
    server = Served(*UVICORN, store=f"file:{tmp_path / 'store'}")
    try:
        before = []
        for event in server.post("/agents/ada/messages", QUESTION, "1"):
            before.append(event)
            if event.name == "text" and "1" in event.data["text"]:
                break
        after = {"last-event-id": before[-1].id}
        events = [*before, *server.post("/agents/ada/messages", QUESTION, "1", **after)]
        assert preview(events) == contents(events)[-1] == ANSWER
        stored = server.client.get("/agents/ada/messages").json()["messages"]
        assert [message["content"] for message in stored] == [QUESTION, ANSWER]
        long = f"{QUESTION} " * 40  # its answer takes longer than a client is waited for
        for event in server.post("/agents/eve/messages", long, "1"):
            if event.name == "text" and "1" in event.data["text"]:
                break
        end = time.monotonic() + 30
        while len(stored := server.client.get("/agents/eve/messages").json()["messages"]) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert stored[0]["content"] == long
        assert stored[1]["content"].startswith("0 1")
        assert not stored[1]["content"].endswith("399")
    finally:
        server.close()


@pytest.mark.deep
def test_sigterm_under_streams_loses_nothing(tmp_path: Path) -> None:
    store = f"file:{tmp_path / 'store'}"
    servers = [Served(*UVICORN, store=store)]
    tally = {"disconnects": 0, "refused": 0}
    clients = [Client(lambda: servers[-1].url, f"agent-{number}", tally) for number in range(20)]
    logs: list[str] = []

    async def talk() -> None:
        async def ask_twice(client: Client, http: httpx.AsyncClient) -> None:
            await client.ask(http)
            await client.ask(http)

        async with httpx.AsyncClient(timeout=60) as http:
            async with anyio.create_task_group() as group:
                for client in clients:
                    group.start_soon(ask_twice, client, http)
                while not all(client.turns and client.turns[0] for client in clients):
                    await anyio.sleep(0.01)
                old = servers[0]
                logs.append(await anyio.to_thread.run_sync(old.stop))
                port = old.port
                new = await anyio.to_thread.run_sync(
                    lambda: Served(*UVICORN, store=store, port=port)
                )
                servers.append(new)
            wrong = [fault for client in clients for fault in client.faults()]
            for client in clients:
                wrong += await client.stored_faults(http)
            assert wrong == []

    try:
        anyio.run(talk)
    finally:
        for server in servers:
            server.close()
    assert tally["disconnects"] + tally["refused"] > 0
    assert servers[0].process.returncode == -signal.SIGTERM  # uvicorn raises it again
    assert "Traceback" not in logs[0]
