"""Code that type checkers must accept: how people use `perdure.adapters`. It is never run."""

# pyright: strict
from __future__ import annotations

from typing import Any, assert_type

from agents.memory import Session, SessionSettings
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationStore

import perdure
from perdure.adapters import PerdureConversationStore, PerdureSession


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
