"""Which parts of an agent are kept (S2-12, S2-14), its type (S2-7), credentials (S2-28)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import ConfigError, Message, SessionError
from perdure.agent import (
    Agent,
    AgentConfig,
    AgentFactory,
    EchoModel,
    Features,
    PersistentSession,
    ScriptedModel,
    call,
)
from perdure.records.records import CONTEXT, MESSAGE_KINDS
from perdure.stores.memory import MemoryStore
from tests.agent.conftest import Configure, World


async def payloads(world: World, agent: Agent) -> list[tuple[str, bytes]]:
    await agent.session.save()
    found = []
    async for chunk in world.store.read_log(agent.session.key):
        found += [(record.kind, record.payload) for record in chunk.records]
    return found


def texts(agent: Agent) -> list[str]:
    return [one.text for one in agent.session.context()]


def test_the_defaults_are_the_seeds() -> None:
    """S2-12: memory, history and permissions are kept, the others have to be asked for."""
    features = Features()
    assert (features.memory, features.history, features.permissions) == (True, True, True)
    assert features.in_context_memory is False
    assert features.persistent_instructions is False
    assert features.persistent_session is False


async def test_without_history_nothing_that_is_said_leaves_a_record(
    world: World, configured: Configure
) -> None:
    """S2-12: a disabled feature is not saved."""
    config = configured(
        features=Features(history=False),
        instructions="A secret prompt.",
        model=ScriptedModel(call("add", a=1, b=2), "It is three.", "Again."),
        tools=[add],
    )
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert await agent.ask("What is it?") == "It is three."
            assert await agent.ask("And again?") == "Again."
            roles = [one.role for one in agent.session.context()]
            assert roles == [
                "system",
                "user",
                "assistant",
                "tool",
                "assistant",
                "user",
                "assistant",
            ]
            records = await payloads(world, agent)
    assert not {kind for kind, _ in records} & {CONTEXT, *MESSAGE_KINDS}
    assert not any(b"secret" in payload or b"three" in payload for _, payload in records)


async def test_without_history_nothing_that_was_said_is_restored(
    world: World, configured: Configure
) -> None:
    """S2-12: a disabled feature is not restored, and what is stored of it stays."""
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            agent.context.state.custom_data["kept"] = True
            await agent.ask("hello")
    for _ in range(2):
        config = configured(features=Features(history=False))
        async with world.connect() as sessions:
            factory = AgentFactory(sessions)
            async with await factory.create_agent(config, agent_id="ada") as agent:
                assert texts(agent) == []
                assert agent.context.state.custom_data == {"kept": True}
                await agent.ask("off the record")
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", configured()) as agent:
            assert texts(agent) == ["hello", "You said: hello"]


async def test_without_the_memory_feature_an_agent_has_no_working_memory(
    memory_world: World, configured: Configure
) -> None:
    """S2-12: nothing to save, nothing to restore."""
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        async with await factory.create_agent(configured(), agent_id="ada") as agent:
            agent.working_memory.set("k", 1)
        config = configured(features=Features(memory=False))
        async with await factory.create_agent(config, agent_id="ada") as agent:
            with pytest.raises(ConfigError, match=r"Features\(memory=True\)"):
                _ = agent.working_memory
        async with await factory.create_agent(configured(), agent_id="ada") as agent:
            assert await agent.working_memory.get("k") == 1


async def test_without_the_permissions_feature_decisions_last_for_one_run(
    memory_world: World, configured: Configure
) -> None:
    """S2-12: neither saved nor restored; and what was stored before is untouched."""
    kept: list[tuple[str, ...]] = []
    for features, tool in (
        (Features(), "first"),
        (Features(permissions=False), "second"),
        (Features(), "third"),
    ):
        async with memory_world.connect() as sessions:
            factory = AgentFactory(sessions)
            config = configured(features=features)
            async with await factory.create_agent(config, agent_id="ada") as agent:
                agent.permissions.block(tool)
                kept.append(agent.permissions.blocklist)
    assert kept == [("first",), ("second",), ("first", "third")]


async def test_in_context_memory_is_off_unless_asked_for(
    memory_world: World, configured: Configure
) -> None:
    async with memory_world.connect() as sessions:
        factory = AgentFactory(sessions)
        async with await factory.create_agent(configured(), agent_id="ada") as agent:
            assert agent.notes is None
            assert agent.context.toolbox.specs == ()


@pytest.mark.parametrize(
    ("given", "configured", "features", "kept"),
    [
        (None, None, Features(), None),
        (True, None, Features(), True),
        (None, None, Features(persistent_session=True), True),
        (None, PersistentSession(), Features(persistent_session=True), True),
        (True, True, Features(persistent_session=True), True),
    ],
)
async def test_both_ways_to_ask_for_a_persistent_session_are_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: Any,
    configured: Any,
    features: Features,
    kept: bool | None,
) -> None:
    """S2-5, S2-14: opt-in, by the shorthand, the object or the feature; without: no file."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    if kept is None:
        given = False  # nothing was said and no manager is there: asked for plainly
    config = AgentConfig(
        name="a", model=EchoModel(), features=features, persistent_session=configured
    )
    async with Agent.create("ada", config=config, persistent_session=given) as agent:
        await agent.ask("hello")
    assert (tmp_path / "home").exists() == bool(kept)


async def test_the_feature_and_a_plain_no_contradict() -> None:
    """S2-14: two settings that differ are an error."""
    config = AgentConfig(name="a", model=EchoModel(), features=Features(persistent_session=True))
    with pytest.raises(ConfigError, match="given twice"):
        await Agent.create("ada", config=config, persistent_session=False)


async def test_an_agent_of_another_type_is_refused(world: World, configured: Configure) -> None:
    """S2-7: the type is checked on load."""
    async with world.connect() as sessions:
        config = configured(agent_type="task-agent")
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("hello")
    async with world.connect() as sessions:
        factory = AgentFactory(sessions)
        with pytest.raises(SessionError, match="stored as a 'task-agent', not as a 'agent'"):
            await factory.restore_agent("ada", configured())
        view = await sessions.load("ada")
        assert view is not None
        assert view.info.agent_type == "task-agent"
        async with await factory.restore_agent("ada", config) as agent:
            assert texts(agent) == ["hello", "You said: hello"]


async def test_credentials_are_kept_out_of_config_and_metadata(
    world: World, configured: Configure
) -> None:
    """S2-28, S2-29: nothing that a key calls a credential is stored; the record says where."""
    config = configured(settings={"region": "north", "client": {"api_key": "sk-hidden-1"}})
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            agent.session.describe(title="T", team="x", auth={"token": "sk-hidden-2"})
            await agent.ask("hello")
            records = await payloads(world, agent)
            stored = agent.session.info.metadata.extra
    assert not any(b"sk-hidden" in payload for _, payload in records)
    assert msgspec.json.decode(stored["auth"]) == {"token": "[redacted]"}
    said = b"".join(payload for _, payload in records)
    assert b'"redacted":["/client/api_key"]' in said
    assert b'"redacted":["/auth/token"]' in said
    assert b'"region":"north"' in said


async def test_tool_arguments_lose_only_the_keys_that_the_user_lists(
    memory_world: World, configured: Configure
) -> None:
    """S2-28: the tool gets what the model said, the log does not."""
    got: list[tuple[str, str]] = []

    async def login(password: str, token: str) -> str:
        got.append((password, token))
        return "ok"

    config = configured(
        model=ScriptedModel(call("login", password="sk-hidden", token="t-1"), "Done."),
        tools=[login],
        redact_arguments=["password"],
    )
    async with memory_world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("hello")
            (asked,) = [one for one in agent.session.context() if one.tool_calls]
            records = await payloads(memory_world, agent)
    assert got == [("sk-hidden", "t-1")]
    (stored,) = asked.tool_calls
    assert stored.arguments == {"password": "[redacted]", "token": "t-1"}
    assert bytes(stored.extra["perdure_redacted"]) == b'["/password"]'
    assert not any(b"sk-hidden" in payload for _, payload in records)


async def test_a_new_conversation_beside_the_stored_one_takes_nothing_over(
    world: World, configured: Configure
) -> None:
    """S2-13, S2-15: load_on_create=False restores nothing, the parts included."""
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).create_agent(configured(), agent_id="ada") as agent:
            agent.permissions.block("old")
            await agent.ask("hello")
    fresh = PersistentSession(load_on_create=False)
    for load in (True, False):
        async with world.connect() as sessions:
            agent = await Agent.create(
                "ada", model=EchoModel(), sessions=sessions, persistent_session=fresh
            )
            async with agent:
                assert agent.permissions.blocklist == ()
                if load:
                    assert await agent.load_persisted_session()
                    assert agent.permissions.blocklist == ("old",)
                    continue
                agent.permissions.block("new")
                await agent.ask("anew")
                await agent.save_persisted_session()
    async with world.connect() as sessions:
        async with await AgentFactory(sessions).restore_agent("ada", configured()) as agent:
            assert agent.permissions.blocklist == ("new",)
            assert texts(agent) == ["anew", "You said: anew"]


def add(a: int, b: int) -> int:
    return a + b


__all__ = ["MemoryStore", "Message"]
