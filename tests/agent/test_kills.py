"""A kill after each write of an agent's life: nothing acknowledged is lost, and every restore
gives a context that a provider takes, the same each time (S0-1, S0-2, S0-17, S1-G1, C14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from perdure import Message, Shutdown, connect
from perdure.agent import AgentConfig, AgentFactory, CompactionPolicy, ScriptedModel, call
from perdure.memory.context import SNAPSHOT
from perdure.providers.tool_pairs import paired
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.agent.conftest import World
from tests.agent.test_worker import Blocked

pytestmark = pytest.mark.deep


async def gauge(hour: int) -> str:
    """Read the gauge."""
    return f"{hour} m " * 10


def answer(messages: Sequence[Message]) -> Any:
    last = messages[-1]
    if last.role == "tool":
        return f"Measured after {len(messages)} messages."
    number = int(last.text)
    return [call("gauge", hour=number), call("gauge", hour=0)] if number % 2 else f"No. {number}"


def config() -> AgentConfig:
    return AgentConfig(
        name="tester",
        model=ScriptedModel(answer),
        tools=[gauge],
        instructions="Be kind.",
        compaction=CompactionPolicy(max_bytes=1500, keep_turns=2, episode_turns=2),
    )


class Life:
    """What a kill after each write would leave, and what was acknowledged by then."""

    def __init__(self) -> None:
        self.world = World(MemoryBacking())
        self.acknowledged: list[tuple[str, str]] = []
        self.images: list[tuple[World, int]] = []

    def store(self) -> MemoryStore:
        store = MemoryStore(backing=self.world.content)  # type: ignore[arg-type]
        append_many = store.append_many

        async def photographed(batches: Any) -> Any:
            outcomes = await append_many(batches)
            self.images.append((self.world.killed(), len(self.acknowledged)))
            return outcomes

        store.append_many = photographed  # type: ignore[method-assign]
        return store

    async def live(self, turns: int) -> None:
        manager = connect(self.store(), shutdown=Shutdown(signals=False), autosave=None)
        async with manager as sessions:
            async with await AgentFactory(sessions).create_agent(config(), agent_id="ada") as agent:
                for number in range(turns):
                    reply = await agent.ask(str(number))
                    self.acknowledged.append((str(number), reply))


async def restored(world: World) -> tuple[list[Message], list[str]]:
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config()) as agent:
            history = await agent.session.history(limit=1000)
            return agent.session.context(), [item.value.text for item in history]


def without_cache(world: World) -> World:
    image = world.killed()
    for session in image.content.sessions.values():  # type: ignore[union-attr]
        session.documents.pop(SNAPSHOT, None)
    return image


async def test_a_kill_after_any_write_loses_nothing_that_was_acknowledged() -> None:
    life = Life()
    await life.live(8)
    assert len(life.images) > 20
    for world, count in life.images:
        context, history = await restored(world.killed())
        said = iter(history)
        for question, reply in life.acknowledged[:count]:
            assert question in said  # in this order
            assert reply in said
        assert paired(context).messages == tuple(context)
        assert context[0].text == "Be kind."


async def test_every_restore_of_the_same_bytes_gives_the_same_context() -> None:
    life = Life()
    await life.live(8)
    for world, _ in life.images[::3]:
        once = world.killed()
        first, _ = await restored(once)
        again, _ = await restored(once)
        cold, _ = await restored(without_cache(once))
        fresh, _ = await restored(world.killed())
        assert plain(first) == plain(again) == plain(cold) == plain(fresh)


def plain(messages: Sequence[Message]) -> list[Message]:
    """Leave out when a repair was made: the rest is deterministic."""
    return [msgspec.structs.replace(one, created_at=None) for one in messages]


async def test_a_restored_agent_goes_on_after_any_kill() -> None:
    life = Life()
    await life.live(5)
    for world, _ in life.images[::4]:
        async with world.killed().connect() as sessions:
            async with await AgentFactory(sessions).restore_agent("ada", config()) as agent:
                assert (await agent.ask("101")).startswith("Measured")
                assert await agent.ask("102") == "No. 102"


async def test_a_resumed_turn_is_found_however_much_of_its_beginning_was_kept() -> None:
    """S1-9: a store keeps a prefix of whole groups of what was saved at once, and no more."""
    looked: list[int] = []

    async def look() -> str:
        """Look."""
        looked.append(1)
        return "found"

    def resuming(model: Any) -> AgentConfig:
        return AgentConfig(name="tester", model=model, tools=[look], on_unfinished="resume")

    world, blocked = World(MemoryBacking()), Blocked()
    heads: list[int] = []
    for is_first in (True, False):
        model = Then(call("look"), blocked) if is_first else blocked
        async with world.agent(resuming(model), autosave=None) as agent:
            if is_first:
                await agent.post_user_message("go")
            await blocked.reached.wait()
            left = world.killed()
            heads.append(len(log_of(left)))
            blocked.go.set()
        world, blocked = left, Blocked()
    for cut in range(heads[0], heads[1] + 1):
        torn = world.killed()
        log = log_of(torn)
        if log[cut - 1].end:
            del log[cut:]
            async with torn.agent(resuming(ScriptedModel("done"))) as agent:
                await agent.stop()
                texts = [one.value.text for one in await agent.session.history()]
            assert (texts.count("go"), texts[-1], len(looked)) == (1, "done", 1)


class Then:
    """Two models, one after the other."""

    def __init__(self, reply: Any, then: Any) -> None:
        self._models = [ScriptedModel(reply), then]

    def stream(self, messages: Any, tools: Any) -> Any:
        return self._models.pop(0).stream(messages, tools)


def log_of(world: World) -> Any:
    (session,) = world.content.sessions.values()  # type: ignore[union-attr]
    return session.entries
