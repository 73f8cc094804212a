"""The part of a session that every record passes: append, save, retract, and its turns.

The manager, contributors, the lifecycle and shutdown use `SessionBase`, which knows none of
them; `Session`, the class that users hold, uses them all. That keeps imports in one direction.

An append touches as little as it can, because with very many sessions fetching a session's
memory is most of what it costs. Appended records reach the contents when they are read, or
while the store is busy with them; never later than that, since they leave memory then.

A turn is one input up to the end of its answer, saved when it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import time
import warnings
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, TypeVar, final

import anyio
import msgspec

from perdure._lib.logs import log_facts
from perdure._lib.loop import loop_timer
from perdure._lib.misnamed import async_only
from perdure._lib.task_scope import TaskScope, enter, is_within, turns
from perdure.autosave.tracked import require_outside
from perdure.errors import (
    HistoryPrunedError,
    InvalidArgumentError,
    NotStorableError,
    SessionError,
    StoreError,
    TurnReusedError,
)
from perdure.memory.attempts import Attempt, cut_attempt, ended_attempt
from perdure.memory.context import RetractionPayload, WorkingContext
from perdure.memory.documents import TurnPayload, described, note_turn
from perdure.memory.working_memory import MemoryInfo, MemoryLimit, MemorySearch
from perdure.records.json import encode
from perdure.records.keys import SessionKey, require_name
from perdure.records.media import LEAST, decode_read, text_bytes
from perdure.records.messages import EncodedRecord, Message, encode_message, message_of
from perdure.records.records import CONTEXT, META, OUTSIDE, RETRACT, TURN, Entry, Record
from perdure.records.types import Registry
from perdure.restore.ladder import RestoredSession
from perdure.restore.report import RestoreStep
from perdure.session.contents import Contents, ReadableSession, check_sizes
from perdure.session.contributors import Contributors
from perdure.session.events import MediaLeftOut, MemoryEvicted, MemorySearched, TurnWarned
from perdure.session.runtime import Runtime, wrong_loop

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.memory.media import FittedMedia
    from perdure.providers import Issuer
    from perdure.providers.context_fit import Format
    from perdure.records.manifest import Manifest
    from perdure.session.contributors import Attachment, Contributor
    from perdure.session.partial import PartialReply


T = TypeVar("T")


log: logging.Logger = logging.getLogger("perdure")

TOLD_AFTER: Final = 5.0
"""Seconds for which a turn waits, before it is reported, for the one in which it was begun."""
_WARNINGS: Final = {
    "append": "another task appended while {turn} ran. The message is no part of the turn, and "
    "stays when the turn is tried again: append what belongs to a turn by turn.append, and give "
    "what does not to sessions.post, which waits for the turn's end",
    "exit": "{turn} was left in another task than it was entered in, so that session.append may "
    "not know it: use turn.append, and sessions.post for what is no part of it",
    "wait": ": if that one waits for it, neither ends. Begin it afterwards, or use turn.append",
}


@final
class Turn:
    """One turn of a session: ``async with session.turn() as turn``.

    Turns of a session run one at a time, in the order in which they were asked for. What was
    appended in a turn is durable when the block has been left without an error. A turn that an
    exception or a cancellation leaves is closed as interrupted, and saved too; a
    cancellation does not wait for that.

    A turn owns what goes through its `append` and `extend`, from any task while it runs, and what
    ``session.append`` and ``session.extend`` get in the task that entered it and in tasks that were
    started there since. A turn with an id may be cut by an error or a kill. When the id is tried
    again, what the cut attempt owned of the conversation is taken back, unless another turn has
    begun since. Everything else stays.
    """

    # With their docstrings: `help` shows them.
    __slots__ = {  # public ones last
        "_attempt": None,
        "_closing": None,
        "_entered": None,
        "_given": None,
        "_messages": None,
        "_request": None,
        "_resume": None,
        "_scope": None,
        "_session": None,
        "_timeout": None,
        "_tokens": None,
        "_told": None,
        "id": "The given id, or ``turn_0001`` and so on; numbers continue after a restore.",
        "number": "The turn's number in the session; 0 before it has begun.",
        "replayed": "True if a turn of this id has ended before: nothing is left to do in it.",
        "resumed": "True if it continues an interrupted attempt, which left its `messages`.",
    }

    def __init__(
        self,
        session: SessionBase,
        turn_id: str | None,
        *,
        resume: bool,
        request: str | None,
        timeout: float | None,
    ) -> None:
        self._entered = False
        self._timeout = timeout
        self._scope: TaskScope | None = None
        self._told = False
        self._session = session
        self._given = turn_id is not None
        self._closing: tuple[Entry, ...] = ()
        self._tokens = 0, 0
        self._resume = resume
        self._request = request
        self._messages: tuple[Any, ...] | None = ()
        self.resumed: bool = False
        """True if it continues an interrupted attempt, whose messages are in ``messages``."""
        self.replayed: bool = False
        """True if a turn of this id has ended before: there is nothing left to do in it."""
        self.id: str = turn_id or ""
        """The given id, or ``turn_0001`` and so on; numbers continue after a restore."""
        self.number: int = 0
        """The turn's number in the session; 0 before it has begun."""
        self._attempt = 0

    def __repr__(self) -> str:
        state = "running" if self._session._turns.running is self else "not running"
        return f"<Turn {self.id or 'without an id'} of {self._session.key} {state}>"

    @property
    def messages(self) -> tuple[Any, ...]:
        """The messages of an earlier attempt of this id; empty if there was none.

        Of a turn that is `replayed`, all that was said in it, its answer last; a rollback since
        does not change them. Of one that was interrupted, what it had appended: it is taken back
        or, with ``resume=True``, still there.

        Raises:
            HistoryPrunedError: The turn has ended before, and the log does not have it any more.

        """
        if self._messages is None:
            key = str(self._session.key)
            raise HistoryPrunedError(
                f"session {key} does not have the records of {self._named()} any more: it has "
                "ended, and old history was removed since; ask again under a new id",
                key=key,
                turn=self.id,
            )
        return self._messages

    def __del__(self) -> None:
        if not self._entered:
            message = (
                f"session.turn() of session {self._session.key} was never entered, so there was no "
                "turn: use `async with session.turn():`, and with perdure.sync `with`"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    if not TYPE_CHECKING:  # a checker has to find the mistake as well

        def __enter__(self) -> NoReturn:
            self._entered = True  # it has heard of it
            raise async_only("session.turn()")

        def __exit__(self, *_: object) -> None:
            """Never called."""

    async def __aenter__(self) -> Self:
        self._entered = True
        session, queue = self._session, self._session._turns
        require_outside(session._tracked, "to begin a turn")
        if not await queue.enter(session._tracked.key, self):
            earlier, cure = "earlier ones", ": give turn(timeout=…) more time"
            if queue.running is not None:
                earlier = queue.running._named()
                if is_within(queue.running, turns.get()):
                    earlier += ", in which it was begun"
                    cure = _WARNINGS["wait"]
            key, waited = str(session._tracked.key), f"has waited {self._timeout:g} s for {earlier}"
            raise SessionError(
                f"session {key}: {self._named()} {waited}{cure}",
                key=key,
                timeout=self._timeout,
            )
        retraction: tuple[Entry, ...] = ()
        try:
            # It may have been closed, or lost, during the wait.
            session._check_open()
            await session._runtime.saver.room(session._tracked)
            done = session._behind.document.turn_ids.get(self.id)
            self.replayed = done is not None
            if self.replayed:
                async with session._newest_first() as records:
                    attempt = await ended_attempt(records, self.id)
                self._require_same(None if attempt is None else attempt.request)
                self._messages = None if attempt is None else self._said(attempt)
            # What a cut attempt appended is taken back in the group of the new begin.
            if self._given and not self.replayed:
                retraction = await self._take_up()
            # No record that was appended, and is not in the contents yet, changes their turns.
            self.number = done or session._behind.document.turns + 1
            self.id = self.id or f"turn_{self.number:04d}"
            # No await from the record to `begin`: no other task's append gets between them.
            if not self.replayed:
                session._accept((*retraction, Entry(TURN, encode(self._turned("begin")))))
                session._count_turns(self.number)
            self._scope = enter(self, turns)
            queue.begin(self)
            if retraction:
                await session._load_media()
        except BaseException:
            queue.leave()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, queue = self._session, self._session._turns
        if self._given and not queue.is_own:
            session._warn_of_turn(self, "exit")
        try:
            if self.replayed:
                await session.save()
            elif exc_type is None or session.is_writable:
                turned = self._turned("end")
                if exc_type is not None:
                    turned.phase, turned.error = "interrupted", exc_type.__name__
                session._accept((*self._closing, Entry(TURN, encode(turned))))
                # Nothing more is the turn's own: what is appended during the save is outside.
                queue.ended()
                if self._given:
                    note_turn(session._behind.document.turn_ids, turned)
                # A retry of its id has to look for this attempt.
                session._may_be_cut = exc_type is not None
                await self._save_ended(waits=exc_type is None or issubclass(exc_type, Exception))
        finally:
            queue.leave()

    async def _save_ended(self, *, waits: bool) -> None:
        """Have the ended turn saved; if the caller is cancelled meanwhile, that continues."""
        session, saver = self._session, self._session._runtime.saver
        if not waits:
            saver.turn_ended(session._tracked)
            return
        try:
            await session.save()
        except BaseException:
            if session.is_writable and not session._tracked.clean:
                saver.turn_ended(session._tracked)
            raise

    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items to this turn, from any task while it runs; return the new version.

        As `Session.append`, and for what does not know that it works for the turn: a generator
        whose items have a task each, a fixture, an exit stack, ``wait_for``, a worker that was
        there before. In a thread, call it by `anyio.from_thread.run_sync` or the loop's
        ``call_soon_threadsafe``.

        Raises:
            SessionError: The turn has not begun, or has ended: nothing was appended.

        """
        self._require_running()
        return self._session._append(self._session._entries(items), self)

    async def extend(
        self, history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
    ) -> Receipt:
        """Append another program's history to this turn, as `Session.extend`, from any task."""
        self._require_running()
        self._session._append(self._session._parsed(history, format, issuer), self)
        return await self._session.save()

    def partial(
        self,
        format: Format | None = None,
        *,
        issuer: Issuer | str | None = None,
        every: float = 1.0,
    ) -> PartialReply:
        """Return a reply to stream into this turn: ``with turn.partial("openai") as reply``.

        ``reply.add(event)`` for each event of the stream returns its text. What has come is saved
        while it comes, and is one message at the end.

        Args:
            format: The API whose stream it is; None if text is added.
            issuer: The provider, if that is not the one whose format it is.
            every: Seconds between two pieces that are appended; 0 for each, as they grow by a
                sixteenth, and ``math.inf`` for none before the end.

        Raises:
            InvalidArgumentError: There is no such format, or time.

        """
        from perdure.session.partial import PartialReply

        return PartialReply(self, format, issuer, every)

    def _require_running(self) -> None:
        if self._scope is None or self._scope.of is None:
            key, state = str(self._session.key), "not begun" if self._scope is None else "ended"
            raise SessionError(
                f"{self._named()} of session {key} has {state}: append within its block",
                key=key,
                turn=self.id,
            )

    def _named(self) -> str:
        return f"turn {self.id!r}" if self.id else "a turn without an id"

    async def _take_up(self) -> tuple[Entry, ...]:
        """Continue the interrupted attempt of this id, or return what takes it back."""
        session, self._attempt = self._session, 1
        if not session._may_be_cut and session._turns.unended is None:
            return ()
        async with session._newest_first() as records:
            attempt = await cut_attempt(records, self.id)
        if attempt is None:
            return ()
        self._require_same(attempt.request)
        self._messages = self._said(attempt)
        self.resumed = self._resume
        self._attempt = attempt.number + (not self._resume)
        return () if self._resume else await session._retraction(attempt.retraction(self.id))

    def _said(self, attempt: Attempt) -> tuple[Any, ...]:
        registry = self._session._runtime.registry
        return tuple([decode_read(one.payload, registry) for one in attempt.messages])

    def _require_same(self, request: str | None) -> None:
        """Refuse another request than the one that the turn of this id was begun with."""
        if None not in (self._request, request) and self._request != request:
            raise turn_reused(self._session.key, self.id)

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

    def _turned(self, phase: str) -> TurnPayload:
        begins = self._given and phase == "begin"
        tokens_in, tokens_out = self._tokens
        return TurnPayload(
            turn=self.id,
            number=self.number,
            phase=phase,
            at=time.time(),
            given=self._given,
            request=self._request if begins else None,
            attempt=self._attempt if begins else 0,
            resumed=self.resumed if begins else False,
            input_tokens=tokens_in,
            output_tokens=tokens_out,
        )


@final
class TurnQueue:
    """First come, first served; refuses a turn of the task that is in one."""

    __slots__ = (
        "_find_task",
        "_free",
        "_holder",
        "_since",
        "_used",
        "_waiting",
        "running",
        "unended",
    )

    def __init__(self, find_task: Callable[[], object]) -> None:
        # Released once for each turn that waits; there is one only while turns wait.
        self._free: anyio.Semaphore | None = None
        self._find_task = find_task
        # The task of the running turn.
        self._holder: object | None = None
        self._waiting = 0
        self._used: bool | anyio.Event = False
        self._since = anyio.current_time()
        self.running: Turn | None = None
        self.unended: Turn | None = None
        """The newest turn, if it has an id, and its end is not in the log."""

    @property
    def number(self) -> int:
        """The running turn's number, 0 between turns."""
        return 0 if self.running is None else self.running.number

    @property
    def busy(self) -> bool:
        """Return whether a turn is running."""
        return self._holder is not None

    @property
    def is_own(self) -> bool:
        """Return whether the running turn is this task's own."""
        return self._holder is not None and self._holder is self._find_task()

    async def used(self, within: float) -> None:
        """Wait until a first turn has begun, or the session has been open for that long."""
        remaining = self._since + within - anyio.current_time()
        if self._used is not True and remaining > 0:
            first = self._used = self._used or anyio.Event()
            with anyio.move_on_after(remaining):
                await first.wait()

    async def pass_by(self, key: SessionKey) -> None:
        """Wait for the turns that run and wait by now."""
        await self.enter(key)
        self.leave()

    async def enter(self, key: SessionKey, turn: Turn | None = None) -> bool:
        """Wait for the earlier turns, and have the session's; False if the turn's time is over."""
        task, holder = self._find_task(), self._holder
        if holder is not None and holder is task:
            raise SessionError(
                f"session {key}: this task already is in a turn; end it before beginning another",
                key=str(key),
            )
        # Where others wait, a turn queues up although none runs for a moment.
        if (holder is not None or self._free is not None) and not await self._wait(turn):
            return False
        self._holder = task
        if turn is not None:
            if isinstance(self._used, anyio.Event):
                self._used.set()
            self._used = True
        return True

    async def _wait(self, turn: Turn | None) -> bool:
        free = self._free = self._free or anyio.Semaphore(0, fast_acquire=True)
        around, disarm = self.running, None
        # Begun within the running turn: if that waits for this one, neither ends.
        if turn is not None and around is not None and is_within(around, turns.get()):
            disarm = turn._session._watch_wait(turn, around)
        self._waiting += 1
        try:
            with anyio.move_on_after(None if turn is None else turn._timeout):
                await free.acquire()
                return True
            return False
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._free = None
            if disarm is not None and turn is not None:
                disarm()
                turn._session._runtime.turn_waits.pop(turn, None)

    def begin(self, turn: Turn) -> None:
        """Note the turn that runs now."""
        self.running = turn
        if not turn.replayed:
            self.unended = turn if turn._given else None

    def ended(self) -> None:
        """Note that the running turn's end is in the log, so that nothing more is its own."""
        self.unended = None
        self._end_scope()

    def leave(self) -> None:
        """Let the next turn begin."""
        self._end_scope()
        self.running = self._holder = None
        if self._free is not None:
            self._free.release()

    def _end_scope(self) -> None:
        if self.running is not None and self.running._scope is not None:
            self.running._scope.leave()


class Receipt(msgspec.Struct, frozen=True):
    """Proof that a session is durable up to a version."""

    version: int
    """Every record up to this seq is durable."""
    durability: str
    """The meaning of durable on this store: "fsync", "memory", …"""


class _Hot(ReadableSession):
    """Fields that an append touches come first, so that they are adjacent in memory."""

    __slots__ = ("_closed_by", "_runtime", "_tracked")


class SessionBase(_Hot):
    """The part of a session that every record passes."""

    __slots__ = (
        "_contributors",
        "_folded_epoch",
        "_folded_format",
        "_may_be_cut",
        "_noted",
        "_rewrite_bytes",
        "_tail_bytes",
        "_tail_records",
        "_turns",
        "_worker",
    )

    def __init__(self, runtime: Runtime, restored: RestoredSession, tracked: Tracked) -> None:
        self._runtime: Runtime = runtime
        self._tracked: Tracked = tracked
        self._closed_by: Exception | None = None
        self._turns = TurnQueue(runtime.find_task)
        self._may_be_cut: bool = restored.info.turns > 0
        """True if the newest turn may have been interrupted."""
        self._worker: object | None = None
        """The agent that works on it, if one does."""
        self._contributors: Contributors | None = None
        """Made when the first one is attached."""
        self._note_fold(restored.manifest)
        self._hold(restored)
        tracked.of = self

    def _hold(self, restored: RestoredSession) -> None:
        """Begin with the contents that were restored."""
        runtime = self._runtime
        self._behind = Contents(runtime.filled, runtime.registry, restored, self)
        contents, tracked = self._behind, self._tracked
        tracked.turns, tracked.labels = contents.document.turns, contents.about()
        tracked.labels_due = bool(contents.changes((META,)))  # no save may have said them
        # What a save under way has brought to the store may have been read already.
        self._noted: int = max(self._tracked.durable, restored.head)
        self._tail_bytes: int = restored.tail_bytes
        self._tail_records: int = restored.tail_records

    def _count_turns(self, number: int) -> None:
        """Note the number of the turn that has begun."""
        self._behind.document.turns = self._tracked.turns = number

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._tracked.version

    @property
    def epoch(self) -> int:
        """This holder's number, which is the fencing token."""
        return self._tracked.epoch

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that is durable."""
        return self._tracked.durable

    @property
    def is_writable(self) -> bool:
        """True if an append would be accepted: the session is open and held here."""
        return self._closed_by is None and self._tracked.writable

    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items as one group, and return the new version.

        Cheap and synchronous; autosave makes it durable within its window, ``save`` at once. It
        belongs to the running turn in the task that entered that, and in tasks started there since;
        in generators, fixtures, exit stacks and ``wait_for`` use `Turn.append`.

        Args:
            items: Messages, also as ``{"role": …, "content": "text"}``, encoded records, or
                objects of registered types. `extend` takes all other dicts of providers.

        Raises:
            NotStorableError: An item cannot be stored; nothing was appended. It names
                the path, the type and the cure.
            TooLargeError: An item is larger than ``Limits.record_bytes``.
            LeaseLostError: Another process has taken the session over.
            SessionClosedError: The session, or its manager, was closed.
            SessionQuarantinedError: The store permanently refuses a record of this session.
            StoreUnavailableError: Too much is unsaved, since the store is down.
            WrongLoopError: The session belongs to another loop, thread or process.

        """
        entries = self._entries(items)
        # No turn with an id is open: whose the entries are makes no difference.
        if self._turns.unended is None:
            return self._accept(entries)
        return self._append(entries, self._turn_of(turns.get()))

    def _entries(self, items: tuple[Any, ...]) -> tuple[Entry, ...]:
        registry = self._runtime.registry
        if len(items) == 1:
            item = items[0]
            return (item.entry if type(item) is EncodedRecord else entry_of(item, registry),)
        return tuple([entry_of(item, registry) for item in items])

    def _parsed(
        self, history: Iterable[Any], format: Format, issuer: Issuer | str | None
    ) -> tuple[Entry, ...]:
        from perdure.providers import parse_history  # imported when used: few sessions need it

        self._check_open()
        return self._entries(tuple(parse_history(history, format, issuer=issuer)))

    def _turn_of(self, scopes: tuple[TaskScope, ...]) -> Turn | None:
        """Return the running turn, if it is among the scopes of a task."""
        turn = self._turns.running
        return turn if turn is None or is_within(turn, scopes) else None

    def _append(self, entries: tuple[Entry, ...], turn: Turn | None) -> int:
        """Append entries to a turn, or outside of any; what is outside stays if it is retried."""
        unended = self._turns.unended
        if unended is None or unended is turn or not entries:
            return self._accept(entries)
        version = self._accept((*self._mark(), *entries))
        if unended is self._turns.running and not is_within(self._tracked):  # a hook of its save
            self._warn_of_turn(unended, "append")
        return version

    def _mark(self) -> tuple[Entry, ...]:
        """Return the record that marks its group as no part of the named turn, if there is one."""
        turn = self._turns.unended
        return () if turn is None else (Entry(OUTSIDE, encode({"turn": turn.id})),)

    def _warn_of_turn(self, turn: Turn, why: Literal["append", "exit"]) -> None:
        """Warn once for each turn that it may not own all of its messages."""
        if not turn._told:
            turn._told = True
            self._tell_of_turn(turn, why, _WARNINGS[why].format(turn=turn._named()))

    def _tell_of_turn(self, turn: Turn, why: Literal["append", "exit", "wait"], what: str) -> None:
        key = self._tracked.key
        message = "session %(session)s: %(what)s"
        log_facts(log, logging.WARNING, message, session=str(key), what=what, turn=turn.id)
        self._runtime.hooks.emit(TurnWarned(key=key, turn=turn.id, why=why))

    def _watch_wait(self, turn: Turn, around: Turn) -> Callable[[], None]:
        """Report later that a turn waits for the one in which it began; return what stops that."""

        def tell() -> None:
            if self._turns.running is around:
                what = f"{turn._named()} waits for {around._named()}, in which it was begun"
                self._runtime.turn_waits[turn] = f"session {self._tracked.key}: {what}"
                self._tell_of_turn(around, "wait", what + _WARNINGS["wait"])

        return loop_timer()(TOLD_AFTER, tell)

    def turn(
        self,
        id: str | None = None,
        *,
        resume: bool = False,
        request: str | bytes | None = None,
        timeout: float | None = 600.0,
    ) -> Turn:
        """Return a turn to enter: ``async with session.turn() as turn``.

        Turns run one at a time, first come, first served. Leaving one waits until it is durable.
        Entering one raises SessionError in the task that is in one. In a task that was started
        there it waits for that turn; a wait of 5 seconds is in the log and in `health`, since
        it never ends if the turn waits for the task.

        Args:
            id: The caller's own name for it, such as a request's id. A retry with the same
                id is the same turn: if it has ended before, ``turn.replayed`` is True, and
                ``turn.messages`` has what was said in it. If it was cut before its end, what it
                said is taken back, unless another turn has begun since.
            resume: Keep what it said, to continue from it: ``turn.resumed``, ``turn.messages``.
            request: What is asked. A fingerprint of it is kept with a turn that has an ``id``, and
                entering raises TurnReusedError if that id was used with another request.
            timeout: Seconds after which entering it raises SessionError, because earlier turns
                have not ended; None to wait for ever.

        """
        if id is not None:
            require_name("turn id", id)
        seconds: Any = timeout
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if timeout is not None and not (is_number and seconds >= 0):
            raise InvalidArgumentError(
                f"invalid timeout={timeout!r}: give seconds, or None to wait for ever",
                option="timeout",
            )
        asked = None if request is None else fingerprint(request)
        return Turn(self, id, resume=resume, request=asked, timeout=timeout)

    def _accept(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in as one group; every change of the session comes through here."""
        runtime, tracked = self._runtime, self._tracked
        if tracked.refuses or runtime.running() is not runtime.loop:
            self._check_open()
        labels: list[bytes] = []
        for kind, payload, _ in entries:
            if len(payload) > runtime.max_record_bytes:
                check_sizes(
                    tracked.key, entries, runtime.max_record_bytes, most=runtime.store_record_bytes
                )
            if kind == META:
                labels.append(payload)
        version = runtime.append(tracked, entries)
        for payload in labels:  # the next save updates the directory
            tracked.labels, tracked.labels_due = described(tracked.labels, payload), True
        return version

    def _accept_now(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in, and apply them to the contents at once."""
        version = self._accept(entries)
        self._catch_up()
        return version

    def _catch_up(self) -> None:
        """Take what was appended into the contents."""
        tracked, noted = self._tracked, self._noted
        if tracked.version <= noted:
            return
        entries = tracked.pending
        # `pending` begins after the durable record; a part of it may have been noted.
        if noted > tracked.durable:
            entries = entries[noted - tracked.durable :]
        self._noted = tracked.version
        self._tail_records += len(entries)
        self._tail_bytes += self._stored_bytes(entries)
        self._behind.note(noted + 1, entries, tracked.epoch)

    def _stored_bytes(self, entries: Sequence[Entry]) -> int:
        """Return how many bytes entries take in the log: media go into blobs."""
        size = sum([len(entry[1]) for entry in entries])
        if size > LEAST and self._behind.context.lifts:
            size = sum([text_bytes(entry[1]) for entry in entries])
        return size

    def _close_with(self, error: Exception) -> None:
        """Refuse every append from now on."""
        self._closed_by = error
        self._tracked.refuses = True  # so that an append has to ask for one thing only

    def _check_home(self) -> None:
        runtime = self._runtime
        if runtime.running() is runtime.loop:
            return  # nearly always
        stray = runtime.home.stray()
        if stray is not None:
            raise wrong_loop(f"session {self._tracked.key}", stray)

    def _check_open(self) -> None:
        self._check_home()
        if self._closed_by is not None:
            raise self._closed_by

    async def save(self) -> Receipt:
        """Make everything that was appended durable, now, and return the proof.

        Saves of different sessions share their commits where the store can. While the store is
        down this waits, and the save is tried again, without limit: bound it with a timeout.
        Cancelling the caller does not stop the save.

        Raises:
            LeaseLostError: Another process has taken the session over.
            SessionQuarantinedError: The store permanently refuses a record of this session.
            SessionClosedError: The manager stopped before it was durable.

        """
        self._check_home()
        version = await self._runtime.saver.save(self._tracked)
        if self._behind.may_lack_media:
            await self._load_media()
        return Receipt(version, self._runtime.durability)

    async def _load_media(self) -> None:
        """Have the media that are shown again after a retraction, or a new context, in memory."""
        with contextlib.suppress(StoreError):  # then the next save tries it again
            await self._contents.load_media()

    async def retract(self, *, after: int) -> int:
        """Take the conversation back to what it was at a record, and return the new version.

        For undo, edit and regenerate. It is appended as a record of its own: nothing is erased,
        and retracting to after it brings the rest back. Memory and states stay as they are.

        Args:
            after: The seq of the last record that stays, as ``append`` returned it.

        Raises:
            InvalidArgumentError: There is no such record.

        """
        return await self._retract(after, turns.get())

    async def _retract(self, after: int, scopes: tuple[TaskScope, ...]) -> int:
        """Retract for a task that is in these scopes."""
        self._check_open()
        if type(after) is not int or not 0 <= after <= self.version:
            raise InvalidArgumentError(
                f"session {self.key} has records up to {self.version}, none at {after}",
                after=after,
                version=self.version,
            )
        retraction = await self._retraction(RetractionPayload(after))
        version = self._append(retraction, self._turn_of(scopes))
        await self._load_media()
        return version

    async def _retraction(self, taken: RetractionPayload) -> tuple[Entry, ...]:
        """Return what takes something back, to be appended as one group before anything else is."""
        entry = Entry(RETRACT, encode(taken))
        if self._contents.context.reaches(taken):
            return (entry,)
        context = WorkingContext(self._contents.context.limit)
        if taken.after:  # what was before the first record is known, even of a pruned log
            await self.save()
            context = await self._contents.as_of(taken.after)
        while taken.after is None:
            version = (await self.save()).version
            context = await self._contents.as_of(version, without=taken)
            if context.follow(self._contents.context, version):
                break
        return (entry, Entry(CONTEXT, context.as_record("retract")))

    def _memory_limit(self) -> MemoryLimit:
        """Return the limit of the working memory; evictions and searches are events."""
        runtime, key = self._runtime, self._tracked.key

        def report(evicted: Sequence[MemoryInfo]) -> None:
            entries = tuple(entry.key for entry in evicted)
            size = sum(entry.size_bytes for entry in evicted)
            runtime.hooks.emit(MemoryEvicted(key=key, entries=entries, bytes=size))

        return MemoryLimit(runtime.limits.memory_bytes, report, self._note_search)

    def _left_out(self, media: FittedMedia) -> None:
        """Report, once, that the model is not shown all media of the context."""
        count, lost = len(media.left_out), len(media.lost)
        size, key = sum(medium.bytes for medium in media.left_out), self._tracked.key
        if lost:
            message = (
                "session %(session)s: %(lost)s media are not shown to the model, their blobs are "
                "lost"
            )
            log_facts(log, logging.WARNING, message, session=str(key), lost=lost)
        if count:
            message = (
                "session %(session)s: the oldest media, %(count)s with %(bytes)s bytes, are left "
                "out of what the model is shown; the log keeps them. "
                "Limits(context_media_tokens=…) is the budget"
            )
            log_facts(log, logging.WARNING, message, session=str(key), count=count, bytes=size)
        self._runtime.hooks.emit(MediaLeftOut(key=key, count=count, bytes=size, lost=lost))

    def _note_search(self, search: MemorySearch) -> None:
        key, hooks = self._tracked.key, self._runtime.hooks
        hooks.emit(
            MemorySearched(key=key, found=search.found, took=search.took, error=search.error)
        )

    async def _load_memory(self) -> None:
        """Load the working memory's index if it has a limit: then `set` needs it."""
        if self._runtime.limits.memory_bytes is not None:
            await self._contents.memory.load()

    # for the manager, turns and the agent

    async def _attach(self, contributor: Contributor, *, restore: bool) -> Attachment:
        """Attach a contributor; without ``restore``, what is stored of it will be replaced."""
        self._check_open()
        if self._contributors is None:
            self._contributors = Contributors(self)
            self._tracked.before_capture = self._before_save
        return await self._contributors.attach(contributor, restore=restore)

    async def _before_save(self) -> None:
        """Run the hooks that wait for a save, and ask the contributors."""
        await self._runtime.hooks.run("before_save", self)
        if self._contributors is not None:
            await self._contributors.capture()

    def _renew(self, restored: RestoredSession) -> None:
        """Replace the contents by what was read, plus what was appended while it was read."""
        restored.report = self._behind.report
        self._hold(restored)
        if self._contributors is not None:
            self._contributors.forget()

    def _report_step(self, what: str, detail: str) -> None:
        """Add a step to the restore report."""
        self._behind.report = self._behind.report.with_step(RestoreStep(what, detail))

    def _newest_first(self) -> AbstractAsyncContextManager[AsyncIterable[Record]]:
        """Return the records of the log from its end, as of now."""
        tracked = self._tracked
        unsaved = tracked.pending_records()[::-1] if tracked.pending else ()
        return contextlib.aclosing(self._contents.newest_first(unsaved, tracked.durable))

    def _durable_tail(self) -> tuple[int, int]:
        """Return the size and the record count of what no fold has of the durable log."""
        tracked = self._tracked
        unsaved = tracked.pending[: max(self._noted - tracked.durable, 0)]
        size = self._tail_bytes - self._stored_bytes(unsaved)
        return size, self._tail_records - len(unsaved)

    def _note_fold(self, manifest: Manifest | None) -> None:
        """Note the size, the epoch and the format of the newest fold, if there was one."""
        documents = {} if manifest is None else manifest.documents
        self._rewrite_bytes: int = sum([document.size for document in documents.values()])
        self._folded_epoch: int = 0 if manifest is None else manifest.epoch
        self._folded_format: int = 1 if manifest is None else manifest.format

    def _folded(self, manifest: Manifest, tail: tuple[int, int]) -> None:
        """Update the contents after a fold; ``tail`` is its ``_durable_tail`` when it began."""
        self._contents.folded(manifest)
        size, records = tail
        self._tail_bytes = max(self._tail_bytes - size, 0)
        self._tail_records = max(self._tail_records - records, 0)
        self._note_fold(manifest)


def turn_reused(key: SessionKey, turn: str) -> TurnReusedError:
    """Return the error for a turn's id that is used for another request."""
    return TurnReusedError(
        f"turn {turn!r} of session {key} was begun with another request: give each request an id "
        "of its own, and the same one only to its retries",
        key=str(key),
        turn=turn,
    )


def fingerprint(request: str | bytes) -> str:
    """Return what a request is recognized by when it comes again."""
    given: Any = request
    if not isinstance(given, str | bytes):
        raise InvalidArgumentError(
            f"invalid request of type {type(given).__name__}: give its text or bytes",
            option="request",
        )
    data = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
    return hashlib.sha256(data).hexdigest()[:32]


def entry_of(item: Message | EncodedRecord | Any, registry: Registry) -> Entry:
    """Return an item as a record; a message without a time gets the present one.

    A message may be a dict of a role and text.

    Raises:
        NotStorableError: It cannot be stored.

    """
    if isinstance(item, Message):
        return encode_message(item, registry, now=time.time())
    if isinstance(item, EncodedRecord):
        return item.entry
    if type(item) is dict:
        return encode_message(message_of(item), registry, now=time.time())
    if type(item) in (list, tuple):
        raise NotStorableError(
            f"append takes items one by one, and got a {type(item).__name__}: write "
            "append(*items), which appends them as one group",
            path="$",
            type=type(item).__name__,
        )
    return registry.encode_record(item)
