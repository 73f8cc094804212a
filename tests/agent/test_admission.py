"""Admission: what was posted is durable before work on it begins, and found again at a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    Message,
    NotStorableError,
    SessionClosedError,
    SessionError,
    Shutdown,
    TurnReusedError,
    connect,
)
from perdure.agent import (
    Agent,
    AgentConfig,
    AgentContext,
    AgentFactory,
    ApprovalRequested,
    Chunk,
    EventStream,
    Features,
    ScriptedModel,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnStarted,
    TurnUnfinished,
    call,
    open_matters,
)
from perdure.agent.bootstrap import MOST_ATTEMPTS
from perdure.agent.events import AgentEvent
from perdure.memory.ledger import LEDGER, change_entry
from perdure.records.records import ADMITTED, Record
from perdure.session.internals import store_of
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.agent.conftest import Configure, World
from tests.agent.test_worker import Blocked
from tests.forged import forge


async def said(agent: Agent) -> list[str]:
    """Return what people and the model have said, as the history has it."""
    items = await agent.session.history(limit=1000)
    return [item.value.text for item in items if item.value.role in {"user", "assistant"}]


async def restored(world: World, config: AgentConfig) -> tuple[list[str], list[Any]]:
    """Go on with what a kill has left; return what was said then, and how it ended."""
    async with world.agent(config) as agent:
        endings = await agent.resume()
        assert agent.unfinished == ()
        return await said(agent), list(endings)


async def killed_amid_answer(
    world: World, configured: Configure, *texts: str, turn_id: str | None = None
) -> World:
    """Return what a kill leaves while the model answers the first of some messages."""
    model = Blocked()
    async with world.agent(configured(model=model), autosave=None) as agent:
        for text in texts:
            await agent.post_user_message(text, turn_id=turn_id)
        await model.reached.wait()
        left = world.killed()
        model.go.set()
    return left


async def test_what_was_posted_is_durable_when_post_returns(
    world: World, configured: Configure
) -> None:
    """S1-4b, S1-6: several wait, the first is answered; after a kill all of them are found."""
    model = Blocked()
    config = configured(model=model)
    async with world.agent(config, autosave=None) as agent:
        for text in ("one", "two", "three"):
            await agent.post_user_message(text)
        left = world.killed()
        assert agent.unfinished == ()  # they wait, and will be answered
        model.go.set()
    async with left.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(), agent_id="ada")
        events = agent.events()
        async with agent:
            assert [one.message.text for one in agent.unfinished] == ["one", "two", "three"]
            endings = await agent.resume()
            assert [one.text for one in endings if isinstance(one, TurnEnded)] == [
                "You said: one",
                "You said: two",
                "You said: three",
            ]
        told = [one.unfinished async for one in events if isinstance(one, TurnUnfinished)]
        assert [one.message.text for one in told] == ["one", "two", "three"]


async def test_a_message_of_a_new_agent_is_found_although_it_has_no_history(
    world: World, configured: Configure
) -> None:
    """S0-21: nothing but the admission is in the log."""
    model = Blocked()

    async def stuck(message: Message, context: AgentContext) -> Message:
        model.reached.set()
        await model.go.wait()
        return message

    config = configured(model=model, input_processors=[stuck])
    async with world.agent(config, autosave=None) as agent:
        await agent.post_user_message("first of all")
        await model.reached.wait()
        left = world.killed()
        model.go.set()
    texts, _ = await restored(left, configured())
    assert texts == ["first of all", "You said: first of all"]


async def test_it_is_durable_before_an_input_processor_sees_it(
    memory_world: World, configured: Configure
) -> None:
    """S1-6: also of whoever asks, and does not wait for the admission."""
    left: list[World] = []

    def look(message: Message, context: AgentContext) -> Message:
        left.append(memory_world.killed())
        return message

    config = configured(input_processors=[look])
    async with memory_world.agent(config, autosave=None) as agent:
        await agent.ask("remember")
    texts, _ = await restored(left[0], configured())
    assert texts == ["remember", "You said: remember"]


async def test_a_message_that_cannot_be_stored_is_refused_at_the_door(
    memory_world: World, configured: Configure
) -> None:
    config = configured(inbox_size=1)
    async with memory_world.agent(config) as agent:
        for _ in range(3):  # it gives its room back
            with pytest.raises(NotStorableError):
                await agent.post_user_message(Message.user([object()]))
        assert await agent.ask("fine") == "You said: fine"


async def test_the_answer_settles_it_in_the_very_group_that_ends_the_turn(
    world: World, configured: Configure
) -> None:
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("hello")
            log = [
                (record.kind, record.end)
                async for chunk in world.store.read_log(agent.session.key)
                for record in chunk.records
            ]
            assert log[-2:] == [("admitted", False), ("turn", True)]
        documents = await world.store.read_documents(agent.session.key)
        assert LEDGER not in documents.found  # nothing is under way: no document


async def test_after_a_fold_what_is_left_is_found_in_a_document(
    world: World, configured: Configure
) -> None:
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(), agent_id="ada")
        await agent.start()
        agent.runtime.drain()
        agent.context.ledger.admit(Message.user("left"), None)
        await agent.stop()
    async with world.connect() as sessions:
        documents = await sessions.load("ada")
        assert documents is not None
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            assert LEDGER in (await world.store.read_documents(agent.session.key)).found
            assert [one.message.text for one in agent.unfinished] == ["left"]
            await agent.dismiss()
            assert agent.unfinished == ()


@pytest.mark.parametrize("damage", ["cut", "gone"])
async def test_a_damaged_ledger_is_made_anew_from_the_log(
    tmp_path: Path, configured: Configure, damage: str
) -> None:
    """S0-26: the document is a view of the log; what is under way does not depend on it."""
    world = World(tmp_path / "data")
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(), agent_id="ada")
        await agent.start()
        agent.context.ledger.admit(Message.user("left"), None)
        await agent.stop()
    assert await audited(world) == []
    path = tmp_path / "data" / "agents" / "ada" / LEDGER
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:40])
    async with world.agent(configured()) as agent:
        assert [one.message.text for one in agent.unfinished] == ["left"]
        await agent.ask("hello")
    assert await audited(world) == []  # it is folded again


async def audited(world: World) -> list[Any]:
    """Return what a whole check of the store finds."""
    from perdure.cli.check import audit

    async with world.connect():
        (listed,) = await world.store.sessions()
        found = await audit(world.store, listed.key)
        return [one for one in found.findings if one.problem]


async def test_resume_at_start_goes_on_before_what_is_posted_since(
    memory_world: World, configured: Configure
) -> None:
    left = await killed_amid_answer(memory_world, configured, "old")
    config = configured(on_unfinished="resume")
    async with left.agent(config) as agent:
        assert await agent.ask("new") == "You said: new"
        assert await said(agent) == ["old", "You said: old", "new", "You said: new"]
        assert agent.unfinished == ()


async def test_reporting_does_nothing_and_the_next_message_passes_it_over(
    memory_world: World, configured: Configure
) -> None:
    """A turn that was half done cannot go on once the conversation has."""
    left = await killed_amid_answer(memory_world, configured, "half done", "not begun")
    async with left.agent(configured()) as agent:
        assert agent.restore_report is not None
        steps = [one.what for one in agent.restore_report.steps]
        assert steps.count("unfinished") == 2
        assert await agent.ask("hello again") == "You said: hello again"
        assert [one.message.text for one in agent.unfinished] == ["not begun"]
        assert await agent.dismiss() == 1
    async with left.agent(configured()) as agent:
        assert agent.unfinished == ()


async def test_a_turn_of_a_given_id_is_resumed_as_that_turn(
    memory_world: World, configured: Configure
) -> None:
    left = await killed_amid_answer(memory_world, configured, "go", turn_id="request-7")
    async with left.agent(configured()) as agent:
        (ending,) = await agent.resume()
        assert ending.turn_id == "request-7"
        again = [one async for one in agent.stream("go", turn_id="request-7")]
        assert isinstance(again[-1], TurnEnded)
        assert again[-1].replayed
        assert await said(agent) == ["go", "You said: go"]
        assert agent.unfinished == ()


async def test_a_request_that_is_tried_again_goes_on_with_its_unfinished_turn(
    memory_world: World, configured: Configure
) -> None:
    """2.1: one request is one message and one turn, however often it is tried."""
    left = await killed_amid_answer(memory_world, configured, "go", turn_id="request-7")
    async with left.agent(configured()) as agent:
        for _ in range(2):
            assert await agent.ask("go", turn_id="request-7") == "You said: go"
        assert await said(agent) == ["go", "You said: go"]
        assert agent.unfinished == agent.context.ledger.messages == ()


async def test_what_kills_the_process_each_time_is_not_resumed_for_ever(
    memory_world: World, configured: Configure
) -> None:
    left = await killed_amid_answer(memory_world, configured, "poison")
    for _ in range(MOST_ATTEMPTS):
        begun, model = left, Blocked()
        async with begun.connect(autosave=None) as sessions:
            config = configured(model=model, on_unfinished="resume")
            agent = await AgentFactory(sessions).create_agent(config, agent_id="ada")
            async with agent:
                if agent.unfinished:  # it was reported, and is not tried again
                    assert agent.unfinished[0].attempts == MOST_ATTEMPTS
                    break
                await model.reached.wait()
                left = begun.killed()
                model.go.set()
    else:
        raise AssertionError("it was begun again and again")
    texts, endings = await restored(left, configured())  # by hand, it may
    assert [type(one) for one in endings] == [TurnEnded]
    assert texts.count("poison") == 1


async def test_stopping_with_the_agent_is_not_the_end_of_a_turn(
    world: World, configured: Configure
) -> None:
    """A deploy amid a turn: what came of the answer is kept and marked, and the turn goes on."""
    model = Blocked(Chunk(text="I was going"))
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(configured(model=model), agent_id="ada")
        await agent.start()
        await agent.post_user_message("go on")
        await agent.post_user_message("and then")
        await model.reached.wait()
        await agent.stop(finish=False)
        assert [one.message.text for one in agent.unfinished] == ["go on", "and then"]
    asked: list[list[str]] = []

    def says(messages: Sequence[Message]) -> str:
        asked.append([one.text for one in messages])
        return "the end" if messages[-1].text == "and then" else "on and on"

    config = configured(model=ScriptedModel(says))
    async with world.agent(config) as agent:
        assert [one.message.text for one in agent.unfinished] == ["go on", "and then"]
        await agent.resume()
        # Half an answer at the end is refused by some providers, and continued by others.
        assert asked == [["go on"], ["go on", "on and on", "and then"]]
        assert await said(agent) == ["go on", "I was going", "on and on", "and then", "the end"]
        partial = agent.session.context()[1]
        assert bytes(partial.extra["perdure_interrupted"]) == b"true"


async def test_interrupting_is_not_stopping(world: World, configured: Configure) -> None:
    """2.1: the turn ends as interrupted, what came is kept, and the agent goes on; for good."""
    model = Blocked(Chunk(text="partly"))
    async with world.agent(configured(model=model)) as agent:
        stream = agent.stream("go")
        await anext(stream)
        await model.reached.wait()
        assert agent.interrupt()
        assert isinstance([one async for one in stream][-1], TurnInterrupted)
        assert agent.unfinished == ()
        model.go.set()
        assert await agent.ask("well?") == "partly and on"
    async with world.agent(configured()) as agent:
        assert agent.unfinished == ()


async def test_a_turn_that_failed_can_be_tried_again(
    memory_world: World, configured: Configure
) -> None:
    """Whoever asked was told; nobody but a person has it tried again."""
    config = configured(model=ScriptedModel(RuntimeError("overloaded"), "back"))
    async with memory_world.agent(config) as agent:
        await agent.post_user_message("go")
        async with agent.events() as events:
            await until(events, TurnFailed)
        assert [one.error for one in agent.unfinished] == ["RuntimeError"]
        (ending,) = await agent.resume()
        assert isinstance(ending, TurnEnded)
        assert await said(agent) == ["go", "back"]
        assert agent.unfinished == ()


async def until(events: EventStream, kind: type[AgentEvent]) -> None:
    async for event in events:
        if isinstance(event, kind):
            return


async def test_a_full_inbox_makes_whoever_posts_wait_and_closing_tells_them(
    memory_world: World, configured: Configure
) -> None:
    """S1-4b: bounded; internal events pass it by."""
    model = Blocked()
    refused: list[str] = []
    async with memory_world.connect() as sessions:
        config = configured(model=model, inbox_size=1)
        agent = await AgentFactory(sessions).create_agent(config, agent_id="ada")
        await agent.start()
        await agent.post_user_message("running")
        await model.reached.wait()
        await agent.post_user_message("waiting")

        async def post(text: str) -> None:
            try:
                await agent.post_user_message(text)
            except SessionClosedError:
                refused.append(text)

        async with anyio.create_task_group() as group:
            group.start_soon(post, "no room")
            group.start_soon(post, "no room either")
            await anyio.wait_all_tasks_blocked()
            agent.runtime.drain()
        assert sorted(refused) == ["no room", "no room either"]
        kept = {one.asked or bytes(one.message) for one in agent.context.ledger.messages}
        assert not any(b"no room" in one for one in kept if isinstance(one, bytes))
        model.go.set()
        await agent.stop()


async def test_without_a_history_nothing_is_admitted(world: World, configured: Configure) -> None:
    """S2-12: what is said leaves no trace."""
    from perdure.agent import Features

    async with world.connect(autosave=None) as sessions:
        config = configured(features=Features(history=False))
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.post_user_message("secret words")
            await agent.ask("more of them")
            await agent.session.save()
            payloads = [
                record.payload
                async for chunk in world.store.read_log(agent.session.key)
                for record in chunk.records
            ]
    assert not any(b"secret words" in one or b"more of them" in one for one in payloads)


# a kill after each write of a turn with tools


async def look() -> str:
    """Look."""
    return "found"


def tools(messages: Sequence[Message]) -> Any:
    last = messages[-1]
    if last.tool_result is not None:
        return f"after {sum(one.tool_result is not None for one in messages)} results"
    return [call("look"), call("look")]


class Life:
    """What a kill after each write would leave, and what was admitted and answered by then."""

    def __init__(self) -> None:
        self.world = World(MemoryBacking())
        self.admitted: list[str] = []
        self.answered: list[str] = []
        self.images: list[tuple[World, list[str], list[str]]] = []

    async def live(self) -> None:
        store = MemoryStore(backing=self.world.content)  # type: ignore[arg-type]
        append_many = store.append_many

        async def photographed(batches: Any) -> Any:
            outcomes = await append_many(batches)
            self.images.append((self.world.killed(), [*self.admitted], [*self.answered]))
            return outcomes

        store.append_many = photographed  # type: ignore[method-assign]
        async with connect(store, shutdown=Shutdown(signals=False), autosave=None) as sessions:
            agent = await AgentFactory(sessions).create_agent(config(), agent_id="ada")
            async with agent, agent.events() as events:
                for text in ("one", "two"):
                    await agent.post_user_message(text)
                    self.admitted.append(text)
                    await until(events, TurnEnded)
                    self.answered.append(text)


def config() -> AgentConfig:
    return AgentConfig(name="tester", model=ScriptedModel(tools), tools=[look])


async def test_a_kill_at_each_step_of_a_turn_with_tools_loses_no_message_and_no_result() -> None:
    """S1-G1, 2.1: an admitted message never vanishes, and completed results are kept."""
    life = Life()
    await life.live()
    assert len(life.images) >= 8
    for world, admitted, answered in life.images:
        had = await results_in(world.killed())
        async with world.killed().connect() as sessions:
            agent = await AgentFactory(sessions).create_agent(config(), agent_id="ada")
            async with agent:
                open_ones = [one.message.text for one in agent.unfinished]
                asked = [text for text in await said(agent) if text in {"one", "two"}]
                for text in admitted:  # here, or still to come
                    assert text in asked or text in open_ones
                assert not set(open_ones) & set(answered)
                await agent.resume()
                assert agent.unfinished == ()
                texts = await said(agent)
                assert [text for text in texts if text in {"one", "two"}] == sorted(
                    {*asked, *open_ones}
                )
                assert texts.count("after 2 results") == texts.count("one")
                assert texts.count("after 4 results") == texts.count("two")
                kept = await agent.session.history(limit=1000)
                results = [item.value.tool_result for item in kept if item.kind == "tool_result"]
                assert [one for one in results if one in had] == had


async def results_in(world: World) -> list[Any]:
    """Return the real results in a log."""
    async with world.connect() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        items = await view.history(limit=1000)
        return [item.value.tool_result for item in items if item.kind == "tool_result"]


async def test_no_message_is_dropped_for_another_one(
    memory_world: World, configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1-4b: a ledger that is full takes no more, and says what to do."""
    monkeypatch.setattr("perdure.memory.ledger.MOST", 3)
    model = Blocked()
    config = configured(model=model)
    async with memory_world.agent(config) as agent:
        for text in ("one", "two", "three"):
            await agent.post_user_message(text)
        with pytest.raises(SessionError, match=r"not answered: continue them, resume\(\)"):
            await agent.post_user_message("four")
        left = memory_world.killed()
        model.go.set()
    async with left.agent(configured()) as agent:
        assert [one.message.text for one in agent.unfinished] == ["one", "two", "three"]
        second = agent.unfinished[1].id
        assert await agent.dismiss(second, "nobody") == 1
        assert [one.message.text for one in agent.unfinished] == ["one", "three"]
        assert await agent.dismiss() == 2
        assert await agent.ask("four") == "You said: four"


async def test_nobody_waits_for_what_was_given_up(
    memory_world: World, configured: Configure
) -> None:
    """S1-6: with the message go the approvals that its turn had asked for."""
    looks = ScriptedModel(call("look"), "done")
    async with memory_world.connect() as sessions:
        config = configured(model=looks, tools=[look], approve="ask")
        agent = await AgentFactory(sessions).create_agent(config, agent_id="ada")
        async with agent.events() as events:
            await agent.start()
            await agent.post_user_message("look")
            async for event in events:
                if isinstance(event, ApprovalRequested):
                    break
        await agent.stop(finish=False)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert [one.tool for one in agent.pending_approvals] == ["look"]
            await agent.dismiss()
            assert agent.pending_approvals == ()


async def killed_amid_an_answer(world: World, config: AgentConfig, look: Gate) -> World:
    """Return what a kill leaves of a message that was asked while nothing else was going on."""
    async with world.agent(config, autosave=None) as agent:
        async with anyio.create_task_group() as group:
            group.start_soon(agent.ask, "what is it?")
            await look.reached.wait()
            left = world.killed()
            look.go.set()
    return left


class Gate:
    """A tool that waits."""

    def __init__(self) -> None:
        self.reached, self.go = anyio.Event(), anyio.Event()

    async def look(self) -> str:
        """Look."""
        self.reached.set()
        await self.go.wait()
        return "it"


async def test_a_message_that_is_answered_at_once_is_admitted_and_stored_once(
    world: World, configured: Configure
) -> None:
    """S1-6: the ledger says where it stands, and finds it there after a kill."""
    gate = Gate()
    config = configured(model=ScriptedModel(call("look"), "done"), tools=[gate.look])
    left = await killed_amid_an_answer(world, config, gate)
    async with left.connect() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        (seen,) = (await open_matters(view)).unfinished
        assert (seen.message.text, seen.turn_id, seen.attempts) == ("what is it?", "turn_0001", 1)
        await sessions.copy("ada", "bea")
        async with sessions.open("bea") as copied:
            assert (await open_matters(copied)).unfinished == (seen,)
        config = configured(model=ScriptedModel("done"))
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert agent.unfinished == (seen,)
            records = [one async for one in records_of(agent)]
            assert sum(b"what is it?" in one.payload for one in records) == 1
            await agent.resume()
            assert agent.unfinished == ()
            assert await said(agent) == ["what is it?", "", "done"]


async def test_two_that_ask_at_once_are_both_answered_after_a_kill(
    memory_world: World, configured: Configure
) -> None:
    """S1-6: the first one's turn has begun when the second one waits; neither is passed over."""
    model = Blocked()
    config = configured(model=model)
    async with memory_world.agent(config, autosave=None) as agent:
        async with anyio.create_task_group() as group:
            first, second = agent.stream("first"), agent.stream("second")
            group.start_soon(anext, first)  # posts
            group.start_soon(anext, second)
            await model.reached.wait()
            left = memory_world.killed()
            model.go.set()
    config = configured(on_unfinished="resume")
    async with left.agent(config) as agent:
        await agent.ask("third")
        texts = [text for text in await said(agent) if not text.startswith("You")]
        assert (sorted(texts[:2]), texts[2:]) == (["first", "second"], ["third"])


async def records_of(agent: Agent) -> AsyncIterator[Record]:
    """Give what the store has of an agent."""
    async with aclosing(store_of(agent.session).read_log(agent.session.key)) as log:
        async for chunk in log:
            for record in chunk.records:
                yield record


@pytest.mark.parametrize("off", [0, 1, 50])
async def test_no_other_message_is_taken_for_the_one_that_was_admitted(
    memory_world: World, configured: Configure, off: int
) -> None:
    """S1-6: in a log whose records were numbered anew, what the ledger names is somebody else's."""
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("one")
            await agent.ask("two")
            seqs = [item.seq for item in await agent.session.history() if item.kind == "message"]
            where = seqs[2] + off
            entry = change_entry(ADMITTED, "x", at=1.0, turn="turn_0009", attempts=1, seq=where)
        await agent.session.aclose()
        await forge(memory_world.store, "ada", entry)
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            assert agent.unfinished == ()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_message_whose_turn_cannot_begin_is_kept(
    memory_world: World, configured: Configure, stops: bool
) -> None:
    """S1-6: a hook fails, or the agent stops, before the turn has taken the message in."""
    reached = anyio.Event()

    async def hook(event: AgentEvent, context: AgentContext) -> None:
        if isinstance(event, TurnStarted):
            reached.set()
            if stops:
                await anyio.sleep_forever()
            raise ValueError

    async with memory_world.connect() as sessions:
        config = configured(lifecycle_hooks=[hook])
        agent = await AgentFactory(sessions).create_agent(config, agent_id="ada")
        await agent.start()
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(SessionError if stops else ValueError):
                    await agent.ask("hello")

            group.start_soon(ask)
            await reached.wait()
            if stops:
                await agent.stop(finish=False)
        await agent.stop()
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as again:
            (one,) = again.unfinished
            assert (one.message.text, one.error) == ("hello", None if stops else "ValueError")
            (ending,) = await again.resume()
            assert ending.text == "You said: hello"


@pytest.mark.parametrize("door", ["ask", "post"])
async def test_another_message_under_the_id_of_an_ended_turn_is_refused_for_good(
    memory_world: World, configured: Configure, door: str
) -> None:
    async with memory_world.agent(configured()) as agent:
        assert await agent.ask("go", turn_id="request-7") == "You said: go"
        if door == "ask":
            with pytest.raises(TurnReusedError):
                await agent.ask("stop", turn_id="request-7")
        else:
            async with agent.events() as events:
                await agent.post_user_message("stop", turn_id="request-7")
                async for event in events:
                    if isinstance(event, TurnFailed):
                        assert isinstance(event.error, TurnReusedError)
                        break
        assert agent.unfinished == agent.context.ledger.messages == ()
        assert await agent.ask("go", turn_id="request-7") == "You said: go"
        assert await said(agent) == ["go", "You said: go"]
    async with memory_world.agent(configured(on_unfinished="resume")) as agent:
        assert agent.unfinished == ()


async def test_another_message_under_the_id_of_an_unfinished_turn_is_refused(
    memory_world: World, configured: Configure
) -> None:
    left = await killed_amid_answer(memory_world, configured, "go", turn_id="request-7")
    async with left.agent(configured()) as agent:
        with pytest.raises(TurnReusedError):
            await agent.ask("stop", turn_id="request-7")
        assert [one.message.text for one in agent.unfinished] == ["go"]
        assert await agent.ask("go", turn_id="request-7") == "You said: go"


async def test_of_an_agent_without_a_history_no_fingerprint_is_kept(
    memory_world: World, configured: Configure
) -> None:
    config = configured(features=Features(history=False))
    async with memory_world.agent(config) as agent:
        await agent.ask("go", turn_id="request-7")
        assert await agent.ask("stop", turn_id="request-7") == ""
