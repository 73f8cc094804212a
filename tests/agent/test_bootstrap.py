"""The bootstrap's order, and the restore within it (S1-1 to S1-3, S1-18 to S1-20, S0-22, S0-23)."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from perdure import ConfigError, Message, NotStorableError, SessionError
from perdure.agent import (
    AgentContext,
    AgentFactory,
    ContextRestored,
    ScriptedModel,
    WorkingContextSnapshotRestoreStep,
    call,
)
from perdure.agent.bootstrap import bootstrap, bootstrap_steps
from perdure.agent.events import BootstrapStepDone
from tests.agent.conftest import Configure, World

STEPS = [
    "WorkspaceContextInitializationStep",
    "McpServerPrewarmingStep",
    "SystemPromptProcessingStep",
    "WorkingContextSnapshotRestoreStep",
]


async def talk(world: World, config: Any, *texts: str) -> None:
    async with world.connect() as sessions:
        factory = AgentFactory(sessions)
        async with await factory.create_agent(config, agent_id="ada") as agent:
            for text in texts:
                await agent.ask(text)


async def test_everything_comes_in_the_seeds_order(world: World, configured: Configure) -> None:
    """S1-1, S1-19, S1-20: prompt before restore, restore before set-up, set-up before input."""
    await talk(world, configured(), "hello")
    order: list[str] = []

    class Workspace:
        async def initialize(self, context: AgentContext) -> None:
            order.append("workspace")

    async def gauge() -> int:
        order.append("tool")
        return 1

    gauge.prewarm = lambda context: order.append("prewarm")  # type: ignore[attr-defined]

    def prompt(text: str, context: AgentContext) -> str:
        order.append("prompt")
        return text + "!"

    async def setup(context: AgentContext) -> None:
        order.append("setup")
        assert [one.text for one in context.session.context()][0] == "Be kind!"

    def answer(messages: Any) -> Any:
        order.append("model")
        return "done" if messages[-1].role == "tool" else call("gauge")

    config = configured(
        instructions="Be kind",
        workspace=Workspace(),
        tools=[gauge],
        system_prompt_processors=[prompt],
        setup=setup,
        model=ScriptedModel(answer),
    )
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        events = agent.events()
        async with agent:
            await agent.ask("go")
        told = [event async for event in events]
    assert order == ["workspace", "prewarm", "prompt", "setup", "model", "tool", "model"]
    assert [event.step for event in told if isinstance(event, BootstrapStepDone)] == STEPS
    names = [type(event).__name__ for event in told]
    assert names[0] == "BootstrapStarted"
    assert names.index("ContextRestored") < names.index("AgentReady") < names.index("TurnStarted")


async def test_the_restore_step_does_nothing_without_restore_options(
    memory_world: World, configured: Configure
) -> None:
    """S0-21, S0-22."""
    async with memory_world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(
            configured(instructions="x"), agent_id="a"
        )
        before = agent.session.version
        assert agent.context.state.restore_options is None
        assert await WorkingContextSnapshotRestoreStep().execute(agent.context)
        assert agent.session.version == before
        assert agent.restore_report is None
        await agent.stop()


async def test_restore_is_the_last_step() -> None:
    assert [type(step).__name__ for step in bootstrap_steps()] == STEPS


class Says:
    def __init__(self, answer: bool) -> None:
        self.answer = answer

    async def execute(self, context: AgentContext) -> bool:
        return self.answer


async def test_a_step_that_fails_ends_the_bootstrap(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(), agent_id="a")
        with pytest.raises(SessionError, match="step Says failed"):
            await bootstrap(agent.context, [Says(True), Says(False)])
        await agent.stop()


async def test_an_agent_whose_bootstrap_fails_lets_go_of_its_session(
    memory_world: World, configured: Configure
) -> None:
    def breaks(text: str, context: AgentContext) -> str:
        raise KeyError("nope")

    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        agent = await factory.create_agent(
            configured(system_prompt_processors=[breaks]), agent_id="a"
        )
        with pytest.raises(KeyError):
            async with agent:
                pytest.fail("not reached")
        async with await factory.create_agent(configured(), agent_id="a") as again:
            assert await again.ask("x") == "You said: x"


async def test_a_bootstrap_can_be_cancelled(memory_world: World, configured: Configure) -> None:
    """S1-3."""
    reached = anyio.Event()

    async def stuck(text: str, context: AgentContext) -> str:
        reached.set()
        await anyio.sleep_forever()
        return text

    async with memory_world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(
            configured(system_prompt_processors=[stuck]), agent_id="a"
        )
        async with anyio.create_task_group() as group:

            async def enter() -> None:
                async with agent:
                    pytest.fail("not reached")

            group.start_soon(enter)
            await reached.wait()
            group.cancel_scope.cancel()
        assert not agent.runtime.is_running


async def test_custom_data_is_saved_with_its_turn_and_comes_back(
    world: World, configured: Configure
) -> None:
    async def count(context: AgentContext) -> int:
        data = context.state.custom_data
        data["count"] = data.get("count", 0) + 1
        return int(data["count"])

    config = configured(
        model=ScriptedModel(lambda ms: "ok" if ms[-1].role == "tool" else call("count")),
        tools=[count],
    )
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("one")
            await agent.ask("two")
            left = world.killed()
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert agent.context.state.custom_data == {"count": 2}
            before = agent.session.version
            assert agent.session.durable_version == before


async def test_custom_data_that_cannot_be_stored_fails_its_turn(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="a") as agent:
            agent.context.state.custom_data["lock"] = object()
            with pytest.raises(NotStorableError):
                await agent.ask("x")
            del agent.context.state.custom_data["lock"]
            assert await agent.ask("y") == "You said: y"


async def test_the_report_tells_what_the_restore_did(world: World, configured: Configure) -> None:
    await talk(world, configured(instructions="Be kind."), "hello")
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).restore_agent(
            "ada", configured(instructions="Be brief.")
        )
        events = agent.events()
        async with agent:
            report = agent.restore_report
        told = [event async for event in events]
    assert report is not None
    assert report.source == "snapshot"
    assert "system prompt" in [step.what for step in report.steps]
    assert [event.report for event in told if isinstance(event, ContextRestored)] == [report]


async def test_a_restored_prompt_is_the_processed_one(world: World, configured: Configure) -> None:
    """S0-23."""
    config = configured(
        instructions="Be {mood}.",
        system_prompt_processors=[lambda text, context: text.format(mood="kind")],
    )
    await talk(world, config, "hello")
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert agent.session.context()[0] == Message.system("Be kind.")
            assert agent.memory.system_prompt_sha256 is not None


async def test_without_instructions_the_stored_prompt_is_kept(
    world: World, configured: Configure
) -> None:
    await talk(world, configured(instructions="Be kind."), "hello")
    model = ScriptedModel(lambda messages: messages[0].text)
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent(
            "ada", configured(model=model)
        ) as agent:
            assert await agent.ask("Who are you?") == "Be kind."
            assert agent.context.state.system_prompt == "Be kind."  # compaction builds with it


async def test_a_prompt_that_has_changed_is_refused_if_asked_for(
    memory_world: World, configured: Configure
) -> None:
    from perdure.agent import WorkingContextSnapshotBootstrapOptions as Options

    await talk(memory_world, configured(instructions="old"), "hello")
    config = configured(instructions="new", restore=Options(system_prompt_policy="error"))
    async with memory_world.connect() as sessions:
        agent = await AgentFactory(sessions).restore_agent("ada", config)
        with pytest.raises(ConfigError, match="system prompt of 'ada'"):
            await agent.start()
        await agent.stop()
