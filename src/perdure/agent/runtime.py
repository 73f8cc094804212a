"""An agent's runtime: the worker, the host task that it runs in, and who listens to it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, final
from weakref import WeakSet

import anyio

from perdure._lib.host import Host
from perdure.agent.bootstrap import keep_custom_data, unfinished
from perdure.agent.context import AgentContext
from perdure.agent.events import (
    AgentEvent,
    EventStream,
    InputQueues,
    LoadRequest,
    QueuedMessage,
    ResumeEvent,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    UnfinishedMessage,
    UserMessageReceivedEvent,
)
from perdure.agent.handlers import WorkerEventDispatcher, usual_handlers
from perdure.agent.plugins import keep_home
from perdure.agent.tools import refuse_to_wait
from perdure.agent.worker import AgentWorker
from perdure.errors import SessionClosedError, SessionError
from perdure.session.internals import disclaim, home_of
from perdure.session.runtime import wrong_loop

_LATER = ("its tools, hooks and processors", "may post_user_message(), which is answered later")


@final
class AgentRuntime:
    """Run one agent's worker.

    Args:
        dispatcher: Who gets which event; None for the usual handlers.

    """

    def __init__(self, *, dispatcher: WorkerEventDispatcher | None = None) -> None:
        self._is_usual = dispatcher is None
        self._dispatcher = dispatcher or WorkerEventDispatcher(usual_handlers())
        self._listeners: WeakSet[EventStream] = WeakSet()  # who listens holds it
        self._host: Host | None = None
        self._context: AgentContext | None = None
        self.worker: AgentWorker | None = None
        """None before the start."""

    @property
    def is_running(self) -> bool:
        """Whether the worker takes messages."""
        return self.worker is not None and not self.worker.done.is_set()

    async def start(self, context: AgentContext) -> None:
        """Start the worker, and wait until it is ready.

        Raises:
            SessionError: It was started before. Errors of the bootstrap are raised, too.

        """
        if self._host is not None:
            raise SessionError(
                f"agent {context.agent_id!r} was started before: make a new one",
                agent=context.agent_id,
            )
        self._context = context
        self._host = Host(on_teardown=self._torn_down)
        await self._host.start()
        worker = AgentWorker(context, self._dispatcher, self.publish)
        self._host.spawn(worker.run)
        self.worker = worker  # from here on somebody may wait for its end
        await worker.ready.wait()
        if worker.error is not None:
            raise worker.error
        if worker.done.is_set():
            raise SessionClosedError(
                f"agent {context.agent_id!r} was stopped before it was ready",
                agent=context.agent_id,
            )

    async def submit_event(
        self, event: UserMessageReceivedEvent, stream: EventStream | None = None
    ) -> None:
        """Admit a message, and put it into the inbox; waits while that is full.

        It is durable with the session's next save, which comes before any work on it. If its
        turn's id is that of one that is unfinished, that one is continued.

        Raises:
            NotStorableError: The message cannot be stored.
            SessionError: The caller is code that the agent waits for, and wants to wait for it.
            SessionClosedError: The agent does not run.
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        inputs, context = self._inputs(), self._of
        if stream is not None:
            refuse_to_wait(context, *_LATER)
        known = None if event.turn_id is None else self._unfinished(event.turn_id)
        if known is not None:
            self._go_on(known, stream)
            return
        await inputs.room()
        try:
            admitted = None
            if event.message is not None:
                # Whoever streams is told of it by the turn, which has the message then.
                at_once = stream is not None and self._is_idle(inputs)
                admitted = context.ledger.admit(event.message, event.turn_id, at_once=at_once)
        except BaseException:
            inputs.no_room_needed()
            raise
        if admitted is not None:
            context.ledger.underway.add(admitted)
        inputs.put(QueuedMessage(event, stream, admitted))

    def _is_idle(self, inputs: InputQueues) -> bool:
        """Whether a message's turn begins at once, and nothing is done with it before it does."""
        busy = self.worker is None or self.worker.busy or inputs.has_posted
        return self._is_usual and not (busy or self._of.config.input_processors)

    async def resume(
        self, unfinished_messages: Sequence[UnfinishedMessage]
    ) -> tuple[EventStream, ...]:
        """Continue messages that were not answered, ahead of the inbox; return their events.

        Raises:
            SessionClosedError: The agent does not run.
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._inputs()
        refuse_to_wait(self._of, *_LATER)
        streams = tuple(
            EventStream(TurnEnded, TurnInterrupted, TurnFailed) for _ in unfinished_messages
        )
        for message, stream in zip(unfinished_messages, streams, strict=True):
            self._go_on(message, stream)
        return streams

    def _unfinished(self, turn_id: str) -> UnfinishedMessage | None:
        matching = [message for message in unfinished(self._of) if message.turn_id == turn_id]
        return matching[0] if matching else None

    def _go_on(self, message: UnfinishedMessage, stream: EventStream | None) -> None:
        self._inputs().put_first(QueuedMessage(ResumeEvent(message), stream, message.id))
        self._of.ledger.underway.add(message.id)

    async def load(self) -> bool:
        """Restore the stored conversation of an agent that was made without it.

        Raises:
            SessionClosedError: The agent does not run.
            SessionError: It has begun a new conversation.

        """
        request = LoadRequest()
        inputs = self._inputs()
        refuse_to_wait(self._of, *_LATER)
        await inputs.room()
        inputs.put(QueuedMessage(request))
        await request.done.wait()
        if request.error is not None:
            raise request.error
        return request.found

    @property
    def _of(self) -> AgentContext:
        assert self._context is not None  # it runs
        return self._context

    def _inputs(self) -> InputQueues:
        context = self._context
        if context is None or context.inputs is None or not self.is_running:
            raise SessionClosedError("this agent does not run: start it, or use `async with agent`")
        self._check_home()
        return context.inputs

    def _check_home(self) -> None:
        context = self._context
        stray = None if context is None else home_of(context.session).stray()
        if context is not None and stray is not None:
            raise wrong_loop(f"agent {context.agent_id!r}", stray)

    def listen(self) -> EventStream:
        """Return a stream of all events from now on."""
        stream = EventStream(on_close=self._listeners.discard)
        self._listeners.add(stream)
        return stream

    def publish(self, event: AgentEvent) -> None:
        """Send an event to every listener."""
        for stream in tuple(self._listeners):
            stream.feed(event)

    def emit(self, event: AgentEvent) -> None:
        """Send an event to every listener, and to those that wait for the running turn.

        Raises:
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._check_home()
        if self.worker is None:
            self.publish(event)
        else:
            self.worker.emit(event)

    async def stop(self, *, finish: bool) -> None:
        """End the worker, and wait for its end; may be called again after a cancellation.

        Raises:
            SessionError: It is the agent's own tool, or hook, that asks for it.

        """
        worker = self.worker
        if worker is not None:
            refuse_to_wait(self._of, "stop it", "from outside of its tools and hooks")
            if not finish:
                worker.cancel()
            else:
                worker.close()
            await worker.done.wait()
        if self._host is not None:
            await self._host.aclose()

    def interrupt(self) -> bool:
        """Stop the running turn for good; False if there is none.

        Raises:
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._check_home()
        return self.worker is not None and self.worker.interrupt()

    def drain(self) -> None:
        """Begin no further turn; the running one continues."""
        if self.worker is not None:
            self.worker.drain()

    async def _torn_down(self) -> None:
        self.drain()  # the loop is being closed: what the turn has is the manager's to save


# What is done about an agent that has stopped: keep what it has, then close what it had open
#
# Whatever fails, or is cancelled, the closing is done to its end: otherwise the session would stay
# claimed, processes would stay behind, and a store of the agent's own would stay locked.


log: logging.Logger = logging.getLogger("perdure.agent")

CLOSING: Final = 30.0
"""Seconds that each part has to close that was opened for the agent."""


@final
class AgentShutdown:
    """Leave one agent's session, once.

    Args:
        context: The agent's.
        save: Whether what came after the last turn is saved.
        release: Gives back what was opened for the agent's session.

    """

    def __init__(
        self, context: AgentContext, *, save: bool, release: Callable[[], Awaitable[object]] | None
    ) -> None:
        self._context = context
        self._save = save
        self._release = release
        self.begun: bool = False

    async def let_go(self, *, within: float | None) -> None:
        """Keep what the agent has, and let go of its session; do nothing the second time.

        Args:
            within: Seconds for the first of the two; None for as long as it takes. What the
                session has not saved by then is its manager's to save.

        """
        if self.begun:
            return
        self.begun = True
        try:
            with anyio.move_on_after(within) as scope:
                await self._keep()
            if scope.cancelled_caught:
                log.warning("an agent was not saved in time", extra=self._facts)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _keep(self) -> None:
        context = self._context
        if context.session.is_writable:
            await context.declared.flush()
        if self._save and context.session.is_writable:
            try:
                keep_custom_data(context)
            finally:
                await context.session.save()
                await context.plugins.memory.flush()
                await keep_home(context)

    async def _close(self) -> None:
        context = self._context
        context.plugins.detach()
        disclaim(context.session, context)
        await context.session.__aexit__(None, None, None)
        for close in reversed(context.at_stop):
            try:
                with anyio.fail_after(CLOSING):
                    await close()
            except Exception as error:  # it does not keep the others open
                log.warning("a part did not close", extra=self._facts, exc_info=error)
        if self._release is not None:
            await self._release()

    @property
    def _facts(self) -> dict[str, str]:
        return {"agent": self._context.agent_id}
