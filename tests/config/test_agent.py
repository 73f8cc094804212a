"""An agent's config, states and home: in its session, whatever store that is in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from perdure import (
    ConfigError,
    LeaseHeldError,
    NotStorableError,
    SessionError,
    Shutdown,
    UnknownConfigKeyError,
    connect,
)
from perdure.agent import Agent, AgentConfig, AgentContext, AgentFactory, EchoModel
from perdure.session.manager import SessionManager
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.agent.conftest import World
from tests.config.conftest import AgentFolder


@pytest.fixture(params=["memory", "file"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(MemoryBacking() if request.param == "memory" else tmp_path / "data")


def made(folder: AgentFolder, sessions: SessionManager, **options: object) -> object:
    options = {"model": EchoModel(), "agent_dir": folder.path, **options}
    return Agent.create("gus-1", sessions=sessions, **options)  # type: ignore[arg-type]


async def run(folder: AgentFolder, world: World, **options: object) -> dict[str, object]:
    """Run the agent once, as a process of its own would, and return its config."""
    async with world.connect() as sessions, made(folder, sessions, **options) as agent:
        await agent.ask("Hello")
        return agent.config.all()


async def test_an_agent_keeps_its_config_and_resuming_preserves_all_of_it(
    folder: AgentFolder, world: World
) -> None:
    """S4-7, S4-15, S4-16, S4-18, S4-G3: a resumed session is no new one."""
    first = await run(folder, world)
    assert re.fullmatch("gus::[0-9a-f]{8}", str(first["zep_user_id"]))
    assert await run(folder, world) == first
    assert await run(folder, world.killed()) == first


async def test_a_new_session_shares_what_is_preserved_and_has_the_rest_for_itself(
    folder: AgentFolder, world: World
) -> None:
    """S4-6, S4-18, S4-G3: the user id is kept, the session id is another; and stays another."""
    first = await run(folder, world)
    second = await run(folder, world, session="second")
    assert second["zep_user_id"] == first["zep_user_id"]
    assert second["zep_session_id"] != first["zep_session_id"]
    assert await run(folder, world, session="second") == second
    assert await run(folder, world) == first


async def test_a_second_session_leaves_the_first_ones_own_values_in_use(
    folder: AgentFolder, world: World
) -> None:
    """S4-G2: what another session declares for itself is no orphan."""
    first = await run(folder, world)
    await run(folder, world, session="second")
    async with world.connect() as sessions:
        view = await sessions.load("gus-1")
        assert view is not None
        stored = await view.state.get("_persistence")
    assert stored["values"] == first
    assert stored["orphans"] == {}


async def test_a_key_that_is_shared_from_now_on_is_one_for_all(
    folder: AgentFolder, world: World
) -> None:
    """S4-6: a session's own value of before is put aside, and not shown."""
    await run(folder, world)
    second = await run(folder, world, session="second")
    folder.declare(folder.yaml.read_text().replace("on_new_session: regenerate", ""))
    first = await run(folder, world)
    after = await run(folder, world, session="second")
    assert after["zep_session_id"] == first["zep_session_id"] != second["zep_session_id"]


async def test_what_one_session_sets_all_the_others_have(folder: AgentFolder, world: World) -> None:
    async with world.connect() as sessions, made(folder, sessions, session="a") as agent:
        await agent.config.set("user_name", "Captain")
        await agent.config.set("zep_session_id", "mine")
    assert (await run(folder, world, session="b"))["user_name"] == "Captain"
    assert (await run(folder, world))["user_name"] == "Captain"
    assert (await run(folder, world, session="a"))["zep_session_id"] == "mine"


async def test_agents_of_one_process_that_begin_at_once_share_one_value(
    folder: AgentFolder, world: World
) -> None:
    """S4-G4: two sessions begin at the same moment; the user id is made once."""
    users: list[object] = []
    async with world.connect() as sessions:

        async def begin(session: str) -> None:
            async with made(folder, sessions, session=session) as agent:
                users.append(agent.config.get("zep_user_id"))

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(begin, f"s{number}")
            group.start_soon(begin, "default")
    assert len(users) == 6
    assert len(set(users)) == 1


async def test_a_new_conversation_in_the_same_session_regenerates(
    folder: AgentFolder, world: World
) -> None:
    """S4-G3: load_on_create=False begins anew."""
    from perdure.agent import PersistentSession

    first = await run(folder, world)
    anew = PersistentSession(load_on_create=False)
    second = await run(folder, world, persistent_session=anew)
    assert second["zep_session_id"] != first["zep_session_id"]
    assert second["zep_user_id"] == first["zep_user_id"]


async def test_a_session_that_was_opened_as_a_new_one_regenerates(
    folder: AgentFolder, world: World
) -> None:
    """S4-G3: ``open(new=True)`` never resumes; the agent's own values are made for it."""
    first = await run(folder, world)
    async with world.connect() as sessions:
        for name, is_there in (("default", True), ("second", False)):
            with pytest.raises(SessionError) if is_there else contextlib.nullcontext():
                await sessions.open("gus-1", session=name, new=True)
        async with made(folder, sessions, session="second") as agent:
            second = agent.config.all()
        with pytest.raises(SessionError, match="exists"):
            await made(folder, sessions, session="second", if_exists="error")
        third = await made(folder, sessions, session="third", if_exists="error")
        async with third:
            assert third.config.get("zep_session_id") not in {
                first["zep_session_id"],
                second["zep_session_id"],
            }
    assert second["zep_session_id"] != first["zep_session_id"]
    assert second["zep_user_id"] == first["zep_user_id"]


async def test_what_another_process_holds_is_waited_for_and_then_said(
    folder: AgentFolder, tmp_path: Path
) -> None:
    """S4-G4: whoever talks in the default session keeps it; nothing is written past its lease."""
    backing = MemoryBacking()
    shutdown = Shutdown(signals=False)
    async with connect(MemoryStore(backing=backing), shutdown=shutdown) as theirs:
        async with theirs.open("gus-1") as held:
            async with connect(MemoryStore(backing=backing), shutdown=shutdown) as sessions:
                with pytest.raises(LeaseHeldError, match="default session"):
                    async with made(folder, sessions, session="b", wait=0):
                        pass
            await held.save()  # it was not taken away
        await (await theirs.open("gus-1")).aclose()
        async with connect(MemoryStore(backing=backing), shutdown=shutdown) as sessions:
            async with made(folder, sessions, session="b", wait=0) as agent:
                assert agent.config.has("zep_user_id")


async def test_a_set_is_durable_when_it_returns(folder: AgentFolder, world: World) -> None:
    """S4-10, S4-G8: what a kill right after it leaves is the new value."""
    async with world.connect(autosave=None) as sessions, made(folder, sessions) as agent:
        await agent.config.set("user_name", "Captain")
        left = world.killed()
    assert (await run(folder, left))["user_name"] == "Captain"


SETTER = """
import asyncio, itertools, sys
import perdure
from perdure.agent import Agent, EchoModel

async def main(store, agent_dir, session):
    async with perdure.connect(store, autosave=None) as sessions:
        gus = Agent.create(
            "gus-1", model=EchoModel(), sessions=sessions, agent_dir=agent_dir, session=session
        )
        async with gus as agent:
            for number in itertools.count(1):
                await agent.config.set("user_name", f"{session} {number}")
                await agent.save_state("count", number)
                print(number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("session", ["default", "second"])
def test_what_an_agent_has_set_survives_a_kill(
    folder: AgentFolder, tmp_path: Path, session: str
) -> None:
    """S4-10, S4-G8: kill -9 in the middle of setting; what was acknowledged is there."""
    world = World(tmp_path / "data")
    for _ in range(2):
        running = subprocess.Popen(
            [sys.executable, "-c", SETTER, str(world.content), str(folder.path), session],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert running.stdout is not None
        lines = [running.stdout.readline(), running.stdout.readline()]
        os.kill(running.pid, signal.SIGKILL)
        acknowledged = max(map(int, ("".join(lines) + running.communicate()[0]).split()))
        name, count = anyio.run(_left, folder, world, session)
        assert int(name.removeprefix(f"{session} ")) >= acknowledged
        assert count >= acknowledged


async def _left(folder: AgentFolder, world: World, session: str) -> tuple[str, int]:
    async with world.connect() as sessions, made(folder, sessions, session=session) as agent:
        return agent.config.get("user_name"), await agent.load_state("count")


async def test_on_files_the_values_lie_where_the_seed_has_them(
    folder: AgentFolder, tmp_path: Path
) -> None:
    """S4-11, S4-13: state/_persistence.json and state/<key>.json, readable."""
    world = World(tmp_path / "data")
    async with world.connect() as sessions, made(folder, sessions) as agent:
        await agent.save_state("tasks", ["water the plants"])
        values = agent.config.all()
        home = agent.home
    state = tmp_path / "data" / "agents" / "gus-1" / "state"
    assert json.loads((state / "_persistence.json").read_text())["values"] == values
    assert json.loads((state / "tasks.json").read_text()) == ["water the plants"]
    assert home == state.parent / "files"


async def test_a_setup_that_only_reads_may_be_a_plain_method(
    folder: AgentFolder, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-15: as an agent's author writes it who has nothing to wait for."""

    class Gus(Agent):
        def setup(self) -> None:  # type: ignore[override]
            self.user = self.config.get("zep_user_id")

    monkeypatch.setattr(sys.modules[__name__], "__file__", str(folder.path / "gus.py"))
    async with world.connect() as sessions:
        async with Gus.create("gus-1", model=EchoModel(), sessions=sessions) as agent:
            assert isinstance(agent, Gus)
            assert agent.user.startswith("gus::")


async def test_an_agents_class_may_set_itself_up(
    folder: AgentFolder, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-15: setup() reads the config; persistence.yaml is found beside the class's module."""

    class Gus(Agent):
        async def setup(self) -> None:
            self.user = self.config.get("zep_user_id")
            await self.config.set("user_name", "Captain")
            if self.config.has("theme"):
                self.seen = self.config.all()

    monkeypatch.setattr(sys.modules[__name__], "__file__", str(folder.path / "gus.py"))
    async with world.connect() as sessions:
        async with Gus.create("gus-1", model=EchoModel(), sessions=sessions) as agent:
            assert isinstance(agent, Gus)
            assert agent.user.startswith("gus::")
            assert agent.seen["user_name"] == "Captain"
            assert agent.persist_paths == ("data", ".config")


async def test_the_setup_of_a_config_has_it_as_well(folder: AgentFolder, world: World) -> None:
    """S4-15: without a class."""
    seen = []

    def setup(context: AgentContext) -> None:
        seen.append(context.declared.config.get("theme"))

    await run(folder, world, setup=setup)
    assert seen == ["default"]


async def test_an_agent_has_no_config_before_it_is_started(world: World) -> None:
    """S4-15: it is lazy."""
    config = AgentConfig(name="gus", model=EchoModel())
    async with world.connect() as sessions:
        agent = await AgentFactory(sessions).create_agent(config)
        with pytest.raises(SessionError, match="before it is started"):
            _ = agent.config
        assert agent.persist_paths == ()
        async with agent:
            assert agent.config.all() == {}
            with pytest.raises(UnknownConfigKeyError):
                await agent.config.set("theme", "dark")
            assert await agent.session.state.keys() == []


async def test_a_file_that_does_not_fit_keeps_the_agent_from_starting(
    folder: AgentFolder, world: World
) -> None:
    folder.declare("version: 1\nconfg: {}\n")
    with pytest.raises(ConfigError, match=r"line 2, column 1: 'confg'.* did you mean 'config'"):
        await run(folder, world)
    async with world.connect() as sessions:
        view = await sessions.load("gus-1")
        assert view is None or await view.state.keys() == []


async def test_states_are_kept_by_key(folder: AgentFolder, world: World) -> None:
    """S4-13: saved durably, listed, deleted; a default for what is not there."""
    async with world.connect(autosave=None) as sessions, made(folder, sessions) as agent:
        await agent.save_state("tasks", {"open": [1, 2]})
        await agent.save_state("../x", "not outside")
        assert await agent.load_state("nothing", default="none") == "none"
        left = world.killed()
    async with left.connect() as sessions, made(folder, sessions) as agent:
        assert await agent.load_state("tasks") == {"open": [1, 2]}
        assert await agent.list_state_keys() == ["../x", "tasks"]
        assert await agent.delete_state("../x")
        assert not await agent.delete_state("../x")
        left = left.killed()
    async with left.connect() as sessions, made(folder, sessions) as agent:
        assert await agent.list_state_keys() == ["tasks"]


@pytest.mark.parametrize("key", ["_persistence", "custom_data", "", "a//b", "/", "x" * 2000])
async def test_some_keys_are_reserved_or_none(
    folder: AgentFolder, memory_world: World, key: str
) -> None:
    """S4-G6: `_persistence` is the config's."""
    async with memory_world.connect() as sessions, made(folder, sessions) as agent:
        for act in (agent.load_state(key), agent.delete_state(key), agent.save_state(key, 1)):
            with pytest.raises(ConfigError, match="invalid"):
                await act
        with pytest.raises(NotStorableError):
            await agent.save_state("fine", object())


@pytest.fixture
def memory_world() -> World:
    return World(MemoryBacking())


async def test_a_home_is_where_one_says_or_in_the_store(
    folder: AgentFolder, memory_world: World, tmp_path: Path
) -> None:
    """S4-14: the third level, files."""
    async with memory_world.connect() as sessions:
        async with made(folder, sessions) as agent:
            with pytest.raises(ConfigError, match="home="):
                _ = agent.home
        async with made(folder, sessions, home=tmp_path / "home") as agent:
            assert agent.home == tmp_path / "home"


async def test_a_fork_is_a_new_session_with_its_own_values(
    folder: AgentFolder, world: World
) -> None:
    """S4-6 S4-G3: two conversations must not write to one session of the memory service."""
    first = await run(folder, world)
    async with world.connect() as sessions:
        await sessions.fork("gus-1", "gus-1", new_session="fork")
    forked = await run(folder, world, session="fork")
    assert forked["zep_session_id"] != first["zep_session_id"]
    assert forked["zep_user_id"] == first["zep_user_id"]
    assert await run(folder, world, session="fork") == forked
    assert await run(folder, world) == first


async def test_a_session_that_was_renamed_is_the_same_one(
    folder: AgentFolder, world: World
) -> None:
    """S4-G3: nothing of it is made anew."""
    first = await run(folder, world, session="second")
    async with world.connect() as sessions:
        await sessions.rename("gus-1", "gus-1", session="second", new_session="third")
    assert await run(folder, world, session="third") == first
    assert await run(folder, world, session="third") == first


async def test_what_a_cancelled_set_has_changed_is_shown(
    folder: AgentFolder, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-G8: it came too late to be undone: what is read is what is stored in the end."""
    async with world.connect() as sessions, made(folder, sessions) as agent:
        with anyio.CancelScope() as scope, monkeypatch.context() as patch:

            async def save(_: object) -> None:
                scope.cancel()
                await anyio.sleep_forever()

            patch.setattr(type(agent.context.session), "save", save)
            await agent.config.set("user_name", "Andy")
        assert scope.cancelled_caught
        assert agent.config.get("user_name") == "Andy"
    assert (await run(folder, world))["user_name"] == "Andy"
