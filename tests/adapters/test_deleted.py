"""A session that was forgotten while a run had it, on every adapter: its writer leaves it so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import perdure
from perdure import SessionManager
from perdure.testing import MemoryBacking, MemoryStore
from tests.adapters.acts import ADAPTERS, Acts

REFUSED = {
    "agent_framework": ("a", "LeaseLostError"),
    "agent_framework_checkpoints": ("a", "LeaseLostError"),
    "openai_agents": ("a", "LeaseLostError"),
    "langgraph": ("a", "LeaseLostError"),
    "pydantic_ai": ("a", "ConversationConflict"),
    "google_adk": ("harbor/ada", "SessionNotFoundError"),
    "claude_agent": ("claude/harbor/a", "LeaseLostError"),
}
"""The agent's id, and the error: as an overtaken writer gets it, or the SDK's own for this."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDKs run on asyncio."""
    return "asyncio"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "by another process"])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
async def test_a_writer_does_not_bring_a_forgotten_session_back(
    adapter: Callable[[SessionManager], Acts], elsewhere: bool
) -> None:
    agent, error = REFUSED[adapter.__name__]
    backing = MemoryBacking()
    stores = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(stores[0]) as sessions, perdure.connect(stores[1]) as others:
        acts = adapter(sessions)
        await acts.write("a telephone number")
        assert (await (others if elsewhere else sessions).forget(agent)).sessions
        for _ in range(2):
            with pytest.raises(Exception, match=".") as refused:
                await acts.write("late")
            assert type(refused.value).__name__ == error
        assert await sessions.list() == []
        assert await acts.read() == []


@pytest.mark.parametrize("length", [1, 8], ids=["shorter", "longer"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "by another process"])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
async def test_a_writer_of_a_forgotten_session_does_not_write_into_the_next_one(
    adapter: Callable[[SessionManager], Acts], elsewhere: bool, length: int
) -> None:
    agent, _ = REFUSED[adapter.__name__]
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        acts = adapter(sessions)
        for number in range(3):
            await acts.write(f"old {number}")
        texts = [f"new {number}" for number in range(length)]
        async with perdure.connect(MemoryStore(backing=backing)) as others:
            begins = others if elsewhere else sessions
            await begins.forget(agent)
            following = adapter(begins)
            for text in texts:
                await following.write(text)
        following = adapter(sessions) if elsewhere else following
        for _ in range(2):
            with pytest.raises(Exception, match="."):
                await acts.write("late")
        assert await following.read() == texts
        await following.write("newer")
        assert await following.read() == [*texts, "newer"]


async def test_a_session_that_was_only_read_is_not_brought_back_either() -> None:
    pytest.importorskip("agents")
    from perdure.adapters import PerdureSession

    async with perdure.connect("memory:") as sessions:
        item: Any = {"role": "user", "content": "a telephone number"}
        async with PerdureSession("a", sessions) as earlier:
            await earlier.add_items([item])
        run = PerdureSession("a", sessions)
        assert await run.get_items() == [item]
        await sessions.forget("a")
        with pytest.raises(perdure.LeaseLostError, match="was deleted"):
            await run.add_items([item])
        assert await run.get_items() == []  # and a new run begins
        await run.add_items([item])
        assert await run.get_items() == [item]
