"""Code that type checkers must accept: how people use `perdure.adapters`. It is never run."""

# pyright: strict
from __future__ import annotations

from typing import Any, assert_type

from agent_framework import (
    AgentSession,
    CheckpointStorage,
    HistoryProvider,
    Message,
    WorkflowCheckpoint,
)
from agents.memory import Session, SessionSettings
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationStore

import perdure
from perdure.adapters import (
    PerdureCheckpointStorage,
    PerdureConversationStore,
    PerdureHistoryProvider,
    PerdureSession,
)


async def in_the_sdk_s_place(sessions: perdure.SessionManager) -> None:
    session: Session = PerdureSession(
        "ada",
        sessions,
        owner="ada",
        title="Tides",
        tags=["harbor"],
        session_settings=SessionSettings(limit=20),
        durable=False,
        on_held="handover",
        wait=2,
    )
    await session.clear_session()


async def by_url() -> None:
    async with PerdureSession.from_url("ada", "sqlite:///agents.db", owner="ada") as session:
        await session.acquire()
        await session.add_items([{"role": "user", "content": "Hello"}])
        await session.replace_items([])
        assert_type(await session.get_items(limit=3), list[Any])
        assert_type(await session.pop_item(), Any | None)
    await PerdureSession.in_memory().aclose()


async def conversations(sessions: perdure.SessionManager) -> None:
    store: ConversationStore = PerdureConversationStore(sessions, tags=["harbor"], wait=2)
    await store.save(Conversation(), scope="ada")
    async with PerdureConversationStore.from_url("sqlite:///agents.db", tenant="a") as own:
        assert_type(await own.load("ada"), Conversation | None)
    await PerdureConversationStore.in_memory().aclose()


async def histories(sessions: perdure.SessionManager) -> None:
    history: HistoryProvider = PerdureHistoryProvider(sessions, source_id="talk", tags=["harbor"])
    await history.save_messages("ada", [Message("user", ["Hello"])])
    async with PerdureHistoryProvider.from_url("sqlite:///agents.db", tenant="a") as own:
        assert_type(await own.get_messages("ada"), list[Message])
        assert_type(await own.load_session("ada"), AgentSession)
        await own.save_session(AgentSession(session_id="ada"))
    await PerdureHistoryProvider.in_memory().aclose()


async def checkpoints(sessions: perdure.SessionManager) -> None:
    storage: CheckpointStorage = PerdureCheckpointStorage("ada", sessions, owner="ada", wait=2)
    assert_type(await storage.save(WorkflowCheckpoint("voyage", "graph")), str)
    async with PerdureCheckpointStorage.from_url("ada", "sqlite:///agents.db") as own:
        assert_type(await own.get_latest(workflow_name="voyage"), WorkflowCheckpoint | None)
        assert_type(await own.delete("a"), bool)
    await PerdureCheckpointStorage.in_memory().aclose()
