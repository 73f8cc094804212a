"""Events of an agent: for people, and for the worker itself.

The first kind reports what has happened to listeners (`Agent.events`, `Agent.stream`).
`TurnEnded` comes only after everything in the turn is durable. The second kind, named
``…Event``, is what the worker dispatches to its handlers, from its `InputQueues`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self, final

import anyio
import msgspec

from perdure.errors import SessionClosedError
from perdure.memory.ledger import Effect
from perdure.records.messages import Message, ToolCall, ToolResult
from perdure.restore.report import RestoreReport


class UnfinishedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was admitted, and whose turn has not ended."""

    id: str
    message: Message
    at: float
    """Time at which it was posted, in seconds since 1970."""
    turn_id: str | None = None
    """The turn that was begun for it; None if none was."""
    attempts: int = 0
    """Number of times its turn was begun."""
    error: str | None = None
    """The type of the error that made the turn fail, if that is how it ended."""


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened in an agent."""

    agent_id: str


class BootstrapStarted(AgentEvent, frozen=True, kw_only=True):
    """The worker's loop runs; the first step comes next."""


class BootstrapStepDone(AgentEvent, frozen=True, kw_only=True):
    """One bootstrap step is done."""

    step: str


class ContextRestored(AgentEvent, frozen=True, kw_only=True):
    """The working context is back."""

    report: RestoreReport


class AgentReady(AgentEvent, frozen=True, kw_only=True):
    """The agent takes messages."""


class TurnEvent(AgentEvent, frozen=True, kw_only=True):
    """Something that happened in a turn."""

    turn_id: str


class TurnStarted(TurnEvent, frozen=True, kw_only=True):
    """A message is being answered."""


class Segment(TurnEvent, frozen=True, kw_only=True):
    """A piece of an answer, as it comes from the model; not durable yet."""

    text: str = ""
    reasoning: str = ""


class ToolStarted(TurnEvent, frozen=True, kw_only=True):
    """A tool is being called; that it is, is durable."""

    call: ToolCall


class ToolFinished(TurnEvent, frozen=True, kw_only=True):
    """Result of a tool call."""

    call: ToolCall
    result: ToolResult


class ApprovalRequested(TurnEvent, frozen=True, kw_only=True):
    """A tool call waits for `Agent.approve` or `Agent.deny`; that it does is durable."""

    call: ToolCall


class EffectUnknown(AgentEvent, frozen=True, kw_only=True):
    """It is unknown whether a tool has done its work: see `Agent.resolve_effect`."""

    effect: Effect


class TurnUnfinished(TurnEvent, frozen=True, kw_only=True):
    """A message was not answered before the agent stopped: see `Agent.resume`."""

    unfinished: UnfinishedMessage


class TurnEnded(TurnEvent, frozen=True, kw_only=True):
    """A message has been answered, and everything about it is durable."""

    message: Message
    """The model's last message."""
    version: int
    """The session's version that is durable."""
    replayed: bool = False
    """True if a turn of this id had ended before: this is the answer from then."""

    @property
    def text(self) -> str:
        """The answer."""
        return self.message.text


class TurnInterrupted(TurnEvent, frozen=True, kw_only=True):
    """The turn was stopped; what had come of the answer is kept, and marked."""

    text: str = ""
    """The text so far."""


class TurnFailed(TurnEvent, frozen=True, kw_only=True):
    """The turn could not be ended."""

    error: Exception


class CompactionStarted(TurnEvent, frozen=True, kw_only=True):
    """Old turns are being turned into long-term memory."""


class CompactionCompleted(TurnEvent, frozen=True, kw_only=True):
    """The working context is smaller now."""

    turns: int
    """Number of turns that left it."""
    bytes_before: int
    bytes_after: int


class CompactionFailed(TurnEvent, frozen=True, kw_only=True):
    """Nothing has changed; the model is not called before a compaction succeeds."""

    error: Exception


class AgentStopped(AgentEvent, frozen=True, kw_only=True):
    """The worker has ended; this is the last event."""

    error: Exception | None = None


# for the worker's handlers


class BootstrapStartedEvent(msgspec.Struct, frozen=True):
    """Make the agent ready."""


class UserMessageReceivedEvent(msgspec.Struct, frozen=True):
    """Input has come: from a user, or as the continuation after tools."""

    message: Message | None
    sender: Literal["user", "tool"] = "user"
    turn_id: str | None = None
    """The turn's id, if the post has one."""


class LLMUserMessageReadyEvent(msgspec.Struct, frozen=True):
    """The working context is ready for the model."""


class ToolInvocationRequestEvent(msgspec.Struct, frozen=True):
    """The model wants tools to be called: those of one message, at the same time."""

    calls: tuple[ToolCall, ...]
    resumed: bool = False
    """True if they were asked for before the agent stopped, and may have run."""


class ResumeEvent(msgspec.Struct, frozen=True):
    """Continue with a message that was not answered."""

    unfinished: UnfinishedMessage


class ToolResultEvent(msgspec.Struct, frozen=True):
    """All tools of one message have answered, in this order."""

    results: tuple[ToolResult, ...]


# Event streams: from the worker to its listeners, never the other way
#
# A worker does not wait for its listeners. Events wait in the stream; once very many do, segments
# are left out (the whole message comes with the event that ends it), and nothing else is. No task
# and no cancel scope belongs to a stream: it may be dropped anywhere.


MAX_WAITING: Final = 4096


@final
class EventStream:
    """Events to iterate over: ``async for event in stream``.

    Args:
        last: Types of event after which the stream is at its end.
        begin: Awaited before the first event is fetched.
        on_close: Called once when it is closed.

    """

    def __init__(
        self,
        *last: type[AgentEvent],
        begin: Callable[[EventStream], Awaitable[object]] | None = None,
        on_close: Callable[[EventStream], object] | None = None,
    ) -> None:
        self._begin = begin
        self._last: tuple[type[AgentEvent], ...] = (*last, AgentStopped)
        self._on_close = on_close
        self._waiting: deque[AgentEvent] = deque()
        self._news = anyio.Event()
        self._ended = False
        self.segments_left_out: int = 0
        """Number of segments that were left out, since they were not fetched in time."""

    def __repr__(self) -> str:
        return f"<EventStream {len(self._waiting)} waiting>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AgentEvent:
        begin, self._begin = self._begin, None
        if begin is not None:
            await begin(self)
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            await self._news.wait()
        event = self._waiting.popleft()
        if not self._waiting and not self._ended:
            self._news = anyio.Event()
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more; what has come can still be fetched."""
        if not self._ended:
            self._ended = True
            self._news.set()
            if self._on_close is not None:
                self._on_close(self)

    def feed(self, event: AgentEvent) -> None:
        """Put an event in; called by the worker."""
        if self._ended:
            return
        if len(self._waiting) >= MAX_WAITING and isinstance(event, Segment):
            self.segments_left_out += 1
            return
        self._waiting.append(event)
        self._news.set()
        if isinstance(event, self._last):
            self.close()


# The worker's two inputs: a bounded inbox for people, and a queue of its own before it
#
# Internal events come first, so that a turn's tools are answered before the next message.
# Nothing in here is durable: the agent's ledger has every message that waits.


@dataclass(eq=False, slots=True)
class QueuedMessage:
    """A message in the inbox, and who waits for what comes of it."""

    event: UserMessageReceivedEvent | ResumeEvent
    stream: EventStream | None = None
    admitted: str | None = None
    """Its entry in the agent's ledger."""


@final
class InputQueues:
    """Made by the worker when it begins to run.

    Args:
        size: How many messages may wait in the inbox.

    """

    def __init__(self, size: int) -> None:
        self._room = anyio.Semaphore(size)
        self._inbox: deque[QueuedMessage] = deque()
        self._first: deque[QueuedMessage] = deque()
        self._news = anyio.Event()
        self._closed = False
        self.internal: deque[Any] = deque()
        """The worker's own events: they come before all messages."""

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncGenerator[None, None]:
        """Wait for room in the inbox, and keep it for the block, which calls `put`.

        If the block raises, the room is free again.

        Raises:
            SessionClosedError: The agent takes no more messages.

        """
        self._check_open()
        await self._room.acquire()
        try:
            self._check_open()
            yield
        except BaseException:
            self._room.release()
            raise

    @property
    def has_posted(self) -> bool:
        """True if something waits already."""
        return bool(self._first or self._inbox)

    def put(self, posted: QueuedMessage) -> None:
        """Put a message into the inbox."""
        self._inbox.append(posted)
        self._news.set()

    def put_first(self, posted: QueuedMessage) -> None:
        """Put what was posted before the agent stopped ahead of the inbox; takes no room."""
        self._check_open()
        self._first.append(posted)
        self._news.set()

    async def next_posted(self) -> QueuedMessage | None:
        """Return the next message; None when no more will come."""
        while not (self._first or self._inbox):
            if self._closed:
                return None
            self._news = anyio.Event()
            await self._news.wait()
        if self._first:
            return self._first.popleft()
        self._room.release()
        return self._inbox.popleft()

    def close(self) -> None:
        """Take no more messages; those that wait are still given out."""
        self._closed = True
        self._news.set()
        for _ in range(self._room.statistics().tasks_waiting):
            self._room.release()  # they are woken; each gives its place back

    def abandon(self) -> tuple[QueuedMessage, ...]:
        """Accept no more, and return the messages that were not handled."""
        self.close()
        return (*self._first, *self._inbox)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("this agent has stopped: it takes no more messages")
