"""``Agent.create``: an agent of its arguments, with a store of its own where it has none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import anyio
import msgspec

from perdure._connect import connect
from perdure._lib.ids import random_id
from perdure.agent.assembling import IfExists, Release, assemble, session_for
from perdure.agent.config import AgentConfig
from perdure.agent.persistent import (
    Persistence,
    PersistentSession,
    autosave_of,
    memory_of,
    persistence_of,
)
from perdure.errors import ConfigError

if TYPE_CHECKING:
    from perdure.agent.agent import Agent
    from perdure.session.manager import SessionManager

__all__ = ["Creating", "close_own", "create", "merged"]

A = TypeVar("A", bound="Agent")


@final
class Creating(Generic[A]):
    """What ``Agent.create(…)`` returns: await it for an agent, or enter it for one that runs."""

    def __init__(self, make: Callable[[], Awaitable[A]]) -> None:
        self._make = make
        self._agent: A | None = None

    def __await__(self) -> Generator[Any, None, A]:
        return self._make().__await__()

    async def __aenter__(self) -> A:
        self._agent = await self._make()
        return await self._agent.__aenter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._agent is not None:
            await self._agent.__aexit__(exc_type, exc, traceback)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle and inspect ask for: there is none
            raise AttributeError(name)
        message = (
            f"Agent.create(…) is no agent yet, and has no {name!r}: write "
            "`async with Agent.create(…) as agent:`, or `agent = await Agent.create(…)`"
        )
        raise AttributeError(message, name=name, obj=self)


def merged(
    config: AgentConfig | None,
    agent_id: str | None,
    *,
    model: Any,
    tools: Sequence[Any],
    mcp: Sequence[Any],
    instructions: str,
    options: Mapping[str, Any],
) -> AgentConfig:
    """Return the config that the arguments of ``Agent.create`` amount to.

    Raises:
        ConfigError: Something is given twice, is missing, or is unknown.

    """
    unknown = sorted(set(options) - set(AgentConfig.__struct_fields__))
    if unknown:
        message = f"Agent.create: {unknown[0]!r} is no option: see AgentConfig for those there are"
        raise ConfigError(message, option=unknown[0])
    if config is not None:
        if model is not None or tools or mcp or instructions:
            message = "Agent.create: give a config, or model, tools, mcp and instructions, not both"
            raise ConfigError(message)
        return msgspec.structs.replace(config, **options)
    if model is None:
        message = "Agent.create: model is missing: give one, such as 'openai:NAME' or EchoModel()"
        raise ConfigError(message, option="model")
    named = {"name": agent_id or "agent", **options}
    return AgentConfig(model=model, tools=tools, mcp=mcp, instructions=instructions, **named)


async def create(
    kind: type[A],
    config: AgentConfig,
    agent_id: str | None,
    sessions: SessionManager | None,
    persistent_session: Persistence,
    if_exists: IfExists,
) -> A:
    """Return the agent of ``Agent.create``, with a manager of its own where it has none."""
    featured = True if config.features.persistent_session else None
    configured = persistence_of(config.persistent_session, featured)
    persistence = persistence_of(persistent_session, configured)
    kept = persistence if isinstance(persistence, PersistentSession) else PersistentSession()
    if kept.storage is not None and sessions is not None:
        message = "two places for one agent: give sessions, or PersistentSession(storage=…)"
        raise ConfigError(message)
    if isinstance(persistence, PersistentSession):
        memory = memory_of(kept, config.memory_storage)
        config = msgspec.structs.replace(config, autosave=autosave_of(kept), memory_storage=memory)
    release: Release | None = None
    if sessions is None or persistence is False:
        # Not persistent: the same road, over a store in memory, and no file anywhere.
        own = connect(kept.storage if persistence else "memory:")
        sessions = await own

        async def release() -> None:
            await close_own(own)

    agent_id = agent_id or f"{config.name}-{random_id()}"
    try:
        session = await session_for(sessions, agent_id, config, if_exists)
        return await assemble(
            kind,
            session,
            config,
            sessions,
            load=kept.load_on_create,
            save_on_close=kept.save_on_close,
            release=release,
        )
    except BaseException:
        if release is not None:
            with anyio.CancelScope(shield=True):
                await release()
        raise


async def close_own(sessions: SessionManager) -> None:
    """Close a manager that was opened for an agent; raise `UnsavedChangesError` if it must."""
    report = await sessions.aclose()
    report.raise_if_unsaved()
