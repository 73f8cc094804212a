"""Functions of the application that an agent waits for: tools, hooks and processors.

An agent waits for them, so they must not wait for the agent: `refuse_to_wait` says so at once.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from perdure._lib.logs import log_facts
from perdure._lib.tasks import stray_cancellation_fails
from perdure.agent.context import AgentContext
from perdure.agent.events import AgentEvent
from perdure.agent.tools import error_text
from perdure.errors import ConfigError, SessionError
from perdure.records.messages import ToolCall, ToolResult

log: logging.Logger = logging.getLogger("perdure.agent")

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Wait:
    """One call of such code; what it leaves running when it returns may wait for the agent."""

    context: AgentContext
    over: bool = False


_wait: ContextVar[_Wait | None] = ContextVar("perdure_wait", default=None)


@contextlib.contextmanager
def waited_for(context: AgentContext) -> Iterator[None]:
    """Note that an agent waits for what runs in the block."""
    wait = _Wait(context)
    token = _wait.set(wait)
    try:
        yield
    finally:
        wait.over = True
        _wait.reset(token)


def refuse_to_wait(context: AgentContext, what: str, cure: str) -> None:
    """Refuse to wait for an agent where the agent waits for the caller.

    Args:
        context: The agent's.
        what: What the caller would wait for.
        cure: What to do instead.

    Raises:
        SessionError: It does.

    """
    wait = _wait.get()
    if wait is not None and wait.context is context and not wait.over:
        raise SessionError(
            f"agent {context.agent_id!r} would wait for itself: {what} {cure}",
            agent=context.agent_id,
        )


async def maybe_await(value: Any, context: AgentContext) -> Any:
    """Return what a function of the application's returns, awaited if it has to be."""
    if not inspect.isawaitable(value):
        return value
    with waited_for(context):
        return await value


async def applied(
    processors: Sequence[Callable[[T, AgentContext], T | Awaitable[T]]],
    value: T,
    kind: type[T],
    option: str,
    context: AgentContext,
) -> T:
    """Return what processors make of a value, one after the other.

    Raises:
        ConfigError: One returned something of another kind, as where a ``return`` was forgotten.

    """
    for process in processors:
        made: object = await maybe_await(process(value, context), context)
        if not isinstance(made, kind):
            name = getattr(process, "__qualname__", type(process).__name__)
            shown = "None" if made is None else f"a {type(made).__name__}"
            raise ConfigError(
                f"{option}: {name} returned {shown}: it must return a {kind.__name__}",
                option=option,
                value=made,
            )
        value = made
    return value


async def processed(result: ToolResult, call: ToolCall, context: AgentContext) -> ToolResult:
    """Return a result as the processors make it; one that fails makes it an error."""
    try:
        processors = context.config.tool_result_processors
        with stray_cancellation_fails():
            result = await applied(
                processors, result, ToolResult, "tool_result_processors", context
            )
    except Exception as error:  # noqa: BLE001  # as if the tool itself had failed
        return ToolResult(
            call.id,
            call.name,
            error=f"the result could not be processed: {error_text(error)}",
        )
    return replace(result, call_id=call.id)  # in any case, this call is answered


async def lived(event: AgentEvent, context: AgentContext) -> None:
    """Have the lifecycle hooks called, in order; what one raises comes out of here."""
    for hook in context.config.lifecycle_hooks:
        with stray_cancellation_fails():
            await maybe_await(hook(event, context), context)


async def told_of(event: AgentEvent, context: AgentContext) -> None:
    """Have the lifecycle hooks called about what cannot be changed any more; never fails."""
    for hook in context.config.lifecycle_hooks:
        try:
            with stray_cancellation_fails():
                await maybe_await(hook(event, context), context)
        except Exception as error:  # noqa: BLE001  # reported
            log_facts(
                log,
                logging.ERROR,
                "a lifecycle hook failed",
                error,
                agent=context.agent_id,
                event=type(event).__name__,
            )
