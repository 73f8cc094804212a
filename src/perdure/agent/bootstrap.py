"""Bootstrap: what happens between a worker's start and its first message, step by step.

    workspace → tools → system prompt → working context (only if one is to be restored) → setup

Each step is awaited in the worker's loop, and may be cancelled. A step that raises, or
answers False, ends the bootstrap: the agent does not start half-ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, final

import msgspec

from perdure.agent.context import AgentContext
from perdure.agent.declared import bring_home, declare
from perdure.agent.events import AgentReady, BootstrapStarted, BootstrapStepDone, ContextRestored
from perdure.agent.mcp.server import start_servers
from perdure.agent.resume import report
from perdure.agent.tools import lived, maybe_await, require
from perdure.errors import SessionError
from perdure.records.values import encode_value
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapper
from perdure.restore.serializer import WorkingContextSnapshotSerializer
from perdure.session.internals import has_content, registry_of

CUSTOM_DATA: Final = "custom_data"
"""The named state that an agent's custom data is kept under."""


class BootstrapStep(Protocol):
    """One step of making an agent ready."""

    async def execute(self, context: AgentContext) -> bool:
        """Do it; False, or an exception, ends the bootstrap."""
        ...


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


@final
class SystemPromptProcessingStep:
    """Make the system prompt of the instructions."""

    async def execute(self, context: AgentContext) -> bool:
        """Run the processors, in order; persistent instructions come before them."""
        prompt = context.config.instructions
        custom = context.plugins.instructions
        if custom is not None:
            prompt = "\n\n".join(filter(None, (prompt, await custom.read())))
        for process in context.config.system_prompt_processors:
            prompt_made = await maybe_await(process(prompt, context), context)
            prompt = require(prompt_made, str, process, "system_prompt_processors")
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
        context.emit(ContextRestored(agent_id=context.agent_id, report=report))
        return True


def bootstrap_steps() -> tuple[BootstrapStep, ...]:
    """Return the steps in their order; restoring is the last, behind the system prompt."""
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
    context.emit(BootstrapStarted(agent_id=agent_id))
    if context.sets_aside:
        await context.ledger.load()
    else:
        await restore_parts(context)
    await declare(context)
    await bring_home(context)
    for step in steps:
        name = type(step).__name__
        if not await step.execute(context):
            message = f"agent {agent_id!r} did not start: its bootstrap step {name} failed"
            raise SessionError(message, agent=agent_id, step=name)
        context.emit(BootstrapStepDone(agent_id=agent_id, step=name))
    if context.config.setup is not None:
        await maybe_await(context.config.setup(context), context)
    report(context)
    await context.declared.set_up()
    ready = AgentReady(agent_id=agent_id)
    context.emit(ready)
    await lived(ready, context)


async def restore_parts(context: AgentContext) -> None:
    """Restore what the agent keeps beside its conversation."""
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
        message = (
            f"agent {context.agent_id!r} has begun a new conversation: "
            "load the stored one before the first message"
        )
        raise SessionError(message, agent=context.agent_id)
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
