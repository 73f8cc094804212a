"""The agents that a server runs: opened by the first request, kept warm, given away when asked.

An agent whose session another process has taken over is opened again, which asks for it back. A
message has its turn's id, so trying it again doubles nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, final

import anyio
import msgspec

from perdure.agent import Agent, AgentConfig, AgentFactory
from perdure.agent.events import AgentStopped, Segment, TurnEnded, TurnFailed, TurnStarted
from perdure.asgi.app import AppSessions
from perdure.asgi.feed import Channel
from perdure.asgi.runs import Run, RunOutcome
from perdure.errors import LeaseLostError, SessionClosedError, SessionError
from perdure.records.keys import SessionKey
from perdure.records.messages import Message
from perdure.serve.access import Token, not_found

TRIES: Final = 3
"""How often a message is given to an agent whose session was taken over in between."""

Source = AgentConfig | Callable[[str], AgentConfig | Awaitable[AgentConfig]]
"""What an agent is made of: the same for all, or by the agent's id."""


class _Warm:
    """An agent that runs, and who uses it."""

    def __init__(self, agent: Agent, owner: str | None) -> None:
        self.agent = agent
        self.owner = owner
        self.users = 0
        self.idle_since = anyio.current_time()


@final
class AgentPool:
    """The agents of one process.

    Args:
        app: The application's sessions.
        source: What an agent is made of.
        keep: Seconds for which an agent that nobody uses stays open.

    """

    def __init__(self, app: AppSessions, source: Source, *, keep: float) -> None:
        self._app = app
        self._source = source
        self._keep = keep
        self._warm: dict[SessionKey, _Warm] = {}
        self._locks: dict[SessionKey, anyio.Lock] = {}

    async def config(self, id: str, tenant: str) -> AgentConfig:
        """Return what an agent is made of, for a tenant."""
        source = self._source
        made = source if isinstance(source, AgentConfig) else source(id)
        config = await made if inspect.isawaitable(made) else made
        return msgspec.structs.replace(config, tenant=tenant)

    async def owner_for(self, key: SessionKey, token: Token) -> str | None:
        """Return who owns an agent: as it is stored, or the token's, whose request makes it.

        Raises:
            Problem: It is another's.

        """
        warm = self._warm.get(key)
        if warm is not None:
            owner = warm.owner
        else:
            view = await self._app.manager.load(key.agent, session=key.session, tenant=key.tenant)
            owner = token.owner if view is None else view.info.metadata.owner
        if not token.opens(owner):
            raise not_found(key.agent)
        return owner

    def is_warm(self, key: SessionKey) -> bool:
        """Whether an agent runs here."""
        return key in self._warm

    async def work(
        self, run: Run, channel: Channel, *, message: Message, config: AgentConfig, token: Token
    ) -> None:
        """Answer a message in a turn: what a `Run` does."""
        for tries_left in range(TRIES - 1, -1, -1):
            try:
                async with self._agent(run.key, config, token) as agent:
                    await _answer(agent, run, channel, message)
                    return
            except (LeaseLostError, SessionClosedError):
                if not tries_left or self._app.draining:
                    raise
                channel.clear()

    @contextlib.asynccontextmanager
    async def _agent(
        self, key: SessionKey, config: AgentConfig, token: Token
    ) -> AsyncGenerator[Agent, None]:
        async with self._locks.setdefault(key, anyio.Lock()):
            warm = self._warm.get(key)
            if warm is not None and not _is_usable(warm.agent):
                await self._stop(key, finish=False)
                warm = None
            if warm is None:
                warm = self._warm[key] = await self._opened(key, config, token)
            if not token.opens(warm.owner):  # made since its owner was looked for
                raise not_found(key.agent)
            warm.users += 1
        try:
            yield warm.agent
        finally:
            warm.users -= 1
            warm.idle_since = anyio.current_time()

    async def _opened(self, key: SessionKey, config: AgentConfig, token: Token) -> _Warm:
        owner = await self.owner_for(key, token)
        async with self._app.manager.open(
            key.agent,
            session=key.session,
            tenant=key.tenant,
            owner=owner,
            on_held=config.on_held,
            wait=config.wait,
        ):  # the agent pins it too
            factory = AgentFactory(self._app.manager)
            agent = await factory.create_agent(config, agent_id=key.agent)
        try:
            await agent.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await agent.stop(finish=False)
            raise
        return _Warm(agent, agent.session.info.metadata.owner)

    async def forget(self, key: SessionKey) -> None:
        """Stop an agent, whose session is removed."""
        async with self._locks.setdefault(key, anyio.Lock()):
            await self._stop(key, finish=False)

    async def _stop(self, key: SessionKey, *, finish: bool) -> None:
        warm = self._warm.pop(key, None)
        if warm is not None:
            # What it cannot save any more is in the manager's report, or another process's.
            with contextlib.suppress(SessionError, LeaseLostError):
                await warm.agent.stop(finish=finish)

    async def tend(self) -> None:
        """Close agents that nobody uses; runs for ever."""
        while True:
            await anyio.sleep(min(self._keep, 5.0))
            for key, warm in tuple(self._warm.items()):
                async with self._locks.setdefault(key, anyio.Lock()):
                    idle = anyio.current_time() - warm.idle_since
                    if not warm.users and idle >= self._keep and self._warm.get(key) is warm:
                        await self._stop(key, finish=True)
            for key in set(self._locks) - set(self._warm):
                if not self._locks[key].statistics().locked:
                    del self._locks[key]

    async def stop(self) -> None:
        """Stop all agents: a turn that runs is cut, what came is kept, and it is unfinished."""
        async with anyio.create_task_group() as group:
            for key in tuple(self._warm):
                group.start_soon(self.forget, key)


def _is_usable(agent: Agent) -> bool:
    return agent.runtime.is_running and agent.session.is_writable


async def _answer(agent: Agent, run: Run, channel: Channel, message: Message) -> None:
    run.after = agent.session.version
    async for event in agent.stream(message, turn_id=run.turn):
        match event:
            case TurnStarted():
                run.begin(turn=event.turn_id, replayed=False)
            case Segment() if event.text:
                channel.add(agent.session, event.text)
            case Segment():
                pass
            case TurnEnded():
                run.begin(turn=event.turn_id, replayed=event.replayed)
                run.outcome = RunOutcome(
                    event.turn_id, event.text, event.version, replayed=event.replayed
                )
            case TurnFailed():
                raise event.error
            case AgentStopped(error=Exception() as error):
                raise error
            case _:
                channel.clear()
