"""Code that type checkers must accept: how people use `perdure.agent`. It is never run."""

# pyright: strict
from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, assert_type

from perdure import Message, Session, SessionManager
from perdure.agent import (
    Agent,
    AgentConfig,
    AgentContext,
    AgentEvent,
    AgentFactory,
    AgentReady,
    AgentRuntimeState,
    AgentStopped,
    Chunk,
    CompactionPolicy,
    EchoModel,
    EventStream,
    MemoryManager,
    Model,
    PersistentSession,
    ScriptedModel,
    Segment,
    Tool,
    ToolFinished,
    ToolSpec,
    ToolStarted,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnStarted,
    Usage,
    WorkingContextSnapshotBootstrapOptions,
    call,
    render_openai,
    tool,
)


class MyModel:
    """A model of a user's own."""

    async def stream(
        self, messages: Sequence[Any], tools: Sequence[ToolSpec]
    ) -> AsyncIterator[Chunk]:
        yield Chunk(text=f"{len(messages)} messages, {[one.name for one in tools]}")
        yield Chunk(usage=Usage(input_tokens=1, output_tokens=1))


def add(a: int, b: int) -> int:
    return a + b


@tool
async def look_up(city: str, context: AgentContext) -> str:
    return f"{context.agent_id}: {city}"


@tool(name="sum_up", description="Sum up.")
def sum_up(text: str) -> str:
    return text[:10]


async def an_agent(sessions: SessionManager) -> None:
    model: Model = MyModel()
    async with Agent.create(
        "mia", model=model, tools=[add, look_up, sum_up, tool(add, name="plus")], sessions=sessions
    ) as agent:
        assert_type(agent, Agent)
        assert_type(agent.session, Session)
        assert_type(agent.memory, MemoryManager)
        assert_type(await agent.ask("Hello"), str)
        await agent.post_user_message(Message.user("Hello"))
        assert_type(agent.interrupt(), bool)
        assert_type(agent.events(), EventStream)
        async for event in agent.stream("Hello", turn_id="request-7"):
            assert_type(event, AgentEvent)
            show(event)
    made = await Agent.create("leo", model=EchoModel(), persistent_session=PersistentSession())
    await made.start()
    await made.stop(finish=False)


def show(event: AgentEvent) -> str:
    match event:
        case Segment(text=text) | TurnInterrupted(text=text):
            return text
        case ToolStarted(call=called) | ToolFinished(call=called):
            return called.name
        case TurnEnded():
            return event.text
        case TurnFailed(error=error):
            return str(error)
        case TurnStarted() | AgentReady() | AgentStopped() | AgentEvent():
            return event.agent_id


async def a_factory(sessions: SessionManager) -> None:
    factory = AgentFactory(sessions)
    config = AgentConfig(
        name="helper",
        model=ScriptedModel("Hello.", call("add", a=1, b=2)),
        tools=[add],
        renderer=render_openai,
        compaction=CompactionPolicy(),
        restore=WorkingContextSnapshotBootstrapOptions(),
    )
    assert_type(await factory.create_agent(config, agent_id="mia", if_exists="replace"), Agent)
    agent = await factory.restore_agent("mia", config, memory_dir="~/agents")
    assert_type(agent.context, AgentContext)
    assert_type(agent.context.state, AgentRuntimeState)


def tools() -> None:
    assert_type(look_up, Tool)
    assert_type(sum_up, Tool)
    assert_type(tool(add), Tool)
    assert_type(sum_up.spec, ToolSpec)
