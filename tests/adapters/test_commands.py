"""What the command line does with a session, it does with each adapter's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import perdure
from perdure import SessionManager
from perdure.cli import main

Run = Callable[..., Any]


class Adapted(NamedTuple):
    """An adapter: what writes a session of its SDK, and what reads it, as plain data."""

    write: Callable[[SessionManager], Awaitable[None]]
    read: Callable[[SessionManager], Awaitable[Any]]
    id: tuple[str, ...]
    """The session for the command line."""
    is_conversation: bool = True
    """Whether perdure knows its messages."""


# OpenAI Agents

ITEMS = [
    {"role": "user", "content": "When is low tide?"},
    {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
    {"type": "from_the_future", "of": [1, None]},
]


async def write_openai(sessions: SessionManager) -> None:
    from perdure.adapters import PerdureSession

    async with PerdureSession("ada", sessions) as session:
        await session.add_items(ITEMS)


async def read_openai(sessions: SessionManager) -> Any:
    from perdure.adapters import PerdureSession

    return await PerdureSession("ada", sessions).get_items()


# Google ADK

WHERE = {"app_name": "harbor", "user_id": "ada", "session_id": "tides"}


async def write_adk(sessions: SessionManager) -> None:
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.genai import types

    from perdure.adapters import PerdureSessionService

    service = PerdureSessionService(sessions)
    session = await service.create_session(**WHERE, state={"begun": True, "user:boat": "Sula"})
    for author in ("user", "harbor"):
        content = types.Content(role=author, parts=[types.Part(text="low tide")])
        actions = EventActions(state_delta={"by": author})
        await service.append_event(session, Event(author=author, content=content, actions=actions))


async def read_adk(sessions: SessionManager) -> Any:
    from perdure.adapters import PerdureSessionService

    session = await PerdureSessionService(sessions).get_session(**WHERE)
    return None if session is None else session.model_dump(mode="json")


# LangGraph


@asynccontextmanager
async def graph(sessions: SessionManager) -> AsyncIterator[Any]:
    from langgraph.graph import START, MessagesState, StateGraph

    from perdure.adapters import PerdureSaver

    async def model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("ai", f"{len(state['messages'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node(model)
    builder.add_edge(START, "model")
    yield builder.compile(checkpointer=PerdureSaver(sessions))


async def write_langgraph(sessions: SessionManager) -> None:
    async with graph(sessions) as built:
        for _ in range(3):
            asked = {"messages": [("user", "When is low tide?")]}
            await built.ainvoke(asked, {"configurable": {"thread_id": "ada"}})


async def read_langgraph(sessions: SessionManager) -> Any:
    async with graph(sessions) as built:
        config = {"configurable": {"thread_id": "ada"}}
        states = [state async for state in built.aget_state_history(config)]
        return [(state.values, state.metadata, state.next) for state in states]


# Pydantic AI


async def write_pydantic_ai(sessions: SessionManager) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.models.test import TestModel

    from perdure.adapters import PerdureConversationStore

    store = PerdureConversationStore(sessions)
    agent = Agent(TestModel(custom_output_text="At noon."))
    for question in ("When is low tide?", "Sure?"):
        conversation = await store.load("ada") or Conversation(conversation_id="ada")
        await store.save(await agent.run(question, conversation=conversation), scope="customer 7")


async def read_pydantic_ai(sessions: SessionManager) -> Any:
    from pydantic_ai.conversation import ConversationTypeAdapter

    from perdure.adapters import PerdureConversationStore

    conversation = await PerdureConversationStore(sessions).load("ada")
    return None if conversation is None else ConversationTypeAdapter.dump_json(conversation)


# Claude Agent SDK


async def write_claude_agent(sessions: SessionManager) -> None:
    from perdure.adapters import PerdureSessionStore

    store = PerdureSessionStore(sessions)
    asked = {"role": "user", "content": "When is low tide?"}
    await store.append(TRANSCRIPT, [{"type": "user", "uuid": "1", "message": asked}])
    await store.append(TRANSCRIPT, [{"type": "custom-title", "customTitle": "Tides"}])


async def read_claude_agent(sessions: SessionManager) -> Any:
    from perdure.adapters import PerdureSessionStore

    store = PerdureSessionStore(sessions)
    summaries = await store.list_session_summaries("harbor")
    return await store.load(TRANSCRIPT), summaries


TRANSCRIPT = {"project_key": "harbor", "session_id": "ada"}


ADAPTERS = {
    "agents": Adapted(write_openai, read_openai, ("ada",)),
    "claude_agent_sdk": Adapted(
        write_claude_agent, read_claude_agent, ("claude/harbor/ada",), is_conversation=False
    ),
    "google.adk": Adapted(write_adk, read_adk, ("harbor/ada", "--session", "tides")),
    "langgraph.graph": Adapted(write_langgraph, read_langgraph, ("ada",), is_conversation=False),
    "pydantic_ai": Adapted(write_pydantic_ai, read_pydantic_ai, ("ada",)),
}


@pytest.fixture(params=ADAPTERS)
def adapted(request: pytest.FixtureRequest) -> Adapted:
    pytest.importorskip(request.param)
    return ADAPTERS[request.param]


@pytest.fixture
def store(tmp_path: Path, adapted: Adapted) -> str:
    """A store with one session, which the adapter has written."""

    async def write() -> None:
        async with perdure.connect(tmp_path / "store") as sessions:
            await adapted.write(sessions)

    anyio.run(write)
    return str(tmp_path / "store")


def read(adapted: Adapted, store: object) -> Any:
    async def run() -> Any:
        async with perdure.connect(store) as sessions:
            return await adapted.read(sessions)

    return anyio.run(run)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``perdure``, and return what it prints."""

    def run(*tokens: object) -> str:
        capsys.readouterr()
        status = main([str(token) for token in tokens])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return run


def test_a_session_is_listed_shown_and_checked(adapted: Adapted, store: str, command: Run) -> None:
    (listed,) = json.loads(command("ls", "--store", store, "--json"))["sessions"]
    id_, *session = adapted.id
    assert (listed["agent"], listed["session"]) == (id_, session[-1] if session else "default")
    assert listed["head"] > 0
    shown = command("show", *adapted.id, "--store", store)
    assert id_ in shown
    if adapted.is_conversation or id_.startswith("claude/"):
        assert "low tide" in shown
    assert json.loads(command("show", *adapted.id, "--store", store, "--json"))
    assert json.loads(command("check", "--store", store, "--json"))["problems"] == 0


@pytest.mark.parametrize("layout", ["full", "files", "bundle"])
def test_an_export_is_imported_as_it_was(
    adapted: Adapted, store: str, command: Run, tmp_path: Path, layout: str
) -> None:
    out, new = tmp_path / "exported", tmp_path / "new"
    command("export", *adapted.id, "--layout", layout, "--out", out, "--store", store)
    command("import", out, *adapted.id[1:], "--store", new)
    before, after = read(adapted, store), read(adapted, new)
    if isinstance(before, dict):  # ADK's: a user's state is in a scope, not in the session
        assert before["state"].pop("user:boat") == "Sula"
    assert after == before


def test_a_session_is_migrated_and_backed_up(
    adapted: Adapted, store: str, command: Run, tmp_path: Path
) -> None:
    before = read(adapted, store)
    moved, restored = f"sqlite:///{tmp_path}/moved.db", tmp_path / "restored"
    command("migrate", store, moved)
    assert read(adapted, moved) == before
    command("backup", moved, tmp_path / "backup", "--verify")
    command("restore-backup", tmp_path / "backup", restored)
    assert read(adapted, restored) == before


def test_a_copy_that_is_renamed_back_is_the_session(
    adapted: Adapted, store: str, command: Run
) -> None:
    before = read(adapted, store)
    id_, *session = adapted.id
    another = id_.replace("ada", "bob")
    command("copy", id_, another, *session, "--store", store)
    command("forget", id_, *session, "--store", store)
    command("rename", another, id_, *session, "--store", store)
    assert read(adapted, store) == before


def test_a_session_is_listed_and_read_while_it_is_written(adapted: Adapted, tmp_path: Path) -> None:
    async def run() -> None:
        async with perdure.connect(tmp_path / "store") as sessions:
            await adapted.write(sessions)
            async with perdure.connect(tmp_path / "store", read_only=True) as others:
                assert len(await others.list()) == 1
                assert await adapted.read(others) == await adapted.read(sessions)

    anyio.run(run)
