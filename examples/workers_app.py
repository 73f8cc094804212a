"""Four workers on one store: FastAPI under uvicorn, where any worker answers for any session.

    uvicorn workers_app:app --workers 4 --timeout-graceful-shutdown 10

Each worker is a process with a manager of its own. A session is written by one of them at a
time; a request that comes to another worker asks for it, gets it when its turn has ended, and
goes on where that one stopped.

The client gives each request an id, and sends it again if it heard nothing, or 503. The id is
the turn's: a turn that has ended before is not run again, on whichever worker the retry lands.
What a turn appends is appended at once, behind the model's answer, so a turn that was cut in
its middle has left nothing that the retry would take back. In generators, fixtures, exit stacks
and `wait_for`, append with `turn.append`. Everything else may use `session.append`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import perdure
from perdure import (
    Autosave,
    LeaseHeldError,
    LeaseLostError,
    Message,
    SessionClosedError,
    TurnReusedError,
)


class Asked(BaseModel):
    """What a client sends."""

    op: str
    """The request's own id: the same for every try."""
    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one manager for the worker."""
    async with perdure.connect(autosave=Autosave.server()) as sessions:
        app.state.sessions = sessions
        yield


app = FastAPI(lifespan=lifespan)


async def answer_to(asked: Asked, known: int) -> str:
    """Stand in for a model: say how much was said before."""
    return f"{asked.text} comes after {known} messages."


@app.post("/sessions/{id}")
async def post(id: str, asked: Asked, request: Request) -> dict[str, Any]:
    """Answer once the turn is durable."""
    sessions: perdure.SessionManager = request.app.state.sessions
    async with sessions.open(id) as session, session.turn(asked.op, request=asked.text) as turn:
        if turn.replayed:
            answer = turn.messages[-1].text
        else:
            answer = await answer_to(asked, len(session.context()))
            session.append(Message.user(asked.text), Message.assistant(answer))
    return {
        "turn": turn.number,
        "answer": answer,
        "replayed": turn.replayed,
        "worker": os.getpid(),
    }


@app.get("/sessions/{id}")
async def get(id: str, request: Request) -> Any:
    """Show a conversation: any worker may, without asking for the session."""
    view = await request.app.state.sessions.load(id)
    if view is None:
        return JSONResponse({"error": "there is no such session"}, status_code=404)
    return {"turns": view.info.turns, "messages": view.context("openai")}


@app.exception_handler(LeaseLostError)
@app.exception_handler(LeaseHeldError)
@app.exception_handler(SessionClosedError)
async def elsewhere(_: Request, error: Exception) -> JSONResponse:
    """Another worker has the session by now, or this one stops: the client tries again."""
    return JSONResponse({"error": str(error)}, status_code=503, headers={"retry-after": "0"})


@app.exception_handler(TurnReusedError)
async def reused(_: Request, error: Exception) -> JSONResponse:
    """Refuse an id that was used for another request."""
    return JSONResponse({"error": str(error)}, status_code=422)
