"""An inspector over sessions in memory, asked by a client in the same process."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import perdure
import perdure.inspector
from perdure import Message, Shutdown, ToolCall
from perdure.inspector import pages
from perdure.session.manager import SessionManager

TOKEN = "a-token-of-some-length"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


@asynccontextmanager
async def connected(**options: Any) -> AsyncGenerator[SessionManager, None]:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False), **options) as sessions:
        yield sessions


async def fill(sessions: SessionManager) -> None:
    """Make a session with everything that a page shows."""
    async with sessions.open("ada", owner="lovelace", tags=["x"]) as ada:
        ada.describe(title=HOSTILE)
        async with ada.turn():
            ada.append(
                Message.user("What is 2 + 3?"),
                Message.assistant(
                    "Let me see.", reasoning="They add.", tool_calls=[ToolCall("c1", "add", {})]
                ),
                Message.tool("c1", 5, name="add"),
                Message.assistant(HOSTILE + "z" * 9000),
            )
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
        ada.append(Message.user([{"type": "text", "text": "See"}, image]))
        ada.state.set("app", {"page": 1})
        ada.memory.set("harbor", {"text": HOSTILE})
        await ada.checkpoints.create("one")
        ada.state.set("app", {"page": 2})
        await ada.checkpoints.create("two")
        await ada.save()
    await sessions.post("bob", Message.user("hello"), key="post-1")


@asynccontextmanager
async def client(sessions: SessionManager, **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    app = perdure.inspector.app(sessions, token=TOKEN, **options)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://localhost:8000",
        headers={"authorization": f"Bearer {TOKEN}"},
    ) as http:
        yield http


def home_of(landing: httpx.Response) -> str:
    """Return where the page that the link with the token opens leads to."""
    assert landing.status_code == 200
    (path,) = re.findall(r'content="0;url=([^"?]*)', landing.text)
    return str(path)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, too, a page shows what it has to read."""
    monkeypatch.setattr(pages, "PATIENCE", 60.0)


@pytest.fixture
async def inspector() -> AsyncGenerator[httpx.AsyncClient, None]:
    async with connected() as sessions:
        await fill(sessions)
        async with client(sessions) as http:
            yield http
