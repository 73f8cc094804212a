"""What the pages and the package say of persistence.yaml."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure import MissingExtraError, PersistentConfig
from perdure.agent import Agent, EchoModel
from perdure.config.schema import FIELDS, SECTIONS, VARIABLES, declaration_of
from perdure.config.yaml_reader import read
from perdure.stores.memory import MemoryBacking
from tests.agent.conftest import World
from tests.config.conftest import AgentFolder

PAGE = (Path(__file__).parents[2] / "docs" / "persistence.md").read_text("utf-8")


def test_the_page_documents_the_three_levels_and_every_key() -> None:
    """S4-14, S4-19: config, state, files; and each section, field and variable."""
    assert re.findall(r"^\| \*\*(\w+)\*\* \|", PAGE, re.MULTILINE) == ["Config", "State", "Files"]
    for name in (*SECTIONS, *FIELDS):
        assert re.search(rf"^\|.*`{name}`", PAGE, re.MULTILINE), name
    assert re.findall(r"^\| `\{\{ (\w+) \}\}` \|", PAGE, re.MULTILINE) == list(VARIABLES)
    for name in ("save_state", "load_state", "list_state_keys", "delete_state"):
        assert f"`{name}(" in PAGE or f"await agent.{name}(" in PAGE
        assert hasattr(Agent, name)


def test_the_files_on_the_page_are_ones_that_fit() -> None:
    """S4-19: nobody copies what does not work."""
    files = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(files) == 2
    for text in files:
        declaration_of(read(text.encode(), "page"), "page")


def test_the_class_is_exported() -> None:
    """S4-19: `from perdure import PersistentConfig`."""
    assert {"PersistentConfig", "PersistentState"} <= set(perdure.__all__)


async def test_config_and_states_go_wherever_the_session_goes(folder: AgentFolder) -> None:
    """S4-14: what is copied, forked or exported has them, without being told."""
    world = World(MemoryBacking())
    options = {"model": EchoModel(), "agent_dir": folder.path}
    async with world.connect() as sessions:
        async with Agent.create("gus-1", sessions=sessions, **options) as agent:  # type: ignore[arg-type]
            await agent.ask("Hello")
            await agent.config.set("user_name", "Captain")
            await agent.save_state("tasks", [1])
            values = agent.config.all()
        await sessions.copy("gus-1", "copy")
        await sessions.fork("gus-1", "fork")
        exported = await perdure.export_state(sessions, "gus-1")
        assert exported is not None
        await perdure.import_state(sessions, exported, id="imported")
        for id in ("copy", "fork", "imported"):
            async with Agent.create(id, sessions=sessions, **options) as agent:  # type: ignore[arg-type]
                found = agent.config.all()
                kept = found.pop("zep_session_id") == values["zep_session_id"]
                assert kept is (id == "imported")  # the others are new sessions
                assert found == {name: values[name] for name in found}
                assert len(found) == 3
                assert await agent.load_state("tasks") == [1]


async def test_pyyaml_is_needed_only_where_there_is_a_file(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-1: optional in every way."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert (await PersistentConfig(folder.state)).all() == {}
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[yaml\]'"):
        await PersistentConfig(folder.state, folder.yaml)


def test_no_import_takes_pyyaml_along() -> None:
    code = (
        "import sys, perdure.agent, perdure.config.persistent_config, perdure.config.yaml_reader;"
        "perdure.PersistentConfig, perdure.PersistentState, perdure.agent.Agent;"
        "sys.exit('yaml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
