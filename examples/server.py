"""A chat server: Starlette under uvicorn, one conversation an agent id.

    uvicorn server:app --timeout-graceful-shutdown 10

* ``POST /agents/{id}/messages`` with ``{"text": …}`` answers as JSON once the turn is durable.
* ``POST /agents/{id}/stream`` answers as server-sent events; ``done`` comes once it is durable.
* ``GET /agents/{id}`` reads a conversation without its lease, on whichever process.
* ``GET /ready`` is for the load balancer. Never use it to restart the process: what is unsaved
  while the store is down exists only there.

At SIGTERM perdure begins to save at once, uvicorn ends the requests, the lifespan closes the
manager. Give uvicorn ``--timeout-graceful-shutdown``: without it an endless stream keeps it
from ever getting to the lifespan's end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import perdure
from perdure import Autosave, Message, SessionClosedError, SessionManager, Shutdown


async def ask_model(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    """Stand in for a model: say in pieces how much of the conversation it was given."""
    asked = sum(message["role"] == "user" for message in messages)
    for piece in ("This ", "is ", "answer ", f"{asked}."):
        await asyncio.sleep(0.005)
        yield piece


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Keep one manager for the process, and say when it begins to stop."""
    shutdown = Shutdown(deadline=20)
    async with perdure.connect(autosave=Autosave.server(), shutdown=shutdown) as sessions:
        app.state.sessions = sessions
        app.state.draining = False
        sessions.on("drain", lambda _: setattr(app.state, "draining", True))
        yield


async def post_message(request: Request) -> Response:
    """Answer as JSON. What is answered is durable: the turn has ended."""
    sessions: SessionManager = request.app.state.sessions
    text = (await request.json())["text"]
    async with sessions.open(request.path_params["id"]) as session, session.turn() as turn:
        session.append(Message.user(text))
        await session.save()
        answer = "".join([piece async for piece in ask_model(session.context("openai"))])
        session.append(Message.assistant(answer))
    return JSONResponse({"answer": answer, "turn": turn.id, "version": session.durable_version})


class Stream(Response):
    """Answer as server-sent events, each through the output gate.

    A client that goes away does not end the turn: the answer is there when it asks again.
    """

    def __init__(self, sessions: SessionManager, id: str, text: str) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._sessions, self._id, self._text = sessions, id, text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def event(name: str, data: object, *, more: bool = True) -> None:
            body = f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with self._sessions.open(self._id) as session:
            await send(start)
            async with session.turn() as turn:
                session.append(Message.user(self._text))
                answer = ""
                async for piece in ask_model(session.context("openai")):
                    answer += piece
                    # Nothing leaves before what it rests on, the question, is durable.
                    await turn.emit(piece, lambda piece: event("piece", piece))
                session.append(Message.assistant(answer))
            await event("done", {"turn": turn.id}, more=False)


async def post_stream(request: Request) -> Response:
    """Answer as server-sent events."""
    text = (await request.json())["text"]
    return Stream(request.app.state.sessions, request.path_params["id"], text)


async def get_agent(request: Request) -> Response:
    """Show a conversation: read-only, without a lease."""
    sessions: SessionManager = request.app.state.sessions
    view = await sessions.load(request.path_params["id"])
    if view is None:
        return JSONResponse({"error": "there is no such agent"}, status_code=404)
    return JSONResponse({"turns": view.info.turns, "messages": view.context("openai")})


async def ready(request: Request) -> Response:
    """Say whether to send requests here."""
    health = request.app.state.sessions.health()
    takes_requests = not request.app.state.draining and health.status != "failing"
    return JSONResponse(
        {
            "ready": takes_requests,
            "saving": health.status,
            "oldest_unsaved_age": health.oldest_unsaved_age,
        },
        status_code=200 if takes_requests else 503,
    )


async def stopping(_: Request, error: Exception) -> Response:
    """Send a client elsewhere while the manager stops."""
    return JSONResponse({"error": str(error)}, status_code=503, headers={"retry-after": "1"})


app = Starlette(
    lifespan=lifespan,
    exception_handlers={SessionClosedError: stopping},
    routes=[
        Route("/agents/{id}/messages", post_message, methods=["POST"]),
        Route("/agents/{id}/stream", post_stream, methods=["POST"]),
        Route("/agents/{id}", get_agent),
        Route("/ready", ready),
    ],
)
