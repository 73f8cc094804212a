"""Files of the format go in and come out: nothing is lost (S2-7, S2-8, S2-17, S2-18)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure
from perdure import (
    ConfigError,
    CorruptRecordError,
    Message,
    SessionError,
    ToolCall,
    UnsupportedVersionError,
)
from perdure.agent import Agent, AgentFactory, EchoModel, Features
from perdure.formats import read_folder, read_state, write_folder, write_state
from perdure.formats.migrations import Finding
from perdure.session.manager import SessionManager
from perdure.stores.memory import MemoryStore
from tests.agent.conftest import Configure, World, configured  # noqa: F401  # a fixture
from tests.formats.samples import (
    MEMORY,
    PLUGIN,
    SESSION,
    copy_of,
    read,
    with_unknown_fields,
    write,
)
from tests.session.test_manager import QUIET


def manager() -> SessionManager:
    return perdure.connect(MemoryStore(), shutdown=QUIET)


async def through(folder: Path, out: Path, *, log: bool = False) -> list[Finding]:
    """Read a folder, make a session of it, and write that session to another folder."""
    found = await read_folder(folder)
    assert found.state is not None
    async with manager() as sessions:
        done = await perdure.import_state(sessions, found.state)
        state = await perdure.export_state(sessions, done.key.agent, log=log)
    assert state is not None
    await write_folder(out, state)
    return [*found.findings, *done.findings]


def whole(session: dict[str, Any]) -> dict[str, Any]:
    """Return what a session.json reads as: its plugins lie in files of their own."""
    session = copy_of(session)
    session["context"]["plugins"] = {}
    return {**session, "plugins": {}}


async def test_the_formats_own_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    """S2-7, S2-8, S2-17, S2-18: every field by its very name; S2-6: where it belongs."""
    session, out = copy_of(SESSION), tmp_path / "out"
    session["context"]["plugins"] = {}
    write(tmp_path / "in", session=session, memory=MEMORY, in_context_memory=PLUGIN)
    assert await through(tmp_path / "in", out) == []
    assert read(out) == {
        "session.json": whole(SESSION),
        "memory.json": MEMORY,
        "plugins/in_context_memory.json": PLUGIN,
    }


async def test_unknown_fields_are_kept_at_every_level(tmp_path: Path) -> None:
    session, memory = with_unknown_fields()
    inner = session["context"]["plugins"]["in_context_memory"]
    write(tmp_path / "in", session=session, memory=memory)
    assert await through(tmp_path / "in", tmp_path / "out") == []
    assert read(tmp_path / "out") == {
        "session.json": whole(session),
        "memory.json": memory,
        "plugins/in_context_memory.json": inner,
    }


async def test_values_are_kept_to_the_byte(tmp_path: Path) -> None:
    """What a decoder would change: exponents, digits beyond a float, escapes."""
    odd = b'{"a":1.0e5,"b":12345678901234567890123,"c":"\\u00e9\\/","d":0.1000}'
    session = copy_of(SESSION)
    marked = json.dumps({**session, "x_odd": "ODD"}).replace('"ODD"', odd.decode())
    memory = json.dumps(MEMORY).replace('{"theme": "dark", "verbosity": "concise"}', odd.decode())
    write(tmp_path / "in", session=marked.encode(), memory=memory.encode(), odd=odd)
    await through(tmp_path / "in", tmp_path / "out")
    for name in ("session.json", "memory.json", "plugins/odd.json"):
        data = (tmp_path / "out" / name).read_bytes()
        assert odd in msgspec.json.format(data, indent=-1), name


async def test_what_comes_out_goes_in_again_unchanged(tmp_path: Path) -> None:
    session, memory = with_unknown_fields()
    write(tmp_path / "0", session=session, memory=memory, other=PLUGIN)
    for step in range(3):
        await through(tmp_path / str(step), tmp_path / str(step + 1), log=step == 1)
    last = read(tmp_path / "3")
    assert last == read(tmp_path / "1")


async def test_an_imported_conversation_is_one_to_go_on_with(
    tmp_path: Path,
    configured: Configure,  # noqa: F811
) -> None:
    """S2-1, S2-2: history, memory, plugins, tools and permissions, in an agent."""
    write(tmp_path / "in", session=SESSION, memory=MEMORY)
    found = await read_folder(tmp_path / "in")
    assert found.state is not None
    config = configured(features=Features(in_context_memory=True), instructions="Be kind.")
    async with manager() as sessions:
        await perdure.import_state(sessions, found.state)
        async with sessions.open("my-assistant") as session:
            texts = [one.text for one in session.context()]
            assert texts == ["You are a helpful assistant", "Hello!", "Hi. How can I help?"]
            assert session.info.metadata.title == "My Assistant Session"
            assert session.info.created_at == "2026-01-31T10:00:00.000Z"
        async with await AgentFactory(sessions).restore_agent("my-assistant", config) as agent:
            assert agent.permissions.verdict("rm") == "blocked"
            assert agent.permissions.verdict("read") == "allowed"
            assert not agent.tool_settings.is_enabled("shell")
            assert agent.notes is not None
            assert agent.notes.get("k") == 1
            assert (await agent.working_memory.get("user_preferences"))["theme"] == "dark"
            await agent.ask("What did I say?")
            texts = [one.text for one in agent.session.context()]
            assert texts[1:3] == ["Hello!", "Hi. How can I help?"]
        state = await perdure.export_state(sessions, "my-assistant", log=False)
    assert state is not None
    core = json.loads(write_state(state))["context"]["core"]
    assert [item["content"] for item in core["history"]][:3] == [
        "Hello!",
        "Hi. How can I help?",
        "What did I say?",
    ]
    assert core["systemPrompt"] == "Be kind."
    assert core["toolCalls"] == SESSION["context"]["core"]["toolCalls"]


CHAT = [
    {"role": "user", "content": "What is 1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"type": "function_call_output", "call_id": "x", "output": "no message"},
]


async def test_items_of_other_forms_are_understood_or_carried(tmp_path: Path) -> None:
    """C4: Chat Completions' tool calls are messages; what is no message stays as it is."""
    session = copy_of(SESSION)
    session["context"]["core"]["history"] = CHAT
    write(tmp_path / "in", session=session)
    findings = await through(tmp_path / "in", tmp_path / "out")
    assert [(one.what, one.where) for one in findings] == [("kept", "context.core.history")]
    assert read(tmp_path / "out")["session.json"] == whole(session)
    found = await read_folder(tmp_path / "in")
    assert found.state is not None
    async with manager() as sessions:
        await perdure.import_state(sessions, found.state)
        async with sessions.open("my-assistant") as opened:
            (asked,) = [one for one in opened.context() if one.tool_calls]
            assert asked.tool_calls == (ToolCall("c1", "add", {"a": 1, "b": 2}),)
            shown = opened.context("openai")
            assert [one["role"] for one in shown] == [
                *("system", "user", "assistant", "tool", "assistant")
            ]
            assert shown[3]["content"] == "3"


# our own sessions


async def fill(sessions: SessionManager) -> None:
    """Have a session with everything that the formats have no place for."""
    async with sessions.open("ada", owner="lovelace", tags=["x"]) as session:
        async with session.turn("given"):
            session.append(Message.system("Be kind."), Message.user("one"))
            session.append(Message.assistant(tool_calls=[ToolCall("c1", "add", {"a": 1})]))
            kept = session.append(Message.tool("c1", 3, name="add"))
        session.append(Message.user("taken back"))
        await session.retract(after=kept)
        session.append(Message.user("two"), perdure.EncodedRecord("app:rating", b'{"stars":5}'))
        session.memory.set("k", {"a": 1}, description="d", pinned=True)
        session.state.set("mood", {"is": "good"})
        session.state.set("pair", (1, 2))
        session.describe(title="Sums", color="blue")
        await session.save()


async def check(sessions: SessionManager, id: str) -> None:
    async with sessions.open(id) as session:
        texts = [one.text for one in session.context()]
        assert texts == ["Be kind.", "one", "", "", "two"]
        assert await session.memory.get("k") == {"a": 1}
        assert await session.state.get("mood") == {"is": "good"}
        assert await session.state.get("pair") == (1, 2)
        assert session.info.metadata.title == "Sums"
        assert session.info.metadata.owner == "lovelace"
        assert bytes(session.info.metadata.extra["color"]).strip() == b'"blue"'
        async with session.turn("given") as turn:
            assert turn.replayed
        kinds = [one.kind for one in await session.history()]
        assert "app:rating" in kinds
        async with session.turn() as turn:
            assert turn.number == 2


async def test_a_session_of_ours_comes_back_whole(tmp_path: Path) -> None:
    """Turns, retractions, named states, types: what only the log knows."""
    async with manager() as sessions:
        await fill(sessions)
        state = await perdure.export_state(sessions, "ada")
    assert state is not None
    (tmp_path / "one").write_bytes(write_state(state))
    await write_folder(tmp_path / "many", state)
    for read_back in (
        read_state((tmp_path / "one").read_bytes()),
        await read_folder(tmp_path / "many"),
    ):
        assert read_back.state is not None
        async with manager() as sessions:
            done = await perdure.import_state(sessions, read_back.state, id="eve")
            assert done.findings == ()
            await check(sessions, "eve")


async def test_a_session_that_moved_between_owners_comes_back_whole(tmp_path: Path) -> None:
    """The log's numbers stay as they were: retractions name them."""
    store = MemoryStore()
    for _ in range(2):
        async with perdure.connect(store, shutdown=QUIET) as sessions:
            async with sessions.open("ada") as session:
                kept = session.append(Message.user("kept"))
                session.append(Message.user("taken back"))
                await session.retract(after=kept)
    async with perdure.connect(store, shutdown=QUIET) as sessions:
        state = await perdure.export_state(sessions, "ada")
        view = await sessions.load("ada")
    assert state is not None
    assert view is not None
    async with manager() as sessions:
        await perdure.import_state(sessions, state)
        again = await sessions.load("ada")
        assert again is not None
        assert [one.seq for one in await again.history()] == [
            one.seq for one in await view.history()
        ]
        assert [one.text for one in again.context()] == ["kept", "kept"]


async def test_the_history_is_not_written_twice() -> None:
    async with manager() as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("x" * 10_000))
            await session.save()
        plain = await perdure.export_state(sessions, "ada", log=False)
        full = await perdure.export_state(sessions, "ada")
    assert plain is not None
    assert full is not None
    assert len(write_state(full)) < len(write_state(plain)) + 1000


async def test_what_somebody_else_has_changed_counts(tmp_path: Path) -> None:
    async with manager() as sessions:
        await fill(sessions)
        state = await perdure.export_state(sessions, "ada")
    assert state is not None
    changed = json.loads(write_state(state))
    changed["context"]["core"]["history"].append({"role": "user", "content": "three"})
    found = read_state(json.dumps(changed).encode())
    assert found.state is not None
    async with manager() as sessions:
        done = await perdure.import_state(sessions, found.state)
        assert [one.what for one in done.findings] == ["mended"]
        async with sessions.open("ada") as session:
            assert session.context()[-1].text == "three"
            assert await session.state.get("mood") == {"is": "good"}
            assert await session.state.get("pair") == (1, 2)
            assert "app:rating" in [one.kind for one in await session.history()]


async def test_without_the_log_a_plugins_version_is_kept(tmp_path: Path) -> None:
    from tests.session.test_contributors import Counter

    async with manager() as sessions:
        async with sessions.open("ada") as session:
            await session.attach(Counter("plug", version=4, count=1))
            await session.save()
        state = await perdure.export_state(sessions, "ada", log=False)
    assert state is not None
    async with manager() as sessions:
        await perdure.import_state(sessions, read_state(write_state(state)).state or state)
        async with sessions.open("ada") as session:
            counter = Counter("plug", version=4)
            await session.attach(counter)
            assert counter.restored == [({"count": 1}, 4)]


# what does not fit


async def test_an_import_never_overwrites(tmp_path: Path) -> None:
    state = read_state(json.dumps(SESSION).encode()).state
    assert state is not None
    async with manager() as sessions:
        await perdure.import_state(sessions, state)
        with pytest.raises(SessionError, match="exists"):
            await perdure.import_state(sessions, state)
        assert (await perdure.import_state(sessions, state, id="copy")).key.agent == "copy"
        state.agent_id = ""
        with pytest.raises(ConfigError, match="give its id"):
            await perdure.import_state(sessions, state)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("memory_set", {"key": "k", "value": 1, "scope": 7}),
        ("state", {"name": "state//x.json", "value": 1}),
        ("meta", {"at": 1e300}),
        ("checkpoint", {"link": "checkpoint"}),
    ],
)
async def test_records_that_no_fold_could_take_in_are_refused(
    kind: str, payload: dict[str, Any]
) -> None:
    """Somebody has edited perdure's own part; the session would be there, and never be folded."""
    async with manager() as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("Hello"))
        state = await perdure.export_state(sessions, "ada")
        assert state is not None
        whole = json.loads(write_state(state))
        whole["perdure"]["log"].append({"kind": kind, "payload": payload})
        changed = read_state(json.dumps(whole).encode()).state
        assert changed is not None
        with pytest.raises(CorruptRecordError, match="make no session.*nothing was changed"):
            await perdure.import_state(sessions, changed, id="new")
        assert not await sessions.exists("new")


def test_an_entry_without_its_key_is_damage() -> None:
    with pytest.raises(CorruptRecordError, match=r"entries\[0\].*'key'"):
        read_state(json.dumps({**SESSION, "memory": {"version": 1, "entries": [{}]}}).encode())


async def test_credentials_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    """S2-28."""
    session = copy_of(SESSION)
    session["context"]["config"]["apiKey"] = "sk-hidden"
    session["metadata"]["auth"] = {"password": "sk-hidden", "user": "ada"}
    write(tmp_path / "in", session=session)
    findings = await through(tmp_path / "in", tmp_path / "out", log=True)
    assert [(one.what, one.detail) for one in findings] == [
        ("redacted", "/auth/password"),
        ("redacted", "/apiKey"),
    ]
    assert "sk-hidden" not in (tmp_path / "out" / "session.json").read_text()
    out = read(tmp_path / "out")["session.json"]
    assert out["metadata"]["auth"] == {"password": "[redacted]", "user": "ada"}


async def test_nothing_exported_is_nothing() -> None:
    """S2-20: missing means None."""
    async with manager() as sessions:
        assert await perdure.export_state(sessions, "nobody") is None


async def test_an_agent_of_ours_has_the_formats_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S2-17: what we write is what the format shows."""
    caplog.set_level(logging.ERROR)
    async with manager() as sessions:
        agent = await Agent.create("ada", model=EchoModel(), sessions=sessions, instructions="P")
        async with agent:
            agent.permissions.block("rm")
            agent.tool_settings.disable("shell")
            agent.working_memory.set("k", 1)
            await agent.ask("hello")
        state = await perdure.export_state(sessions, "ada", log=False)
    assert state is not None
    written = json.loads(write_state(state))
    assert list(written) == [*SESSION, "memory", "plugins"] or set(written) == {
        *SESSION,
        "memory",
        "plugins",
    }
    assert set(written["context"]) == set(SESSION["context"])
    assert set(written["context"]["core"]) == set(SESSION["context"]["core"])
    assert written["context"]["core"]["systemPrompt"] == "P"
    assert written["context"]["permissions"]["blocklist"] == ["rm"]
    assert written["context"]["tools"]["enabled"] == {"shell": False}
    assert set(written["memory"]["entries"][0]) == set(MEMORY["entries"][0])
    assert written["memory"]["stats"] == {"totalEntries": 1, "totalSizeBytes": 1}
    assert written["createdAt"].endswith("Z")
    assert written["plugins"] == {}


__all__ = ["UnsupportedVersionError", "World"]
