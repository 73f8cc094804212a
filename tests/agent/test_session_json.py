"""session.json of a session that goes on: what it says of its agent (S2-17)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from perdure import Message, export_state
from perdure.agent import AgentFactory, CompactionPolicy
from perdure.cli.check import audit
from perdure.formats import write_state
from perdure.records.keys import SessionKey
from perdure.store import take_after
from perdure.stores.file import FileStore
from tests.agent.conftest import Configure, World
from tests.golden.reader import HERE, copy_of

PARTS = ("tools", "permissions", "config")
V1 = HERE / "v1"


def look() -> str:
    """Look."""
    return "seen"


def stored(data: Path, *path: str) -> dict[str, Any]:
    """Return a session's session.json, in words."""
    found: dict[str, Any] = json.loads(data.joinpath("agents", *path, "session.json").read_bytes())
    return found


async def problems(data: Path, key: SessionKey) -> list[str]:
    """Return what `perdure check` finds."""
    store = FileStore(data, owner="reader")
    await store.open()
    try:
        return [str(one) for one in (await audit(store, key)).findings]
    finally:
        await store.aclose()


async def test_it_says_what_the_agent_was(tmp_path: Path, configured: Configure) -> None:
    data = tmp_path / "data"
    config = configured(
        instructions="Be kind.",
        tools=[look],
        compaction=CompactionPolicy(max_tokens=9_000),
        settings={"temperature": 0.5, "api_key": "sk-secret"},
    )
    async with World(data).connect() as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            agent.permissions.block("rm")
            agent.permissions.approve("look", by="me")
            agent.tool_settings.disable("look")
            await agent.ask("hello")
        state = await export_state(sessions, "ada", log=False)
    assert state is not None
    context, exported = stored(data, "ada")["context"], json.loads(write_state(state))["context"]
    assert context["core"]["systemPrompt"] == exported["core"]["systemPrompt"] == "Be kind."
    assert context["core"]["instructions"] == ""
    assert context["core"]["history"] == []
    assert {name: context[name] for name in PARTS} == {name: exported[name] for name in PARTS}
    assert context["permissions"]["blocklist"] == ["rm"]
    assert context["tools"]["enabled"] == {"look": False}
    assert context["config"]["maxContextTokens"] == 9_000
    assert context["plugins"] == {}
    assert "sk-secret" not in json.dumps(context)


async def test_it_keeps_what_a_later_fold_does_not_touch(
    tmp_path: Path, configured: Configure
) -> None:
    data = tmp_path / "data"
    config = configured(instructions="Be kind.")
    for text in ("hello", "again", "and again"):
        async with World(data).agent(config) as agent:
            if text == "hello":
                agent.permissions.block("rm")
            await agent.ask(text)
    async with World(data).connect() as sessions, sessions.open("ada") as session:
        session.append(Message.user("from elsewhere"))
    context = stored(data, "ada")["context"]
    assert context["core"]["systemPrompt"] == "Be kind."
    assert context["permissions"]["blocklist"] == ["rm"]
    assert context["config"]["strategy"] == "compaction"
    assert await problems(data, SessionKey("ada")) == []


async def test_without_an_agent_the_parts_are_there_and_empty(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with World(data).connect() as sessions, sessions.open("ada") as session:
        session.append(Message.user("hello"))
    context = stored(data, "ada")["context"]
    assert (context["core"]["systemPrompt"], context["config"]) == ("", {})
    assert context["tools"] == {"enabled": {}, "namespaces": {}, "priorities": {}}
    assert context["permissions"] == {
        "version": 1,
        "approvals": {},
        "blocklist": [],
        "allowlist": [],
    }


async def test_a_fork_says_it_too(tmp_path: Path, configured: Configure) -> None:
    data = tmp_path / "data"
    async with World(data).agent(configured(instructions="Be kind.")) as agent:
        agent.permissions.block("rm")
        await agent.ask("hello")
    async with World(data).connect() as sessions:
        await sessions.fork("ada", "bob")
        async with sessions.open("bob") as session:
            session.append(Message.user("on my own"))
    context = stored(data, "bob")["context"]
    assert context["core"]["systemPrompt"] == "Be kind."
    assert context["permissions"]["blocklist"] == ["rm"]


async def test_one_that_an_older_release_wrote_is_sound_and_completed(
    tmp_path: Path, configured: Configure
) -> None:
    """The golden store's sessions say nothing of an agent; with its next fold each does."""
    root = copy_of(V1, tmp_path)
    async with World(root).connect() as sessions:
        async with sessions.open("everything") as session:
            await session.attach(Blocks())
            session.append(Message.user("x"))
        key = session.key
    context = stored(root, "everything")["context"]
    assert context["permissions"]["blocklist"] == ["rm"]
    assert await problems(root, key) == []


class Blocks:
    """What an agent's permissions are kept as."""

    name = "agent_permissions"
    version = 1

    async def capture(self) -> dict[str, Any]:
        return {"version": 1, "approvals": {}, "blocklist": ["rm"], "allowlist": []}

    async def restore(self, state: Any, context: object) -> None:
        raise AssertionError("there is none")


async def test_a_state_of_before_is_told_by_the_first_fold_that_can(
    tmp_path: Path, configured: Configure
) -> None:
    """As an older release left it: the plugins are there, session.json is silent."""
    data = tmp_path / "data"
    async with World(data).agent(configured()) as agent:
        agent.permissions.block("rm")
        await agent.ask("hello")
    await as_an_older_release_would(data)
    assert "tools" not in stored(data, "ada")["context"]
    assert await problems(data, SessionKey("ada")) == []
    async with World(data).connect() as sessions, sessions.open("ada") as session:
        assert session.restore_report.damaged == ()
        session.append(Message.user("x"))
    assert stored(data, "ada")["context"]["permissions"]["blocklist"] == ["rm"]
    assert await problems(data, SessionKey("ada")) == []


async def as_an_older_release_would(data: Path) -> None:
    """Take out of session.json what says something of the agent."""
    import hashlib

    store, key = FileStore(data, owner="older"), SessionKey("ada")
    await store.open()
    have = await store.read_documents(key, {"session.json"})
    assert have.manifest is not None
    document = json.loads(have.found["session.json"].data)
    for name in (*PARTS, "plugins"):
        del document["context"][name]
    for name in ("systemPrompt", "instructions"):
        del document["context"]["core"][name]
    written = msgspec.json.format(json.dumps(document).encode(), indent=2)
    digest = hashlib.sha256(written).hexdigest()
    epoch = (await take_after(store, key, after=have.manifest.epoch)).epoch
    one = msgspec.structs.replace(
        have.manifest.documents["session.json"], sha256=digest, size=len(written)
    )
    manifest = msgspec.structs.replace(
        have.manifest, epoch=epoch, documents={**have.manifest.documents, "session.json": one}
    )
    await store.write_documents(key, {"session.json": written}, manifest)
    await store.release(key, epoch)
    await store.aclose()


async def test_times_have_the_form_of_the_export(tmp_path: Path) -> None:
    async with World(tmp_path / "data").connect() as sessions, sessions.open("ada") as session:
        session.append(Message(role="user", content="x", created_at=1769853600.25))
        key = session.key
    document = stored(tmp_path / "data", "ada")
    assert document["createdAt"] == "2026-01-31T10:00:00.250Z"
    assert document["lastActiveAt"] == "2026-01-31T10:00:00.250Z"
    assert await problems(tmp_path / "data", key) == []
