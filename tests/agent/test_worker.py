"""The worker's loop: turns, tools, interruptions, failures; on both loops and two stores."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from perdure import (
    EncodedRecord,
    LeaseLostError,
    Message,
    SessionClosedError,
    SessionError,
    ToolCall,
    WrongLoopError,
)
from perdure.agent import (
    Agent,
    AgentContext,
    AgentFactory,
    AgentStopped,
    Chunk,
    EventStream,
    ScriptedModel,
    Segment,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnStarted,
    call,
)
from perdure.agent.events import AgentEvent, LLMUserMessageReadyEvent
from perdure.records.records import OUTSIDE
from perdure.session.internals import store_of
from perdure.session.manager import SessionManager
from tests.agent.conftest import Configure, World


def roles(messages: Sequence[Message]) -> list[str]:
    return [message.role for message in messages]


def names(events: Sequence[AgentEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


async def made(sessions: SessionManager, config: Any, agent_id: str = "ada") -> Agent:
    return await AgentFactory(sessions).create_agent(config, agent_id=agent_id)


class Blocked:
    """A model, or a tool, that gets stuck until it is let go."""

    def __init__(self, *before: Chunk) -> None:
        self.before = before
        self.reached = anyio.Event()
        self.go = anyio.Event()
        self.closed = False

    async def stream(self, messages: Any, tools: Any) -> AsyncIterator[Chunk]:
        try:
            for chunk in self.before:
                yield chunk
            self.reached.set()
            await self.go.wait()
            yield Chunk(text=" and on")
        finally:
            self.closed = True


async def test_an_answer_comes_and_is_kept(world: World, configured: Configure) -> None:
    async with world.connect(autosave=None) as sessions:
        async with await made(sessions, configured(instructions="Be kind.")) as agent:
            assert await agent.ask("Hello") == "You said: Hello"
            assert agent.session.durable_version == agent.session.version
        view = await sessions.load("ada")
        assert view is not None
        assert [one.text for one in view.context()] == ["Be kind.", "Hello", "You said: Hello"]


async def test_the_events_of_a_turn_come_in_their_order(
    memory_world: World, configured: Configure
) -> None:
    """S1-5, S1-8: segments as they come, then the end."""
    config = configured(model=ScriptedModel("abcdef", chunk_chars=3))
    async with memory_world.agent(config) as agent:
        events = [event async for event in agent.stream("go")]
    assert names(events) == ["TurnStarted", "Segment", "Segment", "TurnEnded"]
    assert [event.text for event in events if isinstance(event, Segment)] == ["abc", "def"]
    assert isinstance(events[-1], TurnEnded)
    assert events[-1].text == "abcdef"


async def test_the_end_of_a_turn_is_told_only_once_it_is_durable(
    world: World, configured: Configure
) -> None:
    """S1-10: the answer is kept, then saved, then told."""
    async with world.agent(configured(), autosave=None) as agent:
        async for event in agent.stream("remember this"):
            if isinstance(event, TurnEnded):
                left = world.killed()
    context = await left.context()
    assert [one.text for one in context][-2:] == [
        "remember this",
        "You said: remember this",
    ]


async def test_the_message_is_durable_before_the_model_is_called(
    world: World, configured: Configure
) -> None:
    """S1-6: admission. A kill while the model thinks does not lose what the user said."""
    model = Blocked()
    async with world.agent(configured(model=model), autosave=None) as agent:
        await agent.post_user_message("do not lose me")
        await model.reached.wait()
        left = world.killed()
        agent.interrupt()
    context = await left.context()
    assert [one.text for one in context] == ["do not lose me"]


async def test_a_tool_call_is_durable_before_the_tool_runs(
    world: World, configured: Configure
) -> None:
    """S1-9: after a kill in a tool, the log knows that it may have run."""
    left: list[World] = []

    async def launch() -> str:
        left.append(world.killed())
        return "launched"

    config = configured(model=ScriptedModel(call("launch"), "done"), tools=[launch])
    async with world.agent(config, autosave=None) as agent:
        assert await agent.ask("go") == "done"
    context = await left[0].context()
    assert [one.name for one in context[-1].tool_calls] == ["launch"]


async def test_results_are_durable_before_the_model_sees_them(
    world: World, configured: Configure
) -> None:
    left: list[World] = []

    def second(messages: Sequence[Message]) -> str:
        left.append(world.killed())
        return "done"

    async def gauge() -> int:
        return 42

    config = configured(model=ScriptedModel(call("gauge"), second), tools=[gauge])
    async with world.agent(config, autosave=None) as agent:
        await agent.ask("go")
    context = await left[0].context()
    result = context[-1].tool_result
    assert result is not None
    assert result.result == 42


async def test_tools_of_one_message_run_at_the_same_time_and_results_come_as_they_do(
    world: World, configured: Configure
) -> None:
    fast_is_done = anyio.Event()

    async def slow() -> str:
        await fast_is_done.wait()
        return "slow"

    async def fast() -> str:
        fast_is_done.set()
        return "fast"

    model = ScriptedModel([call("slow"), call("fast")], "both")
    async with world.agent(configured(model=model, tools=[slow, fast])) as agent:
        events = [event async for event in agent.stream("go")]
        context = agent.session.context("openai")
    results = [event.result.name for event in events if isinstance(event, ToolFinished)]
    assert results == ["fast", "slow"]
    assert [one["role"] for one in context] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [one["content"] for one in context[2:4]] == ["fast", "slow"]
    assert len(context[1]["tool_calls"]) == 2
    assert names(events)[0] == "TurnStarted"
    assert sum(isinstance(event, ToolStarted) for event in events) == 2


async def test_tools_are_answered_before_the_next_message(
    memory_world: World, configured: Configure
) -> None:
    """S1-12; the hang that seed 1's project had: the continuation waits behind nobody."""

    async def gauge() -> int:
        return 42

    def answers(messages: Sequence[Message]) -> Any:
        last = messages[-1]
        return call("gauge") if last.text == "measure" else f"after {last.role}"

    async with memory_world.connect() as sessions:
        config = configured(model=ScriptedModel(answers), tools=[gauge])
        async with await made(sessions, config) as agent:
            await agent.post_user_message("measure")
            await agent.post_user_message("chat")
        texts = [one.text or one.role for one in agent.session.context()]
    assert texts == ["measure", "assistant", "tool", "after tool", "chat", "after user"]


async def test_results_are_kept_once_although_they_pass_the_input_again(
    memory_world: World, configured: Configure
) -> None:
    """S1-13."""

    async def gauge() -> int:
        return 42

    seen: list[Message] = []

    def watch(message: Message, context: AgentContext) -> Message:
        seen.append(message)
        return message

    config = configured(
        model=ScriptedModel(call("gauge"), "done"), tools=[gauge], input_processors=[watch]
    )
    async with memory_world.agent(config) as agent:
        await agent.ask("go")
        assert roles(agent.session.context()) == ["user", "assistant", "tool", "assistant"]
    assert [message.text for message in seen] == ["go"]


async def test_processors_change_what_is_kept(memory_world: World, configured: Configure) -> None:
    """S1-6: it is the processed content that is kept."""

    async def polite(message: Message, context: AgentContext) -> Message:
        return Message.user(f"Please: {message.text}")

    def rounded(result: Any, context: AgentContext) -> Any:
        return type(result)(result.call_id, result.name, round(result.result))

    async def gauge() -> float:
        return 41.7

    config = configured(
        model=ScriptedModel(call("gauge"), "done"),
        tools=[gauge],
        input_processors=[polite],
        tool_result_processors=[rounded],
    )
    async with memory_world.agent(config) as agent:
        await agent.ask("measure")
        user, _, result, _ = agent.session.context()
    assert user.text == "Please: measure"
    assert result.tool_result is not None
    assert result.tool_result.result == 42


async def test_a_processor_that_fails_is_an_error_result(
    memory_world: World, configured: Configure
) -> None:
    def breaks(result: Any, context: AgentContext) -> Any:
        raise KeyError("x")

    async def gauge() -> int:
        return 1

    config = configured(
        model=ScriptedModel(call("gauge"), "done"),
        tools=[gauge],
        tool_result_processors=[breaks],
    )
    async with memory_world.agent(config) as agent:
        assert await agent.ask("go") == "done"
        result = agent.session.context()[2].tool_result
    assert result is not None
    assert "could not be processed: KeyError" in str(result.error)


async def test_a_result_that_cannot_be_stored_is_an_error_that_says_so(
    memory_world: World, configured: Configure
) -> None:
    """S1-G3, defect g: never half, never silently a string."""

    async def handle() -> object:
        return threading.Lock()

    config = configured(model=ScriptedModel(call("handle"), "done"), tools=[handle])
    async with memory_world.agent(config) as agent:
        assert await agent.ask("go") == "done"
        result = agent.session.context()[2].tool_result
    assert result is not None
    assert "cannot be stored" in str(result.error)


async def test_an_interrupted_answer_is_kept_and_marked(
    world: World, configured: Configure
) -> None:
    model = Blocked(Chunk(text="I was going to"))
    async with world.agent(configured(model=model), autosave=None) as agent:
        stream = agent.stream("go")
        assert isinstance(await anext(stream), TurnStarted)
        await model.reached.wait()
        assert agent.interrupt()
        events = [event async for event in stream]
        assert isinstance(events[-1], TurnInterrupted)
        assert events[-1].text == "I was going to"
        assert model.closed
        left = world.killed()
        assert not agent.interrupt()
    context = await left.context()
    last = context[-1]
    assert last.text == "I was going to"
    assert bytes(last.extra["perdure_interrupted"]) == b"true"


async def test_after_an_interruption_the_next_message_is_answered(
    memory_world: World, configured: Configure
) -> None:
    model = Blocked()
    async with memory_world.agent(configured(model=model)) as agent:
        with pytest.raises(SessionError, match="interrupted"):
            async with anyio.create_task_group() as group:
                group.start_soon(interrupt_when, agent, model.reached)
                await anyio.lowlevel.checkpoint()
                try:
                    await agent.ask("first")
                except SessionError as error:
                    found = error
            raise found
        model.go.set()
        assert await agent.ask("second") == " and on"


async def interrupt_when(agent: Agent, reached: anyio.Event) -> None:
    await reached.wait()
    agent.interrupt()


async def test_interrupted_tools_have_results_that_say_so(
    world: World, configured: Configure
) -> None:
    """A provider takes the next request: each call has its result."""
    reached = anyio.Event()

    async def stuck() -> None:
        reached.set()
        await anyio.sleep_forever()

    async def quick() -> str:
        return "quick"

    model = ScriptedModel([call("stuck"), call("quick")], "sorry")
    async with world.agent(configured(model=model, tools=[stuck, quick])) as agent:
        stream = agent.stream("go")
        async for event in stream:
            if isinstance(event, ToolFinished):
                break
        await reached.wait()
        agent.interrupt()
        assert names([event async for event in stream])[-1] == "TurnInterrupted"
        kept = [one.tool_result for one in agent.session.context() if one.tool_result]
        assert {one.name for one in kept} == {"stuck", "quick"}
        assert await agent.ask("well?") == "sorry"
        results = {
            one.tool_result.name: one.tool_result for one in model.last_messages if one.tool_result
        }
    assert results["quick"].result == "quick"
    assert str(results["stuck"].error).startswith("interrupted")


async def test_a_failing_model_fails_its_turn_only(world: World, configured: Configure) -> None:
    model = ScriptedModel(RuntimeError("overloaded"), "back again")
    async with world.agent(configured(model=model)) as agent:
        with pytest.raises(RuntimeError, match="overloaded"):
            await agent.ask("one")
        assert await agent.ask("two") == "back again"
        items = [item.value.text for item in await agent.session.history()]
    assert items == ["one", "two", "back again"]


async def test_what_a_failing_model_had_said_is_kept_and_marked(
    memory_world: World, configured: Configure
) -> None:
    class Breaks:
        async def stream(self, messages: Any, tools: Any) -> AsyncIterator[Chunk]:
            yield Chunk(text="half")
            raise ConnectionError("gone")

    async with memory_world.agent(configured(model=Breaks())) as agent:
        events = [event async for event in agent.stream("go")]
        last = agent.session.context()[-1]
    assert isinstance(events[-1], TurnFailed)
    assert isinstance(events[-1].error, ConnectionError)
    assert (last.text, bytes(last.extra["perdure_interrupted"])) == ("half", b"true")


async def test_a_stream_that_fails_is_closed(memory_world: World, configured: Configure) -> None:
    class Stream:
        closed = False

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Chunk:
            raise ConnectionError("gone")

        async def aclose(self) -> None:
            await anyio.sleep(0)
            self.closed = True

    class Streams:
        def __init__(self) -> None:
            self.made: list[Stream] = []

        def stream(self, messages: Any, tools: Any) -> Any:
            self.made.append(Stream())
            return self.made[-1]

    model = Streams()
    async with memory_world.agent(configured(model=model)) as agent:
        with pytest.raises(ConnectionError):
            await agent.ask("go")
        assert [stream.closed for stream in model.made] == [True]


async def test_a_model_that_calls_tools_without_end_is_stopped(
    memory_world: World, configured: Configure
) -> None:
    async def again() -> int:
        return 1

    model = ScriptedModel(lambda messages: call("again"))
    config = configured(model=model, tools=[again], max_model_calls=3)
    async with memory_world.agent(config) as agent:
        with pytest.raises(SessionError, match="max_model_calls"):
            await agent.ask("go")
        assert model.calls == 3


async def test_the_inbox_is_bounded(memory_world: World, configured: Configure) -> None:
    """S1-4b: posting waits when it is full."""
    model = Blocked()
    async with memory_world.connect() as sessions:
        config = configured(model=model, inbox_size=1)
        async with await made(sessions, config) as agent:
            await agent.post_user_message("in work")
            await model.reached.wait()
            await agent.post_user_message("waits")
            with anyio.move_on_after(0) as scope:
                await agent.post_user_message("one too many")
            assert scope.cancelled_caught
            model.go.set()
        users = [one.text for one in agent.session.context() if one.role == "user"]
    assert users == ["in work", "waits"]


async def test_leaving_answers_what_was_posted(world: World, configured: Configure) -> None:
    async with world.connect() as sessions:
        async with await made(sessions, configured()) as agent:
            for number in range(3):
                await agent.post_user_message(str(number))
        view = await sessions.load("ada")
        assert view is not None
        assert [one.text for one in view.context() if one.role == "assistant"] == [
            "You said: 0",
            "You said: 1",
            "You said: 2",
        ]


async def test_leaving_with_an_error_interrupts(memory_world: World, configured: Configure) -> None:
    model = Blocked(Chunk(text="half"))
    async with memory_world.connect() as sessions:
        with pytest.raises(KeyError):
            async with await made(sessions, configured(model=model)) as agent:
                await agent.post_user_message("go")
                await model.reached.wait()
                raise KeyError
        assert agent.session.context()[-1].text == "half"


async def test_a_cancelled_leave_ends_the_worker_and_keeps_what_came(
    memory_world: World, configured: Configure
) -> None:
    model = Blocked(Chunk(text="half"))
    async with memory_world.connect() as sessions:
        with anyio.CancelScope() as scope:
            async with await made(sessions, configured(model=model)) as agent:
                await agent.post_user_message("go")
                await model.reached.wait()
                scope.cancel()
        assert scope.cancelled_caught
        assert not agent.runtime.is_running
        view = await sessions.load("ada")
        assert view is not None
        assert view.context()[-1].text == "half"


async def test_who_waits_for_an_answer_hears_that_the_agent_stopped(
    memory_world: World, configured: Configure
) -> None:
    model = Blocked()
    async with memory_world.connect() as sessions:
        agent = await made(sessions, configured(model=model))
        await agent.start()
        found: list[BaseException] = []

        async def ask() -> None:
            try:
                await agent.ask("waits in the inbox")
            except SessionError as error:
                found.append(error)

        async with anyio.create_task_group() as group:
            await agent.post_user_message("in work")
            await model.reached.wait()
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await agent.stop(finish=False)
        assert isinstance(found[0], SessionClosedError)


async def test_between_messages_an_agent_and_who_listens_rest(
    memory_world: World, configured: Configure
) -> None:
    heard: list[AgentEvent] = []

    async def listen(stream: EventStream) -> None:
        heard.extend([event async for event in stream])

    async with memory_world.connect() as sessions, anyio.create_task_group() as group:
        async with await made(sessions, configured()) as agent:
            group.start_soon(listen, agent.events())
            for text in ("one", "two"):
                assert await agent.ask(text) == f"You said: {text}"
                with anyio.fail_after(20):  # a task that spins is never blocked
                    await anyio.wait_all_tasks_blocked()
    assert names(heard).count("TurnEnded") == 2


async def test_a_stopped_agent_takes_no_more(memory_world: World, configured: Configure) -> None:
    async with memory_world.connect() as sessions:
        agent = await made(sessions, configured())
        with pytest.raises(SessionClosedError, match="does not run"):
            await agent.post_user_message("too early")
        async with agent:
            pass
        with pytest.raises(SessionClosedError, match="does not run"):
            await agent.ask("too late")
        await agent.stop()
        with pytest.raises(SessionError, match="was started before"):
            await agent.start()


async def test_the_last_event_says_that_the_agent_stopped(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        agent = await made(sessions, configured())
        events = agent.events()
        async with agent:
            await agent.ask("x")
        found = [event async for event in events]
    assert found[-1] == AgentStopped(agent_id="ada")


async def test_a_tool_cannot_wait_for_its_agents_end(
    memory_world: World, configured: Configure
) -> None:
    holder: list[Agent] = []

    async def stop_me() -> None:
        await holder[0].stop()

    config = configured(model=ScriptedModel(call("stop_me"), "still here"), tools=[stop_me])
    async with memory_world.agent(config) as agent:
        holder.append(agent)
        assert await agent.ask("go") == "still here"
        result = agent.session.context()[2].tool_result
    assert result is not None
    assert "from outside of its tools" in str(result.error)


@pytest.mark.parametrize("way", ["tool", "thread", "hook", "task", "resume"])
async def test_what_an_agent_waits_for_cannot_wait_for_the_agent(
    memory_world: World, configured: Configure, way: str
) -> None:
    """It would hang for ever; what was begun there, and goes on by itself, may."""
    found: list[BaseException] = []
    answers: list[str] = []

    async def ask_me() -> str:
        if way == "task":
            group.start_soon(later)
            return "begun"
        if way == "resume":
            return str(await agent.resume())
        return await agent.ask("and?")

    async def later() -> None:
        await over.wait()
        answers.append(await agent.ask("and?"))
        answered.set()

    def from_a_thread() -> str:
        return anyio.from_thread.run(agent.ask, "and?")

    async def hook(event: AgentEvent, context: AgentContext) -> None:
        if way == "hook" and isinstance(event, TurnEnded):
            try:
                await agent.ask("and?")
            except SessionError as error:
                found.append(error)

    over, answered = anyio.Event(), anyio.Event()
    tools = [from_a_thread if way == "thread" else ask_me]
    script = ScriptedModel(*[] if way == "hook" else [call(tools[0].__name__)], lambda _: "done")
    config = configured(model=script, tools=tools, lifecycle_hooks=[hook])
    async with anyio.create_task_group() as group, memory_world.agent(config) as agent:
        assert await agent.ask("go") == "done"
        results = [one.tool_result for one in agent.session.context() if one.tool_result]
        over.set()
        if way == "task":
            await answered.wait()
    if way == "task":
        assert answers == ["done"]
    else:
        told = str(found[0]) if way == "hook" else str(results[0].error)
        assert "agent 'ada' would wait for itself" in told


async def test_another_thread_is_told_what_to_do(
    memory_world: World, configured: Configure
) -> None:
    """S1-4."""
    async with memory_world.connect() as sessions:
        async with await made(sessions, configured()) as agent:
            await anyio.to_thread.run_sync(
                lambda: anyio.from_thread.run(agent.post_user_message, "from a thread")
            )

            def stray() -> None:
                anyio.run(agent.post_user_message, "astray")

            with pytest.raises(WrongLoopError, match="thread"):
                await anyio.to_thread.run_sync(stray)
        users = [one.text for one in agent.session.context() if one.role == "user"]
    assert users == ["from a thread"]


async def test_a_plain_tool_is_told_that_it_runs_in_a_thread(
    memory_world: World, configured: Configure
) -> None:
    """S1-4: an event that is told from there would wake nobody, or break the loop."""

    def shout(context: AgentContext) -> str:
        told = AgentEvent(agent_id=context.agent_id)
        anyio.from_thread.run_sync(context.emit, told)
        for act in (agent.interrupt, lambda: context.emit(told)):
            with pytest.raises(WrongLoopError, match=r"anyio\.from_thread"):
                act()
        return "shouted"

    config = configured(model=ScriptedModel(call("shout"), "done"), tools=[shout])
    async with memory_world.agent(config) as agent:
        events = [event async for event in agent.stream("go")]
        result = agent.session.context()[2].tool_result
    assert result is not None
    assert result.result == "shouted"
    assert names(events).count("AgentEvent") == 1


async def test_a_stolen_session_ends_the_worker(memory_world: World, configured: Configure) -> None:
    model = Blocked()
    async with memory_world.connect() as sessions:
        agent = await made(sessions, configured(model=model))
        await agent.start()
        stream = agent.stream("go")
        await anext(stream)
        await model.reached.wait()
        for owner in memory_world.content.owners.values():  # type: ignore[union-attr]
            owner.alive = False  # as the others see it
        async with memory_world.connect() as others:
            async with others.open("ada", on_held="steal"):
                model.go.set()
                last = [event async for event in stream][-1]
        assert isinstance(last, TurnFailed)
        assert isinstance(last.error, LeaseLostError)
        await anyio.wait_all_tasks_blocked()
        assert not agent.runtime.is_running
        with pytest.raises(SessionClosedError):
            await agent.ask("anybody?")
        await agent.stop()
        (lost,) = sessions.lost  # what the turn had said, which somebody has to decide about
        assert await lost.discard_unsaved() == 3


async def test_who_waits_for_room_hears_that_the_worker_has_ended(
    memory_world: World, configured: Configure
) -> None:
    model = Blocked()
    async with memory_world.connect() as sessions:
        agent = await made(sessions, configured(model=model, inbox_size=1))
        await agent.start()
        await agent.post_user_message("go")
        await model.reached.wait()
        await agent.post_user_message("fills the inbox")

        async def post() -> None:
            with pytest.raises(SessionClosedError, match="takes no more messages"):
                await agent.post_user_message("waits for room")

        async with anyio.create_task_group() as group:
            group.start_soon(post)
            await anyio.wait_all_tasks_blocked()
            for owner in memory_world.content.owners.values():  # type: ignore[union-attr]
                owner.alive = False  # as the others see it
            async with memory_world.connect() as others, others.open("ada", on_held="steal"):
                model.go.set()
        await agent.stop()
        await sessions.lost[0].discard_unsaved()


async def test_a_drain_ends_the_running_turn_and_begins_no_other(
    memory_world: World, configured: Configure
) -> None:
    model = Blocked()
    async with memory_world.connect() as sessions:
        agent = await made(sessions, configured(model=model))
        await agent.start()
        stream = agent.stream("first")
        await anext(stream)
        await model.reached.wait()
        await agent.post_user_message("second")
        sessions.drain()
        model.go.set()
        assert isinstance([event async for event in stream][-1], TurnEnded)
        await agent.stop()
        users = [one.text for one in agent.session.context() if one.role == "user"]
    assert users == ["first"]


async def test_an_agent_is_started_in_one_task_and_stopped_in_another(
    memory_world: World, configured: Configure
) -> None:
    """No cancel scope of the agent stays open across a caller's code."""
    agents: list[Agent] = []
    async with memory_world.connect() as sessions:

        async def start() -> None:
            agents.append(await made(sessions, configured()))
            with anyio.CancelScope():
                await agents[0].start()

        async with anyio.create_task_group() as group:
            group.start_soon(start)
        assert await agents[0].ask("x") == "You said: x"
        async with anyio.create_task_group() as group:
            group.start_soon(agents[0].stop)
    assert not agents[0].runtime.is_running


async def test_cancelling_who_asks_does_not_cancel_the_turn(
    memory_world: World, configured: Configure
) -> None:
    model = Blocked(Chunk(text="on"))
    async with memory_world.connect() as sessions:
        async with await made(sessions, configured(model=model)) as agent:
            async with anyio.create_task_group() as group:
                group.start_soon(agent.ask, "go")
                await model.reached.wait()
                group.cancel_scope.cancel()
            model.go.set()
        assert agent.session.context()[-1].text == "on and on"


async def test_reasoning_and_fields_of_the_provider_are_kept(
    world: World, configured: Configure
) -> None:
    """What a provider needs back is kept on the message that had it."""
    import msgspec

    reply = Message(
        role="assistant",
        content="x",
        reasoning="because",
        tool_calls=(ToolCall("c1", "gauge", {}, {"thought": msgspec.Raw(b'"sig"')}),),
        extra={"signature": msgspec.Raw(b'{"a":1.50}')},
    )

    async def gauge() -> int:
        return 1

    config = configured(model=ScriptedModel(reply, "done"), tools=[gauge])
    async with world.agent(config) as agent:
        await agent.ask("go")
    context = await world.context()
    kept = context[1]
    assert (kept.reasoning, kept.extra, kept.tool_calls) == (
        "because",
        reply.extra,
        reply.tool_calls,
    )


async def test_a_turn_owns_what_its_worker_and_its_tools_append(
    world: World, configured: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    agents: list[Agent] = []

    async def note() -> str:
        agents[0].session.append(EncodedRecord("app:note", b'"1"'))
        return "noted"

    def note_in_a_thread() -> str:
        append = agents[0].session.append
        anyio.from_thread.run_sync(append, EncodedRecord("app:note", b'"2"'))
        return "noted"

    tools = [note, note_in_a_thread]
    model = ScriptedModel(call("note"), call("note_in_a_thread"), "done")
    async with world.agent(configured(model=model, tools=tools)) as agent:
        agents.append(agent)
        assert await agent.ask("go", turn_id="request-7") == "done"
        outside = [
            record.kind
            async for chunk in store_of(agent.session).read_log(agent.session.key)
            for record in chunk.records
            if record.kind == OUTSIDE
        ]
        assert outside == []
        notes = [item.value for item in await agent.session.history() if item.kind == "app:note"]
        assert notes == ["1", "2"]
    assert "another task appended" not in caplog.text


async def test_a_turn_that_is_asked_for_again_is_answered_as_before(
    world: World, configured: Configure
) -> None:
    """A request that is retried after a kill, or a lost connection, is one turn."""
    async with world.agent(configured(model=ScriptedModel("once"))) as agent:
        assert await agent.ask("go", turn_id="request-7") == "once"
        left = world.killed()
    model = ScriptedModel("twice")
    async with left.agent(configured(model=model)) as agent:
        events = [event async for event in agent.stream("go", turn_id="request-7")]
        assert [type(event).__name__ for event in events] == ["TurnEnded"]
        assert isinstance(events[0], TurnEnded)
        assert (events[0].text, events[0].replayed) == ("once", True)
        assert model.calls == 0
        assert [one.text for one in agent.session.context()] == ["go", "once"]


async def test_a_turn_that_ended_with_no_answer_is_told_with_what_the_model_said_in_it(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        async with session.turn("noted"):
            session.append(Message.user("go"), Message.assistant("yes"), Message.system("noted"))
        async with session.turn("silent"):
            session.append(Message.user("go on"))
    model = ScriptedModel("no")
    async with memory_world.agent(configured(model=model)) as agent:
        for turn, text in (("noted", "yes"), ("silent", "")):
            (event,) = [event async for event in agent.stream("go", turn_id=turn)]
            assert isinstance(event, TurnEnded)
            assert (event.text, event.replayed, event.message.role) == (text, True, "assistant")
        assert model.calls == 0


async def test_what_a_failed_turn_had_still_to_do_is_not_done_in_the_next(
    memory_world: World, configured: Configure
) -> None:
    def breaks(message: Message, context: AgentContext) -> Message:
        if message.text == "bad":
            context.enqueue(LLMUserMessageReadyEvent())
            raise KeyError("bad")
        return message

    model = ScriptedModel(lambda messages: "fine")
    config = configured(model=model, input_processors=[breaks])
    async with memory_world.agent(config) as agent:
        with pytest.raises(KeyError):
            await agent.ask("bad")
        assert await agent.ask("good") == "fine"
        assert model.calls == 1


async def test_who_listens_no_more_costs_nothing(
    memory_world: World, configured: Configure
) -> None:
    """A stream that was left, and not closed, does not take in events for ever."""
    async with memory_world.connect() as sessions:
        async with await made(sessions, configured()) as agent:
            listening, left = agent.events(), weakref.ref(agent.events())
            gc.collect()
            assert left() is None
            await agent.ask("go")
        assert [event async for event in listening]
