"""Making agents: new ones, and those that were there before.

A factory opens the session, claims it for one worker, and puts an agent's parts together; the
restore itself happens in the agent's bootstrap. What it opened on the way is given
back if it fails, so a missing agent leaves no trace.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import anyio
import msgspec

from perdure._connect import connect
from perdure._lib.ids import random_id
from perdure.agent.agent import Agent
from perdure.agent.config import AgentConfig
from perdure.agent.context import AgentContext, AgentRuntimeState
from perdure.agent.handlers import set_aside
from perdure.agent.memory import MemoryManager
from perdure.agent.persistent import (
    Persistence,
    PersistentSession,
    autosave_of,
    memory_of,
    persistence_of,
)
from perdure.agent.plugins import AgentPlugins
from perdure.agent.requests import LLMRequestAssembler
from perdure.agent.runtime import AgentRuntime
from perdure.agent.tools import Toolbox
from perdure.errors import ConfigError, SessionError
from perdure.memory.compaction import Compactor
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
from perdure.session.entries import meta_entry
from perdure.session.inside import claim, disclaim, has_content

if TYPE_CHECKING:
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session

__all__ = ["AgentFactory", "IfExists", "create", "merged"]

IfExists = Literal["resume", "error", "replace"]
"""What to do about an agent of the same id: go on with it, refuse, or delete it first."""

DEFAULT_TYPE = "agent"
"""What a session is stored as unless somebody says otherwise."""

Release = Callable[[], Awaitable[object]]
A = TypeVar("A", bound=Agent)


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
            LeaseHeldError: Another process goes on holding it.

        """
        agent_id = agent_id or f"{config.name}-{random_id()}"
        await _clear_the_way(self._sessions, agent_id, config, if_exists)
        new = if_exists == "error"
        session = await _open(self._sessions, agent_id, config, create=True, new=new)
        return await _assemble(Agent, session, config, self._sessions)

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
            LeaseHeldError: Another process goes on holding it.

        """
        if memory_dir is None:
            sessions, release = self._sessions, None
        else:
            sessions, release = await self._share(os.fspath(memory_dir))
        try:
            session = await _open(sessions, agent_id, config, create=False)
            return await _assemble(Agent, session, config, sessions, restore=True, release=release)
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
                await _close(shared.sessions)

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


async def _clear_the_way(
    sessions: SessionManager, agent_id: str, config: AgentConfig, if_exists: IfExists
) -> None:
    place = {"session": config.session, "tenant": config.tenant}
    if if_exists == "resume" or not await sessions.exists(agent_id, **place):
        return
    if if_exists == "error":
        raise _exists(agent_id)
    if if_exists != "replace":
        message = f"if_exists={if_exists!r} does not fit: choose resume, error or replace"
        raise ConfigError(message, option="if_exists")
    session = await _open(sessions, agent_id, config, create=False)
    try:
        owner = object()
        claim(session, owner)  # refuses to delete under a running agent
        await sessions.delete(agent_id, **place, on_held=config.on_held, wait=config.wait)
        disclaim(session, owner)
    finally:
        await session.__aexit__(None, None, None)


def _check_type(session: Session, config: AgentConfig) -> None:
    """Note the type of a new agent; refuse to go on with one of another type."""
    stored, wanted = session.info.agent_type, config.agent_type
    if stored == wanted:
        return
    if has_content(session) or stored != DEFAULT_TYPE:
        message = (
            f"agent {session.id!r} is stored as a {stored!r}, not as a {wanted!r}: give "
            f"agent_type={stored!r}, or choose another id"
        )
        raise SessionError(message, agent=session.id, stored=stored, wanted=wanted)
    session.accept((meta_entry(agent_type=wanted),))


def _exists(agent_id: str) -> SessionError:
    message = (
        f"agent {agent_id!r} exists: choose another id, or if_exists='resume' to go on with it, "
        "'replace' to delete it and begin anew"
    )
    return SessionError(message, agent=agent_id)


async def _open(
    sessions: SessionManager,
    agent_id: str,
    config: AgentConfig,
    *,
    create: bool,
    new: bool = False,
) -> Session:
    return await sessions.open(
        agent_id,
        session=config.session,
        tenant=config.tenant,
        create=create,
        new=new,
        on_held=config.on_held,
        wait=config.wait,
        strict=config.restore.strict,
        autosave=config.autosave,
    )


async def _assemble(
    kind: type[A],
    session: Session,
    config: AgentConfig,
    sessions: SessionManager,
    *,
    restore: bool = False,
    load: bool = True,
    save_on_close: bool = True,
    release: Release | None = None,
) -> A:
    """Claim an open session, and put an agent together around it."""
    try:
        _check_type(session, config)
        restore = restore or (load and has_content(session))
        runtime = AgentRuntime()
        options = config.restore if restore and config.features.history else None
        context = _context(session, config, runtime, options)
        context.sets_aside = not restore and has_content(session)
        claim(session, context)
        if not config.features.history:
            set_aside(context)
    except BaseException:
        await session.__aexit__(None, None, None)
        raise
    forget = sessions.on("drain", lambda _: runtime.drain())

    async def let_go() -> None:
        forget()
        if release is not None:
            await release()

    context.declared.sessions = sessions
    return kind(context, runtime, save_on_close=save_on_close, release=let_go)


def _context(
    session: Session,
    config: AgentConfig,
    runtime: AgentRuntime,
    restore_options: WorkingContextSnapshotBootstrapOptions | None,
) -> AgentContext:
    memory = MemoryManager(
        session,
        compaction_policy=config.compaction,
        compactor=Compactor(config.summarizer),
        options=config.restore,
        history=config.features.history,
        redact_arguments=config.redact_arguments,
    )
    plugins = AgentPlugins(config, session)
    notes = plugins.notes
    assembler = LLMRequestAssembler(
        memory,
        renderer=config.renderer,
        emit=runtime.emit,
        notes=None if notes is None else notes.text,
    )
    state = AgentRuntimeState(
        session.id, workspace=config.workspace, restore_options=restore_options
    )
    return AgentContext(
        config,
        state,
        memory,
        toolbox=Toolbox([*config.tools, *(() if notes is None else notes.tools())]),
        plugins=plugins,
        assembler=assembler,
        emit=runtime.emit,
    )


# Agent.create


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
            await _close(own)

    agent_id = agent_id or f"{config.name}-{random_id()}"
    try:
        await _clear_the_way(sessions, agent_id, config, if_exists)
        new = if_exists == "error"
        session = await _open(sessions, agent_id, config, create=True, new=new)
        return await _assemble(
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


async def _close(sessions: SessionManager) -> None:
    report = await sessions.aclose()
    report.raise_if_unsaved()
