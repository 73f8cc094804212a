"""The worker's two inputs: a bounded inbox for people, and a queue of its own before it.

Internal events come first, so that a turn's tools are answered before the next message.
Nothing in here is durable: the agent's ledger has every message that waits.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import anyio

from perdure.agent.events import EventStream, ResumeEvent, UserMessageReceivedEvent
from perdure.errors import SessionClosedError


@final
class LoadRequest:
    """A request to restore the stored conversation, between two messages."""

    __slots__ = ("done", "error", "found")

    def __init__(self) -> None:
        self.done: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        self.found: bool = False
        """Whether there was one."""


@final
class QueuedMessage:
    """A message in the inbox, and who waits for what comes of it."""

    __slots__ = ("admitted", "event", "stream")

    def __init__(
        self,
        event: UserMessageReceivedEvent | ResumeEvent | LoadRequest,
        stream: EventStream | None = None,
        admitted: str | None = None,
    ) -> None:
        self.event: UserMessageReceivedEvent | ResumeEvent | LoadRequest = event
        self.stream: EventStream | None = stream
        self.admitted: str | None = admitted
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
        self._internal: deque[Any] = deque()

    async def room(self) -> None:
        """Wait for room in the inbox, and take it: `put` follows, with nothing awaited between.

        Raises:
            SessionClosedError: The agent takes no more messages.

        """
        self._check_open()
        await self._room.acquire()
        try:
            self._check_open()
        except SessionClosedError:
            self._room.release()
            raise

    def no_room_needed(self) -> None:
        """Give back the room that was taken: nothing comes."""
        self._room.release()

    @property
    def has_posted(self) -> bool:
        """Whether something waits already."""
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

    def put_internal(self, event: Any) -> None:
        """Put an event before all messages."""
        self._internal.append(event)

    def next_internal(self) -> Any | None:
        """Return the worker's own next event, None for none."""
        return self._internal.popleft() if self._internal else None

    def forget_internal(self) -> None:
        """Drop what a turn that did not end has left."""
        self._internal.clear()

    def close(self) -> None:
        """Take no more messages; those that wait are still given out."""
        self._closed = True
        self._news.set()
        for _ in range(self._room.statistics().tasks_waiting):
            self._room.release()  # they are told; each gives its place back

    def abandon(self) -> tuple[QueuedMessage, ...]:
        """Accept no more, and return the messages that were not handled."""
        self.close()
        unhandled = (*self._first, *self._inbox)
        self._first.clear()
        self._inbox.clear()
        return unhandled

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("this agent has stopped: it takes no more messages")
