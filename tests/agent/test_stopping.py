"""Stopping an agent without time: whoever is cancelled leaves nothing open, and does not hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from perdure import Shutdown, UnsavedChangesError, connect
from perdure.agent import (
    Agent,
    AgentContext,
    AgentEvent,
    AgentFactory,
    AgentStopped,
    Chunk,
    PersistentSession,
    TurnInterrupted,
)
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.agent.conftest import Configure, World
from tests.agent.test_worker import Blocked


class Slow:
    """A store that takes nothing in while it is told to hold."""

    def __init__(self) -> None:
        self.backing = MemoryBacking()
        self.store = MemoryStore(backing=self.backing)
        self.held, self.go = anyio.Event(), anyio.Event()
        self.holds = False
        append_many = self.store.append_many

        async def held(batches: Sequence[Any]) -> Any:
            if self.holds:
                self.held.set()
                await self.go.wait()
            return await append_many(batches)

        self.store.append_many = held  # type: ignore[method-assign]


async def test_a_start_that_is_cancelled_at_once_can_be_stopped(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(), agent_id="ada")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await agent.start()
        with anyio.fail_after(60):
            await agent.stop()
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as again:
            assert await again.ask("well?") == "You said: well?"


async def test_a_stop_that_is_cancelled_while_it_saves_closes_everything(
    configured: Configure,
) -> None:
    """The parts that were opened for the agent, and the store that is its own."""
    closed: list[str] = []
    slow = Slow()

    async def open_part(context: AgentContext) -> None:
        async def close() -> None:
            await anyio.lowlevel.checkpoint()
            closed.append("part")

        context.at_stop.append(close)

    kept = PersistentSession(storage=slow.store)
    with anyio.CancelScope() as scope:
        agent = await Agent.create(
            "ada", config=configured(setup=open_part), persistent_session=kept
        )
        await agent.start()
        agent.session.describe(title="unsaved")
        slow.holds = True
        async with anyio.create_task_group() as group:
            group.start_soon(agent.stop)
            await slow.held.wait()
            slow.go.set()
            scope.cancel()
    assert closed == ["part"]
    async with connect(MemoryStore(backing=slow.backing), shutdown=Shutdown(signals=False)) as new:
        async with new.open("ada", on_held="raise") as session:  # nobody holds it any more
            assert session.info.metadata.title == "unsaved"


@pytest.mark.parametrize("is_answering", [True, False])
async def test_a_store_that_is_down_does_not_hold_up_a_server_that_drains(
    is_answering: bool, configured: Configure
) -> None:
    """The manager saves what the agent leaves, or says that it could not, by its deadline."""
    slow, model = Slow(), Blocked(Chunk(text="half"))
    shutdown = Shutdown(signals=False, deadline=0.01, turn_grace=0.0, hard_grace=0.0)
    with pytest.raises(UnsavedChangesError) as raised:
        async with connect(slow.store, shutdown=shutdown) as sessions:
            agent = await AgentFactory(sessions).create_agent(
                configured(model=model), agent_id="ada"
            )
            await agent.start()
            if is_answering:
                await anext(agent.stream("go"))
                await model.reached.wait()
            slow.holds = True
            agent.context.state.custom_data["mood"] = "calm"
            sessions.drain()
            with anyio.move_on_after(20) as limit:
                await agent.stop(finish=False)
    assert not limit.cancelled_caught
    assert "ada" in str(raised.value)


@pytest.mark.parametrize("is_hooked", [False, True])
async def test_a_store_that_is_down_does_not_hold_up_who_is_cancelled(
    is_hooked: bool, configured: Configure
) -> None:
    """What could not be saved is the manager's, which says so at its own end."""
    slow, model = Slow(), Blocked(Chunk(text="half"))

    async def save(event: AgentEvent, context: AgentContext) -> None:
        if isinstance(event, TurnInterrupted):
            await context.session.save()

    config = configured(model=model, lifecycle_hooks=[save] if is_hooked else [])
    shutdown = Shutdown(signals=False, deadline=0.01, turn_grace=0.0, hard_grace=0.0)
    with pytest.raises(UnsavedChangesError):
        async with connect(slow.store, shutdown=shutdown) as sessions:
            agent = await AgentFactory(sessions).create_agent(config, agent_id="ada")
            with anyio.CancelScope() as scope:
                async with agent:
                    stream = agent.stream("go")
                    await anext(stream)
                    await model.reached.wait()
                    slow.holds = True
                    scope.cancel()
            was_running = agent.runtime.is_running
            events = [event async for event in stream]
            context = agent.session.context()
    assert not was_running
    assert isinstance(events[-1], AgentStopped)
    assert context[-1].text == "half"
