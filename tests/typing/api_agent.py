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
    AgentRuntime,
    AgentRuntimeState,
    AgentStopped,
    BootstrapEventHandler,
    BootstrapStarted,
    BootstrapStartedEvent,
    BootstrapStep,
    BootstrapStepDone,
    Chunk,
    CompactionCompleted,
    CompactionFailed,
    CompactionPolicy,
    CompactionSnapshotBuilder,
    CompactionStarted,
    Compactor,
    ContextRestored,
    EchoModel,
    EventStream,
    Handler,
    LLMRequest,
    LLMRequestAssembler,
    LLMUserMessageReadyEvent,
    LLMUserMessageReadyEventHandler,
    McpServerPrewarmingStep,
    MemoryManager,
    Model,
    PersistentSession,
    Retriever,
    ScriptedModel,
    Segment,
    SystemPromptProcessingStep,
    Tool,
    ToolFinished,
    ToolInvocationRequestEvent,
    ToolInvocationRequestEventHandler,
    ToolResultEvent,
    ToolResultEventHandler,
    ToolSpec,
    ToolStarted,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnStarted,
    TurnTracker,
    Usage,
    UserInputMessageEventHandler,
    UserMessageReceivedEvent,
    WorkerEventDispatcher,
    WorkingContextSnapshot,
    WorkingContextSnapshotBootstrapOptions,
    WorkingContextSnapshotBootstrapper,
    WorkingContextSnapshotRestoreStep,
    WorkingContextSnapshotSerializer,
    WorkingContextSnapshotStore,
    WorkspaceContextInitializationStep,
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


class Listener:
    """The parts that the agent is made of, for those who put one together differently."""

    def __init__(self, agent: Agent) -> None:
        self.runtime: AgentRuntime = agent.runtime
        self.memory: MemoryManager = agent.memory

    async def snapshot(self) -> list[Message]:
        await self.memory.persist_working_context_snapshot()
        store: WorkingContextSnapshotStore = self.memory.working_context_snapshot_store
        payload = await store.read(self.memory.agent_id)
        if payload is None or not WorkingContextSnapshotSerializer().validate(payload):
            return self.memory.get_working_context_messages()
        snapshot, _ = WorkingContextSnapshotSerializer().deserialize(payload)
        assert_type(snapshot, WorkingContextSnapshot)
        return list(snapshot.messages)

    def progress(self, event: AgentEvent) -> str:
        match event:
            case BootstrapStepDone(step=step):
                return step
            case ContextRestored(report=report):
                return str(report)
            case CompactionCompleted(turns=turns):
                return str(turns)
            case CompactionFailed(error=error):
                return str(error)
            case BootstrapStarted() | CompactionStarted() | AgentEvent():
                return ""


async def parts_to_replace(session: Session, agent: Agent) -> None:
    memory = MemoryManager(
        session,
        turn_tracker=TurnTracker(),
        compactor=Compactor(),
        compaction_policy=CompactionPolicy(),
        builder=CompactionSnapshotBuilder(),
    )
    assert_type(memory.retriever, Retriever)
    assembler = LLMRequestAssembler(memory, renderer=render_openai)
    request = await assembler.prepare_request("turn_0001", "Be kind.")
    assert_type(request, LLMRequest)
    step = WorkingContextSnapshotRestoreStep(WorkingContextSnapshotBootstrapper())
    assert_type(await step.execute(agent.context), bool)


class ListeningHandler:
    """A handler of a user's own, around perdure's."""

    def __init__(self) -> None:
        self._usual = UserInputMessageEventHandler()

    async def handle(self, event: UserMessageReceivedEvent, context: AgentContext) -> None:
        await self._usual.handle(event, context)


def other_handlers() -> AgentRuntime:
    steps: tuple[BootstrapStep, ...] = (
        WorkspaceContextInitializationStep(),
        McpServerPrewarmingStep(),
        SystemPromptProcessingStep(),
        WorkingContextSnapshotRestoreStep(),
    )
    handlers: dict[type, Handler] = {
        BootstrapStartedEvent: BootstrapEventHandler(steps),
        UserMessageReceivedEvent: ListeningHandler(),
        LLMUserMessageReadyEvent: LLMUserMessageReadyEventHandler(),
        ToolInvocationRequestEvent: ToolInvocationRequestEventHandler(),
        ToolResultEvent: ToolResultEventHandler(),
    }
    return AgentRuntime(dispatcher=WorkerEventDispatcher(handlers))
