"""`PerdureConversationStore` against the SDK's own store, its agents, and other processes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, strategies as st
from pydantic_ai import Agent, DeferredToolRequests
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
    InMemoryConversationStore,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    BinaryContent,
    ImageUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RunUsage

import perdure
from perdure import Limits, NotStorableError, SessionManager, UnsupportedVersionError
from perdure.adapters import PerdureConversationStore
from perdure.testing import FaultyStore, MemoryBacking, MemoryStore
from tests.adapters import kills

GUARD = 60


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK's agents run on asyncio; the store does on trio, too: there is a test for that."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def asked(text: str) -> ModelRequest:
    return ModelRequest(parts=[UserPromptPart(text)])


def said(text: str) -> ModelResponse:
    return ModelResponse(parts=[TextPart(text)])


LONG = 'a long "text" of the model, which is not stored twice: é\n\x7f\u2028 ' * 4

ODD: list[ModelMessage] = [
    ModelRequest(
        parts=[
            SystemPromptPart("Be brief."),
            UserPromptPart(
                [
                    LONG,
                    ImageUrl("https://harbor.example/map.png"),
                    BinaryContent(b"\x00\xff", media_type="image/png"),
                ]
            ),
        ],
        instructions="Answer in English.",
        metadata={"trace": [1, None, 2.5]},
    ),
    ModelResponse(
        parts=[
            ThinkingPart(
                LONG, signature="EqQBCgIYAhIM1gbcDa9GJwZA2b3h==", provider_name="anthropic"
            ),
            TextPart(LONG),
            ToolCallPart("tide", {"harbor": "Oosthaven"}, "call_1"),
            ToolCallPart("tide", '{"harbor":  "half', "call_2"),
        ],
        provider_details={"finish": "tool_use", "deep": {"a": [[]]}},
    ),
    ModelRequest(
        parts=[
            ToolReturnPart("tide", LONG, "call_1"),
            ToolReturnPart("tide", {"low": [1, {"at": None}], "big": 2**70}, "call_2"),
            UserPromptPart("Go on"),
        ]
    ),
    ModelResponse(parts=[ThinkingPart(LONG), ThinkingPart("two"), TextPart(LONG), TextPart("two")]),
    ModelResponse(parts=[]),
    ModelRequest(parts=[]),
]


def data_of(messages: Sequence[ModelMessage]) -> bytes:
    return ModelMessagesTypeAdapter.dump_json(list(messages))


async def test_messages_come_back_with_the_bytes_that_the_sdk_dumps(tmp_path: Path) -> None:
    async with PerdureConversationStore.from_url(tmp_path) as store:
        assert isinstance(store, ConversationStore)
        await store.save(Conversation(messages=list(ODD), conversation_id="a"))
    async with PerdureConversationStore.from_url(tmp_path) as store:
        loaded = await store.load("a")
        assert loaded is not None
        assert data_of(loaded.messages) == data_of(ODD)
        for limit in range(len(ODD) + 2):
            part = await store.load("a", limit=limit)
            assert part is not None
            assert data_of(part.messages) == data_of(ODD[max(len(ODD) - limit, 0) :])


async def test_a_long_text_is_stored_once(tmp_path: Path) -> None:
    text = "mooring " * 40_000
    messages = [asked(text), ModelResponse(parts=[ThinkingPart(text), TextPart(text)])]
    messages.append(ModelRequest(parts=[ToolReturnPart("tide", text, "call_1")]))
    async with PerdureConversationStore.from_url(tmp_path) as store:
        await store.save(Conversation(messages=messages, conversation_id="a"))
    logs = [path for path in tmp_path.rglob("log/*") if path.is_file()]
    assert sum(path.read_bytes().count(b"mooring ") for path in logs) == 4 * 40_000


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings", "ignore:`RetryPromptPart`")
async def test_what_could_not_be_read_back_is_refused_and_nothing_is_stored() -> None:
    errors: Any = [{"type": "missing", "loc": ("harbor",), "msg": "secret"}]  # without its input
    async with PerdureConversationStore.in_memory() as store:
        retry = ModelRequest(parts=[RetryPromptPart(errors, tool_name="tide", tool_call_id="1")])
        with pytest.raises(NotStorableError, match=r"new_entries\[1\] could never be") as refused:
            await store.save(Conversation(messages=[asked("x"), retry], conversation_id="a"))
        assert "secret" not in str(refused.value)
        assert await store.load("a") is None


async def test_what_is_no_json_is_refused_and_nothing_is_stored() -> None:
    async with PerdureConversationStore.in_memory() as store:
        bad = ModelRequest(parts=[ToolReturnPart("tide", object(), "call_1")])
        with pytest.raises(NotStorableError, match=r"the object at new_entries\[1\].*content"):
            await store.save(Conversation(messages=[asked("one"), bad], conversation_id="a"))
        assert await store.load("a") is None
        assert await store.list_conversations() == []


@pytest.mark.deep
async def test_a_message_that_is_larger_than_a_record_is_in_blobs(tmp_path: Path) -> None:
    image = BinaryContent(bytes(range(256)) * 70_000, media_type="image/png")
    messages = [
        asked("one"),
        ModelRequest(parts=[UserPromptPart(["look", image])]),
        said("x" * 20_000_000),
    ]
    messages += [asked("last")]
    async with perdure.connect(tmp_path) as sessions:
        store = PerdureConversationStore(sessions)
        await store.save(Conversation(messages=messages, conversation_id="a"), scope="ada")
        await store.fork("a", new_conversation_id="b", at=3)
        record = await store.read_record("a")
        assert record is not None
        await store.branch("a", at=2, expected_revision=record.revision)
        conversation = await store.load("b")
        assert conversation is not None
        large = [*conversation.messages, said("y" * 20_000_000)]
        conversation.messages.append(large[-1])
        await store.save(conversation)
    async with perdure.connect(tmp_path) as sessions:
        store = PerdureConversationStore(sessions)
        for name, expected in (("a", messages[:2]), ("b", large)):
            stored = await store.load(name)
            assert stored is not None
            dump = ModelMessagesTypeAdapter.dump_json
            assert dump(stored.messages) == dump(expected)
        await store.delete("a")
        kept = await store.load("b")
        assert kept is not None
        assert len(kept.messages) == 4


async def test_numbers_and_characters_that_json_lacks_come_back(tmp_path: Path) -> None:
    messages: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart("half \ud83d")]),
        ModelResponse(parts=[ToolCallPart("f", {"x": float("nan")}, "c"), TextPart("\udc00 half")]),
        ModelRequest(parts=[ToolReturnPart("f", {"y": [float("-inf"), None]}, "c")]),
    ]
    requests = DeferredToolRequests(approvals=[ToolCallPart("g", {"z": "\ud83d"}, "d")])
    async with PerdureConversationStore.from_url(tmp_path) as store:
        conversation = Conversation(
            messages=list(messages), conversation_id="a", deferred_tool_requests=requests
        )
        await store.save(conversation)
        conversation.messages.append(asked("b"))
        await store.save(conversation)
    async with perdure.connect(tmp_path) as sessions:
        stored = await PerdureConversationStore(sessions).load("a")
        assert stored is not None
        read = repr(stored.messages[:3]).replace("TzInfo(0)", "datetime.timezone.utc")
        assert read == repr(messages)
        view = await sessions.load("a")
        assert view is not None
        assert [message.text for message in view.context()][:2] == ["half ?", "? half"]


@pytest.mark.parametrize("bad", ["", "a\nb", "perdure:scope", "x" * 2000])
async def test_an_id_that_cannot_be_used_is_named_by_the_sdk_s_word(bad: str) -> None:
    async with PerdureConversationStore.in_memory() as store:
        with pytest.raises(perdure.InvalidArgumentError, match="conversation_id") as refused:
            await store.load(bad)
        assert "agent" not in str(refused.value)


@pytest.mark.parametrize("given", ["sqlite:///a.db", None.__class__])
def test_what_is_no_manager_is_refused_with_what_to_write(given: Any) -> None:
    with pytest.raises(perdure.InvalidArgumentError, match=r"PerdureConversationStore\.from_url"):
        PerdureConversationStore(given)


# Against the SDK's own store


IDS = st.sampled_from("abc")
SCOPES = st.sampled_from([None, "ada", "bob"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), IDS, st.integers(1, 4), SCOPES),
        st.tuples(st.just("stale"), IDS, st.integers(1, 2), st.none()),
        st.tuples(st.just("rewrite"), IDS, st.integers(0, 3), st.none()),
        st.tuples(st.just("branch"), IDS, st.integers(0, 6), st.none()),
        st.tuples(st.just("back"), IDS, st.integers(0, 2), st.none()),
        st.tuples(st.just("fork"), IDS, st.integers(0, 6), IDS),
        st.tuples(st.just("fork_branch"), IDS, st.integers(0, 2), IDS),
        st.tuples(st.just("delete"), IDS, st.just(0), SCOPES),
        st.tuples(st.just("reopen"), st.just(""), st.just(0), st.none()),
        st.tuples(st.just("compare"), st.just(""), st.integers(0, 3), st.none()),
    ),
    max_size=14,
)


class Twin:
    """One of two stores, and what a program holds of it."""

    def __init__(self, store: ConversationStore, sessions: SessionManager | None = None) -> None:
        self.store = store
        self.sessions = sessions
        self.old: dict[str, Conversation] = {}

    async def do(self, what: str, name: str, number: int, other: Any, made: list[Any]) -> Any:
        """Do one step; return what can be compared."""
        try:
            return await getattr(self, what)(name, number, other, made)
        except (ConversationConflict, UserError) as error:
            return type(error).__name__

    async def save(self, name: str, number: int, scope: str | None, made: list[Any]) -> Any:
        held = await self.store.load(name) or Conversation(conversation_id=name)
        held.messages.extend(made[:number])
        held.usage = held.usage + RunUsage(requests=1, input_tokens=number)
        if number == 3:
            call = ToolCallPart("tide", {"at": 1}, "c")
            held.deferred_tool_requests = DeferredToolRequests(approvals=[call])
        entries = await self.store.save(held, scope=scope)
        self.old[name] = held
        return len(entries)

    async def stale(self, name: str, number: int, other: Any, made: list[Any]) -> Any:
        """Save what was held at the last save, which another one may have overtaken."""
        held = self.old.get(name) or Conversation(conversation_id=name)
        held.messages = [*held.messages, *made[:number]]
        return len(await self.store.save(held))

    async def rewrite(self, name: str, number: int, other: Any, made: list[Any]) -> Any:
        """Save another history from a message on, as a program that compacts does."""
        held = await self.store.load(name)
        if held is None:
            return None
        new = Conversation(
            messages=[*held.messages[:number], *made[:2]],
            conversation_id=name,
            revision=held.revision,
        )
        return len(await self.store.save(new))

    async def branch(self, name: str, number: int, other: Any, made: list[Any]) -> Any:
        record = await self.store.read_record(name)
        revision = "none" if record is None else record.revision
        held = await self.store.branch(name, at=number, expected_revision=revision)
        return data_of(held.messages)

    async def back(self, name: str, number: int, other: Any, made: list[Any]) -> Any:
        record = await self.store.read_record(name)
        if record is None or number >= len(record.branches):
            return None
        tip = record.branches[number]
        held = await self.store.branch(name, from_entry=tip, expected_revision=record.revision)
        return data_of(held.messages)

    async def fork(self, name: str, number: int, other: Any, made: list[Any]) -> Any:
        held = await self.store.fork(name, at=number, new_conversation_id=other)
        return data_of(held.messages)

    async def fork_branch(self, name: str, number: int, other: Any, made: list[Any]) -> Any:
        record = await self.store.read_record(name)
        if record is None or number >= len(record.branches):
            return None
        tip = record.branches[number]
        held = await self.store.fork(name, from_entry=tip, new_conversation_id=other)
        return data_of(held.messages)

    async def delete(self, name: str, number: int, scope: str | None, made: list[Any]) -> Any:
        return await self.store.delete(name, scope=scope)

    async def check_context(self, name: str, limit: int | None) -> None:
        """The working context is the end of the history."""
        assert self.sessions is not None
        view = await self.sessions.load(name)
        held = await self.store.load(name)
        assert view is not None
        assert held is not None
        texts = [message.text for message in view.context() if message.role == "user"]
        history = [
            part.content
            for message in held.messages
            if isinstance(message, ModelRequest)
            for part in message.parts
            if isinstance(part, UserPromptPart)
        ]
        assert texts == (history[-len(texts) :] if texts else [])

    async def shown(self, limit: int | None) -> list[Any]:
        """Return all that the store knows, but for ids that it has made."""
        shown: list[Any] = []
        for record in await self.store.list_conversations(limit=limit):
            entries = await self.store.load_entries(record.conversation_id, limit=limit)
            assert entries is not None
            for entry in entries:
                assert await self.store.read_entry(entry.id) == entry
            tips = [await self.store.read_history(tip, limit=limit) for tip in record.branches]
            shown.append(
                (
                    record.conversation_id,
                    record.scope,
                    record.forked_from,
                    record.usage,
                    record.deferred_tool_requests,
                    [data_of([entry.message for entry in line]) for line in [entries, *tips]],
                )
            )
            if self.sessions is not None:
                await self.check_context(record.conversation_id, limit)
        scoped = await self.store.list_conversations(scope="ada", limit=limit)
        return [*shown, [record.conversation_id for record in scoped]]


@given(steps=STEPS, context_bytes=st.sampled_from([700, 512 * 1024]))
def test_it_does_what_the_sdk_s_store_does(
    steps: list[tuple[str, str, int, Any]], context_bytes: int
) -> None:
    """With a small context, what is older is read from the log."""

    async def main() -> None:
        backing = MemoryBacking()

        def connected() -> SessionManager:
            store, limits = MemoryStore(backing=backing), Limits(context_bytes=context_bytes)
            return perdure.connect(store, limits=limits, autosave=None)

        sessions = await connected()
        mine, theirs = (
            Twin(PerdureConversationStore(sessions), sessions),
            Twin(InMemoryConversationStore()),
        )
        for at, (what, name, number, other) in enumerate([*steps, ("reopen", "", 0, None)]):
            if what == "reopen":
                await sessions.aclose()
                sessions = await connected()
                mine.store, mine.sessions = PerdureConversationStore(sessions), sessions
                assert await mine.shown(None) == await theirs.shown(None)
            elif what == "compare":
                assert await mine.shown(number) == await theirs.shown(number)
            else:
                made = [asked(f"q{at} {'x' * 90}"), ODD[1], ODD[2], said(f"a{at}")]
                one = await mine.do(what, name, number, other, made)
                assert one == await theirs.do(what, name, number, other, made), what
        await sessions.aclose()

    asyncio.run(main())


async def test_a_write_is_checked_as_the_sdk_says(sessions: SessionManager) -> None:
    store = PerdureConversationStore(sessions)
    first = ConversationEntry(parent_id=None, message=asked("one"))
    unknown = ConversationRecord(conversation_id="a", head_id="unknown")
    with pytest.raises(ConversationConflict):
        await store.write_record(unknown, expected_revision=None)
    assert await sessions.list() == []
    record = ConversationRecord(conversation_id="a", head_id=first.id)
    with pytest.raises(ConversationConflict):
        await store.write_record(record, new_entries=[first], expected_revision="other")
    assert await sessions.list() == []
    await store.write_record(record, new_entries=[first], expected_revision=None)
    for expected in (None, "other"):
        with pytest.raises(ConversationConflict):
            await store.write_record(record, expected_revision=expected)
    with pytest.raises(ConversationConflict):
        await store.write_record(unknown, expected_revision=record.revision)
    with pytest.raises(perdure.InvalidArgumentError, match="new_entries"):
        await store.write_record(unknown, new_entries=[first], expected_revision=record.revision)
    with pytest.raises(ConversationConflict):
        await store.delete_record("a", expected_revision="other")
    with pytest.raises(ConversationConflict):
        await store.delete_record("b", expected_revision="other")
    with pytest.raises(LookupError):
        await store.read_entry("unknown")
    assert await store.read_entry(first.id) == first


async def test_a_save_reads_nothing_of_a_conversation_that_is_held_here() -> None:
    faulty = FaultyStore(MemoryStore(), nth=10**6)
    async with perdure.connect(faulty) as sessions:
        store, conversation = PerdureConversationStore(sessions), Conversation(conversation_id="a")
        await store.save(conversation)
        before = faulty.calls["read_documents"]
        for number in range(3):
            conversation.messages.append(asked(f"{number}"))
            await store.save(conversation)
        assert faulty.calls["read_documents"] == before


async def test_a_head_may_move_to_another_conversation_s_entry(sessions: SessionManager) -> None:
    store, twin = PerdureConversationStore(sessions), InMemoryConversationStore()
    for each in (store, twin):
        await each.save(Conversation(messages=[asked("one"), said("two")], conversation_id="a"))
        await each.save(Conversation(messages=[asked("three")], conversation_id="b"))
        a, b = await each.read_record("a"), await each.read_record("b")
        assert a is not None
        assert b is not None
        moved = ConversationRecord(conversation_id="b", head_id=a.head_id)
        await each.write_record(moved, expected_revision=b.revision)
        await each.delete("a")
        loaded = await each.load("b")
        assert loaded is not None
        assert [type(message) for message in loaded.messages] == [ModelRequest, ModelResponse]


async def test_another_program_s_session_is_no_conversation(sessions: SessionManager) -> None:
    async with sessions.open("a") as session:
        session.append(perdure.Message.user("Hello"))
    store = PerdureConversationStore(sessions)
    assert await store.load("a") is None
    with pytest.raises(perdure.SessionError, match="no conversation of Pydantic AI"):
        await store.save(Conversation(messages=[asked("one")], conversation_id="a"))
    assert [item.value.text for item in await session.history()] == ["Hello"]


# As a session of perdure


async def test_a_fork_shares_the_log(sessions: SessionManager, tmp_path: Path) -> None:
    store = PerdureConversationStore(sessions)
    for at in range(4):
        held = await store.load("a") or Conversation(conversation_id="a")
        held.messages += [asked(f"{at} {'tide ' * 10_000}"), said("At noon.")]
        await store.save(held)
    for at in range(9):
        forked = await store.fork("a", at=at, new_conversation_id=f"fork {at}", scope=f"p{at}")
        assert data_of(forked.messages) == data_of(held.messages[:at])
    listed = {info.key.agent: info.owner for info in await sessions.list(prefix="fork")}
    assert set(listed) == {f"fork {at}" for at in range(9)}
    await store.delete("a")
    for at in range(9):
        kept = await store.load(f"fork {at}", scope=f"p{at}")
        assert kept is not None
        assert data_of(kept.messages) == data_of(held.messages[:at])
        assert len((await sessions.load(f"fork {at}")).context()) == at  # type: ignore[union-attr]


async def test_a_fork_of_old_messages_has_their_context(tmp_path: Path) -> None:
    """With a small context, what the fork begins with was cut off the other one's."""
    names = [f"{at} {'x' * 200}" for at in range(20)]
    async with perdure.connect(tmp_path, limits=Limits(context_bytes=3000)) as sessions:
        store = PerdureConversationStore(sessions)
        messages: list[ModelMessage] = [asked(name) for name in names]
        await store.save(Conversation(messages=messages, conversation_id="a"))
        await store.fork("a", at=5, new_conversation_id="b")
        view = await sessions.load("b")
        assert view is not None
        texts = [message.text for message in view.context()]
        assert texts
        assert texts == names[:5][-len(texts) :]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def test_delete_erases_a_conversation_that_no_fork_shares(tmp_path: Path) -> None:
    async with PerdureConversationStore.from_url(tmp_path) as store:
        held = Conversation(messages=[asked("one"), said("secret words")], conversation_id="a")
        await store.save(held, scope="ada")
        record = await store.read_record("a")
        assert record is not None
        await store.branch("a", at=1, expected_revision=record.revision)
        assert files_with(b"secret words", tmp_path)
        await store.delete("a")
        assert await store.list_conversations() == []
        assert files_with(b"secret words", tmp_path) == []


async def test_what_a_fork_shared_is_erased_when_it_is_forgotten(
    sessions: SessionManager, tmp_path: Path
) -> None:
    store = PerdureConversationStore(sessions)
    held = Conversation(messages=[asked("one"), said("secret words")], conversation_id="a")
    await store.save(held)
    await store.fork("a", new_conversation_id="b")
    await store.delete("a")
    assert files_with(b"secret words", tmp_path)
    await sessions.forget("b")
    assert files_with(b"secret words", tmp_path) == []


def files_with(data: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and data in path.read_bytes()]


async def test_a_person_s_conversations_are_forgotten_by_scope(sessions: SessionManager) -> None:
    store = PerdureConversationStore(sessions)
    for name, scope in (("a", "ada"), ("b", "bob")):
        await store.save(Conversation(messages=[asked("one")], conversation_id=name), scope=scope)
    await store.fork("b", new_conversation_id="c", scope="ada")
    await sessions.forget(owner="ada")
    assert [each.conversation_id for each in await store.list_conversations()] == ["b"]


async def test_the_context_is_the_current_history(sessions: SessionManager) -> None:
    store = PerdureConversationStore(sessions)
    await store.save(Conversation(messages=list(ODD[:4]), conversation_id="a"))
    view = await sessions.load("a")
    assert view is not None
    roles = [message.role for message in view.context()]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert view.context()[2].tool_calls[0].arguments == {"harbor": "Oosthaven"}
    for target in ("openai", "openai-responses", "anthropic", "gemini"):
        assert view.context(target)
    record = await store.read_record("a")
    assert record is not None
    await store.branch("a", at=1, expected_revision=record.revision)
    view = await sessions.load("a")
    assert view is not None
    assert [message.role for message in view.context()] == ["system", "user"]


async def test_conversations_are_backed_up_copied_renamed_and_moved(
    sessions: SessionManager, tmp_path: Path
) -> None:
    store = PerdureConversationStore(sessions)
    await store.save(Conversation(messages=list(ODD), conversation_id="a"))
    await store.fork("a", at=3, new_conversation_id="b")
    await sessions.copy("a", "copy")
    await sessions.rename("copy", "new")
    exported = await perdure.export_state(sessions, "a")
    async with perdure.connect(tmp_path / "other") as others:
        await perdure.import_state(others, exported)
        other = PerdureConversationStore(others)
        loaded = await other.load("a")
        assert loaded is not None
        assert data_of(loaded.messages) == data_of(ODD)
    for name, count in (("a", len(ODD)), ("b", 3), ("new", len(ODD))):
        loaded = await store.load(name)
        assert loaded is not None
        assert data_of(loaded.messages) == data_of(ODD[:count])
        loaded.messages.append(said("more"))
        await store.save(loaded)
    names = {each.conversation_id for each in await store.list_conversations()}
    assert names == {"a", "b", "new"}


async def test_a_pruned_conversation_gives_what_is_left(tmp_path: Path) -> None:
    limits = Limits(context_bytes=4000)
    async with perdure.connect(tmp_path, limits=limits) as sessions:
        store = PerdureConversationStore(sessions)
        for at in range(12):
            held = await store.load("a") or Conversation(conversation_id="a")
            held.messages += [asked(f"{at} {'x' * 400}"), said("yes")]
            await store.save(held)
    async with perdure.connect(tmp_path, limits=limits) as sessions:
        store = PerdureConversationStore(sessions)
        await sessions.prune(perdure.Retention(keep_turns=2))
        left = await store.load("a")
        assert left is not None
        assert 4 <= len(left.messages) < 24
        assert left.messages == held.messages[-len(left.messages) :]
        left.messages.append(said("more"))
        await store.save(left)
        again = await store.load("a")
        assert again is not None
        assert again.messages == left.messages


def test_the_command_line_shows_and_checks_a_conversation(tmp_path: Path) -> None:
    async def main() -> None:
        async with PerdureConversationStore.from_url(tmp_path) as store:
            await store.save(Conversation(messages=[asked("low tide?")], conversation_id="a"))

    asyncio.run(main())
    for arguments in (["ls"], ["show", "a"], ["check"]):
        command = [sys.executable, "-m", "perdure", *arguments, "--store", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GUARD)
        assert done.returncode == 0, done.stderr
        assert ("low tide?" in done.stdout) == (arguments[0] == "show")


# Agents


async def test_an_agent_with_tools_goes_on_after_a_restart(tmp_path: Path) -> None:
    agent = Agent(TestModel())

    @agent.tool_plain
    def tide(harbor: str) -> str:
        return f"low in {harbor}"

    for turn in range(1, 4):
        async with PerdureConversationStore.from_url(tmp_path) as store:
            held = await store.load("a") or Conversation(conversation_id="a")
            result = await agent.run("When is low tide?", conversation=held)
            await store.save(result, scope="ada")
            loaded = await store.load("a", scope="ada")
            assert loaded is not None
            assert data_of(loaded.messages) == result.all_messages_json()
            assert loaded.usage == result.conversation.usage
            assert len(loaded.messages) == 4 * turn if turn == 1 else len(loaded.messages) > 4
            assert await store.load("a", scope="bob") is None


async def test_a_stream_is_saved_as_the_sdk_s_store_saves_it(sessions: SessionManager) -> None:
    agent = Agent(TestModel(custom_output_text="low tide at noon"))
    for store in (PerdureConversationStore(sessions), InMemoryConversationStore()):
        async with agent.run_stream("When?", conversation_id="a") as stream:
            assert [part async for part in stream.stream_text(delta=True)]
            held = Conversation(messages=stream.all_messages(), conversation_id="a")
        await store.save(held)
        loaded = await store.load("a")
        assert loaded is not None
        assert data_of(loaded.messages) == data_of(held.messages)


async def test_a_run_that_waits_for_approval_is_resumed_after_a_restart(tmp_path: Path) -> None:
    agent = Agent(TestModel(), output_type=[str, DeferredToolRequests])

    @agent.tool_plain(requires_approval=True)
    def sail(harbor: str) -> str:
        return f"sailed to {harbor}"

    async with PerdureConversationStore.from_url(tmp_path) as store:
        result = await agent.run("Sail", conversation=Conversation(conversation_id="a"))
        assert isinstance(result.output, DeferredToolRequests)
        await store.save(result)
    async with PerdureConversationStore.from_url(tmp_path) as store:
        held = await store.load("a")
        assert held is not None
        assert held.deferred_tool_requests is not None
        approved = held.deferred_tool_requests.build_results(approve_all=True)
        done = await agent.run(conversation=held, deferred_tool_results=approved)
        assert isinstance(done.output, str)
        assert "sailed to" in done.output
        await store.save(done)
        assert (await store.load("a")).deferred_tool_requests is None  # type: ignore[union-attr]


async def test_a_save_that_is_cancelled_is_there_or_not_as_a_whole(
    sessions: SessionManager,
) -> None:
    store = PerdureConversationStore(sessions)
    for waits in range(12):
        held = Conversation(messages=[asked("one"), said("two")], conversation_id=f"c{waits}")
        task = asyncio.create_task(store.save(held))
        for _ in range(waits):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loaded = await store.load(held.conversation_id)
        assert loaded is None or len(loaded.messages) == 2


async def test_one_of_many_runs_at_the_same_time_is_saved_and_the_others_are_told(
    sessions: SessionManager,
) -> None:
    stores = [PerdureConversationStore(sessions) for _ in range(3)]
    gate = anyio.Event()

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        await gate.wait()
        return said(f"answer {len(messages)}")

    agent = Agent(FunctionModel(answer))
    await stores[0].save(Conversation(conversation_id="a"))
    told: list[str] = []

    async def run(store: PerdureConversationStore, name: str) -> None:
        held = await store.load("a")
        result = await agent.run(name, conversation=held)
        try:
            await store.save(result)
        except ConversationConflict:
            told.append(name)

    async with anyio.create_task_group() as group:
        for number in range(9):
            group.start_soon(run, stores[number % 3], f"run {number}")
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert len(told) == 8
    loaded = await stores[0].load("a")
    assert loaded is not None
    assert len(loaded.messages) == 2


async def test_a_conversation_of_a_newer_format_is_neither_read_nor_written(
    sessions: SessionManager,
) -> None:
    store = PerdureConversationStore(sessions)
    held = Conversation(messages=[asked("one")], conversation_id="a")
    await store.save(held)
    async with sessions.open("a") as session:
        text: str = await session.state.get("pydantic-ai/conversation")
        newer = text.replace('"format_version":1', '"format_version":2')
        session.state.set("pydantic-ai/conversation", newer)
        await session.save()
        record = ConversationRecord(conversation_id="a", head_id=None, usage=RunUsage())
        for call in (
            store.load("a"),
            store.write_record(record, expected_revision=held.revision),
            store.delete_record("a", expected_revision=held.revision or ""),
        ):
            with pytest.raises(UnsupportedVersionError, match="format 2.*upgrade pydantic-ai-slim"):
                await call
        assert await session.state.get("pydantic-ai/conversation") == newer


async def test_a_handover_between_opening_and_writing_is_asked_back(
    sessions: SessionManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PerdureConversationStore(sessions)
    held = Conversation(messages=[asked("one")], conversation_id="a")
    await store.save(held)
    async with perdure.connect(tmp_path / "store") as others:
        taken: list[Any] = []
        read = PerdureConversationStore._record_text

        async def after_a_handover(self: Any, source: Any) -> Any:
            if isinstance(source, perdure.Session) and len(taken) < 2:
                async with others.open("a") as session:
                    taken.append(session)
            return await read(self, source)

        held.messages.append(said("two"))
        monkeypatch.setattr(PerdureConversationStore, "_record_text", after_a_handover)
        await store.save(held)
        assert len(taken) == 2
        await store.delete("a")
        assert await store.load("a") is None


@pytest.mark.parametrize("is_new", [True, False])
async def test_of_writes_that_expect_the_same_record_one_is_done(
    tmp_path: Path, *, is_new: bool
) -> None:
    async with PerdureConversationStore.from_url(tmp_path) as store:
        if not is_new:
            await store.save(Conversation(messages=[asked("one")], conversation_id="a"))
    done: list[str] = []

    async with PerdureConversationStore.from_url(tmp_path) as store:
        stored = await store.read_record("a")
        revision = None if stored is None else stored.revision
        parent = None if stored is None else stored.head_id

        async def write(at: int) -> None:
            entry = ConversationEntry(parent_id=parent, message=asked(f"{at}"))
            record = ConversationRecord(conversation_id="a", head_id=entry.id)
            with contextlib.suppress(ConversationConflict):
                await store.write_record(record, new_entries=[entry], expected_revision=revision)
                done.append(entry.id)

        async with anyio.create_task_group() as group:
            for at in range(8):
                group.start_soon(write, at)
        record = await store.read_record("a")
        assert record is not None
        assert done == [record.head_id]


@pytest.mark.deep
async def test_a_torn_write_leaves_all_of_a_change_or_nothing(
    sessions: SessionManager, tmp_path: Path
) -> None:
    """The log is cut at each byte that a call has written, as a crash might cut it."""
    store = PerdureConversationStore(sessions)
    held = Conversation(messages=list(ODD[:3]), conversation_id="a")

    async def add() -> None:
        await store.save(held)

    async def branch() -> None:
        await store.branch("a", at=1, expected_revision=str(held.revision))

    agents = tmp_path / "store" / "agents"
    for change in (add, branch):  # a fork is seen once it is whole
        before = await seen(store, "a")
        found = list(agents.glob("a/log/*.jsonl"))
        start = max((path.stat().st_size for path in found), default=0)
        await change()
        after = await seen(store, "a")
        assert before != after
        (log,) = agents.glob("a/log/*.jsonl")
        whole = log.read_bytes()
        for end in {start, *range(start + 1, len(whole), 61), len(whole) - 1, len(whole)}:
            copy = tmp_path / f"{change.__name__}-{end}"
            shutil.copytree(tmp_path / "store", copy)
            (copy / log.relative_to(tmp_path / "store")).write_bytes(whole[:end])
            async with PerdureConversationStore.from_url(copy) as torn:
                assert await seen(torn, "a") in (before, after), end
            shutil.rmtree(copy)


async def seen(store: PerdureConversationStore, name: str) -> Any:
    held, record = await store.load(name), await store.read_record(name)
    return held and data_of(held.messages), record and (record.scope, record.branches)


async def test_a_conversation_that_was_deleted_while_another_saves_is_whole_or_gone(
    sessions: SessionManager,
) -> None:
    store = PerdureConversationStore(sessions)
    for number in range(8):
        held = Conversation(messages=[asked("one")], conversation_id="a")
        await store.save(held)
        held.messages.append(said("two"))
        fresh = Conversation(messages=[asked("new")], conversation_id="a")

        async def later(conversation: Conversation, waits: int) -> Any:
            for _ in range(waits):
                await asyncio.sleep(0)
            return await store.save(conversation)

        saved, made, deleted = await asyncio.gather(
            later(held, number),
            later(fresh, 2 * number),
            store.delete("a"),
            return_exceptions=True,
        )
        assert deleted is None
        loaded = await store.load("a")
        if isinstance(made, list):  # it was acknowledged after the deletion
            assert loaded is not None
            assert data_of(loaded.messages) == data_of(fresh.messages)
        elif not isinstance(saved, list):
            assert loaded is None
        assert {type(made), type(saved)} <= {
            list,
            ConversationConflict,
            perdure.SessionNotFoundError,
        }
        await store.delete("a")


def test_the_store_works_on_trio(tmp_path: Path) -> None:
    async def main() -> None:
        async with PerdureConversationStore.from_url(tmp_path) as store:
            await store.save(Conversation(messages=list(ODD), conversation_id="a"))
            await store.fork("a", at=2, new_conversation_id="b")
            await store.delete("a")
            loaded = await store.load("b")
            assert loaded is not None
            assert data_of(loaded.messages) == data_of(ODD[:2])

    anyio.run(main, backend="trio")


# Other processes


PROGRAM = """
import asyncio, sys
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationConflict
from pydantic_ai.messages import ModelRequest, UserPromptPart
from perdure.adapters import PerdureConversationStore

def asked(text):
    return ModelRequest(parts=[UserPromptPart(text)])
"""


def program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + code, *arguments],
        capture_output=True,
        text=True,
        timeout=GUARD * 4,
        check=False,
    )


WRITES = """
async def main():
    done, told = 0, 0
    async with PerdureConversationStore.from_url(sys.argv[1], wait=60) as store:
        while done < int(sys.argv[3]):
            held = await store.load("a") or Conversation(conversation_id="a")
            held.messages.append(asked(f"{sys.argv[2]} {done}"))
            try:
                await store.save(held)
                done += 1
            except ConversationConflict:
                told += 1
    print(done)

asyncio.run(main())
"""


@pytest.mark.deep
async def test_processes_that_save_the_same_conversation_lose_nothing(tmp_path: Path) -> None:
    await several_write(tmp_path, "wxyz", 8)


async def several_write(folder: Path, names: str, count: int) -> None:
    done: list[subprocess.CompletedProcess[str]] = []

    async def work(name: str) -> None:
        arguments = (WRITES, str(folder), name, str(count))
        done.append(await anyio.to_thread.run_sync(program, *arguments))

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(work, name)
    assert [worker.stderr for worker in done if worker.returncode] == []
    async with PerdureConversationStore.from_url(folder) as store:
        held = await store.load("a")
    assert held is not None
    found = [str(message.parts[0].content) for message in held.messages]  # type: ignore[union-attr]
    assert sorted(found) == sorted(f"{name} {at}" for name in names for at in range(count))
    for name in names:
        own = [text for text in found if text.startswith(name)]
        assert own == [f"{name} {at}" for at in range(count)]


@pytest.mark.deep
def test_kills_at_any_time_leave_what_was_acknowledged(tmp_path: Path) -> None:
    """Many more: ``python -m tests.adapters.kills pydantic-ai``."""
    kills.run("pydantic-ai", str(tmp_path / "store"), kills=4)


KILLED = """
import os, signal
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

agent = Agent(TestModel())
runs = []

@agent.tool_plain
def tide(harbor: str) -> str:
    if runs:
        os.kill(os.getpid(), signal.SIGKILL)
    return "low"

async def main():
    store = PerdureConversationStore.from_url(sys.argv[1])
    held = Conversation(conversation_id="a")
    result = await agent.run("When?", conversation=held)
    await store.save(result)
    runs.append(1)
    await agent.run("And in Westhaven?", conversation_id="a")

asyncio.run(main())
"""


@pytest.mark.deep
async def test_a_process_that_is_killed_in_a_run_leaves_the_runs_before(tmp_path: Path) -> None:
    killed = await anyio.to_thread.run_sync(program, KILLED, str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    async with PerdureConversationStore.from_url(tmp_path, wait=GUARD) as store:
        held = await store.load("a")
        assert held is not None
        assert len(held.messages) == 4
        result = await Agent(TestModel()).run("And now?", conversation=held)
        await store.save(result)
        assert len((await store.load("a")).messages) == 6  # type: ignore[union-attr]
