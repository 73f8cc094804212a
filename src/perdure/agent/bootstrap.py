"""Bootstrap: what happens between a worker's start and its first message, step by step.

    workspace → tools → system prompt → working context (only if one is to be restored) → setup

Each step is awaited in the worker's loop, and may be cancelled. A step that raises, or
answers False, ends the bootstrap: the agent does not start half-ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, final

import msgspec

from perdure._lib.tasks import each
from perdure.agent import events
from perdure.agent.context import AgentContext
from perdure.agent.effects import EffectProgress, is_unknown, progress
from perdure.agent.home import bring_home, declare
from perdure.agent.hooks import applied, lived, maybe_await
from perdure.agent.ledger import whole_ledger
from perdure.agent.mcp import McpServer
from perdure.errors import ConfigError, SessionError
from perdure.memory.ledger import Admitted, Approval, Effect
from perdure.memory.traces import newest_turns
from perdure.records.media import decode_read
from perdure.records.values import Types, encode_value
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapper
from perdure.restore.report import RestoreStep
from perdure.restore.serializer import WorkingContextSnapshotSerializer
from perdure.session.internals import has_content, registry_of, report_step, store_of
from perdure.session.session import Session, SessionView

# Unfinished messages: which of them to continue, and how far their turns came


MOST_ATTEMPTS: Final = 3
"""The most times a turn is begun unasked: it may be the one that kills the process."""


class OpenMatters(msgspec.Struct, frozen=True):
    """Work in progress of an agent, as its session has it."""

    unfinished: tuple[events.UnfinishedMessage, ...] = ()
    """Messages that are not answered; one that is being answered is among them."""
    effects: tuple[Effect, ...] = ()
    """Calls of tools with side effects whose outcome is not known; one that runs just now is among
    them."""
    approvals: tuple[Approval, ...] = ()
    """Tool calls that wait for an approval, or have one and have not begun."""


async def open_matters(session: Session | SessionView) -> OpenMatters:
    """Return what is unfinished in a session, for readers without its agent."""
    ledger, types = await whole_ledger(session), registry_of(session)
    unfinished_left = tuple(_unfinished(message, types) for message in ledger.messages())
    effects = tuple(filter(is_unknown, ledger.effects()))
    return OpenMatters(unfinished_left, effects, ledger.approvals())


def unfinished(context: AgentContext) -> tuple[events.UnfinishedMessage, ...]:
    """Return the messages that are not answered, the running turn's aside; oldest first."""
    types = registry_of(context.session)
    return tuple(
        _unfinished(message, types)
        for message in context.ledger.messages
        if message.id not in context.ledger.underway
    )


def _unfinished(admitted: Admitted, types: Types) -> events.UnfinishedMessage:
    return events.UnfinishedMessage(
        id=admitted.id,
        message=decode_read(bytes(admitted.message), types),
        at=admitted.at,
        turn_id=admitted.turn or admitted.asked,
        attempts=admitted.attempts,
        error=admitted.error,
    )


def unknown(context: AgentContext) -> tuple[Effect, ...]:
    """Return the effects of unknown outcome; a call that has begun here runs just now."""
    return tuple(effect for effect in context.ledger.effects if effect.state == "unknown")


def to_resume(
    unfinished_messages: tuple[events.UnfinishedMessage, ...],
) -> tuple[events.UnfinishedMessage, ...]:
    """Return those that an agent continues by itself when it starts.

    Not what has failed, since its sender got the error, nor what may have killed the process.
    """
    return tuple(
        message
        for message in unfinished_messages
        if message.error is None and message.attempts < MOST_ATTEMPTS
    )


def report(context: AgentContext) -> None:
    """Report what was left when the agent stopped, by events and in the restore report."""
    agent_id, steps = context.agent_id, list[RestoreStep]()
    for effect in unknown(context):
        context.emit(events.EffectUnknown(agent_id=agent_id, effect=effect))
        detail = f"{effect.tool}, call {effect.call} of {effect.turn}: {effect.policy}"
        steps.append(RestoreStep("unknown effect", detail))
    for message in unfinished(context):
        context.emit(
            events.TurnUnfinished(
                agent_id=agent_id, turn_id=message.turn_id or "", unfinished=message
            )
        )
        steps.append(
            RestoreStep("unfinished", message.turn_id or "a message that no turn had begun")
        )
    for approval in context.ledger.approvals:
        if approval.answer is None:
            detail = f"{approval.tool}, call {approval.call} of {approval.turn}"
            steps.append(RestoreStep("waits for approval", detail))
    for step in steps:
        report_step(context.session, step.what, step.detail)
    if context.restore_report is not None:
        all_steps = (*context.restore_report.steps, *steps)
        context.restore_report = msgspec.structs.replace(context.restore_report, steps=all_steps)


async def go_on(event: events.ResumeEvent, context: AgentContext) -> EffectProgress:
    """Return how far a turn had come."""
    message = event.unfinished
    if message.turn_id is None or not message.attempts:
        return EffectProgress()
    session = context.session
    await session.save()  # the turns are read from the store
    types = registry_of(session)
    turns = await newest_turns(store_of(session), session.key, message.attempts + 1)
    return progress(
        [
            decode_read(payload, types)
            for turn in turns
            if turn.id == message.turn_id
            for payload in turn.messages
        ]
    )


def first_event(
    done: EffectProgress, message: events.UnfinishedMessage
) -> events.UserMessageReceivedEvent | events.ToolInvocationRequestEvent:
    """Return what a resumed turn continues with; a turn that has its answer needs nothing.

    The calls without a result come before the model, as in a turn that was never stopped.
    """
    if not done.has_input:
        return events.UserMessageReceivedEvent(message.message)
    if done.open_calls:
        return events.ToolInvocationRequestEvent(done.open_calls, resumed=True)
    return events.UserMessageReceivedEvent(None, sender="tool")


CUSTOM_DATA: Final = "custom_data"
"""The named state that an agent's custom data is kept under."""


class BootstrapStep(Protocol):
    """One step of making an agent ready."""

    async def execute(self, context: AgentContext) -> bool:
        """Do it; False, or an exception, ends the bootstrap."""


@final
class WorkspaceContextInitializationStep:
    """Let the workspace get ready, if it wants to."""

    async def execute(self, context: AgentContext) -> bool:
        """Call ``workspace.initialize(context)``."""
        initialize = getattr(context.state.workspace, "initialize", None)
        if initialize is not None:
            await maybe_await(initialize(context), context)
        return True


@final
class McpServerPrewarmingStep:
    """Start MCP servers, and let the model and the tools get ready: what has a ``prewarm``."""

    async def execute(self, context: AgentContext) -> bool:
        """Start the servers, then call ``prewarm(context)`` where there is one, in order."""
        await start_servers(context.config.mcp, context)
        tools = [tool.function for tool in context.toolbox]
        for component in (context.model, context.config.summarizer, *tools):
            prewarm = getattr(component, "prewarm", None)
            if prewarm is not None:
                await maybe_await(prewarm(context), context)
        return True


async def start_servers(given: Sequence[McpServer | str], context: AgentContext) -> None:
    """Start an agent's servers side by side, and give it their tools in the servers' order.

    Raises:
        ToolServerError: One does not start.
        ConfigError: Two tools have the same name.

    """
    servers = [McpServer.of(tool) for tool in given]

    async def start(server: McpServer) -> None:
        await server.start()
        # At once, not after all: if another one fails to start, this one is still stopped.
        context.at_stop.append(server.aclose)

    await each(servers, start, at_once=len(servers))
    for server in servers:
        tools = server.tools()
        clashing = {tool.name for tool in context.toolbox} & {tool.name for tool in tools}
        if clashing:
            raise ConfigError(
                f"MCP server {server.name!r} has a tool {min(clashing)!r}, and so has another "
                "server or the agent: give it a prefix, McpServer(…, prefix='their_')",
                server=server.name,
                tool=min(clashing),
            )
        context.toolbox.add(tools)


@final
class SystemPromptProcessingStep:
    """Make the system prompt of the instructions."""

    async def execute(self, context: AgentContext) -> bool:
        """Run the processors, in order; persistent instructions come before them."""
        prompt = context.config.instructions
        custom = context.plugins.instructions
        if custom is not None:
            prompt = "\n\n".join(filter(None, (prompt, await custom.read())))
        processors = context.config.system_prompt_processors
        prompt = await applied(processors, prompt, str, "system_prompt_processors", context)
        context.state.system_prompt = prompt
        return True


@final
class WorkingContextSnapshotRestoreStep:
    """Restore the working context, if the agent is one that is restored.

    Args:
        bootstrapper: The strategy; None for the usual one.

    """

    def __init__(self, bootstrapper: WorkingContextSnapshotBootstrapper | None = None) -> None:
        self._bootstrapper = bootstrapper

    async def execute(self, context: AgentContext) -> bool:
        """Restore with the processed system prompt; nothing to do without restore options."""
        options = context.state.restore_options
        if options is None:
            return True
        session = context.session
        bootstrapper = self._bootstrapper or WorkingContextSnapshotBootstrapper(
            WorkingContextSnapshotSerializer(registry_of(session))
        )
        context.begun = True
        done = await bootstrapper.bootstrap(context.memory, context.state.system_prompt, options)
        before = session.restore_report
        report = msgspec.structs.replace(
            before, source=done.source, steps=(*before.steps, *done.steps)
        )
        context.restore_report = report
        context.state.system_prompt = done.system_prompt or ""
        context.emit(events.ContextRestored(agent_id=context.agent_id, report=report))
        return True


def bootstrap_steps() -> tuple[BootstrapStep, ...]:
    """Return the steps in their order; restoring is the last, after the system prompt."""
    return (
        WorkspaceContextInitializationStep(),
        McpServerPrewarmingStep(),
        SystemPromptProcessingStep(),
        WorkingContextSnapshotRestoreStep(),
    )


async def bootstrap(context: AgentContext, steps: Sequence[BootstrapStep]) -> None:
    """Make an agent ready.

    Raises:
        SessionError: A step has answered False.

    """
    agent_id = context.agent_id
    context.emit(events.BootstrapStarted(agent_id=agent_id))
    if context.sets_aside:
        await context.ledger.load()
    else:
        await restore_parts(context)
    await declare(context)
    await bring_home(context)
    for step in steps:
        name = type(step).__name__
        if not await step.execute(context):
            raise SessionError(
                f"agent {agent_id!r} did not start: its bootstrap step {name} failed",
                agent=agent_id,
                step=name,
            )
        context.emit(events.BootstrapStepDone(agent_id=agent_id, step=name))
    if context.config.setup is not None:
        await maybe_await(context.config.setup(context), context)
    report(context)
    if context.declared.setup is not None:
        await maybe_await(context.declared.setup(), context)
    ready = events.AgentReady(agent_id=agent_id)
    context.emit(ready)
    await lived(ready, context)


async def restore_parts(context: AgentContext) -> None:
    """Restore what the agent keeps besides its conversation."""
    await context.plugins.attach()
    await context.ledger.load()
    stored = await context.session.state.get(CUSTOM_DATA)
    if isinstance(stored, dict):
        context.saved_custom_data = _encoded(stored, context)
        context.state.custom_data = {**stored, **context.state.custom_data}


async def load_now(context: AgentContext) -> bool:
    """Restore a conversation that the agent was made without; False if there is none.

    Raises:
        SessionError: A new conversation has begun.

    """
    if context.state.restore_options is not None:
        return True
    if context.begun:
        raise SessionError(
            f"agent {context.agent_id!r} has begun a new conversation: "
            "load the stored one before the first message",
            agent=context.agent_id,
        )
    if not has_content(context.session):
        return False
    context.sets_aside = False
    await restore_parts(context)
    if not context.config.features.history:
        return True
    context.state.restore_options = context.config.restore
    return await WorkingContextSnapshotRestoreStep().execute(context)


def keep_custom_data(context: AgentContext) -> None:
    """Append the custom data to the session, if it has changed.

    Raises:
        NotStorableError: A value cannot be stored.

    """
    if context.sets_aside and not context.begun:
        return  # what is stored is still that of the conversation that it may set aside
    encoded = _encoded(context.state.custom_data, context)
    if encoded != context.saved_custom_data:
        context.session.state.set(CUSTOM_DATA, context.state.custom_data)
        context.saved_custom_data = encoded


def _encoded(data: dict[str, Any], context: AgentContext) -> tuple[bytes, dict[str, str] | None]:
    return encode_value(data, registry_of(context.session))
