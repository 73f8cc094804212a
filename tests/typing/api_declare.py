"""What an agent keeps by name, as users would use it. It is checked, never run."""

# pyright: strict
from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import perdure.sync
from perdure import PersistentConfig, PersistentState, SessionManager, connect
from perdure.agent import Agent, AgentConfig, EchoModel

config = AgentConfig(name="gus", model=EchoModel(), agent_dir="gus", home=Path("home"))


class Gus(Agent):
    user_id: str = ""

    async def setup(self) -> None:
        self.user_id = self.config.get("zep_user_id")


async def an_agent(sessions: SessionManager) -> None:
    async with Gus.create("gus-1", config=config, sessions=sessions) as gus:
        assert_type(gus, Gus)
        assert_type(gus.user_id, str)
        assert_type(gus.config, PersistentConfig)
        assert_type(gus.home, Path)
        assert_type(gus.persist_paths, tuple[str, ...])
        await gus.save_state("tasks", ["water"])
        assert_type(await gus.load_state("tasks", default=[]), Any)
        assert_type(await gus.list_state_keys(), list[str])
        assert_type(await gus.delete_state("tasks"), bool)
    assert_type(await Gus.create("gus-1", config=config), Gus)
    assert_type(await Agent.create("gus-1", config=config), Agent)


async def a_folder() -> None:
    config = await PersistentConfig("state", Path("persistence.yaml"), session="1", strict=False)
    assert_type(config, PersistentConfig)
    async with PersistentConfig(agent_name="gus") as entered:
        assert_type(entered.get("theme", "none"), Any)
        assert_type((entered.has("theme"), entered.declared("theme")), tuple[bool, bool])
        assert_type(entered.all(), dict[str, Any])
        await entered.set("theme", {"dark": True})
    states = PersistentState("state")
    await states.save_state("tasks", [])
    assert_type(await states.load_state("tasks"), Any)
    assert_type(await states.list_state_keys(), list[str])
    assert_type(await states.delete_state("tasks"), bool)


def connecting() -> None:
    assert_type(connect(config="persistence.yaml"), SessionManager)
    perdure.sync.connect(config=Path("persistence.yaml"))
