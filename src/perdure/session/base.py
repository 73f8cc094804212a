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
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, final

import anyio
import msgspec

from perdure._lib.loop import loop_timer
from perdure._lib.task_scope import TaskScope, enter, is_within, turns
from perdure._lib.tasks import CurrentTask, task_finder
from perdure.autosave.tracked import require_outside
from perdure.errors import InvalidArgumentError, SessionError, StoreError, TurnReusedError
from perdure.memory.context import RetractionPayload, WorkingContext
from perdure.memory.documents import SessionDocument, TurnPayload, note_turn
from perdure.memory.working_memory import MemoryInfo, MemoryLimit, MemorySearch
from perdure.records.json import encode
from perdure.records.keys import SessionKey, require_name
from perdure.records.manifest import FORMAT
from perdure.records.media import LEAST, text_bytes
from perdure.records.messages import EncodedRecord, Message, encode_message, message_of
from perdure.records.records import CONTEXT, RETRACT, TURN, Entry
from perdure.records.types import Registry
from perdure.restore.ladder import RestoredSession
from perdure.restore.report import RestoreReport, RestoreStep
from perdure.session.contents import Contents, check_sizes
from perdure.session.runtime import (
    MediaLeftOut,
    MemoryEvicted,
    MemorySearched,
    Runtime,
    wrong_loop,
)

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.memory.media import FittedMedia
    from perdure.memory.working_memory import WorkingMemory
    from perdure.records.manifest import Manifest
    from perdure.session.contributors import Contributors
    from perdure.session.fold import OpenTail


T = TypeVar("T")


log: logging.Logger = logging.getLogger("perdure")

CHECK_INTERVAL: Final = 0.5
"""Seconds between two checks of a waiting turn for a wait for itself."""
MOST_EPOCHS: Final = 16
"""How often a session is opened without a fold, at most: each open adds a record, to be read by
the next ones, and on files a log file."""
CHECKS_BEFORE_WARNING: Final = 10
"""Checks after which a warning says that it seems so, though the wait may end."""


@final
class Turn:
    """One turn of a session: ``async with session.turn() as turn``.

    Turns of a session run one at a time, in the order in which they were asked for. What was
    appended in a turn is durable when the block has been left without an error. A turn that an
    exception or a cancellation leaves is closed as interrupted, and saved too; a
    cancellation does not wait for that. What such an attempt, or one that a kill has cut, left of
    the conversation is taken back when its id is tried again, if nothing follows it, and if no
    user's message was appended amid it by a task that neither is in the turn nor was started there.
    """

    __slots__ = (
        "_closing",
        "_entered",
        "_given",
        "_queue",
        "_request",
        "_resume",
        "_session",
        "id",
        "messages",
        "number",
        "replayed",
        "resumed",
    )

    def __init__(
        self,
        session: SessionBase,
        queue: TurnQueue,
        turn_id: str | None,
        *,
        resume: bool = False,
        request: str | bytes | None = None,
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
        self._request = None if request is None else fingerprint(request)
        self.messages: tuple[Any, ...] = ()
        """What an interrupted attempt of this id had appended: it is taken back, or, with
        ``resume=True``, still there."""
        self.resumed: bool = False
        """Whether it continues an interrupted attempt, whose messages are in ``messages``."""
        self.replayed: bool = False
        """Whether a turn of this id has ended before: there is nothing left to do in it."""
        self.id: str = turn_id or ""
        """The given id, or ``turn_0001`` and so on; numbers continue after a restore."""
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
        session, queue = self._session, self._queue
        require_outside(session._tracked, "to begin a turn")
        await queue.enter(session._tracked.key)
        queue.use()
        try:
            done = await session._begin_turn(self.id)
            self.replayed = done is not None
            if self.replayed and self._request is not None:
                self._require_same(await session._request_of(self.id))
            if self._given and not self.replayed:
                await self._find_interrupted()
            # No record that was appended, and is not in the contents yet, changes their turns.
            self.number = done or session._behind.turns + 1
            self.id = self.id or f"turn_{self.number:04d}"
            if not self.replayed:
                session._accept((self._entry("begin"),))
                session._behind.turns = self.number
            queue.begin(self.number, may_be_retried=self._given and not self.replayed)
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
        try:
            if self.replayed:
                await self._session.save()
            elif exc_type is None:
                self._session._end_turn(self._turned("end"), self._closing, is_saved=True)
                await self._session._save_ended()
            elif self._session.is_writable:
                turned = self._turned("interrupted", exc_type.__name__)
                is_saved = issubclass(exc_type, Exception)
                self._session._end_turn(turned, self._closing, is_saved=is_saved)
                if is_saved:
                    await self._session._save_ended()
        finally:
            self._queue.leave()

    async def _find_interrupted(self) -> None:
        """Take back what an interrupted attempt of this id left, or continue from it."""
        session, version = self._session, -1
        retraction: tuple[Entry, ...] = ()
        while version != session.version:  # what is appended meanwhile may follow the attempt
            version = session.version
            attempt = await session._find_attempt(self.id, resume=self._resume)
            if attempt is None:
                self.messages = ()
                return
            before, self.messages, request = attempt
            self._require_same(request)
            if not self._resume:
                retraction = await session._retraction(before)
        self.resumed = self._resume
        if retraction:
            session._accept(retraction)
            await session._load_media()

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
            request=self._request if self._given and phase == "begin" else None,
        )


@final
class TurnQueue:
    """First come, first served; refuses a turn inside a turn instead of waiting for ever."""

    __slots__ = (
        "_find_task",
        "_free",
        "_holder",
        "_scope",
        "_since",
        "_used",
        "_waiting",
        "idle",
        "number",
    )

    def __init__(self) -> None:
        # Released once for each turn that waits; there is one only while turns wait.
        self._free: anyio.Semaphore | None = None
        self._find_task = task_finder()
        # The task of the running turn.
        self._holder: object | None = None
        self._waiting: dict[CurrentTask, None] = {}
        self._used: bool | anyio.Event = False
        self._since = anyio.current_time()
        self.idle: anyio.Event | None = None
        """Set when the running turn ends, if a task waits for that."""
        self.number: int = 0
        """The running turn's number, 0 between turns."""
        self._scope: TaskScope | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._holder is not None

    @property
    def is_own(self) -> bool:
        """Whether the running turn is this task's own."""
        return self._holder is not None and self._holder is self._find_task()

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

    async def enter(self, key: SessionKey) -> None:
        """Wait for the earlier turns, and begin one."""
        task, holder = self._find_task(), self._holder
        if holder is not None and holder is task:
            message = (
                f"session {key}: this task already is in a turn; end it before beginning another"
            )
            raise SessionError(message, key=str(key))
        if holder is not None or self._free is not None:
            await self._wait(str(key), CurrentTask(task))
        self._holder = task

    async def _wait(self, session: str, me: CurrentTask) -> None:
        """Wait for the earlier turns, unless the running one waits for this task."""
        free = self._free = self._free or anyio.Semaphore(0, fast_acquire=True)
        later = loop_timer()
        disarm: Callable[[], None] | None = None
        checks = 0

        def check() -> None:
            nonlocal disarm, checks
            if self._waits_for(me):
                scope.cancel()
                return
            checks += 1
            if (
                checks == CHECKS_BEFORE_WARNING
                and self._holder
                and CurrentTask(self._holder).seems_to_wait_for(me)
            ):
                log.warning(
                    "session %s: a turn has been waiting for the running one, which seems to wait "
                    "for it: begin it when that one has ended, or append without it",
                    session,
                    extra={"session": session},
                )
            disarm = later(CHECK_INTERVAL, check)

        self._waiting[me] = None
        try:
            while True:
                with anyio.CancelScope() as scope:
                    check()
                    await free.acquire()
                    return
                # If the running turn has stopped waiting for this task meanwhile, wait on.
                self.require_no_wait(session, me)
        finally:
            self._waiting.pop(me, None)
            if not self._waiting:
                self._free = None
            if disarm is not None:
                disarm()

    def _waits_for(self, task: CurrentTask) -> bool:
        holder = self._holder
        return holder is not None and CurrentTask(holder).waits_for(task, self._waiting)

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

    def begin(self, number: int, *, may_be_retried: bool) -> None:
        """Note the number of the turn that this task has entered."""
        self.number = number
        if may_be_retried:
            self._scope = enter(self, turns)

    def may_be_retried_elsewhere(self) -> bool:
        """Whether a turn with an id runs that neither this task is in, nor who has started it."""
        return self._scope is not None and not is_within(self, turns)

    def leave(self) -> None:
        """End the turn, and let the next one begin."""
        self.number = 0
        if self._scope is not None:
            self._scope.leave()
            self._scope = None
        self._holder = None
        if self._free is not None:
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


class Receipt(msgspec.Struct, frozen=True):
    """Proof that a session is durable up to a version."""

    version: int
    """Every record up to this seq is durable."""
    durability: str
    """What durable means on this store: "fsync", "memory", …"""


class _Hot:
    """Fields that an append touches come first, so that they are adjacent in memory."""

    __slots__ = ("_closed_by", "_runtime", "_tracked")


class SessionBase(_Hot):
    """The part of a session that every record passes."""

    __slots__ = (
        "_behind",
        "_contributors",
        "_folded_epoch",
        "_folded_format",
        "_folding",
        "_may_be_cut",
        "_noted",
        "_pins",
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
        self._turns = TurnQueue()
        self._may_be_cut: bool = restored.turns > 0
        """Whether the newest turn may have been interrupted."""
        self._worker: object | None = None
        """The agent that works on it, if one does."""
        self._contributors: Contributors | None = None
        """Made when the first one is attached."""
        self._pins: int = 0
        self._folding: bool = False
        manifest = restored.manifest
        self._rewrite_bytes: int = _size(manifest)
        self._folded_epoch: int = 0 if manifest is None else manifest.epoch
        self._folded_format: int = 1 if manifest is None else manifest.format
        self._hold(restored)
        tracked.on_captured = self._catch_up

    def _hold(self, restored: RestoredSession) -> None:
        """Begin with the contents that were restored."""
        runtime = self._runtime
        self._behind: Contents = Contents(runtime.store, runtime.registry, restored, self)
        # What a save under way has brought to the store may have been read already.
        self._noted: int = max(self._tracked.durable, restored.head)
        self._tail_bytes: int = restored.tail_bytes
        self._tail_records: int = restored.tail_records

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._contents.key

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._tracked.version

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times, as of now."""
        return self._contents.describe()

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
        """Whether an append would be accepted: the session is open and held here."""
        return self._closed_by is None and self._tracked.writable

    @property
    def restore_report(self) -> RestoreReport:
        """How it came back; a document that loads later and is damaged is added when it does."""
        return self._behind.report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first awaited."""
        return self._contents.memory

    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items as one group, and return the new version.

        Cheap and synchronous; autosave makes it durable within its window, ``save`` at once.

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
        apart = self._turns.may_be_retried_elsewhere() and self._is_input(items)
        return self._append(items, apart=apart)

    def _append(self, items: tuple[Any, ...], *, apart: bool = False) -> int:
        """Append items; *apart* from the running turn, so that no retry takes them back."""
        registry = self._runtime.registry
        if len(items) == 1:
            item = items[0]
            entry = item.entry if type(item) is EncodedRecord else entry_of(item, registry)
            entries: tuple[Entry, ...] = (entry,)
        else:
            entries = tuple([entry_of(item, registry) for item in items])
            if not entries:
                return self.version
        if apart:  # takes nothing back; before them, since what is refused then is not there
            self._accept((Entry(RETRACT, encode(RetractionPayload(self.version))),))
        return self._accept(entries)

    def _is_input(self, items: tuple[Any, ...]) -> bool:
        """Whether a user's message is among the items, and no hook of a save appends them."""
        if self._tracked.contributing:
            return False
        roles = (
            item.role if isinstance(item, Message) else type(item) is dict and item.get("role")
            for item in items
        )
        return "user" in roles

    def turn(
        self,
        id: str | None = None,
        *,
        resume: bool = False,
        request: str | bytes | None = None,
    ) -> Turn:
        """Return a turn to enter: ``async with session.turn() as turn``.

        Turns run one at a time, first come, first served. Leaving one waits until it is durable.
        Entering one raises SessionError if the running turn waits for this very task: in
        ``gather``, ``wait_for``, a task group. A task that outlives the running turn waits for it.

        Args:
            id: The caller's own name for it, such as a request's id. A retry with the same
                id is the same turn: if it has ended before, ``turn.replayed`` is True. If it was
                cut before its end, what it left of the conversation is taken back.
            resume: Keep that, to continue from it: ``turn.resumed``, ``turn.messages``.
            request: What is asked. A fingerprint of it is kept with a turn that has an ``id``, and
                entering raises TurnReusedError if that id was used with another request.

        """
        return Turn(self, self._turns, id, resume=resume, request=request)

    def _accept(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in as one group; every change of the session comes through here."""
        runtime, tracked = self._runtime, self._tracked
        if tracked.refuses or runtime.running() is not runtime.loop:
            self._check_open()
        for entry in entries:
            if len(entry[1]) > runtime.max_record_bytes:
                check_sizes(
                    tracked.key, entries, runtime.max_record_bytes, most=runtime.store_record_bytes
                )
        return runtime.append(tracked, entries)

    def _accept_now(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in, and apply them to the contents at once."""
        version = self._accept(entries)
        self._catch_up()
        return version

    @property
    def _contents(self) -> Contents:
        """What the session holds, as of its newest record."""
        self._catch_up()
        return self._behind

    def _catch_up(self) -> None:
        """Take what was appended into the contents."""
        tracked, noted = self._tracked, self._noted
        if tracked.version <= noted:
            return
        entries = tracked.pending
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

    @property
    def _needs_mark(self) -> bool:
        """Whether a fold has to say that its messages refer to media in blobs."""
        return self._folded_format < FORMAT and self._behind.context.has_lifted

    def _close_with(self, error: Exception) -> None:
        """Refuse every append from now on."""
        self._closed_by = error
        self._tracked.refuses = True  # so that an append has to ask for one thing only

    def _check_home(self) -> None:
        stray = self._runtime.home.stray()
        if stray is not None:
            raise wrong_loop(f"session {self._tracked.key}", stray)

    def _check_open(self) -> None:
        self._check_home()
        if self._closed_by is not None:
            raise self._closed_by

    async def save(self) -> Receipt:
        """Make everything that was appended durable, now, and return the proof.

        Saves of different sessions share their commits where the store can. Cancelling
        the caller does not stop the save.

        Raises:
            LeaseLostError: Another process has taken the session over.
            SessionQuarantinedError: The store permanently refuses a record of this session.
            SessionClosedError: The manager stopped before it was durable.

        """
        self._check_home()
        version = await self._runtime.saver.save(self._tracked)
        if self._behind.may_lack_media:
            await self._load_media()
        return self._receipt(version)

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
        self._check_open()
        if type(after) is not int or not 0 <= after <= self.version:
            message = f"session {self.key} has records up to {self.version}, none at {after}"
            raise InvalidArgumentError(message, after=after, version=self.version)
        version = self._accept(await self._retraction(after))
        await self._load_media()
        return version

    async def _retraction(self, after: int) -> tuple[Entry, ...]:
        """Return what takes the conversation back to a record, to be appended as one group."""
        entry = Entry(RETRACT, encode(RetractionPayload(after)))
        if self._contents.context.reaches(after):
            return (entry,)
        context = WorkingContext(self._contents.context.limit)
        if after:  # what was before the first record is known, even of a pruned log
            await self.save()
            context = await self._contents.as_of(after)
        return (entry, Entry(CONTEXT, context.as_record("retract")))

    def _memory_limit(self) -> MemoryLimit:
        """Return the limit of the working memory; evictions and searches are events."""
        runtime, key = self._runtime, str(self._tracked.key)

        def report(evicted: Sequence[MemoryInfo]) -> None:
            keys = tuple(entry.key for entry in evicted)
            facts = MemoryEvicted(key, keys, sum(entry.size_bytes for entry in evicted))
            runtime.hooks.emit("memory_evicted", facts)

        return MemoryLimit(runtime.limits.memory_bytes, report, self._note_search)

    def _left_out(self, media: FittedMedia) -> None:
        """Report, once, that the model is not shown all media of the context."""
        count, lost = len(media.left_out), len(media.lost)
        size, key = sum(medium.bytes for medium in media.left_out), str(self._tracked.key)
        extra = {"session": key, "count": count, "bytes": size, "lost": lost}
        if lost:
            message = "session %s: %d media are not shown to the model, their blobs are lost"
            log.warning(message, key, lost, extra=extra)
        if count:
            message = (
                "session %s: the oldest media, %d with %d bytes, are left out of what the model is "
                "shown; the log keeps them. Limits(context_media_tokens=…) is the budget"
            )
            log.warning(message, key, count, size, extra=extra)
        self._runtime.hooks.emit("media_left_out", MediaLeftOut(key, count, size, lost))

    def _note_search(self, search: MemorySearch) -> None:
        facts = MemorySearched(str(self._tracked.key), search.found, search.took, search.error)
        self._runtime.hooks.emit("memory_searched", facts)

    async def _load_memory(self) -> None:
        """Load the working memory's index if it has a limit: then `set` needs it."""
        if self._runtime.limits.memory_bytes is not None:
            await self._contents.memory.load()

    def _receipt(self, version: int) -> Receipt:
        return Receipt(version, self._runtime.durability)

    # for the manager, turns and the agent

    def _renew(self, restored: RestoredSession) -> None:
        """Replace the contents by what was read, plus what was appended while it was read."""
        restored.report = self._behind.report
        self._hold(restored)
        if self._contributors is not None:
            self._contributors.forget()

    def _report_step(self, what: str, detail: str) -> None:
        """Add a step to the restore report."""
        self._behind.report = self._behind.report.with_step(RestoreStep(what, detail))

    @property
    def _running_turn(self) -> int:
        """The number of the turn that is running, 0 between turns."""
        return self._turns.number

    async def _begin_turn(self, turn_id: str) -> int | None:
        """Wait for room, and return the number of a turn of this id that has ended before."""
        self._check_open()
        await self._runtime.saver.room(self._tracked)
        return self._behind.turn_ids.get(turn_id)

    async def _find_attempt(
        self, turn_id: str, *, resume: bool
    ) -> tuple[int, tuple[Any, ...], str | None] | None:
        """Return what an interrupted turn of this id has appended, if nothing follows it.

        The seq of the record before it, its messages, and its request. With ``resume`` it does not
        matter whether others have appended amid it.
        """
        if not self._may_be_cut:
            return None
        tracked = self._tracked
        pending, durable = tracked.pending, tracked.durable
        unsaved = reversed(tracked.pending_records()) if pending else ()
        return await self._contents.attempt(
            turn_id, resume=resume, unsaved=unsaved, durable=durable
        )

    async def _request_of(self, turn_id: str) -> str | None:
        """Return the fingerprint of the request of a turn; None if it is not known."""
        tracked = self._tracked
        unsaved = list(reversed(tracked.pending_records())) if tracked.pending else ()
        return await self._contents.request_of(turn_id, unsaved=unsaved, durable=tracked.durable)

    def _end_turn(
        self, turned: TurnPayload, closing: tuple[Entry, ...] = (), *, is_saved: bool = False
    ) -> None:
        """Append a turn's last record, in one group with others; a save is due with it.

        With ``is_saved`` the caller saves at once, by `_save_ended`.
        """
        self._accept((*closing, Entry(TURN, encode(turned))))
        if turned.given:
            note_turn(self._behind.turn_ids, turned)
        self._may_be_cut = turned.phase != "end"
        if not is_saved:
            self._runtime.saver.turn_ended(self._tracked)

    async def _save_ended(self) -> None:
        """Save a turn that has ended; if the caller is cancelled meanwhile, that goes on."""
        try:
            await self.save()
        except BaseException:
            if self.is_writable and not self._tracked.clean:
                self._runtime.saver.turn_ended(self._tracked)
            raise

    @property
    def _has_tail(self) -> bool:
        """Whether a fold shortens the next restore: of records, or of many epochs without any."""
        epochs = self._tracked.epoch - self._folded_epoch
        return self._tail_records > 0 or (self._folded_epoch > 0 and epochs >= MOST_EPOCHS)

    def _durable_tail(self) -> tuple[int, int]:
        """Return the size and the record count of what no fold has of the durable log."""
        tracked = self._tracked
        unsaved = tracked.pending[: max(self._noted - tracked.durable, 0)]
        size = self._tail_bytes - self._stored_bytes(unsaved)
        return size, self._tail_records - len(unsaved)

    def _open_tail(self) -> OpenTail | None:
        """Return what a fold needs of a session at rest; None if it has to read the store."""
        if not self._tracked.clean:
            return None
        upto = self._tracked.durable
        return self._contents.open_tail(upto, self._runtime.limits.context_bytes)

    def _folded(self, manifest: Manifest, tail: tuple[int, int]) -> None:
        """Update the contents after a fold; ``tail`` is its ``_durable_tail`` when it began."""
        self._contents.folded(manifest.as_of_seq)
        size, records = tail
        self._tail_bytes = max(self._tail_bytes - size, 0)
        self._tail_records = max(self._tail_records - records, 0)
        self._rewrite_bytes = _size(manifest)
        self._folded_epoch = manifest.epoch
        self._folded_format = manifest.format


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
    data = request.encode("utf-8", "surrogatepass") if isinstance(request, str) else request
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
    return registry.encode_record(item)


def _size(manifest: Manifest | None) -> int:
    return 0 if manifest is None else sum(document.size for document in manifest.documents.values())
