"""An inspector inside of a program under load, for a browser: ``python -m tests.inspector.serve``.

Prints its address, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import struct
import time
import zlib
from typing import Any

import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.routing import Mount

import perdure
import perdure.inspector
from perdure import Autosave, Message, Shutdown, ToolCall
from perdure.inspector import pages
from perdure.records.messages import encode_message
from perdure.session.internals import begin_turn
from perdure.session.manager import SessionManager
from tests.inspector.conftest import HOSTILE, TOKEN

REPLIES = (
    "Low tide is at **14:20**. The harbor wall is dry then:\n\n1. *wall*\n2. `river` path",
    "I would take the path along the river: it is two kilometers, and flat.",
    "The ferry leaves at a quarter past each hour until 21:15.",
)


def png(width: int = 160, height: int = 90) -> str:
    """Return a small picture as base64: sky over water."""
    rows = bytearray()
    for y in range(height):
        sky = y < height * 0.6
        rows += b"\0" + bytes((120, 170, 210) if sky else (40, 90, 120 + y // 3)) * width

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


async def fill(sessions: SessionManager) -> None:
    begin = time.time() - 3 * 86400
    async with sessions.open("harbor-guide", owner="ada", tags=["travel", "demo"]) as guide:
        guide.describe(title="A walk along the harbor")
        for number in range(12):
            at = begin + number * 7000
            ask = Message.user("When is low tide today, and which way should I walk?")
            call = ToolCall(f"call-{number}", "tide_table", {"place": "Cuxhaven", "day": 24})
            result = {"low": ["02:05", "14:20"], "high": ["08:11", "20:31"], "unit": "local"}
            reasoning = "The tide table has it; the path depends on the time."
            begin_turn(guide, encode_message(ask, now=at), at=at)
            for later, message in (
                (2, Message.assistant(reasoning=reasoning, tool_calls=[call])),
                (3, Message.tool(call.id, result, name=call.name)),
                (6, Message.assistant(REPLIES[number % 3])),
            ):
                guide.append(replace(message, created_at=at + later))
            if number in {3, 8}:
                guide.state.set("route", {"stage": number, "open": ["wall", "ferry"][: number % 2]})
                await guide.checkpoints.create(f"after stage {number}")
        url = f"data:image/png;base64,{png()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        guide.append(Message.user([{"type": "text", "text": "Is this the wall?"}, picture]))
        guide.append(Message.assistant("Yes, seen from the ferry."))
        guide.memory.set("likes", {"walks": "flat"}, description="What the guest likes")
        await guide.save()
    async with sessions.open("hostile", owner=HOSTILE, tags=[HOSTILE]) as hostile:
        hostile.describe(title=HOSTILE)
        hostile.append(
            Message.user(HOSTILE + "x" * 9000),
            Message.assistant(tool_calls=[ToolCall("c", HOSTILE, {HOSTILE: HOSTILE})]),
            Message.tool("c", {HOSTILE: HOSTILE}, name=HOSTILE),
            Message.user(None, image_urls=["javascript:alert(3)", "http://127.0.0.1:9/x.png"]),
        )
        hostile.state.set("s", {HOSTILE: HOSTILE})
        hostile.memory.set("m", HOSTILE, description=HOSTILE)
        await hostile.checkpoints.create(HOSTILE)
        hostile.state.set("s", {HOSTILE: 2})
        await hostile.checkpoints.create(HOSTILE)
        await hostile.aclose()
    async with sessions.open("stopped", owner="bo") as stopped:
        with contextlib.suppress(TimeoutError):
            async with stopped.turn():
                stopped.append(Message.user("Book the ferry"))
                raise TimeoutError
        await stopped.aclose()
    await fill_thread(sessions)
    for number, name in enumerate(("billing", "intake", "night-watch", "planner", "researcher")):
        async with sessions.open(name, owner="bo" if number % 2 else "ada", tags=["demo"]) as one:
            one.describe(title=f"{name.capitalize()} for customer {number + 1}")
            async with one.turn():
                one.append(Message.user("Hello"), Message.assistant("Hello!"))
            await one.aclose()
    async with sessions.open("harbor-guide") as guide:
        await guide.aclose()
    await sessions.post("harbor-guide", Message.user("The ferry is late."), key="ferry-1")


async def fill_thread(sessions: SessionManager) -> None:
    """Run a graph that waits for a person at its end, if LangGraph is installed."""
    try:
        from langchain_core.messages import AIMessage
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.types import interrupt
    except ImportError:
        return
    from perdure.adapters import PerdureSaver

    async def pilot(state: MessagesState) -> dict[str, Any]:
        usage = {"input_tokens": 212, "output_tokens": 48, "total_tokens": 260}
        asked = len(state["messages"])
        call = {"name": "chart", "args": {"harbor": "Cuxhaven"}, "id": f"call-{asked}"}
        said = "The channel is **clear**." if asked < 4 else HOSTILE
        return {"messages": [AIMessage(said, tool_calls=[call], usage_metadata=usage)]}

    async def tug(state: MessagesState) -> dict[str, Any]:
        if len(state["messages"]) > 4:
            interrupt("May I sail?")
        return {"messages": [AIMessage("The tug is *ready*.")]}

    builder = StateGraph(MessagesState)
    builder.add_node(pilot)
    builder.add_node(tug)
    builder.add_edge(START, "pilot")
    builder.add_edge("pilot", "tug")
    graph: Any = builder.compile(checkpointer=PerdureSaver(sessions))
    for asked in ("Is the channel clear?", "Then take me there."):
        thread = {"configurable": {"thread_id": "pilot"}}
        await graph.ainvoke({"messages": [("user", asked)]}, thread)


async def load(sessions: SessionManager) -> None:
    """Keep some sessions busy, unevenly."""
    for number in itertools.count():
        async with sessions.open(f"worker-{number % 7}", owner="bo", tags=["busy"]) as session:
            async with session.turn():
                session.append(Message.user("Next?"), Message.assistant("Working on it. " * 20))
            session.append(Message.user("to be saved later " * (number % 40)))
        await asyncio.sleep(0.02 if number % 60 < 40 else 0.12)


async def main() -> None:
    shutdown = Shutdown(signals=False)
    autosave = Autosave(debounce=2.0, max_delay=4.0)
    async with perdure.connect("memory:", shutdown=shutdown, autosave=autosave) as sessions:
        await fill(sessions)
        inside = perdure.inspector.app(sessions, token=TOKEN, allow_changes=True)
        app = Starlette(routes=[Mount("/perdure", inside)])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        busy = [asyncio.create_task(load(sessions)), asyncio.create_task(server.serve())]
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"http://127.0.0.1:{port}/perdure/", flush=True)
        await asyncio.gather(*busy)


if __name__ == "__main__":
    pages.PATIENCE = 60.0  # type: ignore[misc]  # on a slow machine, too
    asyncio.run(main())
