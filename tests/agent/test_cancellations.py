"""Cancellations that an agent's tools, models and functions let out although nobody cancelled them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest

from perdure import Message, ToolCall
from perdure.agent import (
    Agent,
    Chunk,
    EffectUnknown,
    ScriptedModel,
    ToolFinished,
    TurnEnded,
    TurnFailed,
    call,
    tool,
)
from perdure.agent.compaction import CompactionPolicy, ModelSummarizer
from tests.agent.conftest import Configure, World


async def stray() -> str:
    """Let out a cancellation that is over, as a library does that awaits what it has cancelled."""
    caught: list[BaseException] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class() as error:
            caught.append(error)
            raise
    raise caught[0]


class StrayModel:
    """A model whose answer ends with a stray cancellation, once."""

    def __init__(self, *, words: str = "", times: int = 1) -> None:
        self.words, self.left = words, times

    async def stream(self, messages: Sequence[Any], tools: Sequence[Any]) -> AsyncIterator[Chunk]:
        """Answer."""
        if self.left > 0:
            self.left -= 1
            if self.words:
                yield Chunk(text=self.words)
            await stray()
        yield Chunk(text="fine")


async def heard(agent: Agent, question: str = "go") -> list[object]:
    with anyio.fail_after(20):
        return [event async for event in agent.stream(question)]


def results(agent: Agent) -> list[str | None]:
    found = [message.tool_result for message in agent.session.context()]
    return [result.error for result in found if result is not None]


async def test_a_tool_that_lets_a_cancellation_out_has_failed(
    memory_world: World, configured: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    async def fine() -> str:
        return "fine"

    model = ScriptedModel([call("stray"), call("fine")], "done")
    async with memory_world.agent(configured(model=model, tools=[stray, fine])) as agent:
        events = await heard(agent)
        assert isinstance(events[-1], TurnEnded)
        assert sum(isinstance(event, ToolFinished) for event in events) == 2
        errors = results(agent)
        assert len(errors) == 2
        assert "CancelledError: something within the tool was cancelled" in errors
    assert "a tool let a cancellation out" in caplog.text


async def test_what_such_a_tool_has_done_is_unknown(
    memory_world: World, configured: Configure
) -> None:
    @tool(effect="ask")
    async def pay(amount: int) -> str:
        """Pay."""
        return await stray()

    model = ScriptedModel(call("pay", amount=3), "done")
    async with memory_world.agent(configured(model=model, tools=[pay])) as agent:
        events = await heard(agent)
        assert any(isinstance(event, EffectUnknown) for event in events)
        assert [effect.told for effect in agent.unknown_effects] == [True]
        assert len(results(agent)) == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_tool_that_cancels_its_own_task_has_failed(
    memory_world: World, configured: Configure, anyio_backend: str
) -> None:
    async def cancels_itself() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "never"

    model = ScriptedModel(call("cancels_itself"), "done")
    async with memory_world.agent(configured(model=model, tools=[cancels_itself])) as agent:
        assert isinstance((await heard(agent))[-1], TurnEnded)
        assert results(agent) == ["CancelledError: the tool cancelled its own task"]


async def test_a_tool_in_a_thread_that_lets_a_cancellation_out_has_failed(
    memory_world: World, configured: Configure
) -> None:
    def threaded() -> str:
        raise asyncio.CancelledError

    model = ScriptedModel(call("threaded"), "done")
    async with memory_world.agent(configured(model=model, tools=[threaded])) as agent:
        assert isinstance((await heard(agent))[-1], TurnEnded)
        assert results(agent) == ["CancelledError: something within the tool was cancelled"]


async def test_an_interrupted_tool_is_no_failure(
    memory_world: World, configured: Configure
) -> None:
    begun = anyio.Event()

    async def slow() -> None:
        begun.set()
        await anyio.sleep_forever()

    async with memory_world.agent(
        configured(model=ScriptedModel(call("slow"), "x"), tools=[slow])
    ) as agent:
        async with anyio.create_task_group() as group:
            group.start_soon(heard, agent)
            await begun.wait()
            agent.interrupt()
        (reason,) = results(agent)
        assert reason is not None
        assert reason.startswith("interrupted")


async def test_who_approves_and_lets_a_cancellation_out_has_not_approved(
    memory_world: World, configured: Configure
) -> None:
    async def approve(call: ToolCall, context: Any) -> bool:
        await stray()
        return True

    async def pay() -> str:
        return "paid"

    model = ScriptedModel(call("pay"), "done")
    config = configured(model=model, tools=[pay], approve=approve)
    async with memory_world.agent(config) as agent:
        assert isinstance((await heard(agent))[-1], TurnEnded)
        (error,) = results(agent)
        assert error is not None
        assert "could not be approved" in error


async def test_a_model_that_lets_a_cancellation_out_fails_its_turn_only(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.agent(configured(model=StrayModel(words="I th"))) as agent:
        failed = (await heard(agent))[-1]
        assert isinstance(failed, TurnFailed)
        assert "no one has cancelled it" in str(failed.error)
        assert [message.text for message in agent.session.context()] == ["go", "I th"]
        with anyio.fail_after(20):
            assert await agent.ask("again") == "fine"


@pytest.mark.parametrize("option", ["input_processors", "tool_result_processors", "hook"])
async def test_a_function_that_lets_a_cancellation_out_ends_no_agent(
    memory_world: World, configured: Configure, option: str
) -> None:
    left = [1]

    async def function(value: Any, context: Any) -> Any:
        if left and not (option == "hook" and not isinstance(value, TurnEnded)):
            left.pop()
            await stray()
        return value

    async def fine() -> str:
        return "fine"

    name = "lifecycle_hooks" if option == "hook" else option
    config = configured(
        model=ScriptedModel(call("fine"), lambda _: "done"), tools=[fine], **{name: [function]}
    )
    async with memory_world.agent(config) as agent:
        await heard(agent)
        assert left == []
        with anyio.fail_after(20):
            assert await agent.ask("again")


async def test_a_bootstrap_function_that_lets_a_cancellation_out_is_an_error(
    memory_world: World, configured: Configure
) -> None:
    async def setup(context: Any) -> None:
        await stray()

    with pytest.raises(RuntimeError, match="no one has cancelled it"):
        async with memory_world.agent(configured(setup=setup)):
            pass


async def test_a_summarizer_that_lets_a_cancellation_out_fails_the_compaction(
    memory_world: World, configured: Configure
) -> None:
    config = configured(
        summarizer=ModelSummarizer(StrayModel()),
        compaction=CompactionPolicy(max_bytes=6_000, keep_turns=1),
    )
    async with memory_world.agent(config) as agent:
        ended = [(await heard(agent, "x" * 1_500))[-1] for _ in range(5)]
        assert [type(event) for event in ended].count(TurnFailed) == 1
        assert isinstance(ended[-1], TurnEnded)
        assert isinstance(agent.session.context()[-1], Message)
