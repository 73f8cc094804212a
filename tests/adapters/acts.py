"""What a worker does with a session on every adapter: write a text, and read all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from perdure.session.manager import SessionManager

GUARD = 60


class Acts(NamedTuple):
    """A worker's calls; a text is stored once ``write`` has returned."""

    write: Callable[[str], Awaitable[Any]]
    read: Callable[[], Awaitable[list[str]]]


def openai_agents(sessions: SessionManager, name: str = "a") -> Acts:
    from perdure.adapters import PerdureSession

    session = PerdureSession(name, sessions, wait=GUARD)

    async def read() -> list[str]:
        return [item["content"] for item in await session.get_items()]

    return Acts(lambda text: session.add_items([{"role": "user", "content": text}]), read)


def pydantic_ai(sessions: SessionManager, name: str = "a") -> Acts:
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.messages import ModelRequest, UserPromptPart

    from perdure.adapters import PerdureConversationStore

    store = PerdureConversationStore(sessions, wait=GUARD)
    mine: list[Conversation] = []

    async def write(text: str) -> None:
        if not mine:
            mine.append(await store.load(name) or Conversation(conversation_id=name))
        mine[0].messages.append(ModelRequest(parts=[UserPromptPart(text)]))
        await store.save(mine[0])

    async def read() -> list[str]:
        conversation = await store.load(name)
        messages: list[Any] = conversation.messages if conversation else []
        return [message.parts[0].content for message in messages]

    return Acts(write, read)


def langgraph(sessions: SessionManager, name: str = "a") -> Acts:
    base = pytest.importorskip("langgraph.checkpoint.base")
    from perdure.adapters import PerdureSaver

    saver = PerdureSaver(sessions, wait=GUARD)
    config: Any = {"configurable": {"thread_id": name, "checkpoint_ns": ""}}
    texts: list[str] = []
    goes_on = [config]

    async def write(text: str) -> None:
        if not texts:
            newest = await saver.aget_tuple(config)
            if newest is not None:
                goes_on[0] = newest.config
                texts.extend(newest.checkpoint["channel_values"]["texts"])
        texts.append(text)
        checkpoint = base.empty_checkpoint()
        checkpoint["channel_values"], versions = {"texts": texts}, {"texts": len(texts)}
        checkpoint["channel_versions"] = versions
        about = {"source": "loop", "step": len(texts)}
        goes_on[0] = await saver.aput(goes_on[0], checkpoint, about, versions)

    async def read() -> list[str]:
        newest = await saver.aget_tuple(config)
        return list(newest.checkpoint["channel_values"]["texts"]) if newest else []

    return Acts(write, read)


def google_adk(sessions: SessionManager, name: str = "a") -> Acts:
    pytest.importorskip("google.adk.sessions")
    from google.adk.events.event import Event

    from perdure.adapters import PerdureSessionService

    service = PerdureSessionService(sessions, wait=GUARD)
    about: Any = {"app_name": "harbor", "user_id": "ada", "session_id": name}
    mine: list[Any] = []

    async def write(text: str) -> None:
        if not mine:
            stored = await service.get_session(**about)
            mine.append(stored or await service.create_session(**about))
        await service.append_event(mine[0], Event(author=text))

    async def read() -> list[str]:
        stored = await service.get_session(**about)
        return [event.author for event in stored.events] if stored else []

    return Acts(write, read)


def agent_framework(sessions: SessionManager, name: str = "a") -> Acts:
    from agent_framework import Message

    from perdure.adapters import PerdureHistoryProvider

    history = PerdureHistoryProvider(sessions, wait=GUARD)

    async def read() -> list[str]:
        return [message.text for message in await history.get_messages(name)]

    return Acts(lambda text: history.save_messages(name, [Message("user", [text])]), read)


def agent_framework_checkpoints(sessions: SessionManager, name: str = "a") -> Acts:
    from agent_framework import WorkflowCheckpoint

    from perdure.adapters import PerdureCheckpointStorage

    storage = PerdureCheckpointStorage(name, sessions, wait=GUARD)
    mine: list[WorkflowCheckpoint] = []

    async def write(text: str) -> None:
        newest = mine[0] if mine else await storage.get_latest(workflow_name="w")
        checkpoint = WorkflowCheckpoint("w", "graph")
        texts = []
        if newest is not None:
            checkpoint.previous_checkpoint_id = newest.checkpoint_id
            texts = newest.state["texts"]
        checkpoint.state["texts"] = [*texts, text]
        await storage.save(checkpoint)
        mine[:] = [checkpoint]

    async def read() -> list[str]:
        newest = await storage.get_latest(workflow_name="w")
        return list(newest.state["texts"]) if newest else []

    return Acts(write, read)


def claude_agent(sessions: SessionManager, name: str = "a") -> Acts:
    pytest.importorskip("claude_agent_sdk")
    from perdure.adapters import PerdureSessionStore

    store = PerdureSessionStore(sessions, wait=GUARD)
    key = {"project_key": "harbor", "session_id": name}

    async def read() -> list[str]:
        return [entry["uuid"] for entry in await store.load(key) or ()]

    return Acts(lambda text: store.append(key, [{"type": "user", "uuid": text}]), read)


ADAPTERS = (
    openai_agents,
    pydantic_ai,
    langgraph,
    google_adk,
    agent_framework,
    agent_framework_checkpoints,
    claude_agent,
)
