"""A memory manager without an agent: its caller drives it (S0-11, S0-14, S1-4c, S1-6, S1-10)."""

from __future__ import annotations

import anyio
import pytest

from perdure import CorruptRecordError, Message, SessionError, StoreError, ToolCall
from perdure.agent import (
    AgentFactory,
    CompactionPolicy,
    MemoryManager,
    ScriptedModel,
    WorkingContextSnapshot,
    WorkingContextSnapshotBootstrapOptions,
    WorkingContextSnapshotBootstrapper,
    WorkingContextSnapshotSerializer,
    WorkingContextSnapshotStore,
)
from tests.agent.conftest import Configure, World

ASKS = Message.assistant(tool_calls=[ToolCall("c1", "look")])


def texts(messages: list[Message]) -> list[str]:
    return [one.text for one in messages]


async def test_a_turn_begins_with_the_message_that_names_it(world: World) -> None:
    async with world.connect(autosave=None) as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        assert memory.budget.count([]) == 0
        memory.ingest_user_message(Message.user("one"), "turn_0001")
        memory.ingest_tool_intent(ASKS, "turn_0001")
        assert memory.ingest_tool_result(Message.tool("c1", 7), "turn_0001")
        memory.ingest_assistant_response(Message.assistant("first"), "turn_0001")
        memory.ingest_user_message(Message.user("two"), "turn_0002")
        memory.ingest_assistant_response(Message.assistant("second"), "turn_0002")
        await memory.persist_working_context_snapshot()
        assert session.info.turns == 2
        assert texts(await memory.get_raw_tail(1, exclude_turn_id="turn_0002"))[0] == "one"
        turns = [trace.turn_id async for trace in memory.raw_traces()]
        assert turns == ["turn_0001"] * 5 + ["turn_0002"] * 2
        expected = memory.get_working_context_messages()
        left = world.killed()
    async with left.connect() as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        assert memory.get_working_context_messages() == expected
        memory.ingest_user_message(Message.user("three"), "turn_0003")
        assert session.info.turns == 3


async def test_a_turn_of_the_session_is_the_running_one(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        async with session.turn() as turn:
            memory.ingest_user_message(Message.user("one"), turn.id)
            memory.ingest_assistant_response(Message.assistant("first"), turn.id)
        assert session.info.turns == 1
        assert [trace.turn_id async for trace in memory.raw_traces()] == ["turn_0001"] * 2


async def test_an_agents_memory_is_its_workers(memory_world: World, configured: Configure) -> None:
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured()) as agent:
            with pytest.raises(SessionError, match="'turn_0009', but no turn is running"):
                agent.memory.ingest_user_message(Message.user("late"), "turn_0009")
            assert agent.session.context() == []


async def test_a_context_is_reset_with_messages_alone(world: World) -> None:
    async with world.connect(autosave=None) as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        memory.ingest_user_message(Message.user("old"), "turn_0001")
        await memory.reset_working_context_snapshot([Message.system("p"), Message.user("new")])
        left = world.killed()
    async with left.connect() as sessions, sessions.open("ada") as session:
        assert texts(session.context()) == ["p", "new"]
        options = WorkingContextSnapshotBootstrapOptions(system_prompt_policy="error")
        bootstrap = WorkingContextSnapshotBootstrapper().bootstrap
        done = await bootstrap(MemoryManager(session), "p", options)  # the prompt that it has
        assert done.system_prompt == "p"
        assert texts([one.value for one in await session.history()]) == ["old"]


async def test_raw_traces_say_which_event_brought_a_message(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        memory.ingest_user_message(Message.user("hello"), "turn_0001", "WebhookEvent")
        memory.ingest_assistant_response(Message.assistant("hi"), "turn_0001", source_event=None)
        await session.save()
        sources = [trace.source_event async for trace in memory.raw_traces()]
        assert sources == ["WebhookEvent", None]
        assert session.context("openai")[0] == {"role": "user", "content": "hello"}


async def test_a_snapshot_may_be_given(world: World) -> None:
    given = WorkingContextSnapshot(
        messages=(Message.system("p"), Message.user("before")),
        epoch_id=4,
        last_compaction_ts=1_738_100_000.0,
    )
    async with world.connect() as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session, working_context_snapshot=given)
        assert memory.working_context_snapshot == given
        memory.ingest_user_message(Message.user("now"), "turn_0001")
    async with world.connect() as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        assert texts(memory.get_working_context_messages()) == ["p", "before", "now"]
        assert memory.working_context_snapshot.epoch_id == 4


async def test_a_snapshot_is_written_as_the_serializer_makes_it(world: World) -> None:
    """Nothing was folded before; the payload does not say as of which record it is."""
    async with world.connect() as sessions, sessions.open("ada") as session:
        memory = MemoryManager(session)
        memory.ingest_user_message(Message.user("long"), "turn_0001")
        store = memory.working_context_snapshot_store
        snapshot = WorkingContextSnapshot(messages=(Message.user("short"),))
        payload = WorkingContextSnapshotSerializer().serialize(snapshot, {"agent_id": "ada"})
        await store.write("ada", payload)
        read = await store.read("ada")
        assert read is not None
        assert [one["content"] for one in read["messages"]] == ["short"]
        assert texts(session.context()) == ["long"]  # it is a cache, for the next restore
    async with world.connect() as sessions, sessions.open("ada") as session:
        assert texts(session.context()) == ["short"]
        assert session.restore_report.source == "snapshot"
        assert texts([one.value for one in await session.history()]) == ["long"]


async def test_what_is_no_snapshot_is_not_written(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        session.append(Message.user("x"))
        store = MemoryManager(session).working_context_snapshot_store
        assert isinstance(store, WorkingContextSnapshotStore)
        for payload, why in (
            ({"schema_version": 1, "agent_id": "ada"}, "not well-formed"),
            ({"schema_version": 9, "agent_id": "ada", "messages": []}, "schema version"),
            ({"schema_version": 1, "agent_id": "bob", "messages": []}, "bob"),
        ):
            with pytest.raises(CorruptRecordError, match=why):
                await store.write("ada", payload)
        read = await store.read("ada")
        assert read is not None
        with pytest.raises(StoreError, match="leave seq out"):
            await store.write("ada", {**read, "seq": 99})


async def test_a_snapshot_says_its_epoch_before_the_first_compaction(memory_world: World) -> None:
    """S0-27: the fields are there from the beginning."""
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        session.append(Message.user("x"))
    async with memory_world.connect() as sessions, sessions.open("ada") as session:
        payload = await MemoryManager(session).working_context_snapshot_store.read("ada")
    assert payload is not None
    assert (payload["epoch_id"], payload["last_compaction_ts"]) == (0, None)


async def test_a_compaction_is_folded(memory_world: World, configured: Configure) -> None:
    policy = CompactionPolicy(max_bytes=2400, keep_turns=1)
    config = configured(model=ScriptedModel(lambda messages: "long " * 200), compaction=policy)
    folded = anyio.Event()
    async with memory_world.connect() as sessions:
        sessions.on("folded", lambda _: folded.set())
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            while not agent.memory.compaction_required:
                await agent.ask("go on")
            assert not folded.is_set()
            await agent.ask("and now?")
            with anyio.fail_after(60):
                await folded.wait()
            memory = agent.memory
            payload = await memory.working_context_snapshot_store.read("ada")
            assert payload is not None
            assert payload["epoch_id"] == memory.working_context_snapshot.epoch_id > 0


async def test_before_the_first_fold_nothing_is_missing(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("hello")
            left = memory_world.killed()
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", configured()) as agent:
            report = agent.restore_report
            assert report is not None
            assert "no snapshot yet" in str(report)
            assert "missing" not in str(report)
