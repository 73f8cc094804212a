"""A chat server: `uvicorn chat_server:app --port 8001 --timeout-graceful-shutdown 10`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Header, HTTPException

from perdure import Message, Session, Turn
from perdure.asgi import AppSessions

USERS = {"Bearer ada-token": "ada", "Bearer bob-token": "bob"}  # your own login goes here
sessions = AppSessions()  # PERDURE_URL=postgresql://…
app = FastAPI(lifespan=sessions.lifespan)
app.add_middleware(sessions.middleware)
app.mount("/health", sessions.probes)
app.add_route("/metrics", sessions.metrics)


async def ask_model(messages: list[Any]) -> AsyncIterator[str]:
    for word in f"You said: {messages[-1]['content']}".split(" "):
        await asyncio.sleep(0.05)
        yield f"{word} "


async def login(authorization: Annotated[str, Header()] = "") -> str:
    if authorization not in USERS:
        raise HTTPException(401)
    return USERS[authorization]


User = Annotated[str, Depends(login)]
Key = Annotated[str, Header(alias="idempotency-key")]


@app.post("/chats/{id}")
async def post(id: str, text: Annotated[str, Body(embed=True)], key: Key, user: User) -> Any:
    async def answer(session: Session, turn: Turn) -> AsyncIterator[str]:
        turn.append(Message.user(text))
        async for piece in ask_model(session.context("openai")):
            yield piece

    return sessions.stream(id, answer, turn_id=key, request=text, owner=user)


@app.get("/chats/{id}")
async def get(id: str, user: User) -> Any:
    return sessions.events(id, owner=user)
