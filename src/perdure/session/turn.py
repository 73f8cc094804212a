"""A turn: one input up to the end of its answer, saved when it ends."""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, final

import anyio

from perdure._lib.loop import loop_timer
from perdure._lib.tasks import CurrentTask
from perdure.autosave.tracked import require_outside
from perdure.errors import SessionError
from perdure.memory.documents import TurnPayload
from perdure.records.json import encode
from perdure.records.keys import require_name
from perdure.records.records import TURN, Entry

if TYPE_CHECKING:
    from perdure.session.base import SessionBase

T = TypeVar("T")


log: logging.Logger = logging.getLogger("perdure")

LOOK: Final = 0.5
"""Seconds after which a turn that waits looks again whether it waits for itself."""
DOUBTED: Final = 10
"""Looks after which it is told that it seems so, though it may end."""


@final
class Turn:
    """One turn of a session: ``async with session.turn() as turn``.

    Turns of a session run one at a time, in the order in which they were asked for. What was
    appended in a turn is durable when the block has been left without an error. A turn that an
    exception or a cancellation leaves is closed as interrupted, and saved too; a
    cancellation does not wait for that. What such an attempt, or one that a kill has cut, left of
    the conversation is taken back when its id is tried again, if nothing follows it.
    """

    __slots__ = (
        "_closing",
        "_entered",
        "_given",
        "_queue",
        "_resume",
        "_session",
        "id",
        "messages",
        "number",
        "replayed",
        "resumed",
    )

    def __init__(
        self, session: SessionBase, queue: TurnQueue, turn_id: str | None, *, resume: bool = False
    ) -> None:
        self._entered = True  # so that nothing is said of one that is refused
        if turn_id is not None:
            require_name("turn id", turn_id)
        self._entered = False
        self._session = session
        self._queue = queue
        self._given = turn_id is not None
        self._closing: tuple[Entry, ...] = ()
        self._resume = resume
        self.messages: tuple[Any, ...] = ()
        """What an interrupted attempt of this id had appended: it is taken back, or, with
        ``resume=True``, still there."""
        self.resumed: bool = False
        """Whether it goes on from an interrupted attempt, ``messages`` being what that has."""
        self.replayed: bool = False
        """Whether a turn of this id has ended before: there is nothing left to do in it."""
        self.id: str = turn_id or ""
        """The given id, or ``turn_0001`` and so on; numbers go on after a restore."""
        self.number: int = 0

    def __del__(self) -> None:
        if not self._entered:
            message = (
                f"session.turn() of session {self._session.key} was never entered, so there was no "
                "turn: use `async with session.turn():`, and with perdure.sync `with`"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    async def __aenter__(self) -> Self:
        self._entered = True
        require_outside(self._session._tracked, "to begin a turn")
        await self._queue.enter(str(self._session.key))
        self._queue.use()
        try:
            done = await self._session._begin_turn(self.id)
            self.replayed = done is not None
            if self._given and not self.replayed:
                await self._look_back()
            self.number = done or self._session._next_turn()
            self.id = self.id or f"turn_{self.number:04d}"
            if not self.replayed:
                self._session._accept((self._entry("begin"),))
            self._queue.number = self.number
        except BaseException:
            self._queue.leave()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.replayed:
                await self._session.save()
            elif exc_type is None:
                self._session._end_turn(self._turned("end"), self._closing)
                await self._session.save()
            elif self._session.is_writable:
                turned = self._turned("interrupted", exc_type.__name__)
                self._session._end_turn(turned, self._closing)
                if issubclass(exc_type, Exception):
                    await self._session.save()
        finally:
            self._queue.leave()

    async def _look_back(self) -> None:
        attempt = await self._session._find_attempt(self.id)
        if attempt is None:
            return
        before, self.messages = attempt
        self.resumed = self._resume
        if not self._resume:
            await self._session.retract(after=before)

    async def emit(self, item: T, send: Callable[[T], Awaitable[object] | object]) -> None:
        """Send something once everything before it is durable: the output gate.

        Args:
            item: What is sent.
            send: Called with it, and awaited if it returns an awaitable.

        Raises:
            LeaseLostError: Another process has the session: nothing was sent.
            SessionQuarantinedError: The store refuses a record: nothing was sent.

        """
        await self._session.save()
        result = send(item)
        if inspect.isawaitable(result):
            await result

    def _entry(self, phase: str) -> Entry:
        return Entry(TURN, encode(self._turned(phase)))

    def _turned(self, phase: str, error: str | None = None) -> TurnPayload:
        return TurnPayload(
            turn=self.id,
            number=self.number,
            phase=phase,
            at=time.time(),
            error=error,
            given=self._given,
        )


@final
class TurnQueue:
    """First come, first served; refuses a turn inside a turn instead of waiting for ever."""

    __slots__ = (
        "_free",
        "_holder",
        "_later",
        "_since",
        "_task",
        "_used",
        "_waiting",
        "idle",
        "number",
    )

    def __init__(self) -> None:
        self._free = anyio.Semaphore(1)
        self._task = 0
        self._holder: CurrentTask | None = None
        self._waiting: set[CurrentTask] = set()
        self._later = loop_timer()
        self._used: bool | anyio.Event = False
        self._since = anyio.current_time()
        self.idle: anyio.Event | None = None
        """Set when the running turn ends, if somebody waits for that."""
        self.number: int = 0
        """The running turn's number, 0 between turns."""

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._task != 0

    @property
    def mine(self) -> bool:
        """Whether the running turn is this task's own."""
        return self.busy and anyio.get_current_task().id == self._task

    def use(self) -> None:
        """Note that a turn has begun."""
        if self._used is not True:
            if self._used:
                self._used.set()
            self._used = True

    async def used(self, within: float) -> None:
        """Wait until a first turn has begun, or the session has been open for that long."""
        remaining = self._since + within - anyio.current_time()
        if self._used is not True and remaining > 0:
            first = self._used = self._used or anyio.Event()
            with anyio.move_on_after(remaining):
                await first.wait()

    async def enter(self, session: str) -> None:
        """Wait for one's turn."""
        task = anyio.get_current_task().id
        if task == self._task:
            message = (
                f"session {session}: this task already is in a turn; "
                "end it before beginning another"
            )
            raise SessionError(message, key=session)
        me = CurrentTask()
        if self._free.value:
            await self._free.acquire()
        else:
            await self._wait(session, me)
        self._task, self._holder = task, me

    async def _wait(self, session: str, me: CurrentTask) -> None:
        """Wait for the earlier turns, unless the running one waits for this task."""
        disarm: Callable[[], None] | None = None
        looks = 0

        def look() -> None:
            nonlocal disarm, looks
            if self._waits_for(me):
                scope.cancel()
                return
            looks += 1
            if looks == DOUBTED and self._holder and self._holder.seems_to_wait_for(me):
                log.warning(
                    "session %s: a turn has been waiting for the running one, which seems to wait "
                    "for it: begin it when that one has ended, or append without it",
                    session,
                    extra={"session": session},
                )
            disarm = self._later(LOOK, look)

        self._waiting.add(me)
        try:
            with anyio.CancelScope() as scope:
                look()
                await self._free.acquire()
                return
        finally:
            self._waiting.discard(me)
            if disarm is not None:
                disarm()
        self.require_no_wait(session, me)

    def _waits_for(self, task: CurrentTask) -> bool:
        return self._holder is not None and self._holder.waits_for(task, self._waiting)

    def require_no_wait(self, session: str, task: CurrentTask) -> None:
        """Refuse to wait for a turn that waits for this very task.

        Raises:
            SessionError: It does.

        """
        if self._waits_for(task):
            message = (
                f"session {session}: the running turn waits for this task, which would wait for "
                "the turn: append without a turn of its own, or begin it when that one has ended"
            )
            raise SessionError(message, key=session)

    def leave(self) -> None:
        """Let the next one in."""
        self._task = self.number = 0
        self._holder = None
        self._free.release()
        if self.idle is not None:
            self.idle.set()
            self.idle = None

    async def wait_idle(self) -> None:
        """Wait until no turn is running."""
        while self.busy:
            if self.idle is None:
                self.idle = anyio.Event()
            await self.idle.wait()
