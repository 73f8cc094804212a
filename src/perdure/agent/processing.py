"""The functions of the application's that messages and results pass on their way."""

from __future__ import annotations

import inspect
import logging
from typing import Any, TypeVar

from msgspec.structs import replace

from perdure.agent.context import AgentContext
from perdure.agent.events import AgentEvent
from perdure.agent.waiting import waited_for
from perdure.errors import ConfigError
from perdure.model.messages import Message, ToolCall, ToolResult

__all__ = ["lived", "maybe_await", "processed", "received", "require", "told_of"]

log: logging.Logger = logging.getLogger("perdure.agent")

T = TypeVar("T")


async def maybe_await(value: Any, context: AgentContext) -> Any:
    """Return what a function of the application's returns, awaited if it has to be."""
    if not inspect.isawaitable(value):
        return value
    with waited_for(context):
        return await value


def require(made: Any, kind: type[T], process: Any, option: str) -> T:
    """Return what a processor has made.

    Raises:
        ConfigError: It is of another kind, as where a ``return`` was forgotten.

    """
    if isinstance(made, kind):
        return made
    name = getattr(process, "__qualname__", type(process).__name__)
    shown = "None" if made is None else f"a {type(made).__name__}"
    message = f"{option}: {name} returned {shown}: it must return a {kind.__name__}"
    raise ConfigError(message, option=option, value=made)


async def received(message: Message, context: AgentContext) -> Message:
    """Return a user's message as the input processors make it."""
    for process in context.config.input_processors:
        made = await maybe_await(process(message, context), context)
        message = require(made, Message, process, "input_processors")
    return message


async def processed(result: ToolResult, call: ToolCall, context: AgentContext) -> ToolResult:
    """Return a result as the processors make it; one that fails makes it an error."""
    try:
        for process in context.config.tool_result_processors:
            made = await maybe_await(process(result, context), context)
            result = require(made, ToolResult, process, "tool_result_processors")
            result = replace(result, call_id=call.id)  # whatever it made, this call is answered
    except Exception as error:  # noqa: BLE001  # as if the tool itself had failed
        why = f"the result could not be processed: {type(error).__name__}: {error}"
        return ToolResult(call.id, call.name, error=why)
    return result


async def lived(event: AgentEvent, context: AgentContext) -> None:
    """Have the lifecycle hooks called, in order; what one raises comes out of here."""
    for hook in context.config.lifecycle_hooks:
        await maybe_await(hook(event, context), context)


async def told_of(event: AgentEvent, context: AgentContext) -> None:
    """Have the lifecycle hooks called about what cannot be changed any more; never fails."""
    for hook in context.config.lifecycle_hooks:
        try:
            await maybe_await(hook(event, context), context)
        except Exception:
            facts = {"agent": context.agent_id, "event": type(event).__name__}
            log.exception("a lifecycle hook failed", extra=facts)
