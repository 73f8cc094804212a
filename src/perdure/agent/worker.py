"""The worker, one loop that answers an agent's messages, and the runtime that holds it.

The loop runs as a task of the runtime's host, so none of its cancel scopes spans a caller's code.
Each message is one turn of the session. A turn that fails, or is interrupted, is closed
and saved as such, and the next message is answered; only a session that cannot be
written any more ends the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVarTuple, final
from weakref import WeakSet

import anyio
import msgspec

from perdure._lib.logs import log_facts
from perdure._lib.tasks import Host
from perdure.agent.bootstrap import (
    first_event,
    go_on,
    keep_custom_data,
    load_now,
    to_resume,
    unfinished,
)
from perdure.agent.context import AgentContext
from perdure.agent.events import (
    AgentEvent,
    AgentStopped,
    BootstrapStartedEvent,
    EventStream,
    InputQueues,
    QueuedMessage,
    ResumeEvent,
    TurnEnded,
    TurnFailed,
    TurnInterrupted,
    TurnStarted,
    UnfinishedMessage,
    UserMessageReceivedEvent,
)
from perdure.agent.handlers import WorkerEventDispatcher, begin_context, usual_handlers
from perdure.agent.home import keep_home
from perdure.agent.hooks import lived, refuse_to_wait, told_of
from perdure.errors import (
    ContextOverflowError,
    PerdureError,
    SessionClosedError,
    SessionError,
    TurnReusedError,
)
from perdure.records.messages import Message, encode_message
from perdure.records.records import Entry
from perdure.session.base import turn_reused
from perdure.session.internals import (
    accept,
    close_unsaved,
    count_tokens,
    disclaim,
    end_with,
    home_of,
    is_draining,
    refusal_of,
    registry_of,
    time_to_leave,
)
from perdure.session.runtime import wrong_loop
from perdure.session.session import Session

log: logging.Logger = logging.getLogger("perdure.agent")

Ts = TypeVarTuple("Ts")

LAST_WORDS: Final = 5.0
"""Seconds that hooks have when the agent stops."""


_LATER = ("its tools, hooks and processors", "may post_user_message(), which is answered later")


@final
class AgentRuntime:
    """Run one agent's worker: the loop, the host task that it runs in, and who listens to it.

    Args:
        dispatcher: Who gets which event; None for the usual handlers.

    """

    def __init__(self, *, dispatcher: WorkerEventDispatcher | None = None) -> None:
        self._is_usual = dispatcher is None
        self._dispatcher = dispatcher or WorkerEventDispatcher(usual_handlers())
        self._listeners: WeakSet[EventStream] = WeakSet()  # who listens holds it
        self._host: Host | None = None
        # These three are there from the start on.
        self._context: AgentContext
        self._inputs: InputQueues
        self._life: anyio.CancelScope
        self._ready = anyio.Event()  # set when the bootstrap is over, well or not
        self._done = anyio.Event()  # set while no loop runs
        self._done.set()
        self._error: Exception | None = None  # that ended the loop
        self._between_turns = anyio.Lock(fast_acquire=True)
        self._draining = False
        self._posted: QueuedMessage | None = None  # what is being answered
        self._turn_scope: anyio.CancelScope | None = None
        self._by_hand = False  # whether the turn is stopped for good, and not with the agent

    def __repr__(self) -> str:
        return f"<AgentRuntime {'running' if self.is_running else 'not running'}>"

    @property
    def is_running(self) -> bool:
        """True while the worker takes messages."""
        return not self._done.is_set()

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
        self._life = anyio.CancelScope()
        self._inputs = context.inputs = InputQueues(context.config.inbox_size)
        self._host.spawn(self._run)
        self._done = anyio.Event()  # from here on a caller may wait for its end
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        if self._done.is_set():
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
            TurnReusedError: Its turn was begun with another message.
            SessionError: The caller is code that the agent waits for, and wants to wait for it.
            SessionClosedError: The agent does not run.
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._require_running()
        inputs, context = self._inputs, self._context
        if stream is not None:
            refuse_to_wait(context, *_LATER)
        for known in () if event.turn_id is None else unfinished(context):
            if known.turn_id != event.turn_id:
                continue
            session = context.session
            if event.message is not None and _request_of(event.message, session) != _request_of(
                known.message, session
            ):
                raise turn_reused(session.key, event.turn_id or "")
            self._go_on(known, stream)
            return
        async with inputs.room():
            admitted = None
            if event.message is not None:
                # A stream gets it from the turn, which has the message then: if that begins at
                # once, and nothing is done with the message before.
                is_idle = self._turn_scope is None and not inputs.has_posted
                is_plain = self._is_usual and not context.config.input_processors
                at_once = stream is not None and is_idle and is_plain
                admitted = context.ledger.admit(event.message, event.turn_id, at_once=at_once)
            if admitted is not None:
                context.ledger.underway.add(admitted)
            inputs.put(QueuedMessage(event, stream, admitted))

    async def resume(
        self, unfinished_messages: Sequence[UnfinishedMessage]
    ) -> tuple[EventStream, ...]:
        """Continue messages that were not answered, ahead of the inbox; return their events.

        Raises:
            SessionClosedError: The agent does not run.
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._require_running()
        refuse_to_wait(self._context, *_LATER)
        streams = tuple(
            EventStream(TurnEnded, TurnInterrupted, TurnFailed) for _ in unfinished_messages
        )
        for message, stream in zip(unfinished_messages, streams, strict=True):
            self._go_on(message, stream)
        return streams

    def _go_on(self, message: UnfinishedMessage, stream: EventStream | None) -> None:
        self._inputs.put_first(QueuedMessage(ResumeEvent(message), stream, message.id))
        self._context.ledger.underway.add(message.id)

    async def load(self) -> bool:
        """Restore the stored conversation of an agent that was made without it.

        Raises:
            SessionClosedError: The agent does not run.
            SessionError: It has begun a new conversation.

        """
        self._require_running()
        refuse_to_wait(self._context, *_LATER)
        assert self._host is not None  # it runs

        async def restored() -> bool:
            async with self._between_turns:
                return await load_now(self._context)

        return await self._host.call(restored)

    def _require_running(self) -> None:
        if not self.is_running:
            raise SessionClosedError("this agent does not run: start it, or use `async with agent`")
        self._check_home()

    def _check_home(self) -> None:
        stray = None if self._host is None else home_of(self._context.session).stray()
        if stray is not None:
            raise wrong_loop(f"agent {self._context.agent_id!r}", stray)

    def listen(self) -> EventStream:
        """Return a stream of all events from now on."""
        stream = EventStream(on_close=self._listeners.discard)
        self._listeners.add(stream)
        return stream

    def emit(self, event: AgentEvent) -> None:
        """Send an event to every listener, and to those that wait for the running turn.

        Raises:
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._check_home()
        self._publish(event)

    def _publish(self, event: AgentEvent) -> None:
        for stream in tuple(self._listeners):
            stream.feed(event)
        if self._posted is not None and self._posted.stream is not None:
            self._posted.stream.feed(event)

    async def stop(self, *, finish: bool, within: float | None = None) -> None:
        """End the worker, and wait for its end; may be called again after a cancellation.

        Args:
            finish: Answer what was posted before; otherwise interrupt the running turn.
            within: Seconds until all that still waits is cut, as a hook for a store that is down.

        Raises:
            SessionError: It is the agent's own tool, or hook, that asks for it.

        """
        if self.is_running:
            refuse_to_wait(self._context, "stop it", "from outside of its tools and hooks")
            if finish:
                self._inputs.close()  # those that wait are answered
            else:
                self._cancel()
            with anyio.move_on_after(within) as limit:
                await self._done.wait()
            if limit.cancelled_caught:
                self._life.cancel()
                await self._done.wait()
        if self._host is not None:
            await self._host.aclose()

    def _cancel(self) -> None:
        """Stop now, in the turn or the bootstrap, and begin nothing else.

        Unlike an interrupted turn, one that is stopped with the agent may be resumed.
        """
        # Before the turn is cut: the loop begins no other one in between.
        self.drain()
        if self._turn_scope is None:
            self._life.cancel()
        else:
            self._turn_scope.cancel()

    def interrupt(self) -> bool:
        """Stop the running turn for good; False if there is none.

        Raises:
            WrongLoopError: The agent belongs to another loop, thread or process.

        """
        self._check_home()
        if self._turn_scope is None:
            return False
        self._by_hand = True
        self._turn_scope.cancel()
        return True

    def drain(self) -> None:
        """Begin no further turn; the running one continues."""
        if self.is_running:
            self._draining = True
            self._inputs.close()

    async def _torn_down(self) -> None:
        self.drain()  # the loop is being closed: what the turn has is the manager's to save

    # the loop, in the host's task

    async def _run(self) -> None:
        """Bootstrap, then answer message after message."""
        try:
            with self._life:
                # First: what is posted meanwhile waits until the agent is restored.
                self._inputs.internal.append(BootstrapStartedEvent())
                await self._drain_internal()
                self._resume_what_is_left()
                self._ready.set()
                await self._answer_all()
        except Exception as error:  # noqa: BLE001  # raised in the waiter
            self._error = error
        finally:
            try:
                with anyio.CancelScope(shield=True), anyio.move_on_after(LAST_WORDS):
                    await told_of(self._stopped(), self._context)
            finally:
                self._end()

    def _resume_what_is_left(self) -> None:
        context = self._context
        if context.config.on_unfinished == "resume" and not context.sets_aside:
            for message in to_resume(unfinished(context)):
                context.ledger.underway.add(message.id)
                self._inputs.put_first(QueuedMessage(ResumeEvent(message), admitted=message.id))

    async def _drain_internal(self) -> None:
        while self._inputs.internal:
            await self._dispatcher.dispatch(self._inputs.internal.popleft(), self._context)

    async def _answer_all(self) -> None:
        session = self._context.session
        while not self._draining:
            self._posted = posted = await self._inputs.next_posted()
            if posted is None:
                break
            async with self._between_turns:  # a stored conversation may be loaded just now
                if self._draining:  # it began to during the wait
                    break
                await self._answer(posted)
            self._posted = None
            self._inputs.internal.clear()  # what a turn that did not end has left
            if not session.is_writable:
                self._error = refusal_of(session)
                break

    async def _answer(self, posted: QueuedMessage) -> None:
        """Run one turn, and report how it ended."""
        context = self._context
        over = _TurnOutcome()
        self._by_hand = False
        scope = self._turn_scope = anyio.CancelScope()
        try:
            with scope:
                await self._turn(posted, over)
            self._turn_scope = None
            if scope.cancelled_caught:  # an interruption does not wait for the turn's save
                limit = time_to_leave(context.session) if self._draining else None
                with anyio.move_on_after(limit):
                    await context.session.save()
        except Exception as error:  # noqa: BLE001  # reported, and the next message is answered
            agent = context.agent_id
            log_facts(log, logging.INFO, "a turn failed", agent=agent, turn=over.turn_id)
            if isinstance(error, TurnReusedError) and not over.turn_id:
                self._try(context.ledger.refuse, posted.admitted)  # tried again, it fails again
            ended: AgentEvent = TurnFailed(
                agent_id=context.agent_id, turn_id=over.turn_id, error=_innermost(error)
            )
        else:
            ids: dict[str, Any] = {"agent_id": context.agent_id, "turn_id": over.turn_id}
            last = context.last_message
            ended = TurnInterrupted(text="" if last is None else last.text, **ids)
            # Interrupted while its end was being saved, it has ended all the same.
            if over.answer is not None:
                version = context.session.durable_version
                ended = TurnEnded(
                    message=over.answer, version=version, replayed=over.replayed, **ids
                )
        finally:
            self._turn_scope = None
            self._keep(posted)
        context.ledger.underway.discard(posted.admitted or "")
        self._publish(ended)
        await told_of(ended, context)
        self._try(keep_custom_data, context)  # a hook may have changed it: with the next save

    async def _turn(self, posted: QueuedMessage, over: _TurnOutcome) -> None:
        context, ledger, event = self._context, self._context.ledger, posted.event
        context.model_calls, context.last_message, context.tokens = 0, None, (0, 0)
        begin_context(context)
        await context.plugins.attach(restore=False)  # done before, unless all is set aside
        asked = request = None
        goes_on = False
        if isinstance(event, ResumeEvent):
            asked = event.unfinished.turn_id
            # First: how often it was begun says how far back it is looked for.
            if asked is not None:
                ledger.begin(posted.admitted, asked)
                goes_on = True
        else:
            asked = event.turn_id
            if event.message is not None and context.config.features.history:
                request = _request_of(event.message, context.session)
        # Resumed in any case: what a cut attempt of this id has said is continued.
        beginning = context.session.turn(asked, resume=True, request=request, timeout=None)
        async with beginning as turn:
            over.turn_id, over.replayed = turn.id, turn.replayed
            if turn.replayed:
                # It has ended before: only the ledger does not know yet.
                over.answer = await context.memory.answer_of(turn.id)
                accept(context.session, ledger.closing(posted.admitted, turn.id, how="replayed"))
                return
            if not goes_on:
                ledger.begin(posted.admitted, turn.id)
            context.memory.turn_tracker.begin(turn.id, turn.number)
            try:
                started = TurnStarted(agent_id=context.agent_id, turn_id=turn.id)
                self._publish(started)
                await lived(started, context)
                await self._begin(posted)
                await self._drain_internal()
                keep_custom_data(context)
                over.answer = context.last_message
                # In the group of the turn's end: without it, the message would be answered again.
                end_with(turn, *ledger.closing(posted.admitted, turn.id, how="answered"))
            except BaseException as error:
                # A provider would refuse calls without results, also in the next turn.
                self._try(context.memory.close_open_calls)
                if isinstance(error, ContextOverflowError):
                    await context.memory.leave_out_turn(turn.id)
                self._try(keep_custom_data, context)
                end_with(turn, *self._left_by(error, posted, turn.id))
                raise
            finally:
                count_tokens(turn, *context.tokens)
                context.memory.turn_tracker.end()

    async def _begin(self, posted: QueuedMessage) -> None:
        """Queue what a turn begins or continues with, before everything else."""
        context, event = self._context, posted.event
        if not isinstance(event, ResumeEvent):
            if context.config.input_processors:
                await context.session.save()  # they may do something: it is work on the message
            self._inputs.internal.append(event)
            return
        done = await go_on(event, context)
        if done.answer is not None:
            context.last_message = done.answer
            return
        context.memory.turn_tracker.asked(context.turn_id, done.open_calls)
        self._inputs.internal.append(first_event(done, event.unfinished))

    def _left_by(
        self, error: BaseException, posted: QueuedMessage, turn_id: str
    ) -> tuple[Entry, ...]:
        """Return what the ledger has to say of a turn that has not come to its end."""
        ledger = self._context.ledger
        self._keep(posted)
        cut = ledger.cut(turn_id)
        if isinstance(error, Exception):
            return (*cut, *ledger.failing(posted.admitted, _innermost(error)))
        if self._by_hand:
            return (*cut, *ledger.closing(posted.admitted, turn_id, how="interrupted"))
        return cut  # stopped with the agent, which continues it when it comes back

    def _keep(self, posted: QueuedMessage) -> None:
        """Note a message that its turn does not have, so that it is found again."""
        if self._context.session.is_writable:
            self._try(self._context.ledger.keep, posted.admitted)

    def _try(self, keep: Callable[[*Ts], object], *args: *Ts) -> None:
        """Keep what is not the turn's own, if it can be kept: the turn's own error counts."""
        try:
            keep(*args)
        except PerdureError as error:
            log_facts(
                log,
                logging.WARNING,
                "not all that a turn leaves could be kept",
                agent=self._context.agent_id,
                error=type(error).__name__,
            )

    def _refuse(self, posted: QueuedMessage) -> None:
        self._keep(posted)
        self._context.ledger.underway.discard(posted.admitted or "")
        error = self._error or SessionClosedError(
            f"agent {self._context.agent_id!r} stopped before it came to this message: it is "
            "kept, and found when the agent comes back"
        )
        if posted.stream is not None:
            posted.stream.feed(AgentStopped(agent_id=self._context.agent_id, error=error))

    def _stopped(self) -> AgentStopped:
        return AgentStopped(agent_id=self._context.agent_id, error=self._error)

    def _end(self) -> None:
        for posted in self._inputs.abandon():
            self._refuse(posted)
        if self._posted is not None:
            self._refuse(self._posted)
        self._publish(self._stopped())
        self._ready.set()
        self._done.set()


def _request_of(message: Message, session: Session) -> bytes:
    """Return what a message asks, whenever it was created."""
    dateless = msgspec.structs.replace(message, created_at=None)
    return encode_message(dateless, registry_of(session)).payload


def _innermost(error: Exception) -> Exception:
    """Return what a task group has wrapped, if it is one error."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class _TurnOutcome(msgspec.Struct):
    """Outcome of a turn."""

    turn_id: str = ""
    replayed: bool = False
    answer: Message | None = None
    """None unless it has ended."""


# What is done about an agent that has stopped: keep what it has, then close what it had open
#
# Even if a part fails, or is cancelled, the closing is done to its end: otherwise the session would
# stay claimed, processes would keep running, and a store of the agent's own would stay locked.


CLOSING: Final = 30.0
"""Seconds that each part has to close that was opened for the agent, unless it is to be quick."""


async def let_go(
    context: AgentContext,
    *,
    save: bool,
    cut: bool,
    release: Callable[[], Awaitable[object]] | None,
) -> None:
    """Keep what an agent has, and let go of its session.

    Args:
        context: The agent's.
        save: Whether what came after the last turn is saved; otherwise what is not durable of it
            is dropped, unless others use the session.
        cut: Whether saving has only the time that the manager's ``turn_grace`` gives. What is not
            saved by then is the manager's to save.
        release: Gives back what was opened for the agent's session.

    """
    agent = context.agent_id
    try:
        limit = time_to_leave(context.session) if cut else None
        with anyio.move_on_after(limit) as scope:
            await _keep(context, save=save)
        if scope.cancelled_caught:
            log_facts(log, logging.WARNING, "an agent was not saved in time", agent=agent)
    finally:
        with anyio.CancelScope(shield=True):
            context.plugins.detach()
            disclaim(context.session, context)
            await context.session.__aexit__(None, None, None)
            if not save:
                await close_unsaved(context.session)
            for close in reversed(context.at_stop):
                session = context.session
                limit = time_to_leave(session) if is_draining(session) else CLOSING
                try:
                    with anyio.fail_after(limit):
                        await close()
                except Exception as error:  # noqa: BLE001  # it does not keep the others open
                    log_facts(log, logging.WARNING, "a part did not close", error, agent=agent)
            if release is not None:
                await release()


async def _keep(context: AgentContext, *, save: bool) -> None:
    if not save:
        return
    try:
        config = context.declared.config
        if config is not None and context.session.is_writable:
            await config.flush()
    finally:  # also without time for it: what is kept here is the manager's to save
        if context.session.is_writable:
            try:
                keep_custom_data(context)
            finally:
                await context.session.save()
                await context.plugins.memory.flush()
                await keep_home(context)
