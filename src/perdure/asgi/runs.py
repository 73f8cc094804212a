"""Turns that answer requests: each runs in a task of the application, not in its client's.

So a client that goes away does not end its turn at once, one that comes back finds it, and a
retry joins it instead of running it twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar, final

import anyio
import msgspec
from anyio.abc import TaskGroup

from perdure.asgi.feed import Channel, Cursor, Feed, FeedEvent
from perdure.asgi.responses import Events, FeedResponse, answered, failure
from perdure.errors import HistoryPrunedError, SessionClosedError, SessionError
from perdure.records.keys import SessionKey
from perdure.records.messages import CUT_OFF, Message
from perdure.session.base import Turn, turn_reused
from perdure.session.internals import time_to_leave
from perdure.session.session import Session

S = TypeVar("S")


class RunOutcome(msgspec.Struct, frozen=True):
    """How a turn came to its end; everything of it is durable."""

    turn: str
    text: str
    """The answer."""
    version: int
    replayed: bool = False
    """Whether the turn had ended before: this is what was answered then."""


@final
class Run:
    """A turn that answers requests.

    Args:
        feed: Where its events are read.
        key: The session.
        turn: The turn's id; None for one that the session gives.
        request: What is asked; None: it is not compared with what the turn was begun with.

    """

    def __init__(
        self, feed: Feed, key: SessionKey, turn: str | None, request: str | bytes | None = None
    ) -> None:
        self.key = key
        self.turn: str | None = turn
        self.request: str | bytes | None = request
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
        self._feed = feed

    def begin(self, *, turn: str, replayed: bool) -> None:
        """Note that the turn has begun."""
        self.turn, self.replayed = turn, replayed
        self.begun.set()

    async def wait(self) -> RunOutcome:
        """Return the outcome, once it is durable; what made the turn fail is raised."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        if self.outcome is None:
            raise SessionClosedError(
                f"turn {self.turn!r} of session {self.key} was interrupted; what came of the "
                "answer is kept, and a request with the same key answers it again",
                key=str(self.key),
                turn=self.turn,
            )
        return self.outcome

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
        inside = cursor is not None and cursor.seq > after
        return self._events(cursor if cursor is not None and inside else Cursor(after), inside)

    async def _events(
        self,
        cursor: Cursor,
        inside: bool,  # noqa: FBT001  # private
    ) -> AsyncGenerator[FeedEvent | None, None]:
        events = self._feed.events(self.key, cursor, until=self.done.is_set)
        async with contextlib.aclosing(events):
            async for event in events:
                if event is not None and event.name == "turn":
                    inside = event.data["turn"] == self.turn
                if inside or event is None:
                    yield event
                if event is not None and event.name in {"end", "interrupted"} and inside:
                    return
        if self.error is not None:
            yield failure(self.error)


@final
class Runs:
    """The turns that run for the requests of one application.

    Args:
        feed: Where their events are read.
        group: Where they run.

    """

    def __init__(self, feed: Feed, group: TaskGroup) -> None:
        self._feed = feed
        self._group = group
        self._running: set[Run] = set()

    def start(
        self,
        key: SessionKey,
        turn: str | None,
        work: Callable[[Run, Channel], Awaitable[None]],
        *,
        request: str | bytes | None = None,
    ) -> Run:
        """Run a turn, or return the one of this id that runs already.

        Args:
            key: The session.
            turn: The turn's id, the request's own; None: it is never the same as another.
            work: Does it: calls ``run.begin``, and sets ``run.outcome``.
            request: What is asked.

        Raises:
            TurnReusedError: The one that runs has been asked something else.

        """
        for run in self._running:
            if turn is not None and (run.key, run.turn) == (key, turn):
                if None not in (request, run.request) and run.request != request:
                    raise turn_reused(key, turn)
                return run
        run = Run(self._feed, key, turn, request)
        self._running.add(run)
        self._group.start_soon(self._run, run, work)
        return run

    async def _run(self, run: Run, work: Callable[[Run, Channel], Awaitable[None]]) -> None:
        with self._feed.channel(run.key) as channel:
            try:
                with run.scope:
                    await work(run, channel)
            except Exception as error:  # noqa: BLE001  # raised to whoever waits
                answered(error)  # perhaps nobody does
                run.error = error
            finally:
                self._running.discard(run)
                run.begun.set()
                run.done.set()
                channel.clear()

    def respond(self, run: Run, *, linger: float | None) -> FeedResponse:
        """Return the response that streams a turn.

        Args:
            run: The turn.
            linger: Seconds for which it continues when nobody reads it any more; None: to its end.

        """
        run.readers += 1

        def leave() -> None:
            run.readers -= 1
            if linger is not None and not run.readers and not run.done.is_set():
                self._group.start_soon(self._cut_unread, run, linger)

        return FeedResponse(run.events, leave)

    async def _cut_unread(self, run: Run, linger: float) -> None:
        with anyio.move_on_after(linger):
            await run.done.wait()
        if not run.readers:
            run.scope.cancel()

    async def idle(self, within: float) -> None:
        """Wait for the turns that run now, for so many seconds at most."""
        with anyio.move_on_after(within):
            for run in tuple(self._running):
                await run.done.wait()

    async def cut(self) -> None:
        """Cut the turns that still run, and wait until what they have left is kept."""
        running = tuple(self._running)
        for run in running:
            run.scope.cancel()
        for run in running:
            await run.done.wait()


Answer = Callable[[Session, Turn], AsyncGenerator[str, None]]
"""Answers in a turn: appends the question, and yields the answer in pieces."""


async def answer_in(
    session: Session, run: Run, channel: Channel, answer: Answer
) -> RunOutcome | None:
    """Run a turn of a session with a function of the application.

    The answer is one message, which is appended at its end. If the turn is cut before, what
    came of it is kept, marked as interrupted. None: that is what has happened.
    """
    run.after = session.version
    ended: str | None = None
    try:
        async with session.turn(run.turn, request=run.request) as turn:
            run.begin(turn=turn.id, replayed=turn.replayed)
            if not turn.replayed:
                ended = await _pieces(session, turn, channel, answer)
    finally:
        if session.is_writable:  # a turn that was cancelled does not wait for its save
            with anyio.move_on_after(time_to_leave(session), shield=True):
                await session.save()
    if ended is None:
        ended = await _answer_of(run)
    return RunOutcome(run.turn or "", ended, session.durable_version, replayed=run.replayed)


async def _pieces(session: Session, turn: Turn, channel: Channel, answer: Answer) -> str:
    pieces: list[str] = []
    try:
        async with contextlib.aclosing(answer(session, turn)) as stream:
            async for piece in stream:
                if not pieces:
                    await session.save()  # the question is durable before anything leaves
                pieces.append(piece)
                channel.add(session, piece)
    except BaseException:
        if pieces and session.is_writable:
            partial = {CUT_OFF: msgspec.Raw(b"true")}
            turn.append(Message(role="assistant", content="".join(pieces), extra=partial))
        raise
    text = "".join(pieces)
    turn.append(Message.assistant(text))
    return text


async def _answer_of(run: Run) -> str:
    """Return what a turn has answered that had ended before."""
    async with contextlib.aclosing(await run.events(None)) as events:
        messages = [event.data async for event in events if event and event.name == "message"]
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    return texts[-1] or "" if texts else ""


def require_started(value: S | None) -> S:
    """Return what the lifespan has made.

    Raises:
        SessionError: The lifespan has not begun.

    """
    if value is None:
        raise SessionError(
            "the application's lifespan has not begun: pass `lifespan=sessions.lifespan` to the "
            "framework, and let the server run it"
        )
    return value
