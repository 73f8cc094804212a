"""A worker that was stopped and overtaken, on every adapter: its next write names who has it now."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.lease import LeaseOptions
from perdure.session.manager import SessionManager

LEASE = LeaseOptions(heartbeat=0.1, ttl=1)
GUARD = 60
Write = Callable[[str], Awaitable[Any]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDKs run on asyncio."""
    return "asyncio"


def openai_agents(sessions: SessionManager) -> Write:
    from perdure.adapters import PerdureSession

    session = PerdureSession("a", sessions, wait=GUARD)
    return lambda text: session.add_items([{"role": "user", "content": text}])


def pydantic_ai(sessions: SessionManager) -> Write:
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.messages import ModelRequest, UserPromptPart

    from perdure.adapters import PerdureConversationStore

    store = PerdureConversationStore(sessions, wait=GUARD)
    mine: list[Conversation] = []

    async def write(text: str) -> None:
        if not mine:
            mine.append(await store.load("a") or Conversation(conversation_id="a"))
        mine[0].messages.append(ModelRequest(parts=[UserPromptPart(text)]))
        await store.save(mine[0])

    return write


def langgraph(sessions: SessionManager) -> Write:
    base = pytest.importorskip("langgraph.checkpoint.base")
    from perdure.adapters import PerdureSaver

    saver = PerdureSaver(sessions, wait=GUARD)
    config: Any = {"configurable": {"thread_id": "a", "checkpoint_ns": ""}}

    async def write(text: str) -> None:
        checkpoint = base.empty_checkpoint()
        checkpoint["channel_values"], versions = {"a": text}, {"a": text}
        checkpoint["channel_versions"] = versions
        await saver.aput(config, checkpoint, {"source": "loop", "step": 1}, versions)

    return write


ADAPTERS = (openai_agents, pydantic_ai, langgraph)


async def write_twice(adapter: Callable[[SessionManager], Write], url: str, pipe: Any) -> None:
    async with perdure.connect(url, lease=LEASE) as sessions:
        write = adapter(sessions)
        await write("mine")
        pipe.send("ready")
        pipe.recv()  # it is stopped here, and overtaken
        try:
            await write("late")
        except Exception as error:  # whatever it is, it is looked at
            pipe.send(f"{error}")
        for lost in sessions.lost:
            await lost.discard_unsaved()
    pipe.send("closed")


def worker(adapter: Callable[[SessionManager], Write], url: str, pipe: Connection) -> None:
    asyncio.run(write_twice(adapter, url, pipe))


@pytest.mark.deep
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
async def test_a_stopped_worker_is_refused_and_told_who_continued(
    tmp_path: Path, adapter: Any
) -> None:
    url = str(tmp_path)  # SQLite would stay locked if it were stopped amid a heartbeat
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=worker, args=(adapter, url, there), daemon=True)
    process.start()
    there.close()
    assert await asyncio.to_thread(here.recv) == "ready"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    async with perdure.connect(url, lease=LEASE) as sessions:
        await adapter(sessions)("taken over")
        os.kill(process.pid, signal.SIGCONT)
        here.send("go on")
        told = await asyncio.to_thread(here.recv)
        assert f"process {os.getpid()} on" in told
        assert await asyncio.to_thread(here.recv) == "closed"
    await asyncio.to_thread(process.join, GUARD)
