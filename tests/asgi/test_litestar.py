"""Sessions in an application of Litestar: lifespan, middleware, probes, turns and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("litestar")

from litestar import Litestar, Request, Response as LitestarResponse, asgi, post
from litestar.testing import TestClient
from starlette.responses import Response

from perdure import Message, Session, Shutdown
from perdure.asgi import AppSessions, problem_of
from perdure.errors import LeaseHeldError, PerdureError
from perdure.session.base import Turn


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
