"""An agent's home is archived when it stops, and brought back when it starts."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import perdure
from perdure.agent import Agent, EchoModel
from perdure.errors import ConfigError, NotStorableError
from perdure.session.manager import SessionManager
from tests.archive.trees import look, make

YAML = """\
version: 1
persist_paths:
  - data/
  - .config/
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a folder of code with a persistence.yaml."""
    return make(tmp_path / "code", {"persistence.yaml": YAML})


def agent(sessions: SessionManager, code: Path, id: str = "gus", **options: object) -> object:
    return Agent.create(
        id,
        model=EchoModel(),
        sessions=sessions,
        agent_dir=code,
        **options,  # type: ignore[arg-type]
    )


async def test_the_files_of_an_agent_follow_it_to_another_machine(
    tmp_path: Path, code: Path
) -> None:
    """S4-8, S4-17: archived at the session's end, restored at the next start; deletions, too."""
    files = {"data/notes.txt": "1", "data/gone.txt": "1", ".config/x": "1", ".bashrc": "poison"}
    url = f"file:{tmp_path}/store"
    async with perdure.connect(url) as sessions:
        async with agent(sessions, code, home=tmp_path / "one") as gus:
            make(gus.home, files)
            await gus.archives.save(label="by hand")
            (gus.home / "data/gone.txt").unlink()
        async with agent(sessions, code, home=tmp_path / "two") as gus:
            assert {path for path, data in look(gus.home).items() if data} == {
                "data/notes.txt",
                ".config/x",
            }
            (gus.home / "data/notes.txt").write_text("2")
    async with perdure.connect(url) as sessions, agent(sessions, code, home=tmp_path / "one"):
        assert (tmp_path / "one/data/notes.txt").read_text() == "2"
        assert (tmp_path / "one/.bashrc").read_text() == "poison"


async def test_in_the_file_store_the_home_lies_with_the_agent(tmp_path: Path, code: Path) -> None:
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        async with agent(sessions, code) as gus:
            make(gus.home, {"data/a": "1"})
            assert str(gus.home) == gus.archives.home
        async with agent(sessions, code) as gus:
            assert [one.files for one in await gus.archives.all()] == [1]


async def test_each_agents_archives_lie_in_its_own_session(tmp_path: Path, code: Path) -> None:
    """S4-17: (2.4) sub-agents are agents: each is saved by itself, and resumed by its name."""
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        async with agent(sessions, code, "boss", home=tmp_path / "boss") as boss:
            make(boss.home, {"data/who": "boss"})
            async with agent(sessions, code, "boss.helper", home=tmp_path / "helper") as helper:
                make(helper.home, {"data/who": "helper"})
            await boss.save_state("delegations", {"helper": "boss.helper"})
        async with agent(sessions, code, "boss", home=tmp_path / "again") as boss:
            name = (await boss.load_state("delegations"))["helper"]
            async with agent(sessions, code, name, home=tmp_path / "helper again") as helper:
                assert (helper.home / "data/who").read_text() == "helper"
            assert (boss.home / "data/who").read_text() == "boss"


@pytest.mark.parametrize(("archive", "count"), [(None, 0), (True, 1), (False, 0)])
async def test_without_persist_paths_it_is_asked_for(
    tmp_path: Path, archive: bool | None, count: int
) -> None:
    code = make(tmp_path / "code", {"persistence.yaml": "version: 1\n"})
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        async with agent(sessions, code, archive=archive) as gus:
            make(gus.home, {"a": "1"})
        async with agent(sessions, code, archive=False) as gus:
            assert len(await gus.archives.all()) == count


async def test_a_failure_to_archive_is_raised_and_the_session_is_saved(
    tmp_path: Path, code: Path
) -> None:
    """S4-17: (2.4) failures were only logged; state is saved whatever becomes of the files."""
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        with pytest.raises(NotStorableError, match="is refused"):
            async with agent(sessions, code) as gus:
                await gus.ask("Hello")
                make(gus.home, {"data/A": "1", "data/a": "1"})
        assert gus.session.durable_version == gus.session.version
        async with agent(sessions, code, archive=False) as gus:
            assert len(gus.session.context()) == 2


async def test_without_a_home_it_is_said(
    tmp_path: Path, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with perdure.connect("memory:") as sessions:
        async with agent(sessions, code):
            assert "persist_paths not kept" in caplog.text
        with pytest.raises(ConfigError, match="give the home folder"):
            async with agent(sessions, code, "other", archive=True):
                pass


async def test_a_stop_that_is_cancelled_archives_all_the_same(tmp_path: Path, code: Path) -> None:
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        gus = await agent(sessions, code)  # type: ignore[misc]
        await gus.start()
        make(gus.home, {"data/a": "1"})
        with anyio.CancelScope() as scope:
            scope.cancel()
            await gus.stop()
        assert scope.cancelled_caught
        async with agent(sessions, code, archive=False) as gus:
            assert [one.files for one in await gus.archives.all()] == [1]


async def test_a_home_may_begin_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    async with Agent.create("ada", model=EchoModel(), home="~/work") as agent:
        assert agent.home == tmp_path / "work"
        assert agent.archives.home == str(agent.home)
