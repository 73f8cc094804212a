"""The worker's two inputs: a bounded inbox for people, and a queue of its own before it.

Internal events come first, so that a turn's tools are answered before the next message.
Nothing in here is durable: a message is, from the moment that its turn calls the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, final

import anyio

from perdure.agent.events import UserMessageReceivedEvent
from perdure.agent.streams import EventStream
from perdure.errors import SessionClosedError

__all__ = ["InputQueues", "LoadRequest", "Posted"]


@final
class LoadRequest:
    """A wish to restore the stored conversation, between two messages."""

    __slots__ = ("done", "error", "found")

    def __init__(self) -> None:
        self.done: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        self.found: bool = False
        """Whether there was one."""


@final
class Posted:
    """A message in the inbox, and who waits for what comes of it."""

    __slots__ = ("event", "stream")

    def __init__(
        self, event: UserMessageReceivedEvent | LoadRequest, stream: EventStream | None = None
    ) -> None:
        self.event: UserMessageReceivedEvent | LoadRequest = event
        self.stream: EventStream | None = stream


@final
class InputQueues:
    """Made by the worker when it begins to run.

    Args:
        size: How many messages may wait in the inbox.

    """

    def __init__(self, size: int) -> None:
        self._inbox_in, self._inbox = anyio.create_memory_object_stream[Posted](size)
        self._internal: deque[Any] = deque()

    async def post(self, posted: Posted) -> None:
        """Put a message into the inbox; waits while it is full.

        Raises:
            SessionClosedError: The agent takes no more messages.

        """
        try:
            await self._inbox_in.send(posted)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            raise SessionClosedError("this agent has stopped: it takes no more messages") from None

    async def next_posted(self) -> Posted | None:
        """Return the next message; None when no more will come."""
        try:
            return await self._inbox.receive()
        except anyio.EndOfStream:
            return None

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
        self._inbox_in.close()

    def abandon(self) -> Iterator[Posted]:
        """Close both ends, and return the messages that nobody has handled."""
        self._inbox_in.close()
        while True:
            try:
                yield self._inbox.receive_nowait()
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
        self._inbox.close()
