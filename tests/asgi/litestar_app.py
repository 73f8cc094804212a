"""A chat with Litestar, for a server in a process of its own: `uvicorn tests.asgi.litestar_app:app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from litestar import Litestar, Request, Response as LitestarResponse, asgi, get, post
from litestar.params import Parameter
from starlette.responses import Response

from perdure import Message, Session
from perdure.asgi import AppSessions, problem_of
from perdure.errors import PerdureError
from perdure.session.base import Turn

sessions = AppSessions(grace=1.0)


def answer_problem(_: Request[Any, Any, Any], error: PerdureError) -> LitestarResponse[bytes]:
    problem = problem_of(error)
    return LitestarResponse(problem.body, status_code=problem.status, headers=problem.headers)


@post("/agents/{id:str}/messages", sync_to_thread=False)
def stream(
    id: str, data: dict[str, str], key: Annotated[str, Parameter(header="idempotency-key")]
) -> Response:
    async def answer(session: Session, _: Turn) -> AsyncGenerator[str, None]:
        session.append(Message.user(data["text"]))
        for place, _ in enumerate(data["text"].split()):
            await asyncio.sleep(0.05)
            yield f" {place}" if place else "0"

    return sessions.stream(id, answer, turn_id=key, linger=0.5)


@get("/agents/{id:str}/messages")
async def messages(id: str) -> dict[str, Any]:
    view = await sessions.manager.load(id)
    return {"messages": [] if view is None else view.context("openai")}


@asgi("/health", is_mount=True)
async def probes(scope: Any, receive: Any, send: Any) -> None:
    await sessions.probes(scope, receive, send)


app = Litestar(
    [stream, messages, probes],
    lifespan=[sessions.lifespan],
    middleware=[sessions.middleware],
    exception_handlers={PerdureError: answer_problem},
)
