"""Event streams: from the worker to whoever listens, never the other way.

A worker does not wait for its listeners. Events wait in the stream; once very many do,
segments are left out (the whole message comes with the event that ends it), and
nothing else is. No task and no cancel scope belongs to a stream: it may be dropped anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self, final

import anyio

from perdure.agent.events import AgentEvent, AgentStopped, Segment

__all__ = ["EventStream"]

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
        """How many segments were left out, since nobody fetched them in time."""

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
        self._end()

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
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._news.set()
            if self._on_close is not None:
                self._on_close(self)
