"""An agent's memory: keeping, persisting, compacting (S0-17 to S0-20, S1-7, S1-9 to S1-17)."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import CompactionError, Message, SessionError, ToolCall
from perdure.agent import (
    AgentFactory,
    CompactionCompleted,
    CompactionFailed,
    CompactionPolicy,
    CompactionStarted,
    Compactor,
    MemoryManager,
    Retriever,
    ScriptedModel,
    TurnFailed,
    call,
    render_openai,
)
from perdure.agent.llm.model import Chunk, Usage
from perdure.memory.compaction import EpisodicItem, SemanticItem, Summary, TurnTrace
from perdure.memory.documents import TurnPayload
from perdure.providers.tool_pairs import is_synthetic
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.records import TURN
from perdure.restore.rebuild import CompactionSnapshotBuilder, is_memory
from perdure.session.internals import store_below
from perdure.session.session import Session
from perdure.store import all_records
from tests.agent.conftest import Configure, World


def managed(session: Session, turn_id: str = "turn_0001", **parts: object) -> MemoryManager:
    memory = MemoryManager(session, **parts)  # type: ignore[arg-type]
    memory.turn_tracker.begin(turn_id, 1)
    return memory


ASKS = Message.assistant("Let me see", tool_calls=[ToolCall("c1", "look"), ToolCall("c2", "look")])


async def test_what_is_ingested_is_the_working_context(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("a") as session:
        memory = managed(session)
        said = [Message.user("go"), ASKS, Message.tool("c1", 1), Message.tool("c2", 2)]
        memory.ingest_user_message(said[0], "turn_0001")
        memory.ingest_tool_intent(said[1], "turn_0001")
        assert memory.ingest_tool_result(said[2], "turn_0001")
        assert memory.ingest_tool_result(said[3], "turn_0001")
        answer = Message.assistant("done")
        memory.ingest_assistant_response(answer, "turn_0001")
        found = memory.get_working_context_messages()
        assert [(one.role, one.content, one.tool_calls, one.tool_result) for one in found] == [
            (one.role, one.content, one.tool_calls, one.tool_result) for one in [*said, answer]
        ]


async def test_a_second_result_of_a_call_is_not_kept(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("a") as session:
        memory = managed(session)
        memory.ingest_tool_intent(ASKS, "turn_0001")
        assert memory.ingest_tool_result(Message.tool("c1", 1), "turn_0001")
        assert not memory.ingest_tool_result(Message.tool("c1", 2), "turn_0001")
        assert not memory.ingest_tool_result(Message.tool("c9", 2), "turn_0001")
        assert len(session.context()) == 2


async def test_what_belongs_to_another_turn_is_refused(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("a") as session:
        with pytest.raises(SessionError, match="turn_0009"):
            managed(session).ingest_user_message(Message.user("late"), "turn_0009")
        assert session.context() == []


async def test_open_calls_are_closed_once(memory_world: World) -> None:
    async with memory_world.connect() as sessions, sessions.open("a") as session:
        memory = managed(session)
        memory.ingest_tool_intent(ASKS, "turn_0001")
        memory.ingest_tool_result(Message.tool("c2", 2), "turn_0001")
        assert [memory.close_open_calls(), memory.close_open_calls()] == [1, 0]
        last = session.context()[-1]
        assert is_synthetic(last)
        assert last.tool_result is not None
        assert last.tool_result.call_id == "c1"


async def test_a_kill_right_after_persisting_gives_the_same_context(world: World) -> None:
    """S0-17: the log is what it makes durable; the file follows at the fold."""
    async with world.connect(autosave=None) as sessions, sessions.open("a") as session:
        memory = managed(session)
        memory.ingest_user_message(Message.user("go"), "turn_0001")
        memory.ingest_tool_intent(ASKS, "turn_0001")
        await memory.persist_working_context_snapshot()
        expected = memory.get_working_context_messages()
        left = world.killed()
        memory.ingest_tool_result(Message.tool("c1", 1), "turn_0001")
    async with left.connect() as sessions, sessions.open("a") as session:
        assert session.context() == expected


async def test_resetting_moves_no_counter_and_is_durable(world: World) -> None:
    """Defect c; S0-18."""
    async with world.connect(autosave=None) as sessions, sessions.open("a") as session:
        memory = managed(session)
        memory.ingest_user_message(Message.user("old"), "turn_0001")
        await memory.reset_working_context_snapshot(
            [Message.system("p"), Message.user("new")], system_prompt="p", reason="test"
        )
        left = world.killed()
    async with left.connect() as sessions, sessions.open("a") as session:
        from perdure.session.internals import working_context

        context = working_context(session)
        assert [one.text for one in session.context()] == ["p", "new"]
        assert (context.epoch_id, context.last_compaction_ts) == (0, None)
        assert [item.value.text for item in await session.history()] == ["old"]


async def test_the_raw_tail_is_what_was_said(world: World, configured: Configure) -> None:
    async with world.connect() as sessions:
        config = configured(instructions="p")
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            for text in "one", "two", "three":
                await agent.ask(text)
            everything = [one.text for one in await agent.memory.get_raw_tail(None)]
            newest = [one.text for one in await agent.memory.get_raw_tail(1)]
            without = [
                one.text for one in await agent.memory.get_raw_tail(1, exclude_turn_id="turn_0003")
            ]
    assert everything[0] == "one"
    assert len(everything) == 6
    assert newest == ["three", "You said: three"]
    assert without == ["two", "You said: two"]


# compaction


SMALL = CompactionPolicy(max_bytes=2400, keep_turns=1, episode_turns=2)
LONG = "It is a rather long answer. " * 22


async def compacting(world: World, configured: Configure, count: int) -> Sequence[Message]:
    """Let an agent talk beyond its budget; return what the model saw last."""
    model = ScriptedModel(lambda messages: f"answer to {messages[-1].text} {LONG}")
    config = configured(model=model, instructions="Be kind.", compaction=SMALL)
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            for number in range(count):
                await agent.ask(f"My number is {number}.")
    return model.last_messages


async def test_old_turns_become_memory_on_the_next_request(
    world: World, configured: Configure
) -> None:
    """S1-11, S1-14, S1-16: requested after an answer, done before the next, not with the turn in it."""
    last = await compacting(world, configured, 6)
    assert last[0] == Message.system("Be kind.")
    assert is_memory(last[1])
    assert "- My number is 0." in last[1].text
    assert "User: My number is " in last[1].text
    assert last[-1].text == "My number is 5."
    assert len(last) < 8
    async with world.connect() as sessions, sessions.open("a") as session:
        said = [item.value.text for item in await session.history(limit=100)]
        assert said[::2] == [f"My number is {number}." for number in range(6)]
        assert len(said) == 12  # S1-15: nothing is dropped


async def test_nothing_is_summed_up_twice_and_nothing_is_forgotten(
    world: World, configured: Configure
) -> None:
    await compacting(world, configured, 9)
    async with world.connect() as sessions, sessions.open("a") as session:
        episodes = await MemoryManager(session).retriever.episodic()
        covered = [turn_id for item in episodes for turn_id in item.turn_ids]
        assert covered == sorted(set(covered))
        raw = [one.text for one in await MemoryManager(session).get_raw_tail(None)]
        assert covered == [f"turn_{number:04d}" for number in range(1, len(covered) + 1)]
        first_raw = raw[0]
        assert first_raw == f"My number is {len(covered)}."
        assert all(len(item.turn_ids) <= SMALL.episode_turns for item in episodes)


async def test_a_compaction_moves_the_counter_and_tells(
    memory_world: World, configured: Configure
) -> None:
    from perdure.session.internals import working_context

    config = configured(model=ScriptedModel(lambda messages: LONG), compaction=SMALL)
    async with memory_world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(config, agent_id="a")
        events = agent.events()
        async with agent:
            for number in range(9):
                await agent.ask(str(number))
            epoch_id = working_context(agent.session).epoch_id
        told = [event async for event in events]
    assert sum(isinstance(event, CompactionStarted) for event in told) == epoch_id >= 2
    done = [event for event in told if isinstance(event, CompactionCompleted)]
    assert len(done) == epoch_id
    assert all(event.turns and event.bytes_after < event.bytes_before for event in done)


class Fails:
    """A summarizer that fails until it is mended."""

    def __init__(self) -> None:
        self.broken = True

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        if self.broken:
            raise ConnectionError("no summary today")
        return Summary(f"{len(turns)} turns")


async def test_a_compaction_that_fails_blocks_the_model_and_stays_asked_for(
    world: World, configured: Configure
) -> None:
    """S1-17: the flag goes only with success; until then the model is not asked."""
    summarizer = Fails()
    model = ScriptedModel(lambda messages: LONG)
    config = configured(model=model, compaction=SMALL, summarizer=summarizer)
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(config, agent_id="a")
        events = agent.events()
        async with agent:
            while not agent.memory.compaction_required:
                await agent.ask("go on")
            calls, before = model.calls, agent.session.context()
            with pytest.raises(CompactionError, match="turn_0001") as caught:
                await agent.ask("three")
            assert isinstance(caught.value.__cause__, ConnectionError)
            assert model.calls == calls
            assert agent.memory.compaction_required
            assert agent.session.context()[: len(before)] == before
            assert await agent.memory.retriever.episodic() == []
            summarizer.broken = False
            await agent.ask("four")
            assert model.calls == calls + 1
            first, *_ = await agent.memory.retriever.episodic()
            assert first.summary == "2 turns"
        told = [event async for event in events]
    failed = [event for event in told if isinstance(event, CompactionFailed)]
    assert [type(event.error) for event in failed] == [CompactionError]
    assert sum(isinstance(event, TurnFailed) for event in told) == 1


async def test_a_compaction_that_nobody_asked_for_and_that_fails_is_asked_for(
    world: World, configured: Configure
) -> None:
    """A message was too long for the budget: it may be gone when the next one comes."""
    config = configured(model=ScriptedModel(lambda _: "ok"), compaction=SMALL, summarizer=Fails())
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            for _ in range(2):
                await agent.ask("short")
            assert not agent.memory.compaction_required
            with pytest.raises(CompactionError):
                await agent.ask(LONG * 4)
            assert agent.memory.compaction_required


async def test_a_kill_after_a_compaction_gives_the_same_context(
    world: World, configured: Configure
) -> None:
    """One group: it has happened, or it has not."""
    model = ScriptedModel(lambda messages: LONG)
    config = configured(model=model, compaction=SMALL, instructions="p")
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            for number in range(5):
                await agent.ask(str(number))
            expected = agent.session.context()
            assert agent.memory.system_prompt_sha256 == hashlib.sha256(b"p").hexdigest()
            left = world.killed()
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("a", config) as agent:
            assert agent.session.context() == expected
            assert agent.restore_report is not None
            assert agent.restore_report.source in {"rebuild", "catch_up", "snapshot"}


@pytest.mark.parametrize("name", ["episodic.jsonl", "semantic.jsonl"])
async def test_a_truncated_line_costs_no_memory(
    tmp_path: Path, configured: Configure, name: str
) -> None:
    """Defect f of seed 1's project: its readers died of one. The log makes the file anew."""
    world = World(tmp_path / "data")
    await compacting(world, configured, 9)

    async def remembered() -> list[EpisodicItem | SemanticItem]:
        async with world.connect() as sessions, sessions.open("a") as session:
            retriever = MemoryManager(session).retriever
            return [*await retriever.episodic(), *await retriever.semantic()]

    before = await remembered()
    (file,) = (tmp_path / "data").rglob(name)
    file.write_bytes(file.read_bytes()[:-20])
    assert await remembered() == before
    assert len({type(one) for one in before}) == 2


async def test_the_model_may_report_a_budget_in_tokens(
    memory_world: World, configured: Configure
) -> None:
    class Counts:
        async def stream(self, messages: Sequence[Message], tools: object) -> AsyncIterator[Chunk]:
            tokens = 100 if len(messages) == 1 else 1_001
            yield Chunk(text="x", usage=Usage(input_tokens=tokens))

    policy = CompactionPolicy(max_tokens=1_000, keep_turns=0)
    async with memory_world.connect() as sessions:
        config = configured(model=Counts(), compaction=policy)
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            await agent.ask("one")
            assert not agent.memory.compaction_required
            await agent.ask("two")
            assert agent.memory.compaction_required


async def test_the_end_of_a_turn_says_which_tokens_its_calls_took(
    memory_world: World, configured: Configure
) -> None:
    class Counts:
        async def stream(self, messages: Sequence[Message], tools: object) -> AsyncIterator[Chunk]:
            if messages[-1].text == "fail":
                raise ValueError("fail")
            if messages[-1].role == "user":
                yield Chunk(tool_calls=(ToolCall("c", "gauge", {}),), usage=Usage(100, 20))
            else:
                yield Chunk(text="done", usage=Usage(150, 5))

    async def gauge() -> str:
        return "deep"

    config = configured(model=Counts(), tools=[gauge])
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            await agent.ask("one")
            with pytest.raises(ValueError, match="fail"):
                await agent.ask("fail")
        log = store_below(sessions).read_log(SessionKey("a"))
        records = [record for record in await all_records(log) if record.kind == TURN]
        turns = [decode(record.payload, TurnPayload) for record in records]
    assert [(turn.phase, turn.input_tokens, turn.output_tokens) for turn in turns] == [
        ("begin", 0, 0),
        ("end", 250, 25),
        ("begin", 0, 0),
        ("interrupted", 0, 0),
    ]


async def test_tools_stay_with_their_calls_through_a_compaction(
    world: World, configured: Configure
) -> None:
    async def gauge() -> str:
        return "deep " * 90

    model = ScriptedModel(lambda messages: "done" if messages[-1].role == "tool" else call("gauge"))
    config = configured(model=model, tools=[gauge], compaction=SMALL, renderer=None)
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            for number in range(4):
                await agent.ask(str(number))
            roles = [one.role for one in agent.session.context() if not is_memory(one)]
    before = [roles[at - 1] for at, role in enumerate(roles) if role == "tool"]
    assert len(roles) < 16
    assert before == ["assistant"] * len(before) != []


async def test_the_renderer_makes_what_the_model_takes(
    memory_world: World, configured: Configure
) -> None:
    """S1-7."""
    model = ScriptedModel(lambda messages: messages[-1]["content"].upper())  # type: ignore[index]
    async with memory_world.connect() as sessions:
        config = configured(model=model, renderer=render_openai, instructions="p")
        async with await AgentFactory(sessions).create_agent(config, agent_id="a") as agent:
            assert await agent.ask("hello") == "HELLO"
    assert model.last_messages == (
        {"role": "system", "content": "p"},
        {"role": "user", "content": "hello"},
    )


async def test_parts_can_be_replaced(memory_world: World) -> None:
    """S1-4c."""

    async def read(name: str) -> list[bytes]:
        return []

    async with memory_world.connect() as sessions, sessions.open("a") as session:
        retriever, compactor = Retriever(read), Compactor(Fails())
        memory = managed(session, retriever=retriever, compactor=compactor)
        assert memory.retriever is retriever
        assert memory.compactor is compactor


async def test_a_builder_of_ones_own_puts_the_context_together(memory_world: World) -> None:
    """S1-4c: what a compaction leaves is what the builder says."""

    class Builder(CompactionSnapshotBuilder):
        def build(self, *args: Any, **more: Any) -> tuple[Message, ...]:
            return (*super().build(*args, **more), Message.user("as I put it"))

    async with memory_world.connect() as sessions, sessions.open("a") as session:
        memory = managed(session, builder=Builder(), compaction_policy=SMALL)
        for number in range(4):
            turn_id = f"turn_{number + 1:04}"
            memory.turn_tracker.begin(turn_id, number + 1)
            async with session.turn(turn_id):
                memory.ingest_user_message(Message.user(LONG), turn_id)
                memory.ingest_assistant_response(Message.assistant(LONG), turn_id)
        memory.request_compaction()
        await memory.compact("p")
        assert session.context()[-1].text == "as I put it"
        assert len(session.context()) < 8


async def test_a_snapshot_that_was_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    """Also by those who were made before, and with what only its writer knows."""
    async with perdure.connect(tmp_path / "store", shutdown=perdure.Shutdown(signals=False)) as one:
        async with one.open("ada") as session, session.turn():
            session.append(Message.user("one"))
        await session.aclose()
        session = await one.open("ada")
        first, second = (MemoryManager(session).working_context_snapshot_store for _ in range(2))
        payload = await first.read("ada")
        assert payload is not None
        assert payload == await first.read("ada")
        changed = {**payload, "messages": [], "message_seqs": [], "atoms": [], "note": 1}
        await first.write("ada", changed)
        for store in (first, second):
            assert await store.exists("ada")
            assert (await store.read("ada") or {})["messages"] == []
            assert (await store.read("ada") or {})["note"] == 1
        await session.aclose()
        session = await one.open("ada")
        store = MemoryManager(session).working_context_snapshot_store
        assert (await store.read("ada") or {})["note"] == 1
