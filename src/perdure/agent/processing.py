"""The functions of the application's that messages and results pass on their way."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from perdure.agent.context import AgentContext
from perdure.agent.events import AgentEvent
from perdure.model.messages import Message, ToolCall, ToolResult

__all__ = ["lived", "maybe_await", "processed", "received", "told_of"]

log: logging.Logger = logging.getLogger("perdure.agent")


async def maybe_await(value: Any) -> Any:
    """Return a value, awaited if it has to be: for functions of either kind."""
    return await value if inspect.isawaitable(value) else value


async def received(message: Message, context: AgentContext) -> Message:
    """Return a user's message as the input processors make it."""
    for process in context.config.input_processors:
        message = await maybe_await(process(message, context))
    return message


async def processed(result: ToolResult, call: ToolCall, context: AgentContext) -> ToolResult:
    """Return a result as the processors make it; one that fails makes it an error."""
    try:
        for process in context.config.tool_result_processors:
            result = await maybe_await(process(result, context))
    except Exception as error:  # noqa: BLE001  # as if the tool itself had failed
        why = f"the result could not be processed: {type(error).__name__}: {error}"
        return ToolResult(call.id, call.name, error=why)
    return result


async def lived(event: AgentEvent, context: AgentContext) -> None:
    """Have the lifecycle hooks called, in order; what one raises comes out of here."""
    for hook in context.config.lifecycle_hooks:
        await maybe_await(hook(event, context))


async def told_of(event: AgentEvent, context: AgentContext) -> None:
    """Have the lifecycle hooks called about what cannot be changed any more; never fails."""
    for hook in context.config.lifecycle_hooks:
        try:
            await maybe_await(hook(event, context))
        except Exception:
            facts = {"agent": context.agent_id, "event": type(event).__name__}
            log.exception("a lifecycle hook failed", extra=facts)
