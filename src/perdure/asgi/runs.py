"""Turns that answer requests: each runs in a task of the application, not in its client's.

So a client that goes away does not end its turn at once, one that comes back finds it, and a
retry joins it instead of running it twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import final

import anyio
import msgspec

from perdure.asgi.feed import Channel, Cursor, Feed, FeedEvent
from perdure.asgi.responses import Events, failure
from perdure.errors import HistoryPrunedError, SessionClosedError
from perdure.records.keys import SessionKey
from perdure.session.base import Turn
from perdure.session.internals import time_to_leave
from perdure.session.session import Session


class RunOutcome(msgspec.Struct, frozen=True):
    """The end of a turn; everything of it is durable."""

    turn: str
    text: str
    """The answer."""
    version: int
    replayed: bool = False
    """True if the turn had ended before: this is the answer of then."""


@final
class Run:
    """A turn that answers requests.

    Args:
        feed: Where its events are read.
        key: The session.
        turn: The turn's id; None for one that the session gives.
        request: What is asked; None: it is not compared with what the turn was begun with.
        owner: Whose request it is.

    """

    def __init__(
        self,
        feed: Feed,
        key: SessionKey,
        turn: str | None,
        request: str | bytes | None = None,
        owner: str | None = None,
    ) -> None:
        self.key = key
        self.turn: str | None = turn
        self.request: str | bytes | None = request
        self.owner: str | None = owner
        self.after: int = 0
        """The session's version before the turn."""
        self.replayed: bool = False
        self.outcome: RunOutcome | None = None
        self.error: BaseException | None = None
        self.begun: anyio.Event = anyio.Event()
        """Set when the turn has begun, or has ended before, or cannot begin."""
        self.done: anyio.Event = anyio.Event()
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.readers: int = 0
        self.visits: int = 0
        """How many readers it has had."""
        self._feed = feed

    def begin(self, *, turn: str, replayed: bool) -> None:
        """Note that the turn has begun."""
        self.turn, self.replayed = turn, replayed
        self.begun.set()

    async def wait(self) -> RunOutcome:
        """Return the outcome, once it is durable; what made the turn fail is raised."""
        await self.done.wait()
        if self.error is not None or self.outcome is None:
            raise self.error or self.interrupted()
        return self.outcome

    def interrupted(self) -> SessionClosedError:
        """Return the error of a turn that was cut."""
        return SessionClosedError(
            f"turn {self.turn!r} of session {self.key} was interrupted; what came of the "
            "answer is kept, and a request with the same key answers it again",
            key=str(self.key),
            turn=self.turn,
        )

    async def events(self, cursor: Cursor | None) -> Events:
        """Return the turn's events after a place, up to its end.

        Raises:
            HistoryPrunedError: It has ended before, and the log does not have it any more.

        """
        await self.begun.wait()
        if self.error is not None:
            raise self.error
        after = self.after
        if self.replayed:
            began = await self._feed.begin_of(self.key, self.turn or "")
            if began is None:
                raise HistoryPrunedError(
                    f"session {self.key} does not have the records of turn {self.turn!r}",
                    key=str(self.key),
                    turn=self.turn,
                )
            after = began - 1
        # A client that saw an earlier attempt gets what took that back: it is before the new begin.
        inside = cursor is not None and await self._feed.turn_at(self.key, cursor) == self.turn
        start = cursor if cursor is not None and (inside or cursor.seq > after) else Cursor(after)
        return self._events(start, after, inside)

    async def _events(
        self,
        cursor: Cursor,
        after: int,
        inside: bool,  # noqa: FBT001  # private
    ) -> AsyncGenerator[FeedEvent | None, None]:
        events = self._feed.events(self.key, cursor, until=self.done.is_set)
        async with contextlib.aclosing(events):
            async for event in events:
                if event is not None and event.name == "turn":
                    inside = event.data["turn"] == self.turn
                if inside or event is None:
                    yield event
                if inside and _ends(event, after):
                    return
        if self.error is not None or self.outcome is None:
            yield failure(self.error or self.interrupted())


def _ends(event: FeedEvent | None, after: int) -> bool:
    """Return whether an event ends a turn, and not an attempt at it before a place."""
    if event is None or event.id is None or event.id.seq <= after:
        return False
    return event.name in {"end", "interrupted"}


Answer = Callable[[Session, Turn], AsyncIterator[str]]
"""Answers in a turn: appends the question, and yields the answer in pieces."""


async def answer_in(session: Session, run: Run, channel: Channel, answer: Answer) -> RunOutcome:
    """Run a turn of a session with a function of the application.

    The answer is one message, which is appended at its end. If the turn is cut before, what
    came of it is kept, marked as interrupted.
    """
    run.after = session.version
    try:
        async with session.turn(run.turn, request=run.request) as turn:
            run.begin(turn=turn.id, replayed=turn.replayed)
            if turn.replayed:
                answers = [one.text for one in turn.messages if one.role == "assistant"]
                ended = answers[-1] if answers else ""
            else:
                ended = await _pieces(session, turn, channel, answer)
    finally:
        if session.is_writable:  # a turn that was cancelled does not wait for its save
            with anyio.move_on_after(time_to_leave(session), shield=True):
                await session.save()
    return RunOutcome(run.turn or "", ended, session.durable_version, replayed=run.replayed)


@contextlib.asynccontextmanager
async def _closing(stream: AsyncIterator[str]) -> AsyncGenerator[AsyncIterator[str], None]:
    """Close what can be closed: a generator, or a client's stream."""
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


async def _pieces(session: Session, turn: Turn, channel: Channel, answer: Answer) -> str:
    begun = False
    with turn.partial() as reply:
        async with _closing(answer(session, turn)) as stream:
            async for piece in stream:
                if not begun:
                    await session.save()  # the question is durable before anything leaves
                    begun = True
                channel.add(session, reply.add(piece))
    return reply.text
