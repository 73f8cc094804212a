"""The extension points: processors, renderers, workspace, custom data, lifecycle hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import ConfigError, Message, SessionNotFoundError, ToolResult
from perdure.agent import (
    Agent,
    AgentContext,
    AgentEvent,
    AgentFactory,
    AgentReady,
    AgentStopped,
    PersistentSession,
    ScriptedModel,
    TurnEnded,
    TurnFailed,
    TurnStarted,
    call,
    render_openai,
    tool,
)
from tests.agent.conftest import Configure, World


async def test_hooks_are_awaited_at_the_stable_boundaries(
    memory_world: World, configured: Configure
) -> None:
    """S1-21: ready, turn begun, turn over and durable, stopped; in order, before what follows."""
    seen: list[tuple[str, int]] = []

    async def first(event: AgentEvent, context: AgentContext) -> None:
        session = context.session
        if isinstance(event, TurnEnded):
            assert session.durable_version == session.version
        seen.append((type(event).__name__, 1))

    def second(event: AgentEvent, context: AgentContext) -> None:
        seen.append((type(event).__name__, 2))

    config = configured(lifecycle_hooks=[first, second])
    async with memory_world.agent(config, autosave=None) as agent:
        assert seen == [("AgentReady", 1), ("AgentReady", 2)]
        await agent.ask("hello")
    kinds = [AgentReady, TurnStarted, TurnEnded, AgentStopped]
    assert seen == [(kind.__name__, number) for kind in kinds for number in (1, 2)]


async def test_a_hook_that_fails_on_an_end_harms_nobody(
    memory_world: World, configured: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(event: AgentEvent, context: AgentContext) -> None:
        if isinstance(event, TurnEnded | AgentStopped):
            raise KeyError("hook")

    config = configured(lifecycle_hooks=[breaks])
    async with memory_world.agent(config) as agent:
        assert await agent.ask("one") == "You said: one"
        assert await agent.ask("two") == "You said: two"
    failed = [one for one in caplog.records if one.message.startswith("a lifecycle hook failed")]
    assert [one.event for one in failed] == ["TurnEnded", "TurnEnded", "AgentStopped"]  # type: ignore[attr-defined]


async def test_a_hook_that_fails_on_a_beginning_ends_what_begins(
    memory_world: World, configured: Configure
) -> None:
    failing: list[type[AgentEvent]] = [TurnStarted]
    ended: list[str] = []

    def breaks(event: AgentEvent, context: AgentContext) -> None:
        ended.append(type(event).__name__)
        if isinstance(event, tuple(failing)):
            raise KeyError("hook")

    async with memory_world.connect() as sessions:
        config = configured(lifecycle_hooks=[breaks])
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            with pytest.raises(KeyError):
                await agent.ask("one")
            assert ended == ["AgentReady", "TurnStarted", TurnFailed.__name__]
            failing.clear()
            assert await agent.ask("two") == "You said: two"
        failing.append(AgentReady)
        with pytest.raises(KeyError):
            async with await AgentFactory(sessions).create_agent(config, agent_id="ada"):
                pass


async def test_custom_data_and_the_workspace_are_there_before_the_prompt_is_made(
    world: World, configured: Configure
) -> None:
    """S1-1: the runtime state; custom data is saved with the turn that changes it."""

    class Desk:
        def __init__(self) -> None:
            self.found: list[Any] = []

        def initialize(self, context: AgentContext) -> None:
            self.found.append(dict(context.state.custom_data))

    def prompt(text: str, context: AgentContext) -> str:
        return f"{text} {context.state.custom_data.get('city', 'nowhere')}"

    async def move(city: str, context: AgentContext) -> str:
        context.state.custom_data["city"] = city
        return "moved"

    for wanted, city in ([{}], "nowhere"), ([{"city": "Rome"}], "Rome"):
        desk = Desk()
        config = configured(
            model=ScriptedModel(call("move", city="Rome"), "done"),
            tools=[move],
            instructions="You are in",
            workspace=desk,
            system_prompt_processors=[prompt],
        )
        async with world.agent(config) as agent:
            assert agent.context.state.system_prompt == f"You are in {city}"
            assert agent.context.state.workspace is desk
            await agent.ask("go to Rome")
        assert desk.found == wanted


async def test_the_renderer_makes_what_the_model_gets(
    memory_world: World, configured: Configure
) -> None:
    """S1-7."""
    got: list[Any] = []

    def says(messages: Sequence[Any]) -> str:
        got.extend(messages)
        return "yes"

    config = configured(model=ScriptedModel(says), renderer=render_openai, instructions="Be kind.")
    async with memory_world.agent(config) as agent:
        await agent.ask("hello")
    assert got == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
    ]


async def test_a_resumed_turn_passes_its_input_through_the_processors_once(
    memory_world: World, configured: Configure
) -> None:
    """S1-6: what was kept is the processed message."""

    def louder(message: Message, context: AgentContext) -> Message:
        return Message.user(f"{message.text}!")

    config = configured(
        model=ScriptedModel(RuntimeError("down"), "fine"), input_processors=[louder]
    )
    async with memory_world.agent(config) as agent:
        with pytest.raises(RuntimeError):
            await agent.ask("hello")
        await agent.resume()
        assert [one.text for one in agent.session.context()] == ["hello!", "fine"]


async def test_processors_see_a_result_before_it_is_moved_to_a_blob(
    memory_world: World, configured: Configure
) -> None:
    sizes: list[int] = []

    def shorter(result: ToolResult, context: AgentContext) -> ToolResult:
        sizes.append(len(result.result))
        return ToolResult(result.call_id, result.name, result.result[:10])

    async def fetch() -> str:
        return "x" * 10_000

    config = configured(
        model=ScriptedModel(call("fetch"), "done"),
        tools=[fetch],
        tool_result_processors=[shorter],
        max_inline_bytes=100,
    )
    async with memory_world.agent(config) as agent:
        await agent.ask("go")
        (result,) = [one.tool_result for one in agent.session.context() if one.tool_result]
    assert (sizes, result.result) == ([10_000], "x" * 10)


async def test_an_agent_is_restored_from_a_folder_of_its_own(
    memory_world: World, tmp_path: Path, configured: Configure
) -> None:
    """S0-24: same id, not started, from ``memory_dir``; nothing is made where nothing is."""
    elsewhere = World(tmp_path / "backup")
    async with elsewhere.agent(configured()) as agent:
        await agent.ask("remember")
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        agent = await factory.restore_agent("ada", configured(), memory_dir=tmp_path / "backup")
        assert (agent.id, agent.runtime.is_running) == ("ada", False)
        assert agent.context.state.restore_options is not None  # S0-21
        async with agent:
            assert [one.text for one in agent.session.context()][0] == "remember"
        with pytest.raises(SessionNotFoundError, match="in .*backup.*: create_agent makes it"):
            await factory.restore_agent("bea", configured(), memory_dir=tmp_path / "backup")
        with pytest.raises(SessionNotFoundError, match="in .*nowhere.*: create_agent makes it"):
            await factory.restore_agent("ada", configured(), memory_dir=tmp_path / "nowhere")
        assert not (tmp_path / "nowhere").exists()
        assert await sessions.exists("ada") is False


async def test_custom_data_is_kept_whoever_has_set_it(world: World, configured: Configure) -> None:
    """S1-1: at the start, in a turn that fails, by a hook when the turn is over, at the stop."""

    class Desk:
        def initialize(self, context: AgentContext) -> None:
            context.state.custom_data.setdefault("made", len(agents))

    def count(event: AgentEvent, context: AgentContext) -> None:
        seen = context.state.custom_data.setdefault("seen", [])
        seen.append(type(event).__name__)

    agents: list[Any] = []
    left: list[World] = []
    for _ in range(2):
        model = ScriptedModel(RuntimeError("down"), "fine")
        config = configured(workspace=Desk(), lifecycle_hooks=[count], model=model)
        async with world.agent(config) as agent:
            agents.append(agent)
            with pytest.raises(RuntimeError):
                await agent.ask("go")
            left.append(world.killed())
            await agent.ask("go")
    once = ["AgentReady", "TurnStarted", "TurnFailed", "TurnStarted", "TurnEnded", "AgentStopped"]
    for one, expected in ((world, [*once, *once]), (left[0], ["AgentReady", "TurnStarted"])):
        async with one.connect() as sessions:
            view = await sessions.load("ada")
            assert view is not None
            assert await view.state.get("custom_data") == {"made": 0, "seen": expected}


async def test_custom_data_of_a_new_conversation_is_not_that_of_the_old_one(
    memory_world: World, configured: Configure
) -> None:
    """S2-13: what was set aside does not come back when the new conversation does."""
    for load, told in (True, {"old": 1}), (False, {}), (True, {}):
        kept = PersistentSession(load_on_create=load)
        async with memory_world.connect() as sessions:
            made = Agent.create(
                "ada", config=configured(), sessions=sessions, persistent_session=kept
            )
            async with made as agent:
                if told:
                    agent.context.state.custom_data["old"] = 1
                assert agent.context.state.custom_data == told
                await agent.ask("go")


@pytest.mark.parametrize("part", ["system_prompt_processors", "input_processors"])
async def test_a_processor_that_forgets_to_return_is_told_of(
    memory_world: World, configured: Configure, part: str
) -> None:
    """A prompt or a message would be gone otherwise, and nobody would know why."""

    def forgets(given: Any, context: AgentContext) -> None: ...

    async with memory_world.connect() as sessions:
        config = configured(instructions="Be kind.", **{part: [forgets]})
        with pytest.raises(ConfigError, match=f"{part}: .*forgets.* returned None"):
            async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
                await agent.ask("hello")


async def test_whatever_a_processor_makes_of_a_result_its_call_is_answered(
    memory_world: World, configured: Configure
) -> None:
    """S1-9: the call has a result, and its effect is settled."""

    def forgets(result: ToolResult, context: AgentContext) -> Any:
        return None if result.name == "fetch" else ToolResult("other", result.name, 1)

    async def fetch() -> str:
        return "x"

    @tool
    async def send(idempotency_key: str) -> str:
        return "sent"

    config = configured(
        model=ScriptedModel([call("fetch"), call("send")], "done"),
        tools=[fetch, send],
        tool_result_processors=[forgets],
    )
    async with memory_world.agent(config) as agent:
        assert await agent.ask("go") == "done"
        results = [one.tool_result for one in agent.session.context() if one.tool_result]
        assert agent.unknown_effects == ()
    fetched, sent = sorted(results, key=lambda one: one.name)
    assert "tool_result_processors: " in str(fetched.error)
    assert "forgets returned None" in str(fetched.error)
    assert (sent.name, sent.result, sent.error) == ("send", 1, None)
