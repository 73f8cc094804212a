"""In-context memory: what the model notes, sees again, and finds after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from perdure import ConfigError, Message
from perdure.agent import AgentFactory, Features, InContextMemory, ScriptedModel, call
from perdure.agent.requests import with_notes
from tests.agent.conftest import Configure, World
from tests.agent.test_permissions import CONTEXT

ON = Features(in_context_memory=True)


async def test_a_note_is_seen_in_each_later_request_and_after_a_restart(
    world: World, configured: Configure
) -> None:
    """S2-1, S2-6: kept as plugins/in_context_memory.json."""
    seen: list[str] = []

    def answer(messages: Sequence[Message]) -> Any:
        seen.append(messages[0].text if messages[0].role == "system" else "")
        if messages[-1].text == "remember":
            return call("note_set", key="color", value={"is": "blue"}, description="liked")
        return "ok"

    config = configured(model=ScriptedModel(answer), features=ON, instructions="Be kind.")
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("remember")
            # What is kept of the conversation does not hold the notes.
            assert agent.session.context()[0].text == "Be kind."
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert agent.notes is not None
            assert agent.notes.get("color") == {"is": "blue"}
            await agent.ask("what was it?")
            assert await agent.session.state.keys() == []
    assert seen[0] == "Be kind."
    for prompt in seen[1:]:
        assert prompt.startswith("Be kind.\n\n[Notes")
        assert '- color (liked): {"is":"blue"}' in prompt


async def test_the_model_can_drop_a_note(memory_world: World, configured: Configure) -> None:
    script = ScriptedModel(
        call("note_set", key="a", value="1"), "ok", call("note_drop", key="a"), "ok"
    )
    config = configured(model=script, features=ON)
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            notes = agent.notes
            assert notes is not None
            await agent.ask("one")
            assert notes.keys == ("a",)
            await agent.ask("two")
            assert notes.keys == ()


async def test_the_weightiest_notes_stay() -> None:
    notes = InContextMemory(max_entries=2)
    notes.set("a", 1, priority="high")
    notes.set("b", 2, priority="low")
    notes.set("c", 3)
    assert notes.keys == ("a", "c")
    notes.set("d", 4)
    assert notes.keys == ("a", "d")
    notes.set("a", 5, priority="low")
    notes.set("e", 6)
    assert notes.keys == ("d", "e")
    with pytest.raises(ConfigError, match="max_entries"):
        InContextMemory(max_entries=0)


async def test_a_state_in_the_seeds_form_comes_back_whole() -> None:
    """S2-17: {entries, config}; unknown fields, entries and settings are kept."""
    state: dict[str, Any] = {
        "entries": [
            {"key": "k", "value": 1, "priority": "critical", "later": [1, 2]},
            {"of another kind": True},
        ],
        "config": {"maxEntries": 20, "showTimestamps": True},
        "later": "x",
    }
    notes = InContextMemory()
    assert await notes.capture() is None
    await notes.restore(state, CONTEXT)
    assert await notes.capture() == state
    notes.set("k", 2)
    captured = await notes.capture()
    assert captured is not None
    assert captured["entries"][0]["later"] == [1, 2]


def test_notes_stand_behind_the_prompt_whatever_its_form() -> None:
    user = Message.user("hi")
    assert with_notes([user], "") == (user,)
    assert with_notes([user], "N") == (Message.system("N"), user)
    assert with_notes([Message.system("P"), user], "N")[0].text == "P\n\nN"
    parts = with_notes([Message.system([{"type": "text", "text": "P"}])], "N")
    assert parts[0].content == [{"type": "text", "text": "P"}, {"type": "text", "text": "N"}]
