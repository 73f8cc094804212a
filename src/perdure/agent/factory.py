"""Making agents whose sessions one manager keeps: new ones, and those that were there before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

import anyio

from perdure._connect import connect
from perdure._lib.ids import random_id
from perdure.agent.agent import Agent
from perdure.agent.context import AgentConfig
from perdure.agent.create import IfExists, Release, assemble, close_own, open_session, session_for

if TYPE_CHECKING:
    from perdure.session.manager import SessionManager


@final
class AgentFactory:
    """Make agents whose sessions are kept by one manager.

    Args:
        sessions: The manager; it must be connected, and outlive the agents.

    """

    def __init__(self, sessions: SessionManager) -> None:
        self._sessions = sessions
        self._elsewhere: dict[str, _Shared] = {}

    async def create_agent(
        self, config: AgentConfig, *, agent_id: str | None = None, if_exists: IfExists = "resume"
    ) -> Agent:
        """Return an agent, not started.

        Args:
            config: What it is made of.
            agent_id: Its id; None for a new one, which begins with the config's name.
            if_exists: What to do if there is something stored under the id.

        Raises:
            SessionAlreadyActiveError: An agent runs on this session here.
            SessionError: It exists, and ``if_exists`` is "error".
            LeaseHeldError: Another process keeps holding it.

        """
        agent_id = agent_id or f"{config.name}-{random_id()}"
        session = await session_for(self._sessions, agent_id, config, if_exists)
        return await assemble(Agent, session, config, self._sessions)

    async def restore_agent(
        self,
        agent_id: str,
        config: AgentConfig,
        memory_dir: str | os.PathLike[str] | None = None,
    ) -> Agent:
        """Return an agent that was there before, not started.

        What it remembers comes back when it starts, before its first message. What was
        waiting or running when it stopped is not run by itself: see `Agent.unfinished`.

        Args:
            agent_id: Its id.
            config: What it is made of now.
            memory_dir: A file store to restore it from, other than the factory's sessions;
                closed with the agent.

        Raises:
            SessionNotFoundError: There is no such agent; nothing was made.
            SessionAlreadyActiveError: An agent runs on this session here.
            LeaseHeldError: Another process keeps holding it.

        """
        if memory_dir is None:
            sessions, release = self._sessions, None
        else:
            sessions, release = await self._share(os.fspath(memory_dir))
        try:
            session = await open_session(sessions, agent_id, config, create=False)
            return await assemble(Agent, session, config, sessions, restore=True, release=release)
        except BaseException:
            if release is not None:
                with anyio.CancelScope(shield=True):
                    await release()
            raise

    async def _share(self, memory_dir: str) -> tuple[SessionManager, Release]:
        """Return a manager of another folder, the same for all agents that use it."""
        path = str(await (await anyio.Path(memory_dir).expanduser()).resolve())
        shared = self._elsewhere.get(path)
        if shared is None:
            shared = self._elsewhere[path] = _Shared(connect(f"file:{path}"))
        shared.users += 1

        async def release() -> None:
            shared.users -= 1
            if shared.users == 0:
                if self._elsewhere.get(path) is shared:
                    del self._elsewhere[path]
                await close_own(shared.sessions)

        try:
            await shared.opened()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await release()
            raise
        return shared.sessions, release


class _Shared:
    """A manager with several users, connected by the first."""

    def __init__(self, sessions: SessionManager) -> None:
        self.sessions = sessions
        self.users = 0
        self._lock = anyio.Lock()
        self._is_open = False

    async def opened(self) -> None:
        async with self._lock:
            if not self._is_open:
                await self.sessions
                self._is_open = True
