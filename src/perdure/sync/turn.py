"""A turn in blocking style: its whole life is one task of the loop, whatever thread waits.

The caller's thread has it: a second turn of the same thread on the same session is refused
instead of waiting for itself for ever. A block that Ctrl-C leaves is closed as interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

import anyio

from perdure.errors import SessionError

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from perdure.records.keys import SessionKey
    from perdure.session import turn
    from perdure.sync.loop import LoopThread
    from perdure.sync.session import Session

T = TypeVar("T")


_Error = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


@final
class Turn:
    """One turn of a session: ``with session.turn() as turn``. As `perdure.Turn`, blocking."""

    def __init__(
        self, loop: LoopThread, session: Session, inner: turn.Turn, in_turn: TurnThread
    ) -> None:
        self._loop = loop
        self._session = session
        self._inner = inner
        self._in_turn = in_turn
        self._life = _TurnTask(inner)

    @property
    def id(self) -> str:
        """The given id, or ``turn_0001`` and so on; numbers go on after a restore."""
        return self._inner.id

    @property
    def number(self) -> int:
        """Which of the session's turns it is; 0 before it has begun."""
        return self._inner.number

    @property
    def replayed(self) -> bool:
        """Whether a turn of this id has ended before: there is nothing left to do in it."""
        return self._inner.replayed

    @property
    def resumed(self) -> bool:
        """Whether it goes on from an interrupted attempt, ``messages`` being what that has."""
        return self._inner.resumed

    @property
    def messages(self) -> tuple[Any, ...]:
        """What an interrupted attempt of this id had appended: taken back, or still there."""
        return self._inner.messages

    def __enter__(self) -> Self:
        self._inner._entered = True  # even if it is refused before it begins
        self._in_turn.refuse(self._session.key, "beginning another")
        try:
            self._loop.call(lambda: self._loop.tasks.start(self._life.live))
        except BaseException:
            # Ctrl-C may come when the turn has just begun.
            self._loop.post(self._life.give_up)
            raise
        self._in_turn.thread = threading.get_ident()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._in_turn.thread = 0
        if self._loop.forked:  # the parent's turn
            return
        try:
            self._loop.call(lambda: self._life.leave((exc_type, exc, traceback)))
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, perhaps before it was told
                self._loop.post(lambda: self._life.tell((exc_type, exc, traceback)))
            raise

    def emit(self, item: T, send: Callable[[T], object]) -> None:
        """Send something once everything before it is durable: the output gate.

        Args:
            item: What is sent.
            send: Called with it, in this thread.

        Raises:
            LeaseLostError: Somebody else has the session: nothing was sent.
            SessionQuarantinedError: The store refuses a record: nothing was sent.

        """
        self._session.save()
        send(item)


class TurnThread:
    """Which thread has the session's turn: shared by the session's turns."""

    thread = 0

    def refuse(self, key: SessionKey, what: str) -> None:
        """Raise if it is this thread: what it wants waits for the turn's end."""
        if self.thread == threading.get_ident():
            message = f"session {key}: this thread already is in a turn; end it before {what}"
            raise SessionError(message, key=str(key))


class _TurnTask:
    """A turn's task: it enters the turn, waits to be told, and leaves it."""

    def __init__(self, inner: turn.Turn) -> None:
        self._inner = inner
        self._scope: anyio.CancelScope | None = None
        self._error: Exception | None = None
        self._given_up = False
        self._told: _Error = (None, None, None)

    async def live(self, *, task_status: TaskStatus[None]) -> None:
        self._leave = anyio.Event()
        self._left = anyio.Event()
        with anyio.CancelScope() as self._scope:
            if self._given_up:
                return
            await self._inner.__aenter__()
            try:
                task_status.started()
                await self._leave.wait()
            except anyio.get_cancelled_exc_class() as error:  # given up, or the loop ends
                await self._exit((type(error), error, None))
                raise
            await self._exit(self._told)

    async def _exit(self, exit_error: _Error) -> None:
        try:
            await self._inner.__aexit__(*exit_error)
        except Exception as error:  # noqa: BLE001  # for whoever leaves
            self._error = error
        finally:
            self._left.set()

    async def leave(self, error: _Error) -> None:
        """Leave the turn; cancelling this ends the wait only."""
        self.tell(error)
        await self._left.wait()
        if self._error is not None:
            raise self._error

    def tell(self, error: _Error) -> None:
        """Have the turn left, if nobody has told it to leave."""
        if not self._leave.is_set():
            self._told = error
            self._leave.set()

    def give_up(self) -> None:
        """Interrupt the turn: nobody knows that it has begun."""
        self._given_up = True
        if self._scope is not None:
            self._scope.cancel()
