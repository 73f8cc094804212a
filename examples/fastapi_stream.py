"""A chat with FastAPI: `uvicorn fastapi_stream:app --timeout-graceful-shutdown 10`."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header

from perdure import Message, Session
from perdure.asgi import AppSessions

Text = Annotated[str, Body(embed=True)]
sessions = AppSessions()
app = FastAPI(lifespan=sessions.lifespan)
app.add_middleware(sessions.middleware)
app.mount("/health", sessions.probes)


async def ask_model(messages: list[Any]) -> AsyncGenerator[str]:
    for word in f"You said: {messages[-1]['content']}".split(" "):
        await asyncio.sleep(0.05)
        yield f"{word} "


@app.post("/agents/{id}")
async def post(id: str, text: Text, idempotency_key: Annotated[str, Header()]) -> Any:
    async def answer(session: Session, _: Any) -> AsyncGenerator[str]:
        session.append(Message.user(text))
        async for piece in ask_model(session.context("openai")):
            yield piece

    return sessions.stream(id, answer, turn_id=idempotency_key, request=text, linger=0.5)


@app.get("/agents/{id}")
async def get(id: str) -> Any:
    view = await sessions.manager.load(id)
    return [] if view is None else view.context("openai")
