"""A Starlette app with a stream that never ends: each event says what was just appended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import perdure
from perdure import Message


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with perdure.connect(os.environ["ENDLESS_STORE"]) as sessions:
        app.state.sessions = sessions
        yield


async def endless(request: Request) -> StreamingResponse:
    session = await request.app.state.sessions.open(request.path_params["id"])

    async def events() -> AsyncIterator[str]:
        number = 0
        while True:
            number += 1
            session.append(Message.user(f"{session.id}:{number}"))
            yield f"data: {session.id}:{number}\n\n"
            await asyncio.sleep(0.002)

    return StreamingResponse(events(), media_type="text/event-stream")


app = Starlette(lifespan=lifespan, routes=[Route("/{id}", endless)])
