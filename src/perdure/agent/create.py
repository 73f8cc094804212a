"""Creating an agent: open and claim its session, and build its parts around it.

The restore itself is a bootstrap step. What was opened on the way is closed again if creating the
agent fails, so a missing agent leaves no trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, final, get_args

import anyio
import msgspec

from perdure._connect import connect
from perdure._lib.ids import random_id
from perdure.agent.context import (
    AgentConfig,
    AgentContext,
    AgentRuntimeState,
    Persistence,
    PersistentSession,
    autosave_of,
    memory_of,
    persistence_of,
)
from perdure.agent.handlers import set_aside
from perdure.agent.memory import MemoryManager
from perdure.agent.plugins import AgentPlugins
from perdure.agent.requests import LLMRequestAssembler
from perdure.agent.tools import Toolbox
from perdure.agent.worker import AgentRuntime
from perdure.errors import InvalidArgumentError, SessionError
from perdure.memory.compaction import Compactor
from perdure.session.contents import meta_entry
from perdure.session.internals import accept, claim, disclaim, has_content

if TYPE_CHECKING:
    from perdure.agent.agent import Agent
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session


IfExists = Literal["resume", "error", "replace"]
"""What to do about an agent of the same id: go on with it, refuse, or delete it first."""

DEFAULT_TYPE: Final = "agent"
"""What a session is stored as unless somebody says otherwise."""

Release = Callable[[], Awaitable[object]]
A = TypeVar("A", bound="Agent")


async def session_for(
    sessions: SessionManager, agent_id: str, config: AgentConfig, if_exists: IfExists
) -> Session:
    """Open the session of an agent that is made: the one that is stored, or a new one.

    Raises:
        InvalidArgumentError: ``if_exists`` is invalid.
        LeaseHeldError: Another process keeps holding it.
        SessionAlreadyActiveError: It is to be replaced, and an agent runs on it here.
        SessionError: It exists, and shall not.

    """
    await _clear_the_way(sessions, agent_id, config, if_exists)
    new = if_exists == "error"
    return await open_session(sessions, agent_id, config, create=True, new=new)


async def _clear_the_way(
    sessions: SessionManager, agent_id: str, config: AgentConfig, if_exists: IfExists
) -> None:
    """Refuse, or delete, what is stored under an agent's id, as is wished."""
    if if_exists not in get_args(IfExists):
        raise InvalidArgumentError(
            f"invalid if_exists={if_exists!r}: choose resume, error or replace", option="if_exists"
        )
    place = {"session": config.session, "tenant": config.tenant}
    if if_exists == "resume" or not await sessions.exists(agent_id, **place):
        return
    if if_exists == "error":
        raise _exists(agent_id)
    session = await open_session(sessions, agent_id, config, create=False)
    try:
        owner = object()
        claim(session, owner)  # refuses to delete under a running agent
        await sessions.delete(agent_id, **place, on_held=config.on_held, wait=config.wait)
        disclaim(session, owner)
    finally:
        await session.__aexit__(None, None, None)


async def open_session(
    sessions: SessionManager,
    agent_id: str,
    config: AgentConfig,
    *,
    create: bool,
    new: bool = False,
) -> Session:
    """Open an agent's session, as its config says."""
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


async def assemble(
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
    """Claim an open session, and put an agent together around it.

    Raises:
        SessionAlreadyActiveError: An agent runs on it here.
        SessionError: It is stored as another kind of agent.

    """
    context: AgentContext | None = None
    undo: list[Callable[[], object]] = []
    try:
        _check_type(session, config)
        restore = restore or (load and has_content(session))
        runtime = AgentRuntime()
        options = config.restore if restore and config.features.history else None
        context = _context(session, config, runtime, options)
        context.sets_aside = not restore and has_content(session)
        context.declared.sessions = sessions
        claim(session, context)
        undo.append(lambda: disclaim(session, context))
        if not config.features.history:
            set_aside(context)
        forget = sessions.on("drain", lambda _: runtime.drain())
        undo.append(forget)

        async def let_go() -> None:
            forget()
            if release is not None:
                await release()

        return kind(context, runtime, save_on_close=save_on_close, release=let_go)
    except BaseException:
        for step in reversed(undo):
            step()
        await session.__aexit__(None, None, None)
        raise


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


def _check_type(session: Session, config: AgentConfig) -> None:
    """Record the type of a new agent; refuse to continue one of another type."""
    stored, wanted = session.info.agent_type, config.agent_type
    if stored == wanted:
        return
    if has_content(session) or stored != DEFAULT_TYPE:
        raise SessionError(
            f"agent {session.id!r} is stored as a {stored!r}, not as a {wanted!r}: give "
            f"agent_type={stored!r}, or choose another id",
            agent=session.id,
            stored=stored,
            wanted=wanted,
        )
    accept(session, (meta_entry(agent_type=wanted),))


def _exists(agent_id: str) -> SessionError:
    return SessionError(
        f"agent {agent_id!r} exists: choose another id, or if_exists='resume' to go on with it, "
        "'replace' to delete it and begin anew",
        agent=agent_id,
    )


# ``Agent.create``: an agent of its arguments, with a store of its own where it has none


@final
class AgentCreation(Generic[A]):
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
        raise AttributeError(
            f"Agent.create(…) is no agent yet, and has no {name!r}: write "
            "`async with Agent.create(…) as agent:`, or `agent = await Agent.create(…)`",
            name=name,
            obj=self,
        )


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
    """Return the config that results from the arguments of ``Agent.create``.

    Raises:
        InvalidArgumentError: Something is given twice, is missing, or is unknown.

    """
    unknown = sorted(set(options) - set(AgentConfig.__struct_fields__))
    if unknown:
        raise InvalidArgumentError(
            f"Agent.create: {unknown[0]!r} is no option: see AgentConfig for those there are",
            option=unknown[0],
        )
    if config is not None:
        if model is not None or tools or mcp or instructions:
            raise InvalidArgumentError(
                "Agent.create: give a config, or model, tools, mcp and instructions, not both"
            )
        return msgspec.structs.replace(config, **options)
    if model is None:
        raise InvalidArgumentError(
            "Agent.create: model is missing: give one, such as 'openai:NAME' or EchoModel()",
            option="model",
        )
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
    persistent = persistence if isinstance(persistence, PersistentSession) else PersistentSession()
    if persistent.storage is not None and sessions is not None:
        raise InvalidArgumentError(
            "two places for one agent: give sessions, or PersistentSession(storage=…)"
        )
    if isinstance(persistence, PersistentSession):
        memory = memory_of(persistent, config.memory_storage)
        config = msgspec.structs.replace(
            config, autosave=autosave_of(persistent), memory_storage=memory
        )
    release: Release | None = None
    if sessions is None or persistence is False:
        # Not persistent: the same road, over a store in memory, and no file anywhere.
        own = connect(persistent.storage if persistence else "memory:")
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
            load=persistent.load_on_create,
            save_on_close=persistent.save_on_close,
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
