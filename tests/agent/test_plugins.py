"""Persistent instructions, and what is stored of a configuration (S2-6, S2-17)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from perdure import ConfigError
from perdure.agent import AgentFactory, Features
from perdure.agent.plugins import MAX_INSTRUCTIONS, PersistentInstructions, StoredConfig
from tests.agent.conftest import Configure, World
from tests.agent.test_permissions import CONTEXT

ON = Features(persistent_instructions=True)


async def test_custom_instructions_are_read_and_never_touched(
    tmp_path: Path, configured: Configure
) -> None:
    """S2-6: from the agent's own folder; saving, folding and deleting leave it as it is."""
    world = World(tmp_path / "data")
    path = tmp_path / "data" / "agents" / "ada" / "custom_instructions.md"
    config = configured(features=ON, instructions="Be kind.")
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert agent.context.state.system_prompt == "Be kind."
            await agent.ask("hello")
    assert not path.exists()
    path.write_text("Answer in rhymes.\n")
    before = path.stat()
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
            assert agent.context.state.system_prompt == "Be kind.\n\nAnswer in rhymes."
            await agent.ask("hello")
            assert agent.session.context()[0].text.endswith("rhymes.")
        assert await sessions.delete("ada")
    after = path.stat()
    assert path.read_text() == "Answer in rhymes.\n"
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


async def test_without_the_feature_the_file_is_not_read(
    tmp_path: Path, configured: Configure
) -> None:
    """S2-12."""
    path = tmp_path / "mine.md"
    path.write_text("Answer in rhymes.")
    world = World(tmp_path / "data")
    async with world.connect() as sessions:
        factory = AgentFactory(sessions)
        async with await factory.create_agent(
            configured(custom_instructions=path), agent_id="ada"
        ) as agent:
            assert agent.context.state.system_prompt == ""


async def test_a_store_without_folders_needs_a_path(
    memory_world: World, configured: Configure, tmp_path: Path
) -> None:
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        with pytest.raises(ConfigError, match="custom_instructions=PATH"):
            await factory.create_agent(configured(features=ON), agent_id="ada")
        config = configured(features=ON, custom_instructions=tmp_path / "x.md")
        (tmp_path / "x.md").write_text("Rhyme.")
        async with await factory.create_agent(config, agent_id="ada") as agent:
            assert agent.context.state.system_prompt == "Rhyme."


async def test_changed_instructions_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.md"
    path.write_text("One.")
    instructions = PersistentInstructions(str(path))
    await instructions.read()
    state = await instructions.capture()
    assert state is not None
    with caplog.at_level(logging.INFO, "perdure.agent"):
        await instructions.restore(state, CONTEXT)
        assert caplog.records == []
        path.write_text("Two.")
        await instructions.read()
        await instructions.restore(state, CONTEXT)
    assert "have changed" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (MAX_INSTRUCTIONS + 1)])
async def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.md"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="x.md"):
        await PersistentInstructions(str(path)).read()


async def test_the_stored_configuration_keeps_what_is_not_configured_any_more() -> None:
    """S2-17: config{model, maxContextTokens, strategy}, and whatever else was there."""
    config = StoredConfig({"model": "new"})
    await config.restore({"model": "old", "temperature": 0.5}, CONTEXT)
    assert await config.capture() == {"model": "new", "temperature": 0.5}


async def test_an_agents_model_is_noted(world: World, configured: Configure) -> None:
    """S2-17."""
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            await agent.ask("hello")
            session = agent.session
        await session.aclose()
        found = await world.store.read_documents(session.key, {"plugins/agent_config.json"})
    document = found.found["plugins/agent_config.json"].data
    assert b'"model": "ScriptedModel"' in document
    assert b'"strategy": "compaction"' in document
