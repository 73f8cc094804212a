"""`config.set` without `await`: nothing that was set is lost but by a kill."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from perdure import ConfigError, PersistentConfig, connect
from perdure.agent import Agent, AgentFactory, EchoModel
from perdure.testing import SwitchedStore
from tests.agent.conftest import Configure, World, configured, memory_world, world

__all__ = ["configured", "memory_world", "world"]

SCHEMA = """
version: 1
config:
  theme: {init: default}
  user_name: {init: null}
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Return a folder with a persistence.yaml."""
    path = tmp_path / "code" / "persistence.yaml"
    path.parent.mkdir()
    path.write_text(SCHEMA)
    return path


@pytest.mark.parametrize("session", ["default", "another"])
async def test_an_agent_keeps_it(
    world: World, configured: Configure, beside: Path, session: str
) -> None:
    """In the default session, and by its lease from another one."""
    config = configured(agent_dir=beside.parent, session=session)
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            agent.config.set("theme", "dark")
            assert agent.config.get("theme") == "dark"
            agent.config.set("user_name", "Ada")
            agent.config.set("user_name", "Captain")
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert agent.config.all() == {"theme": "dark", "user_name": "Captain"}


async def test_it_is_kept_while_the_agent_goes_on(
    memory_world: World, configured: Configure, beside: Path
) -> None:
    async with memory_world.connect(autosave=None) as sessions:
        config = configured(agent_dir=beside.parent)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            agent.config.set("theme", "dark")
            with anyio.fail_after(60):
                while agent.session.durable_version < agent.session.version or not await kept(
                    agent
                ):
                    await anyio.sleep(0.01)
            left = memory_world.killed()
    async with left.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert agent.config.get("theme") == "dark"


async def kept(agent: Agent) -> bool:
    stored = await agent.session.state.get("_persistence")
    return bool(stored["values"]["theme"] == "dark")


async def test_in_a_folder_it_is_kept_when_the_block_ends(beside: Path, tmp_path: Path) -> None:
    async with PersistentConfig(tmp_path / "state", beside) as config:
        config.set("theme", "dark")
        assert config.get("theme") == "dark"
        config.set("theme", "light")
        await config.set("user_name", "Ada")
        assert saved(tmp_path / "state")["theme"] == "light"  # what came before is kept first
        config.set("theme", "dark")
    assert saved(tmp_path / "state") == {"theme": "dark", "user_name": "Ada"}


def saved(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "_persistence.json").read_text())["values"]
    return found


def test_in_a_folder_it_is_kept_when_the_process_ends(beside: Path, tmp_path: Path) -> None:
    code = f"""
import asyncio
from perdure import PersistentConfig

async def main():
    config = await PersistentConfig({str(tmp_path / "state")!r}, {str(beside)!r})
    config.set("theme", "dark")

asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert saved(tmp_path / "state")["theme"] == "dark"


async def test_what_cannot_be_kept_is_raised_or_logged_and_not_shown(
    beside: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    async with PersistentConfig(state, beside) as config:
        (state / "_persistence.json").unlink()
        (state / "_persistence.json").mkdir()  # in the way
        with pytest.raises(ConfigError, match="a pipe, a device or a folder"):
            await config.set("theme", "dark")
        assert config.get("theme") == "default"
        caplog.set_level(logging.ERROR)
        config.set("user_name", "Ada")
        assert config.get("user_name") == "Ada"
        await config.flush()
        assert config.get("user_name") is None
    assert [one.getMessage() for one in caplog.records] == [
        "config.user_name was set and could not be kept"
    ]


async def test_an_agent_whose_store_is_down_keeps_it_until_the_store_is_back(
    beside: Path, tmp_path: Path
) -> None:
    from perdure.stores.memory import MemoryBacking, MemoryStore

    backing = MemoryBacking()
    store = SwitchedStore(MemoryStore(backing=backing))
    async with connect(store) as sessions:
        options = {"model": EchoModel(), "agent_dir": beside.parent, "sessions": sessions}
        async with Agent.create("ada", **options) as agent:
            store.down()
            agent.config.set("theme", "dark")
            await anyio.sleep(0.01)
            assert agent.config.get("theme") == "dark"
            store.up()
    async with connect(MemoryStore(backing=backing)) as sessions:
        options = {"model": EchoModel(), "agent_dir": beside.parent, "sessions": sessions}
        async with Agent.create("ada", **options) as agent:
            assert agent.config.get("theme") == "dark"
