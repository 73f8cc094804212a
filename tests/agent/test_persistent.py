"""Which of two settings counts (S2-13, S2-14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure import Autosave, ConfigError, Message, connect, sync
from perdure.agent import Agent, AgentConfig, AgentFactory, EchoModel, PersistentSession
from perdure.agent.options import persistence_of

FIVE = PersistentSession(autosave_interval=5.0)


@pytest.mark.parametrize(
    ("given", "configured", "counts"),
    [
        (None, None, None),
        (True, None, True),
        (None, FIVE, FIVE),
        (True, FIVE, FIVE),
        (FIVE, True, FIVE),
        (FIVE, FIVE, FIVE),
        (False, False, False),
    ],
)
def test_an_object_counts_before_the_shorthand(given: Any, configured: Any, counts: Any) -> None:
    assert persistence_of(given, configured) == counts


@pytest.mark.parametrize(
    ("given", "configured"), [(FIVE, PersistentSession()), (True, False), (False, FIVE)]
)
def test_two_that_differ_are_refused(given: Any, configured: Any) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        persistence_of(given, configured)


@pytest.mark.parametrize(
    ("interval", "timers"),
    [(30.0, Autosave(max_delay=30.0)), (1.0, Autosave(max_delay=1.0)), (0, None)],
)
async def test_the_interval_is_the_longest_delay_and_0_is_no_timer(
    interval: float, timers: Autosave | None
) -> None:
    kept = PersistentSession(storage="memory:", autosave_interval=interval)
    async with Agent.create("ada", model=EchoModel(), persistent_session=kept) as agent:
        assert agent.context.config.autosave == timers


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_an_interval_that_does_not_fit_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="autosave_interval"):
        PersistentSession(autosave_interval=bad)


@pytest.mark.parametrize("way", ["text", "URL", "path", "mapping", "object"])
@pytest.mark.parametrize("door", ["create", "config"])
async def test_a_place_or_options_say_where_a_session_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, door: str
) -> None:
    """S2-14."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    place = str(tmp_path / "mine")
    given: Any = {
        "text": place,
        "URL": f"file:{place}",
        "path": tmp_path / "mine",
        "mapping": {"storage": place, "autosave_interval": 60},
        "object": PersistentSession(storage=place),
    }[way]
    options: Any = {"model": EchoModel(), "persistent_session": given}
    if door == "config":
        options = {"config": AgentConfig(name="ada", **options)}
    async with Agent.create("ada", **options) as agent:
        await agent.ask("Hello")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (1, "invalid persistent_session=1"),
        (0, "invalid persistent_session=0"),
        ("", "invalid persistent_session=''"),
        ([], "invalid persistent_session"),
        ({"nonsense": 1}, "'nonsense' is no option: choose storage, "),
        ({"autosave_interval": "30"}, "invalid autosave_interval='30'"),
        ({"load_on_create": 1}, "invalid load_on_create=1"),
    ],
)
async def test_what_says_neither_whether_nor_how_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, said: str
) -> None:
    """S2-14."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match=said):
        Agent.create("ada", model=EchoModel(), persistent_session=given)
    with pytest.raises(ConfigError, match=said):
        AgentConfig(name="ada", model=EchoModel(), persistent_session=given)
    assert list(tmp_path.iterdir()) == []


async def test_a_factory_heeds_what_a_config_says_of_it(tmp_path: Path) -> None:
    """S2-13, S2-14: both ways to make an agent mean the same."""

    def config(persistent_session: Any) -> AgentConfig:
        return AgentConfig(name="ada", model=EchoModel(), persistent_session=persistent_session)

    options = {"autosave_interval": 0, "save_on_close": False, "load_on_create": False}
    async with connect(tmp_path, autosave=None) as sessions:
        factory = AgentFactory(sessions)
        for known in (0, 1):
            async with await factory.create_agent(config(options), agent_id="ada") as agent:
                assert agent.context.config.autosave is None
                assert await agent.load_persisted_session() is bool(known)
                await agent.ask("Hello")
                agent.session.append(Message.user("dropped"))
        async with await factory.restore_agent("ada", config({"save_on_close": False})) as agent:
            assert [message.text for message in agent.session.context()][-1] == "You said: Hello"
            agent.session.append(Message.user("dropped"))
        view = await sessions.load("ada")
        assert view is not None
        assert "dropped" not in [message.text for message in view.context()]
        # Not persistent: nothing of it is stored.
        async with await factory.create_agent(config(False), agent_id="bob") as agent:
            await agent.ask("Hello")
        assert await sessions.exists("bob") is False
        for contradiction in (options, False, {"storage": tmp_path / "elsewhere"}):
            with pytest.raises(ConfigError, match="restore_agent continues|two places"):
                await factory.restore_agent("ada", config(contradiction))


@pytest.mark.parametrize("place", ["sqlite:///agents.db", None, 5])
def test_what_is_no_manager_is_refused_where_it_is_given(place: Any) -> None:
    said = "is no session manager of async code: give .*persistent_session=url"
    with pytest.raises(ConfigError, match=said):
        AgentFactory(place)
    if place is not None:
        with pytest.raises(ConfigError, match=said):
            Agent.create("ada", model=EchoModel(), sessions=place)


def test_the_manager_of_blocking_code_is_refused() -> None:
    with sync.connect("memory:") as sessions:
        with pytest.raises(ConfigError, match="perdure.sync.* is no session manager of async"):
            Agent.create("ada", model=EchoModel(), sessions=sessions)  # type: ignore[arg-type]


async def test_timers_of_the_config_count_before_the_default_interval() -> None:
    mine = Autosave(debounce=0.5)
    options: Any = {"model": EchoModel(), "autosave": mine}
    kept = PersistentSession(storage="memory:")
    async with Agent.create("ada", persistent_session=kept, **options) as agent:
        assert agent.session.autosave.setting == mine
    kept = PersistentSession(storage="memory:", autosave_interval=5)
    with pytest.raises(ConfigError, match="autosave is given twice"):
        await Agent.create("ada", persistent_session=kept, **options)
