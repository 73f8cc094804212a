"""Approvals: a call that waits for somebody does so over a restart, and is answered once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from perdure import Message, SessionError
from perdure.agent import (
    Agent,
    AgentFactory,
    ApprovalRequested,
    EventStream,
    ScriptedModel,
    TurnEnded,
    call,
)
from tests.agent.conftest import Configure, World


class Doors:
    """A tool that must not run unasked."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def config(self, configured: Configure, **options: Any) -> Any:
        async def open_door(door: str) -> str:
            """Open a door."""
            self.opened.append(door)
            return "open"

        async def look() -> str:
            """Look."""
            return "closed"

        model = ScriptedModel(wants)
        options = {"approve": ask, "model": model, **options}
        return configured(tools=[open_door, look], **options)


def ask(tool_call: Any, context: Any) -> Any:
    return "ask" if tool_call.name == "open_door" else True


def wants(messages: Sequence[Message]) -> Any:
    results = {one.tool_result.name: one.tool_result for one in messages if one.tool_result}
    if not results:
        return [call("open_door", door="north"), call("look")]
    return f"{results['open_door'].result or results['open_door'].error}"


async def until_asked(events: EventStream) -> str:
    async for event in events:
        if isinstance(event, ApprovalRequested):
            return event.call.id
    raise AssertionError("nobody was asked")


async def waiting(world: World, configured: Configure) -> World:
    """Return what a kill leaves while a call waits for its approval."""
    doors = Doors()
    config = doors.config(configured)
    async with world.agent(config, autosave=None) as agent:
        async with agent.events() as events:
            await agent.post_user_message("go")
            await until_asked(events)
        left = world.killed()
        assert doors.opened == []
        agent.interrupt()
        await settled(agent)
        assert agent.pending_approvals == ()  # withdrawn with its turn
    return left


async def settled(agent: Agent) -> None:
    """Wait until the turn that was interrupted is over."""
    while agent.context.turn_id:
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("yes", "answer"), [(True, "open"), (False, "the tool 'open_door' was not")]
)
async def test_a_call_waits_for_its_answer(
    memory_world: World, configured: Configure, yes: bool, answer: str
) -> None:
    doors = Doors()
    config = doors.config(configured)
    async with memory_world.agent(config) as agent:
        endings: list[str] = []

        async def go() -> None:
            endings.append(await agent.ask("go"))

        async with agent.events() as events, anyio.create_task_group() as group:
            group.start_soon(go)
            call_id = await until_asked(events)
            assert [one.call for one in agent.pending_approvals] == [call_id]
            assert doors.opened == []
            if yes:
                await agent.approve(call_id)
            else:
                await agent.deny(call_id, "it is cold outside")
        assert endings[0].startswith(answer)
        assert "cold" in endings[0] or yes
        assert doors.opened == (["north"] if yes else [])
        assert agent.pending_approvals == agent.context.ledger.approvals == ()


async def test_each_of_two_calls_gets_its_own_answer(
    memory_world: World, configured: Configure
) -> None:
    """The second one is answered first, and differently."""

    def wants_two(messages: Sequence[Message]) -> Any:
        if any(one.tool_result for one in messages):
            return "done"
        return [call("open_door", door="north"), call("open_door", door="south")]

    doors = Doors()
    config = doors.config(configured, model=ScriptedModel(wants_two))
    async with memory_world.agent(config) as agent:
        async with agent.events() as events:
            await agent.post_user_message("go")
            asked: dict[str, str] = {}
            while len(asked) < 2:
                event = await anext(events)
                if isinstance(event, ApprovalRequested):
                    asked[event.call.arguments["door"]] = event.call.id
            await agent.deny(asked["south"], "it is cold outside")
            await agent.approve(asked["north"])
            async for event in events:
                if isinstance(event, TurnEnded):
                    break
        assert doors.opened == ["north"]


async def test_always_is_remembered(memory_world: World, configured: Configure) -> None:
    doors = Doors()
    config = doors.config(configured, approve="ask")
    async with memory_world.agent(config) as agent:
        agent.permissions.allow("look")
        async with agent.events() as events:
            await agent.post_user_message("go")
            await agent.approve(await until_asked(events), always=True)
            async for event in events:
                if isinstance(event, TurnEnded):
                    break
        assert agent.permissions.verdict("open_door") == "allowed"


async def test_nobody_waits_for_an_answer_that_was_given(
    memory_world: World, configured: Configure
) -> None:
    config = Doors().config(configured)
    async with memory_world.agent(config) as agent:
        for answer in (agent.approve, agent.deny):
            with pytest.raises(SessionError, match="waits for an approval"):
                await answer("c9")


async def test_an_answer_to_another_call_lets_none_run(
    memory_world: World, configured: Configure
) -> None:
    doors = Doors()
    async with memory_world.agent(doors.config(configured)) as agent:
        async with agent.events() as events:
            await agent.post_user_message("go")
            call_id = await until_asked(events)
        for answer in (agent.approve, agent.deny):
            with pytest.raises(SessionError, match="waits for an approval"):
                await answer("c9")
        assert [one.call for one in agent.pending_approvals] == [call_id]
        assert doors.opened == []
        agent.interrupt()
        await settled(agent)


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("yes", [True, False])
async def test_after_a_restart_it_is_still_asked_for(
    world: World, configured: Configure, when: str, yes: bool
) -> None:
    """The approval is a record: it is listed, asked for again, and answered once."""
    left = await waiting(world, configured)
    doors = Doors()
    async with left.connect() as sessions:
        config = doors.config(configured)
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            (approval,) = agent.pending_approvals
            assert (approval.tool, approval.answer) == ("open_door", None)
            assert agent.restore_report is not None
            assert "waits for approval" in {one.what for one in agent.restore_report.steps}
            answer = agent.approve if yes else agent.deny
            if when == "before":
                await answer(approval.call)
                assert doors.opened == []
                (ending,) = await agent.resume()
            else:
                endings: list[Any] = []

                async def go_on() -> None:
                    endings.extend(await agent.resume())

                async with agent.events() as events, anyio.create_task_group() as group:
                    group.start_soon(go_on)
                    assert await until_asked(events) == approval.call
                    await answer(approval.call)
                (ending,) = endings
            assert isinstance(ending, TurnEnded)
            assert ending.text.startswith("open" if yes else "the tool 'open_door' was not")
            assert agent.pending_approvals == agent.context.ledger.approvals == ()
    assert doors.opened == (["north"] if yes else [])


async def test_who_was_asked_decides_though_nobody_is_asked_any_more(
    world: World, configured: Configure
) -> None:
    """It comes back configured to ask nobody, and the call still waits for its answer."""
    left = await waiting(world, configured)
    doors = Doors()
    async with left.connect() as sessions:
        config = doors.config(configured, approve=None)
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            async with agent.events() as events, anyio.create_task_group() as group:
                group.start_soon(agent.resume)
                call_id = await until_asked(events)
                assert doors.opened == []
                await agent.deny(call_id)
    assert doors.opened == []


@pytest.mark.parametrize("approve", [ask, None])
async def test_an_answer_survives_another_kill(
    world: World, configured: Configure, approve: Any
) -> None:
    """Also where the agent comes back configured to ask nobody."""
    left = await waiting(world, configured)
    async with left.connect(autosave=None) as sessions:
        config = Doors().config(configured)
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            await agent.deny(agent.pending_approvals[0].call, "no")
            again = left.killed()
    doors = Doors()
    async with again.connect() as sessions:
        config = doors.config(configured, approve=approve)
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert agent.pending_approvals == ()
            await agent.resume()
    assert doors.opened == []


async def test_what_was_approved_and_may_have_begun_is_not_begun_again(
    memory_world: World, configured: Configure
) -> None:
    """An approval is for one call: a kill amid it leaves nothing that is approved."""
    reached, go = anyio.Event(), anyio.Event()
    opened: list[str] = []

    async def open_door(door: str) -> str:
        """Open a door."""
        opened.append(door)
        reached.set()
        await go.wait()
        return "open"

    def config() -> Any:
        return configured(model=ScriptedModel(wants), tools=[open_door], approve=ask)

    async with memory_world.agent(config(), autosave=None) as agent:
        async with agent.events() as events:
            await agent.post_user_message("go")
            await agent.approve(await until_asked(events))
        await reached.wait()
        left = memory_world.killed()
        go.set()
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config()) as agent:
            assert agent.pending_approvals == ()
            (ending,) = await agent.resume()
            assert isinstance(ending, TurnEnded)
            assert ending.text.startswith("interrupted")
    assert opened == ["north"]
