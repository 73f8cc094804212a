"""Agents: the public class, its open matters, and the factory of agents over one manager.

Open matters are messages that were not answered, tool calls that wait for an approval, and
effects whose outcome is unknown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TypeVar, final, get_args

import anyio
import msgspec

from perdure._connect import connect
from perdure._lib.designs import lookup, pointer
from perdure._lib.ids import random_id
from perdure._lib.misnamed import Misnamed
from perdure._lib.options import meant
from perdure.agent.bootstrap import unfinished, unknown
from perdure.agent.context import AgentConfig, AgentContext, AgentRuntimeState
from perdure.agent.effects import given_result, is_intact, is_unknown, takes_result
from perdure.agent.events import (
    AgentStopped,
    EventStream,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    UnfinishedMessage,
    UserMessageReceivedEvent,
)
from perdure.agent.home import RESERVED, archives_of, code_dir, home_of
from perdure.agent.memory import MemoryManager
from perdure.agent.options import (
    Persistence,
    PersistentSession,
    kept_as,
    memory_of,
    persistence_of,
)
from perdure.agent.plugins import AgentPlugins
from perdure.agent.requests import LLMRequestAssembler
from perdure.agent.tools import Toolbox
from perdure.agent.worker import AgentRuntime, let_go
from perdure.autosave.options import KEEP, Autosave
from perdure.config.locations import check_state_key
from perdure.errors import (
    InvalidArgumentError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
)
from perdure.memory.compaction import Compactor
from perdure.memory.traces import BEGIN
from perdure.memory.working_memory import Lazy
from perdure.records.keys import require_name, require_text
from perdure.records.messages import Message, message_of
from perdure.records.values import encode_value
from perdure.session.contents import meta_entry
from perdure.session.internals import (
    accept,
    claim,
    disclaim,
    grouped,
    has_content,
    is_draining,
    time_to_leave,
)
from perdure.session.manager import require_manager

if TYPE_CHECKING:
    from perdure.agent.ledger import Decision
    from perdure.agent.llm.model import Model
    from perdure.agent.mcp import McpServer
    from perdure.agent.plugins import InContextMemory, Permissions, ToolSettings
    from perdure.agent.tools import Tool
    from perdure.archive.archives import Archives
    from perdure.config.persistent_config import PersistentConfig
    from perdure.memory.ledger import Approval, Effect
    from perdure.memory.working_memory import MemoryStorage, WorkingMemory
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.report import RestoreReport
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session

_PLACE: Final = "Agent.create(…, persistent_session=url)"

IfExists = Literal["resume", "error", "replace"]
"""Treatment of an agent of the same id: continue it, refuse, or delete it first."""

Ending = TurnEnded | TurnInterrupted | TurnFailed
"""Outcome of a turn."""


class Agent:
    """Answer messages in a session that keeps itself: ``async with agent``.

    Made by `Agent.create`, or by an `AgentFactory`; it holds its session, whether it was
    started or not, until it is stopped. Entering starts it. Leaving without an error
    answers what was posted before, then stops; leaving with an error interrupts.

    It belongs to the event loop that made it. From a worker thread of anyio's:
    ``anyio.from_thread.run(agent.post_user_message, text)``; from any other, through
    an ``anyio.from_thread.BlockingPortal``.
    """

    if not TYPE_CHECKING:
        __getattr__ = lookup

    context: AgentContext
    """Its state, and what its handlers and tools work with."""
    runtime: AgentRuntime
    """Its worker."""

    def __init__(
        self,
        context: AgentContext,
        runtime: AgentRuntime,
        *,
        save_on_close: bool = True,
        release: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.context = context
        context.declared.code_dir = code_dir(type(self), Agent)
        context.declared.setup = self.setup
        self.runtime = runtime
        self._save_on_close = save_on_close
        self._release = release
        self._has_left = False

    @classmethod
    def create(
        cls,
        id: str | None = None,
        *,
        model: Model | str | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        mcp: Sequence[McpServer | str] = (),
        instructions: str = "",
        sessions: SessionManager | None = None,
        persistent_session: Persistence = None,
        if_exists: IfExists = "resume",
        config: AgentConfig | None = None,
        **options: Any,
    ) -> AgentCreation[Self]:
        """Make an agent: ``async with Agent.create(…) as agent`` starts it, too; or await it.

        Args:
            id: The agent's id; None for a new one.
            model: Answers: a `Model`, or a name such as "openai:NAME" or "anthropic:NAME".
            tools: Functions that the model may call.
            mcp: Servers of more tools: `McpServer`, a command line, or a URL.
            instructions: The system prompt; without any, the stored one is kept.
            sessions: Where its session is kept.
            persistent_session: True, or how it is kept: a `PersistentSession`, a mapping of its
                options, or a path or URL. Without ``sessions``, in a store that the agent opens
                and closes. False: in memory only, no file is made. None: kept if ``sessions``
                are given.
            if_exists: Continue the stored session, refuse, or delete it and start over.
            config: All of it in one, instead of model, tools, mcp and instructions.
            options: Everything else that an `AgentConfig` takes.

        Raises:
            InvalidArgumentError: Something is invalid.

        """
        kept_as(persistent_session)
        if sessions is not None:
            require_manager(sessions, _PLACE)
        settings = merged(
            config,
            id,
            model=model,
            tools=tools,
            mcp=mcp,
            instructions=instructions,
            options=options,
        )
        return AgentCreation(
            lambda: _created(cls, settings, id, sessions, persistent_session, if_exists)
        )

    def __repr__(self) -> str:
        state = "running" if self.runtime.is_running else "stopped" if self._has_left else "new"
        return f"<Agent {self.id} {state}>"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.stop(finish=False)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop(finish=exc_type is None)

    @property
    def id(self) -> str:
        """The agent's id."""
        return self.context.agent_id

    @property
    def session(self) -> Session:
        """The session that it writes."""
        return self.context.session

    @property
    def memory(self) -> MemoryManager:
        """Its memory."""
        return self.context.memory

    @property
    def working_memory(self) -> WorkingMemory:
        """Its working memory.

        Raises:
            InvalidArgumentError: ``Features(memory=False)``: it has none.

        """
        return self.context.working_memory

    @property
    def memory_storage(self) -> MemoryStorage:
        """Storage of its memory's entries: the configured one, or else the session.

        Raises:
            InvalidArgumentError: ``Features(memory=False)``: it has none.

        """
        return self.context.memory_storage

    @property
    def permissions(self) -> Permissions:
        """Decisions on its tools: allowed, blocked, approved."""
        return self.context.plugins.permissions

    @property
    def tool_settings(self) -> ToolSettings:
        """Settings of which tools are offered to the model, and in which order."""
        return self.context.plugins.tools

    @property
    def notes(self) -> InContextMemory | None:
        """Its in-context memory; None unless ``Features(in_context_memory=True)``."""
        return self.context.plugins.notes

    @property
    def restore_report(self) -> RestoreReport | None:
        """Report of its restore; None for an agent that is new, or was not started."""
        return self.context.restore_report

    async def start(self) -> None:
        """Start the worker, and wait until it is ready.

        Raises:
            SessionError: It was started before, or a bootstrap step failed. What a step
                raises comes out of here.

        """
        await self.runtime.start(self.context)

    if not TYPE_CHECKING:
        aclose = Misnamed("await agent.stop()")
        close = Misnamed("await agent.stop()")
        run = Misnamed("await agent.ask(message)")

    async def stop(self, *, finish: bool = True) -> None:
        """Stop, and let go of the session; does nothing the second time.

        Args:
            finish: Answer what was posted before; otherwise interrupt the running turn, and
                leave the rest.

        """
        try:
            await self.runtime.stop(finish=finish)
        except anyio.get_cancelled_exc_class():
            # The caller has no time: end the worker, keep what it has, and be cancelled.
            with anyio.CancelScope(shield=True):
                await self.runtime.stop(finish=False, within=time_to_leave(self.session))
                await self._leave(cut=True)
            raise
        await self._leave(cut=is_draining(self.session))

    async def _leave(self, *, cut: bool) -> None:
        """Let go of the session, once."""
        if not self._has_left:
            self._has_left = True
            save, release = self._save_on_close, self._release
            await let_go(self.context, save=save, cut=cut, release=release)

    def interrupt(self) -> bool:
        """Stop the running turn, keep what it has, and continue with the next message.

        Returns at once, False if no turn is running. A `TurnInterrupted` follows.

        Raises:
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        return self.runtime.interrupt()

    async def post_user_message(
        self, message: str | Message | dict[str, Any], *, turn_id: str | None = None
    ) -> None:
        """Post a message; returns when it is durable, not with the answer.

        Waits while the inbox is full. Once this returns, the message is answered, or
        is found among ``unfinished`` when the agent comes back.

        Args:
            message: What the user says: text, a `Message`, or ``{"role": …, "content": "text"}``.
            turn_id: An id of one's own for its turn: a turn of this id that has ended is not
                run again, but answered as before. For requests that may be retried.

        Raises:
            InvalidArgumentError: The message is neither text nor a `Message`, or the turn's id is
                not text.
            SessionClosedError: The agent does not run.
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        await self._post(message, None, turn_id)
        await self.session.save()

    def stream(
        self, message: str | Message | dict[str, Any], *, turn_id: str | None = None
    ) -> EventStream:
        """Return the events of a turn: ``async for event in agent.stream("Hello")``.

        The message is posted when the first event is fetched. The last event is a `TurnEnded`,
        `TurnInterrupted`, `TurnFailed` or `AgentStopped`.
        """
        return EventStream(
            TurnEnded,
            TurnInterrupted,
            TurnFailed,
            begin=lambda stream: self._post(message, stream, turn_id),
        )

    async def ask(
        self, message: str | Message | dict[str, Any], *, turn_id: str | None = None
    ) -> str:
        """Post a message, and return the answer once it is durable.

        Cancelling the caller ends the wait only: `interrupt` ends the turn.

        Raises:
            SessionError: The turn was interrupted; or it is a tool, hook or processor of this
                agent's that asks, and would wait for itself.
            SessionClosedError: The agent stopped before. What made a turn fail is raised, too.

        """
        async for event in self.stream(message, turn_id=turn_id):
            if isinstance(event, TurnEnded):
                return event.text
            if isinstance(event, TurnFailed):
                raise event.error
            if isinstance(event, TurnInterrupted):
                raise SessionError(
                    f"turn {event.turn_id} of agent {self.id!r} was interrupted; what came is kept",
                    agent=self.id,
                    turn=event.turn_id,
                )
            if isinstance(event, AgentStopped) and event.error is not None:
                raise event.error
        raise SessionClosedError(f"agent {self.id!r} stopped before it had answered", agent=self.id)

    async def _post(
        self,
        message: str | Message | dict[str, Any],
        stream: EventStream | None,
        turn_id: str | None,
    ) -> None:
        given = Message.user(message) if isinstance(message, str) else message
        if type(given) is dict:
            given = message_of(given)
        if not isinstance(given, Message):
            raise InvalidArgumentError(
                f"a message is text or a Message, not {type(given).__name__}", agent=self.id
            )
        if turn_id is not None:
            require_name("turn id", turn_id)
        event = UserMessageReceivedEvent(given, turn_id=turn_id)
        await self.runtime.submit_event(event, stream)

    def events(self) -> EventStream:
        """Return all events from now on; iterate over it, and close it."""
        return self.runtime.listen()

    async def load_persisted_session(self) -> bool:
        """Continue the stored conversation; False if there is none.

        Only for an agent that was made with ``load_on_create=False``, before its first message;
        all others have loaded it already.

        Raises:
            SessionError: A new conversation has begun.

        """
        return await self.runtime.load()

    async def save_persisted_session(self) -> None:
        """Make everything durable now."""
        await self.memory.persist_working_context_snapshot()
        await self.context.plugins.memory.flush()

    async def setup(self) -> None:
        """Get ready: override it. Called when the agent has been restored, before any message."""

    @property
    def config(self) -> PersistentConfig:
        """The values that persistence.yaml declares, from the agent's start on.

        Raises:
            SessionError: The agent was not started.

        """
        config = self.context.declared.config
        if config is None:
            raise SessionError(
                "this agent has no config before it is started: use `async with agent`"
            )
        return config

    @property
    def home(self) -> Path:
        """The folder of its files: what `AgentConfig.home` says, else one in the store.

        Raises:
            ConfigError: The store has no folders, and none was given.

        """
        return home_of(self.context)

    @property
    def persist_paths(self) -> tuple[str, ...]:
        """The folders in its home that persistence.yaml names, from the agent's start on."""
        return self.context.declared.persist_paths

    @property
    def archives(self) -> Archives:
        """Its home, saved with its session and brought back: ``await agent.archives.save()``."""
        return archives_of(self.context)

    async def save_state(self, key: str, data: Any) -> None:
        """Keep a value under a key, and return when it is durable.

        Raises:
            ConfigError: The key is empty, or reserved.
            NotStorableError: The value cannot be stored.

        """
        session = self.context.session
        session.state.set(check_state_key(key, RESERVED), data)
        await session.save()

    async def load_state(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``.

        Raises:
            ConfigError: The key is empty, or reserved.

        """
        return await self.context.session.state.get(check_state_key(key, RESERVED), default)

    async def list_state_keys(self) -> list[str]:
        """Return the keys that have a value, in order."""
        keys = await self.context.session.state.keys()
        return [key for key in keys if key not in RESERVED]

    async def delete_state(self, key: str) -> bool:
        """Forget a key durably; say whether it was there.

        Raises:
            ConfigError: The key is empty, or reserved.

        """
        session = self.context.session
        if check_state_key(key, RESERVED) not in await session.state.keys():
            return False
        session.state.drop(key)
        await session.save()
        return True

    @property
    def unfinished(self) -> tuple[UnfinishedMessage, ...]:
        """The messages that were posted and not answered, oldest first.

        Those of a turn that failed are among them until the next message is answered. What waits
        or is answered just now is not.
        """
        return unfinished(self.context)

    async def resume(self) -> tuple[Ending, ...]:
        """Continue everything that is unfinished, ahead of newer messages.

        A turn that had begun continues where it stopped: stored tool results are
        kept. Returns how each of them ended, as far as the agent came to it.

        Raises:
            SessionClosedError: The agent does not run.

        """
        endings: list[Ending] = []
        for stream in await self.runtime.resume(self.unfinished):
            endings += [event async for event in stream if isinstance(event, Ending)]
        return tuple(endings)

    async def dismiss(self, *ids: str) -> int:
        """Give up on unfinished messages, all of them or those of these ids; return how many.

        What was kept of them stays in the history.
        """
        dismissed = [message for message in self.unfinished if not ids or message.id in ids]
        for message in dismissed:
            self.context.ledger.drop(message.id)
        await self.context.session.save()
        return len(dismissed)

    @property
    def pending_approvals(self) -> tuple[Approval, ...]:
        """The tool calls that wait for `approve` or `deny`; they do so over a restart, too."""
        return tuple(
            approval for approval in self.context.ledger.approvals if approval.answer is None
        )

    async def approve(self, call_id: str, *, always: bool = False) -> None:
        """Let a tool call that waits run; the answer is durable.

        For a turn that is unfinished after a restart, `resume` continues it.

        Args:
            call_id: The tool call's id.
            always: Whether the tool may run from now on without asking.

        Raises:
            SessionError: No such call waits.

        """
        approval = self.context.ledger.answer(call_id, "approved")
        if always:
            self.context.plugins.permissions.approve(approval.tool)
        await self.context.session.save()

    async def deny(self, call_id: str, why: str | None = None) -> None:
        """Refuse a tool call that waits; the model gets the reason as its result.

        Raises:
            InvalidArgumentError: The reason is no text.
            SessionError: No such call waits.

        """
        if why is not None:
            require_text("why", why)
        self.context.ledger.answer(call_id, "denied", why)
        await self.context.session.save()

    @property
    def unknown_effects(self) -> tuple[Effect, ...]:
        """The calls of tools with side effects whose outcome is unknown."""
        return unknown(self.context)

    async def resolve_effect(self, id: str, decision: Decision, *, result: Any = None) -> None:
        """Decide on an unknown effect; the decision is durable.

        Args:
            id: The effect's id, or that of its tool call.
            decision: "done": the tool has done its work, ``result`` is what came of it.
                "skip": it has not, or that is unknown, and it shall not. "replay": call it
                again, with the same idempotency key, when its unfinished turn continues.
            result: With "done", the result for the model; if the turn is over, or continues
                without it, in place of what the model was told.

        Raises:
            SessionError: There is no such effect, or the call runs just now; or it cannot be
                replayed, since its turn is over, or the model already has the answer that the
                outcome is unknown; or the result cannot reach the model, since the call has left
                the context.
            NotStorableError: The result cannot be stored.

        """
        context, ledger = self.context, self.context.ledger
        effect = ledger.effect(id)
        if decision not in {"done", "skip", "replay"}:
            raise InvalidArgumentError(
                f"resolve_effect: invalid {decision!r}: choose done, skip or replay",
                option="decision",
            )
        if effect.state == "begun":
            raise SessionError(
                f"the effect {effect.id} of tool {effect.tool!r} is not unknown: the call runs "
                "just now; wait for its result, or interrupt() the turn first",
                agent=context.agent_id,
                effect=effect.id,
            )
        # The turns that may still wait for it: the running one, and those that are unfinished.
        going_on = {context.turn_id, *(open_message.turn for open_message in ledger.messages)}
        goes_on = not effect.told and effect.turn in going_on
        if decision == "replay" and not (goes_on and self._can_run(effect)):
            raise SessionError(
                f"the effect {effect.id} of tool {effect.tool!r} cannot be replayed: its turn is "
                "over, or does not wait for it, or its tool or arguments are gone; settle it as "
                "done or skip, and ask again",
                agent=context.agent_id,
                effect=effect.id,
            )
        given = encode_value(result)[0]
        if goes_on or not is_unknown(effect):
            ledger.decide(effect, decision, given)
        else:
            known = msgspec.structs.replace(effect, result=msgspec.Raw(given))
            late = Message(role="tool", tool_result=given_result(known))
            takes = decision == "done" and takes_result(context.session.context(), effect, late)
            if decision == "done" and result is not None and not takes:
                raise SessionError(
                    f"the result of effect {effect.id} of tool {effect.tool!r} cannot be given to "
                    "the model: its call has left the context, or a newer one has its id; settle "
                    "it without a result, and say what came of it in the next message",
                    agent=context.agent_id,
                    effect=effect.id,
                )
            with grouped(context.session):
                if takes:
                    context.memory.ingest_late_result(late)
                ledger.settled(effect, decision)
        await context.session.save()

    def _can_run(self, effect: Effect) -> bool:
        if self.context.toolbox.find(effect.tool) is None:
            return False
        calls = [call for message in self.context.session.context() for call in message.tool_calls]
        return all(is_intact(call) for call in calls if call.id == effect.call)


# Creation: open and claim a session, and build an agent's parts around it
#
# The restore itself is a bootstrap step. What was opened on the way is closed again if creating the
# agent fails, so a missing agent leaves no trace.


DEFAULT_TYPE: Final = "agent"
"""Type that a session is stored as unless another is given."""

Release = Callable[[], Awaitable[object]]
A = TypeVar("A", bound=Agent)


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
    if if_exists not in get_args(IfExists):
        raise InvalidArgumentError(
            f"invalid if_exists={if_exists!r}: choose resume, error or replace", option="if_exists"
        )
    place = {"session": config.session, "tenant": config.tenant}
    if if_exists != "resume" and await sessions.exists(agent_id, **place):
        if if_exists == "error":
            raise SessionError(
                f"agent {agent_id!r} exists: choose another id, or if_exists='resume' to continue "
                "it, 'replace' to delete it and begin again",
                agent=agent_id,
            )
        async with await open_session(sessions, agent_id, config, create=False) as stored:
            owner = object()
            claim(stored, owner)  # refuses to delete under a running agent
            await sessions.delete(agent_id, **place, on_held=config.on_held, wait=config.wait)
            disclaim(stored, owner)
    new = if_exists == "error"
    return await open_session(sessions, agent_id, config, create=True, new=new)


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
        on_damage=config.on_damage,
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
    undo = contextlib.ExitStack()
    try:
        _check_type(session, config)
        restore = restore or (load and has_content(session))
        runtime = AgentRuntime()
        options = config.restore if restore and config.features.history else None
        context = _context(session, config, runtime, options)
        context.sets_aside = not restore and has_content(session)
        context.declared.sessions = sessions
        claim(session, context)
        undo.callback(disclaim, session, context)
        if not config.features.history:
            context.memory.replace_context((), system_prompt=None, reason=BEGIN)
        forget = sessions.on("drain", lambda _: runtime.drain())
        undo.callback(forget)

        async def give_back() -> None:
            forget()
            if release is not None:
                await release()

        return kind(context, runtime, save_on_close=save_on_close, release=give_back)
    except BaseException:
        undo.close()
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
    settings = {
        "model": getattr(config.model, "name", None) or type(config.model).__name__,
        "maxContextTokens": config.compaction.max_tokens,
        "strategy": "compaction",
    }
    known = {key: value for key, value in settings.items() if value is not None}
    plugins = AgentPlugins(
        session,
        config.features,
        settings={**known, **config.settings},
        memory=config.memory_storage,
        instructions=config.custom_instructions,
    )
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


# ``Agent.create``: an agent of its arguments, with a store of its own where it has none


@final
class AgentCreation(Generic[A]):
    """Result of ``Agent.create(…)``: await it for an agent, or enter it for one that runs."""

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
        end = pointer(unknown[0])
        question = (
            ""
            if end
            else meant(unknown[0], [*AgentConfig.__struct_fields__, "sessions", "if_exists"])
        )
        raise InvalidArgumentError(
            f"Agent.create: {unknown[0]!r} is no option: "
            f"{question or 'see AgentConfig for those there are'}{end}",
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


async def _created(
    kind: type[A],
    config: AgentConfig,
    agent_id: str | None,
    sessions: SessionManager | None,
    persistent_session: Persistence,
    if_exists: IfExists,
) -> A:
    """Return an agent that is made, with a manager of its own where it has none."""
    persistence = _persistence(config, persistent_session)
    persistent, config = _with_persistence(config, persistence, sessions)
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


def _persistence(config: AgentConfig, given: Persistence = None) -> bool | PersistentSession | None:
    """Return the setting that counts, of an argument, the config, and its features."""
    featured = True if config.features.persistent_session else None
    return persistence_of(given, persistence_of(config.persistent_session, featured))


def _with_persistence(
    config: AgentConfig,
    persistence: Persistence,
    sessions: SessionManager | None,
) -> tuple[PersistentSession, AgentConfig]:
    """Return the options that count, and the config with what they say of it."""
    if not isinstance(persistence, PersistentSession):
        return PersistentSession(), config
    if persistence.storage is not None and sessions is not None:
        raise InvalidArgumentError(
            "two places for one agent: give sessions, or PersistentSession(storage=…)"
        )
    interval, autosave = persistence.autosave_interval, config.autosave
    if autosave is KEEP:
        autosave = None if interval == 0 else Autosave(max_delay=interval)
    elif interval != PersistentSession().autosave_interval:
        raise InvalidArgumentError(
            "autosave is given twice: give autosave=…, or PersistentSession(autosave_interval=…)",
            option="autosave",
        )
    memory_storage = memory_of(persistence, config.memory_storage)
    return persistence, msgspec.structs.replace(
        config, autosave=autosave, memory_storage=memory_storage
    )


async def close_own(sessions: SessionManager) -> None:
    """Close a manager that was opened for an agent; raise `UnsavedChangesError` if it must."""
    report = await sessions.aclose()
    report.raise_if_unsaved()


# Factory of agents whose sessions one manager keeps


@final
class AgentFactory:
    """Make agents whose sessions are kept by one manager.

    Args:
        sessions: The manager; it must be connected, and outlive the agents.

    """

    def __init__(self, sessions: SessionManager) -> None:
        require_manager(sessions, _PLACE)
        self._sessions = sessions
        self._elsewhere: dict[str, _Shared] = {}

    async def create_agent(
        self,
        config: AgentConfig,
        *,
        agent_id: str | None = None,
        if_exists: IfExists = "resume",
    ) -> Agent:
        """Return an agent, not started.

        Args:
            config: What it is made of.
            agent_id: Its id; None for a new one, which begins with the config's name.
            if_exists: What to do if there is something stored under the id.

        Raises:
            InvalidArgumentError: The config names another storage than the factory's sessions.
            SessionAlreadyActiveError: An agent runs on this session here.
            SessionError: It exists, and ``if_exists`` is "error".
            LeaseHeldError: Another process keeps holding it.

        """
        return await _created(Agent, config, agent_id, self._sessions, None, if_exists)

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
            InvalidArgumentError: The config says not to continue what is stored, or names another
                storage.
            SessionNotFoundError: There is no such agent; nothing was made.
            SessionAlreadyActiveError: An agent runs on this session here.
            LeaseHeldError: Another process keeps holding it.

        """
        persistence = _persistence(config)
        persistent, config = _with_persistence(config, persistence, self._sessions)
        if persistence is False or not persistent.load_on_create:
            raise InvalidArgumentError(
                "restore_agent continues what is stored: leave out persistent_session=False and "
                "load_on_create=False, or make the agent by create_agent",
                option="persistent_session",
            )
        if memory_dir is None:
            sessions, release = self._sessions, None
        else:
            sessions, release = await self._share(agent_id, os.fspath(memory_dir))
        try:
            try:
                session = await open_session(sessions, agent_id, config, create=False)
            except SessionNotFoundError as error:
                raise _no_agent(agent_id, memory_dir) from error
            return await assemble(
                Agent,
                session,
                config,
                sessions,
                restore=True,
                save_on_close=persistent.save_on_close,
                release=release,
            )
        except BaseException:
            if release is not None:
                with anyio.CancelScope(shield=True):
                    await release()
            raise

    async def _share(self, agent_id: str, memory_dir: str) -> tuple[SessionManager, Release]:
        """Return a manager of another folder, the same for all agents that use it."""
        folder = await (await anyio.Path(memory_dir).expanduser()).resolve()
        path = str(folder)
        if not await folder.exists():  # connecting would make it
            raise _no_agent(agent_id, memory_dir)
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
            await shared.connected.get()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await release()
            raise
        return shared.sessions, release


def _no_agent(agent_id: str, memory_dir: str | os.PathLike[str] | None) -> SessionNotFoundError:
    where = "" if memory_dir is None else f" in {os.fspath(memory_dir)}"
    return SessionNotFoundError(
        f"there is no agent {agent_id!r}{where}, or not any more: create_agent makes it",
        agent=agent_id,
    )


class _Shared:
    """A manager with several users, connected by the first."""

    def __init__(self, sessions: SessionManager) -> None:
        self.sessions = sessions
        self.connected: Lazy[SessionManager] = Lazy(lambda: sessions)
        self.users = 0
