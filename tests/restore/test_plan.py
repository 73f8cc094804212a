"""Plans: what a restore would do is told before, by the very strategy that does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure.sync
from perdure import (
    ConfigError,
    CorruptRecordError,
    Message,
    SessionNotFoundError,
    Shutdown,
    StalePlanError,
    ToolCall,
    connect,
)
from perdure.agent import AgentConfig, AgentFactory, EchoModel
from perdure.memory.context import SNAPSHOT
from perdure.providers import parse
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE_KINDS
from perdure.restore import WorkingContextSnapshotBootstrapOptions
from perdure.restore.report import RestoreStep
from perdure.session.internals import store_below
from perdure.session.manager import SessionManager
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.types import RestorePlan
from tests.agent.conftest import World
from tests.session.conftest import Connect, again

__all__ = ["again"]

Options = WorkingContextSnapshotBootstrapOptions
ASKS = Message.assistant("Let me see.", tool_calls=[ToolCall("c1", "look"), ToolCall("c2", "look")])
QUIET = Shutdown(signals=False)


async def talk(sessions: SessionManager, *messages: Message, prompt: str = "Be kind.") -> None:
    config = AgentConfig(name="tester", model=EchoModel(), instructions=prompt)
    async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
        await agent.ask("hello")
        agent.session.append(*messages or (Message.user("more"),))


async def records_of(store: Store, id: str = "ada") -> list[Any]:
    return [one async for chunk in store.read_log(perdure.SessionKey(id)) for one in chunk.records]


# a plan is what the restore does


CASES: dict[str, tuple[str, dict[str, Any], tuple[Message, ...]]] = {
    "as it was": ("Be kind.", {}, ()),
    "another prompt": ("Be brief.", {}, ()),
    "another prompt, kept out": ("Be brief.", {"system_prompt_policy": "keep"}, ()),
    "another prompt, rebuilt": ("Be brief.", {"system_prompt_policy": "rebuild"}, ()),
    "a rebuild": ("Be kind.", {"rebuild": True}, ()),
    "a rebuild of one turn": ("Be kind.", {"rebuild": True, "raw_tail_turns": 1}, ()),
    "open calls": ("Be kind.", {}, (Message.user("go"), ASKS, Message.tool("c2", 2))),
    "open calls, dropped": ("Be kind.", {"dangling_calls": "drop"}, (Message.user("go"), ASKS)),
    "open calls in the middle": ("Be kind.", {}, (ASKS, Message.user("hello?"))),
}
SOUND = {"as it was", "another prompt, kept out", "a rebuild"}
"""Those of them that need no repair, unless a document is lost."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lost", [False, True], ids=["cached", "lost"])
async def test_a_plan_says_what_the_restore_does(
    memory_world: World, case: str, lost: bool
) -> None:
    """S0-4, S0-Q1, S1-G2, C8: the same source, steps and context; and planning writes nothing."""
    prompt, options, messages = CASES[case]
    async with memory_world.connect() as sessions:
        await talk(sessions, *messages)
    if lost:
        for session in memory_world.content.sessions.values():  # type: ignore[union-attr]
            del session.documents[SNAPSHOT]
    chosen = Options(**options)
    async with memory_world.connect() as sessions:
        before = await records_of(store_below(sessions))
        plan = await sessions.plan_restore("ada", system_prompt=prompt, options=chosen)
        assert await records_of(store_below(sessions)) == before
        assert await sessions.plan_restore("ada", system_prompt=prompt, options=chosen) == plan
        said = str(plan).splitlines()
        assert ("nothing to repair" in said) == plan.is_sound == (case in SOUND and not lost)
        assert any(line.startswith("replace ") for line in said) == plan.replaces
        config = AgentConfig(name="x", model=EchoModel(), instructions=prompt, restore=chosen)
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            report = agent.restore_report
            assert report is not None
            # The holder's own epoch record comes first.
            assert (plan.source, plan.head + 1) == (report.source, report.head)
            assert [step.what for step in plan.steps if step.what != "read"] == [
                step.what for step in report.steps if step.what not in {"read", "caught up"}
            ]
            assert agent.session.context() == list(plan.messages)
            changed = len(await records_of(store_below(sessions))) - len(before) - 1
            assert changed == (1 if plan.replaces else len(plan.appended))
            assert plan.system_prompt == agent.context.state.system_prompt


@pytest.fixture
def memory_world() -> World:
    from perdure.stores.memory import MemoryBacking

    return World(MemoryBacking())


async def test_a_prompt_that_is_refused_is_refused_by_the_plan(memory_world: World) -> None:
    """S0-Q1."""
    async with memory_world.connect() as sessions:
        await talk(sessions)
        options = Options(system_prompt_policy="error")
        with pytest.raises(ConfigError, match="system prompt of 'ada'"):
            await sessions.plan_restore("ada", system_prompt="Be brief.", options=options)
        assert (await sessions.plan_restore("ada", system_prompt="Be kind.", options=options)).head


# a session's own


async def test_a_session_plans_its_own_restore_and_carries_it_out(again: Connect) -> None:
    """C14: what was made up is appended, once; what the plan says is what comes back."""
    async with again(autosave=None) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("go"), ASKS, Message.tool("c2", 2))
        await ada.save()
        plan = await ada.plan_restore()
        assert (plan.source, plan.head, plan.is_sound) == ("rebuild", ada.version, False)
        assert plan.records_read == plan.head
        assert [one.tool_result.call_id for one in plan.appended if one.tool_result] == ["c1"]
        assert len(ada.context()) == 3
        await ada.apply(plan)
        assert ada.durable_version == ada.version
        assert ada.context() == list(plan.messages)
        after = await ada.plan_restore()
        assert (after.appended, after.is_sound) == ((), True)
        with pytest.raises(StalePlanError, match="plan again"):
            await ada.apply(plan)
    async with again() as sessions, sessions.open("ada") as ada:
        assert ada.context() == list(plan.messages)
        assert (await ada.plan_restore()).source == "snapshot"


async def test_a_plan_that_replaces_the_context_erases_nothing(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("go"), ASKS, Message.user("hello?"))
        await ada.save()
        plan = await ada.plan_restore()
        assert plan.replaces
        await ada.apply(plan)
        assert ada.context() == list(plan.messages)
        said = [item for item in await ada.history() if item.kind in MESSAGE_KINDS]
        assert len(said) == 3


async def test_what_is_unsaved_is_not_planned_for(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("saved"))
        await ada.save()
        ada.append(Message.user("not yet"))
        plan = await ada.plan_restore()
        assert [message.text for message in plan.messages] == ["saved"]
        with pytest.raises(StalePlanError, match="save it, and plan again"):
            await ada.apply(plan)


async def test_a_plan_needs_no_lease(tmp_path: Path) -> None:
    async with connect(tmp_path, autosave=None, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as ada:
            ada.append(Message.user("hello"))
            await ada.save()
            async with connect(tmp_path, shutdown=QUIET) as others:
                plan = await others.plan_restore("ada")
                assert [message.text for message in plan.messages] == ["hello"]
            ada.append(Message.user("on"))
            await ada.save()


async def test_of_nothing_a_plan_says_so(again: Connect) -> None:
    async with again() as sessions:
        plan = await sessions.plan_restore("nobody")
        assert (plan.source, plan.head, plan.messages, plan.is_sound) == ("fresh", 0, (), True)
        assert not await sessions.exists("nobody")


async def test_a_plan_for_a_provider_says_what_it_does_not_get(again: Connect) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s" * 9}
    reply = {
        "role": "assistant",
        "content": [thought, {"type": "text", "text": "4 m"}],
        "stop_reason": "end_turn",
    }
    async with again(autosave=None) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("depth?"), parse(reply, "anthropic"))
        await ada.save()
        assert (await ada.plan_restore("anthropic")).stripped == ()
        (step,) = (await ada.plan_restore("openai")).stripped
        assert step.what == "stripped"
        assert "anthropic" in step.detail
        assert (await ada.plan_restore()).stripped == ()
        with pytest.raises(ConfigError, match="target 'llama' is unknown"):
            await ada.plan_restore("llama")  # type: ignore[arg-type]


async def test_a_plan_is_told_in_words(tmp_path: Path) -> None:
    async with connect(tmp_path, autosave=None, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as ada:
            ada.append(Message.user("go"), ASKS)
            ada.memory.set("harbor", "north")
            await ada.aclose()
        (tmp_path / "agents" / "ada" / "memory.json").unlink()
        plan = await sessions.plan_restore("ada")
    said = str(plan).splitlines()
    assert said[0] == f"ada: the context comes from the snapshot as it is, up to {plan.head}"
    assert "rebuild   memory.json: it is lost, or not what its manifest says" in said
    assert "use       session.json" in said
    assert "append    a result for call c1" in said
    assert "nothing to repair" not in said
    assert "memory.json" in plan._repr_html_()


# rebuilding


async def test_a_rebuild_under_an_open_session_leaves_it_open(tmp_path: Path) -> None:
    """S0-Q3."""
    async with connect(tmp_path, autosave=None, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as ada:
            ada.append(Message.user("hello"))
            ada.memory.set("harbor", "north")
            await ada.save()
            report = await sessions.rebuild_working_context("ada")
            assert report.wrong == ()
            assert SNAPSHOT in report.rebuilt
            ada.append(Message.user("on"))
            await ada.save()
            assert await ada.memory.get("harbor") == "north"
            assert [message.text for message in ada.context()] == ["hello", "on"]
        assert (await sessions.rebuild_working_context("ada", dry_run=True)).wrong == ()
        with pytest.raises(SessionNotFoundError, match="no session nobody"):
            await sessions.rebuild_working_context("nobody")


async def test_documents_ahead_of_the_log_are_not_rebuilt() -> None:
    """S0-Q3: they know what the log lacks."""
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as ada:
            ada.append(Message.user("hello"), Message.assistant("hi"))
    stored = backing.sessions[SessionKey("ada")]
    del stored.entries[2:], stored.epochs[2:]  # as after a log that was restored from an old copy
    documents = dict(stored.documents)
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        for dry_run in (True, False):
            with pytest.raises(CorruptRecordError, match="the log ends at 2: records are missing"):
                await sessions.rebuild_working_context("ada", dry_run=dry_run)
    assert stored.documents == documents


async def test_an_agent_can_be_strict(tmp_path: Path) -> None:
    """C8."""
    async with connect(tmp_path, shutdown=QUIET) as sessions:
        await talk(sessions)
    (tmp_path / "agents" / "ada" / SNAPSHOT).write_bytes(b"{")
    strict = Options(strict=True)
    config = AgentConfig(name="x", model=EchoModel(), instructions="Be kind.", restore=strict)
    async with connect(tmp_path, shutdown=QUIET) as sessions:
        with pytest.raises(CorruptRecordError, match="strict=True"):
            await sessions.plan_restore("ada", options=strict)
        with pytest.raises(CorruptRecordError, match="strict=True"):
            await AgentFactory(sessions).restore_agent("ada", config)
        await sessions.rebuild_working_context("ada")
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert await agent.ask("again") == "You said: again"


def test_the_blocking_api_plans_too(tmp_path: Path) -> None:
    with perdure.sync.connect(tmp_path, autosave=None) as sessions:
        with sessions.open("ada") as ada:
            ada.append(Message.user("go"), ASKS)
            ada.save()
            plan: RestorePlan = ada.plan_restore("openai")
            assert len(plan.appended) == 2
            ada.apply(plan)
            assert ada.context() == list(plan.messages)
        assert sessions.plan_restore("ada").is_sound
        assert sessions.rebuild_working_context("ada", dry_run=True).dry_run


def test_a_plan_names_what_the_provider_does_not_get() -> None:
    plan = RestorePlan(
        key=SessionKey("a"), source="snapshot", stripped=(RestoreStep("thinking", "of another"),)
    )
    assert [line for line in plan.lines() if line.startswith("strip ")] == [
        f"strip     {RestoreStep('thinking', 'of another')}"
    ]
