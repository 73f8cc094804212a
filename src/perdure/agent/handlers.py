"""Handlers of the worker's events: small steps, each of which asks for the next.

    user message → model → answer
                     ↓  ↑
                   tools → results

Nothing leaves the process before what caused it is durable: not a request to the model, not a
tool call, not the end of a turn. A partial answer is kept and marked when its turn is cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from perdure._lib.tasks import stray_cancellation_fails
from perdure.agent.bootstrap import BootstrapStep, bootstrap, bootstrap_steps
from perdure.agent.calls import PlannedCall, lost, make, plan
from perdure.agent.context import AgentContext
from perdure.agent.events import (
    BootstrapStartedEvent,
    LLMUserMessageReadyEvent,
    Segment,
    ToolInvocationRequestEvent,
    ToolResultEvent,
    UserMessageReceivedEvent,
)
from perdure.agent.hooks import applied
from perdure.agent.llm.failures import overflow_of
from perdure.agent.llm.model import ReplyStream, ToolSpec, closing
from perdure.agent.requests import LLMRequest
from perdure.errors import ContextOverflowError, SessionError
from perdure.memory.traces import BEGIN
from perdure.records.messages import Message, ToolResult
from perdure.session.internals import contents_of, grouped


class Handler(Protocol):
    """Deals with one type of event."""

    async def handle(self, event: Any, context: AgentContext) -> None:
        """Do what the event asks for."""


@final
class WorkerEventDispatcher:
    """Give each event to the handler of its type.

    Args:
        handlers: By type of event.

    """

    def __init__(self, handlers: dict[type, Handler]) -> None:
        self._handlers = handlers

    async def dispatch(self, event: Any, context: AgentContext) -> None:
        """Have an event handled.

        Raises:
            RuntimeError: A model, a hook or a step let out a cancellation that is not this task's.
            SessionError: No handler is there for it.

        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise SessionError(
                f"agent {context.agent_id!r}: nothing handles a {type(event).__name__}",
                agent=context.agent_id,
                event=type(event).__name__,
            )
        with stray_cancellation_fails():
            await handler.handle(event, context)


@final
class BootstrapEventHandler:
    """Make the agent ready.

    Args:
        steps: What to do, in order; None for the usual steps.

    """

    def __init__(self, steps: tuple[BootstrapStep, ...] | None = None) -> None:
        self._steps = bootstrap_steps() if steps is None else steps

    async def handle(self, event: BootstrapStartedEvent, context: AgentContext) -> None:
        """Run the steps, then the agent's own set-up."""
        await bootstrap(context, self._steps)


@final
class UserInputMessageEventHandler:
    """Process input, and keep what a user said."""

    async def handle(self, event: UserMessageReceivedEvent, context: AgentContext) -> None:
        """Keep a user's message; the results of tools are kept already."""
        if event.message is not None and event.sender == "user":
            processors = context.config.input_processors
            message = await applied(processors, event.message, Message, "input_processors", context)
            with grouped(context.session):
                seq = context.memory.ingest_user_message(message, context.turn_id)
                context.ledger.said(seq)
        context.enqueue(LLMUserMessageReadyEvent())


def begin_context(context: AgentContext) -> None:
    """Begin a working context that was not restored, with the system prompt and nothing else.

    Called before a turn: what it sets aside shall not be a part of the turn.
    """
    state, memory = context.state, context.memory
    if context.begun:
        return
    context.begun = True
    if context.sets_aside:
        context.saved_custom_data = None
    if state.restore_options is not None or not (context.sets_aside or state.system_prompt):
        return
    head = (Message.system(state.system_prompt),) if state.system_prompt else ()
    before = () if context.sets_aside else tuple(contents_of(context.session).stored())
    memory.replace_context(
        (*head, *before),
        system_prompt=state.system_prompt or None,
        reason="system prompt" if before else BEGIN,
    )


@final
class LLMUserMessageReadyEventHandler:
    """Ask the model, and keep what it says."""

    async def handle(self, event: LLMUserMessageReadyEvent, context: AgentContext) -> None:
        """Stream an answer; tools, or the end of the turn, come next."""
        limit = context.config.max_model_calls
        if context.model_calls >= limit:
            raise SessionError(
                f"agent {context.agent_id!r}: the model was called {limit} times in turn "
                f"{context.turn_id}: raise max_model_calls, or look at its tools",
                agent=context.agent_id,
                turn=context.turn_id,
            )
        context.model_calls += 1
        specs = context.plugins.tools.offered(context.toolbox.specs)
        context.memory.budget.note_window(getattr(context.model, "context_window", None))
        context.memory.budget.note_tools(specs)
        request = await context.assembler.prepare_request(
            context.turn_id, context.state.system_prompt
        )
        request, reply = await self._asked(request, specs, context)
        memory, message = context.memory, reply.message()
        context.last_message = message
        if message.tool_calls:
            memory.ingest_tool_intent(message, context.turn_id)
            context.enqueue(ToolInvocationRequestEvent(message.tool_calls))
        else:
            memory.ingest_assistant_response(message, context.turn_id)
        tokens = None if reply.usage is None else reply.usage.input_tokens
        memory.note_usage(request.messages, tokens)
        if reply.usage is not None:
            read, written = context.tokens
            context.tokens = read + reply.usage.input_tokens, written + reply.usage.output_tokens

    async def _asked(
        self, request: LLMRequest, specs: Sequence[ToolSpec], context: AgentContext
    ) -> tuple[LLMRequest, ReplyStream]:
        """Ask the model; if the request is too long for it, compact and ask once more.

        Raises:
            ContextOverflowError: It is too long even so.

        """
        memory, reply = context.memory, ReplyStream()
        try:
            return request, await self._ask(request, reply, specs, context)
        except Exception as error:
            overflow = overflow_of(error)
            if overflow is None or reply.partial() is not None:
                raise
            # The next request compacts to what fits.
            tokens_before = memory.budget.note_overflow(request.messages, overflow)
            memory.request_compaction()
            cause = error
        request = await context.assembler.prepare_request(
            context.turn_id, context.state.system_prompt
        )
        tokens = memory.budget.count(request.messages)
        try:
            if tokens < tokens_before:
                return request, await self._ask(request, ReplyStream(), specs, context)
        except Exception as error:
            overflow = overflow_of(error)
            if overflow is None:
                raise
            memory.budget.note_overflow(request.messages, overflow)
            memory.request_compaction()
            cause = error
        tokens = overflow.tokens or tokens
        window = "" if overflow.window is None else f" of {overflow.window} tokens"
        raise ContextOverflowError(
            f"agent {context.agent_id!r}: turn {context.turn_id} does not fit into the model's "
            f"window{window}: even compacted, the request has about {tokens} tokens; ask with "
            "less, have tools return less, or choose a model with a larger window",
            agent=context.agent_id,
            turn=context.turn_id,
            tokens=tokens,
            window=overflow.window,
        ) from cause

    async def _ask(
        self,
        request: LLMRequest,
        reply: ReplyStream,
        specs: Sequence[ToolSpec],
        context: AgentContext,
    ) -> ReplyStream:
        stream = context.model.stream(request.rendered, specs)
        try:
            async with closing(stream):
                async for chunk in stream:
                    reply.take(chunk)
                    if chunk.text or chunk.reasoning:
                        segment = Segment(text=chunk.text, reasoning=chunk.reasoning, **context.ids)
                        context.emit(segment)
        except BaseException:
            partial = reply.partial()
            if partial is not None and context.session.is_writable:
                context.last_message = partial
                context.memory.ingest_assistant_response(partial, context.turn_id)
            raise
        return reply


@final
class ToolInvocationRequestEventHandler:
    """Call the tools that one message of the model asks for, all at the same time."""

    async def handle(self, event: ToolInvocationRequestEvent, context: AgentContext) -> None:
        """Keep each result as it arrives; continue when all have arrived."""
        planned = [plan(call, context, resumed=event.resumed) for call in event.calls]
        # The intent first: after a kill, the model must know that a tool may have run.
        await context.memory.persist_working_context_snapshot()
        results: list[ToolResult] = []
        unanswered = list(planned)

        async def answer(call_planned: PlannedCall) -> None:
            result = await make(call_planned, context)
            unanswered.remove(call_planned)
            if result is not None:
                results.append(result)

        async with anyio.create_task_group() as group:
            for call_planned in planned:
                group.start_soon(
                    answer, call_planned, name=f"perdure:tool {call_planned.call.name}"
                )
        await checkpoint_if_cancelled()  # then they were cancelled with this task
        results += [lost(call_planned, context) for call_planned in unanswered]
        context.enqueue(ToolResultEvent(tuple(results)))


@final
class ToolResultEventHandler:
    """Continue after tools: before any other message, in the same turn."""

    async def handle(self, event: ToolResultEvent, context: AgentContext) -> None:
        """Send the turn through the input pipeline again, as the tools' continuation."""
        context.enqueue(UserMessageReceivedEvent(None, sender="tool"))


def usual_handlers() -> dict[type, Handler]:
    """Return the handlers of an agent."""
    return {
        BootstrapStartedEvent: BootstrapEventHandler(),
        UserMessageReceivedEvent: UserInputMessageEventHandler(),
        LLMUserMessageReadyEvent: LLMUserMessageReadyEventHandler(),
        ToolInvocationRequestEvent: ToolInvocationRequestEventHandler(),
        ToolResultEvent: ToolResultEventHandler(),
    }
