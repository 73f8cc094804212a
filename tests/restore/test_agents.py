"""An agent's restore from its first write to its next answer, by the seeds' requirements."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import perdure.agent
from perdure import Message, SessionKey, Shutdown, ToolCall, connect
from perdure.agent import AgentConfig, AgentFactory, EchoModel, MemoryManager, ScriptedModel, call
from perdure.agent.bootstrap import WorkingContextSnapshotRestoreStep
from perdure.memory.context import SNAPSHOT
from perdure.records.records import MESSAGE_KINDS
from perdure.restore import (
    WorkingContextSnapshotBootstrapOptions,
    WorkingContextSnapshotBootstrapper,
    WorkingContextSnapshotStore,
)
from perdure.session.internals import working_context
from perdure.stores.memory import MemoryBacking
from tests.agent.conftest import World
from tests.source_tree import ROOT

SOURCE = ROOT / "src" / "perdure"
QUIET = Shutdown(signals=False)


@pytest.fixture
def world() -> World:
    return World(MemoryBacking())


def config(**options: Any) -> AgentConfig:
    return AgentConfig(
        **{"name": "tester", "model": EchoModel(), "instructions": "Be kind."} | options
    )


def imports_of(path: Path) -> set[str]:
    """Return what a module imports when it runs: names for types aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        name
        for node in found
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }


# roles


def test_the_five_roles_know_no_more_than_they_have_to() -> None:
    """S0-5: pure, IO only, strategy only, triggers, construction only."""
    restore = SOURCE / "restore"
    strategy = imports_of(restore / "bootstrapper.py")
    assert not {name for name in strategy if name.startswith(("perdure.store", "perdure.session"))}
    stored = imports_of(restore / "snapshot_store.py")
    assert not stored & {f"perdure.restore.{one}" for one in ("bootstrapper", "rebuild")}
    serializer = imports_of(restore / "serializer.py")
    assert not {name for name in serializer if name.startswith(("perdure.store", "anyio"))}
    factory = imports_of(SOURCE / "agent" / "agent.py")
    assert not factory & {"perdure.restore.serializer", "perdure.restore.snapshot_store"}
    manager = imports_of(SOURCE / "agent" / "memory.py")
    assert "perdure.restore.serializer" not in manager


def test_restoring_has_one_entry() -> None:
    """S1-22: the factory's, and no service beside it."""
    assert callable(AgentFactory.restore_agent)
    assert not [name for name in perdure.agent.__all__ if name.endswith("RestoreService")]


# where, when


async def test_the_snapshot_lies_where_the_seed_says(tmp_path: Path) -> None:
    """S0-12: with the store's root at ``memory/``, and S0-27's fields in it."""
    async with connect(tmp_path / "memory", shutdown=QUIET) as sessions:
        async with await AgentFactory(sessions).create_agent(config(), agent_id="ada") as agent:
            await agent.ask("hello")
    path = tmp_path / "memory" / "agents" / "ada" / "working_context_snapshot.json"
    payload = json.loads(path.read_bytes())
    assert (payload["schema_version"], payload["agent_id"]) == (1, "ada")
    assert [one["role"] for one in payload["messages"]] == ["system", "user", "assistant"]


async def test_everything_is_durable_once_an_answer_is_there(world: World) -> None:
    """S0-19, S0-Q2: after each answer, without timers; a kill right then loses nothing."""
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(config(), agent_id="ada") as agent:
            for text in ("one", "two"):
                await agent.ask(text)
                assert agent.session.durable_version == agent.session.version
            expected, left = agent.session.context(), world.killed()
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config()) as agent:
            assert agent.session.context() == expected


async def test_durability_comes_at_boundaries_without_any_timer(world: World) -> None:
    """S0-Q2, S1-G1, S1-21: before a tool is called, with its results, and at the turn's end."""
    durable: list[tuple[str, list[str]]] = []

    def note(where: str) -> None:
        backing = world.content
        assert isinstance(backing, MemoryBacking)
        log = backing.sessions[SessionKey("ada")].entries
        durable.append((where, [one.kind for one in log if one.kind in MESSAGE_KINDS]))

    async def gauge() -> int:
        note("tool")
        return 4

    def answer(messages: Any) -> Any:
        note("model")
        return "4 m" if messages[-1].role == "tool" else call("gauge")

    made = config(model=ScriptedModel(answer), tools=[gauge])
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(made, agent_id="ada") as agent:
            await agent.ask("depth?")
            note("end")
    places = [where for where, _ in durable]
    assert places == ["model", "tool", "model", "end"]
    counts = [len(kinds) for _, kinds in durable]
    assert counts == sorted(counts)
    user, call_, result, end = (kinds for _, kinds in durable)
    assert len(user) >= 1  # the question, before anybody is asked
    assert len(call_) == len(user) + 1  # the wish, before it is done
    assert len(result) == len(call_) + 1  # what came of it, before the model reads it
    assert len(end) == len(result) + 1


async def test_restoring_reads_before_anything_is_written(world: World) -> None:
    """S1-18, S0-21: what is restored is what was left, and only the options ask for it."""
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config(), agent_id="ada") as agent:
            assert agent.context.state.restore_options is not None or agent.restore_report is None
            await agent.ask("hello")
            expected = agent.session.context()
    seen: list[int] = []

    class Watching:
        async def initialize(self, context: Any) -> None:
            seen.append(context.session.version)
            assert context.session.context() == expected

    async with world.connect() as sessions:
        chosen = WorkingContextSnapshotBootstrapOptions(max_episodic=1)
        made = config(workspace=Watching(), restore=chosen)
        agent = await AgentFactory(sessions).restore_agent("ada", made)
        assert agent.context.state.restore_options == chosen
        assert agent.restore_report is None  # made, not started
        async with agent:
            assert seen == [agent.session.version]
            assert agent.session.context() == expected


# counters


async def test_turns_records_and_epochs_go_on_where_they_stopped(world: World) -> None:
    """Defect d, S0-3: no number is given twice, after a clean end or a kill within a turn."""
    async with world.connect(autosave=None) as sessions, sessions.open("ada") as ada:
        async with ada.turn() as first:
            ada.append(Message.user("one"))
        async with ada.turn() as second:
            ada.append(Message.user("two"))
            await ada.save()
            left, version, epoch = world.killed(), ada.version, ada.epoch
    assert (first.id, second.id) == ("turn_0001", "turn_0002")
    async with left.connect(autosave=None) as sessions, sessions.open("ada") as ada:
        assert (ada.version, ada.epoch) == (version + 1, epoch + 1)
        async with ada.turn() as third:
            ada.append(Message.user("three"))
        assert third.id == "turn_0003"
    for document in left.content.sessions[SessionKey("ada")].documents:  # type: ignore[union-attr]
        assert document
    left.content.sessions[SessionKey("ada")].documents.clear()  # type: ignore[union-attr]
    async with left.connect() as sessions, sessions.open("ada") as ada:
        async with ada.turn() as fourth:
            pass
        assert fourth.id == "turn_0004"


async def test_a_restore_is_no_compaction(world: World) -> None:
    """Defect c: cached, caught up or rebuilt, neither counter nor time moves."""
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config(), agent_id="ada") as agent:
            await agent.ask("hello")
    for lose in ((), (SNAPSHOT,)):
        for name in lose:
            del world.content.sessions[SessionKey("ada")].documents[name]  # type: ignore[union-attr]
        async with world.connect() as sessions:
            made = config(instructions="Be brief.")
            async with await AgentFactory(sessions).restore_agent("ada", made) as agent:
                context = working_context(agent.session)
                assert (context.epoch_id, context.last_compaction_ts) == (0, None)


# a bad cache


@pytest.mark.parametrize("left", [b"", b"{", b"[]", b'{"schema_version":1,"agent_id":"ada"}'])
async def test_a_bad_snapshot_file_never_fails_a_bootstrap(tmp_path: Path, left: bytes) -> None:
    """Defects a and b: the restore step answers True, and no half-written file is there."""
    async with connect(tmp_path, shutdown=QUIET) as sessions:
        async with await AgentFactory(sessions).create_agent(config(), agent_id="ada") as agent:
            await agent.ask("hello")
            expected = agent.session.context()
    path = tmp_path / "agents" / "ada" / SNAPSHOT
    assert [one.name for one in path.parent.iterdir() if ".tmp" in one.name] == []
    path.write_bytes(left)
    async with connect(tmp_path, shutdown=QUIET) as sessions:
        agent = await AgentFactory(sessions).restore_agent("ada", config())
        assert await WorkingContextSnapshotRestoreStep().execute(agent.context)
        assert agent.context.restore_report is not None
        assert agent.context.restore_report.source == "rebuild"
        assert SNAPSHOT in agent.context.restore_report.damaged
        assert agent.session.context() == expected
        await agent.stop()


async def test_the_parts_work_together_as_the_seed_names_them(world: World) -> None:
    """S0-13, S0-11: bootstrapper, memory manager and store, each by its own name."""
    async with world.connect() as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("go"), Message.assistant(tool_calls=[ToolCall("c1", "look")]))
        memory = MemoryManager(ada)
        done = await WorkingContextSnapshotBootstrapper().bootstrap(
            memory, "Be kind.", WorkingContextSnapshotBootstrapOptions()
        )
        assert done.source == "rebuild"
        assert [one.role for one in ada.context()] == ["system", "user", "assistant", "tool"]
        store = memory.working_context_snapshot_store
        assert isinstance(store, WorkingContextSnapshotStore)
        assert not await store.exists("ada")
        await ada.aclose()
    async with world.connect() as sessions, sessions.open("ada") as ada:
        store = MemoryManager(ada).working_context_snapshot_store
        assert await store.exists("ada")
        payload = await store.read("ada")
        assert payload is not None
        await store.write("ada", payload)
