"""Sessions, views, memory, named states and scopes in blocking style.

Any thread may use them. Plain values are read as they are; everything else is done in the manager's
own thread, one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, final, overload

import anyio

from perdure._lib.task_scope import enter, turns
from perdure.errors import SessionError
from perdure.sync import parts

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from perdure.autosave.options import AutosaveStatus
    from perdure.memory import state, working_memory
    from perdure.memory.documents import SessionDocument
    from perdure.memory.working_memory import MemoryInfo
    from perdure.providers import Issuer, ReasoningPolicy, RenderedContext
    from perdure.providers.context_fit import Format
    from perdure.records.keys import SessionKey
    from perdure.records.messages import EncodedRecord, Message
    from perdure.records.records import Record
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.report import RestorePlan, RestoreReport
    from perdure.session import base, fork, scope, session, session as view
    from perdure.session.base import Receipt
    from perdure.session.contents import ContextFormat, HistoryItem, Listed, Separate
    from perdure.session.contributors import Contributor as AsyncContributor
    from perdure.session.fork import Fork, History
    from perdure.session.scope import ScopeChange
    from perdure.sync.loop import LoopThread


# A turn in blocking style: one task of the loop runs it from start to end, for any waiting thread


T = TypeVar("T")


_Error = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


@final
class Turn:
    """One turn of a session: ``with session.turn() as turn``. As `perdure.Turn`, blocking."""

    def __init__(
        self, loop: LoopThread, session: Session, inner: base.Turn, in_turn: TurnThread
    ) -> None:
        self._loop = loop
        self._session = session
        self._inner = inner
        self._in_turn = in_turn
        self._life = _BlockTask(inner)

    @property
    def id(self) -> str:
        """The given id, or ``turn_0001`` and so on; numbering continues after a restore."""
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
        """Whether it continues an interrupted attempt, whose messages are ``messages``."""
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
        self._scope = enter(self._inner, turns)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._in_turn.thread = 0
        self._scope.leave()
        if self._loop.forked:  # the parent's turn
            return
        try:
            self._loop.call(lambda: self._life.leave((exc_type, exc, traceback)))
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, perhaps before the exit was sent
                self._loop.post(lambda: self._life.request_exit((exc_type, exc, traceback)))
            raise

    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items to this turn, from any thread while it runs; return the new version."""
        return self._loop.do(lambda: self._inner.append(*items))

    def extend(
        self, history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
    ) -> Receipt:
        """Append another program's history to this turn, and return once it is durable."""
        return self._loop.call(lambda: self._inner.extend(history, format, issuer=issuer))

    def emit(self, item: T, send: Callable[[T], object]) -> None:
        """Send something once everything before it is durable: the output gate.

        Args:
            item: What is sent.
            send: Called with it, in this thread.

        Raises:
            LeaseLostError: Another process has the session: nothing was sent.
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
            raise SessionError(
                f"session {key}: this thread already is in a turn; end it before {what}",
                key=str(key),
            )


class _BlockTask:
    """A block's task: it enters what the block is of, waits for the block's end, and leaves it."""

    def __init__(self, inner: AbstractAsyncContextManager[Any]) -> None:
        self._inner = inner
        self.entered: Any = None
        """What entering it gave."""
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
            self.entered = await self._inner.__aenter__()
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
        except Exception as error:  # noqa: BLE001  # raised when the block is left
            self._error = error
        finally:
            self._left.set()

    async def leave(self, error: _Error) -> None:
        """Leave it; cancelling this ends the wait only."""
        self.request_exit(error)
        await self._left.wait()
        if self._error is not None:
            raise self._error

    def request_exit(self, error: _Error) -> None:
        """Make the task leave it, unless it already does."""
        if not self._leave.is_set():
            self._told = error
            self._leave.set()

    def give_up(self) -> None:
        """Interrupt it: its caller has not received it."""
        self._given_up = True
        if self._scope is not None:
            self._scope.cancel()


# Working memory, named states and scopes in blocking style


@final
class WorkingMemory:
    """A session's working memory: ``session.memory``."""

    def __init__(self, loop: LoopThread, inner: working_memory.WorkingMemory) -> None:
        self._loop = loop
        self._inner = inner

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        return self._loop.call(lambda: self._inner.get(key, default))

    def set(
        self,
        key: str,
        value: Any,
        *,
        description: str = "",
        scope: str = "session",
        priority: str = "normal",
        pinned: bool = False,
    ) -> int:
        """Keep a value under a key, and return the session's version."""
        return self._loop.do(
            lambda: self._inner.set(
                key,
                value,
                description=description,
                scope=scope,
                priority=priority,
                pinned=pinned,
            )
        )

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._loop.do(lambda: self._inner.drop(key))

    def keys(self) -> list[str]:
        """Return the keys, oldest entry first."""
        return self._loop.call(self._inner.keys)

    def entries(self) -> list[MemoryInfo]:
        """Return what is known of the entries, oldest first; reads no value."""
        return self._loop.call(self._inner.entries)

    def search(
        self, query: str, *, scope: str | None = None, limit: int = 10, values: bool = False
    ) -> list[MemoryInfo]:
        """Return the entries that a query's words are found in, the best first."""
        return self._loop.call(
            lambda: self._inner.search(query, scope=scope, limit=limit, values=values)
        )


@final
class States:
    """A session's named states: ``session.state``."""

    def __init__(self, loop: LoopThread, inner: state.States) -> None:
        self._loop = loop
        self._inner = inner

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        return self._loop.call(lambda: self._inner.get(key, default))

    def set(self, key: str, value: Any) -> int:
        """Keep a value under a key, and return the session's version."""
        return self._loop.do(lambda: self._inner.set(key, value))

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._loop.do(lambda: self._inner.drop(key))

    def keys(self) -> list[str]:
        """Return the keys in order."""
        return self._loop.call(self._inner.keys)

    def typed(self, key: str, type: type[T]) -> TypedState[T]:
        """Return one key's value as a type: ``session.state.typed("app", MyState)``.

        As ``session.state.typed`` of `perdure.Session`.
        """
        return TypedState(self._loop, self._inner.typed(key, type))


@final
class TypedState(Generic[T]):
    """One named state as a type; made by ``session.state.typed``."""

    def __init__(self, loop: LoopThread, inner: state.TypedState[T]) -> None:
        self._loop = loop
        self._inner = inner

    def get(self) -> T | None:
        """Return the value, None if there is none."""
        return self._loop.call(self._inner.get)

    def set(self, value: T) -> int:
        """Keep a value, and return the session's version."""
        return self._loop.do(lambda: self._inner.set(value))

    def drop(self) -> int:
        """Forget it (no error if it is not there), and return the session's version."""
        return self._loop.do(self._inner.drop)


@final
class Scope:
    """Values that many sessions share: ``sessions.scope("user:ada")``. As `perdure.types.Scope`."""

    def __init__(self, loop: LoopThread, inner: scope.Scope) -> None:
        self._loop = loop
        self._inner = inner

    @property
    def id(self) -> str:
        """The scope's id."""
        return self._inner.id

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        return self._loop.call(lambda: self._inner.get(key, default))

    def values(self, prefix: str = "") -> dict[str, Any]:
        """Return all values by their keys, or those whose keys begin with a prefix."""
        return self._loop.call(lambda: self._inner.values(prefix))

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys in order; reads no value."""
        return self._loop.call(lambda: self._inner.keys(prefix))

    def set(self, key: str, value: Any) -> None:
        """Store a value under a key. As `perdure.types.Scope.set`."""
        self._loop.call(lambda: self._inner.set(key, value))

    def delete(self, *keys: str) -> None:
        """Delete keys (no error if one does not exist). As `perdure.types.Scope.delete`."""
        self._loop.call(lambda: self._inner.delete(*keys))

    def update(self, values: Mapping[str, Any], *, delete: Collection[str] = ()) -> None:
        """Store several values and delete others: all or none. As `perdure.types.Scope.update`."""
        self._loop.call(lambda: self._inner.update(values, delete=delete))

    @contextmanager
    def edit(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Read, change and store values with nobody in between. As `perdure.types.Scope.edit`."""
        life = _BlockTask(self._inner.edit(prefix))
        try:
            self._loop.call(lambda: self._loop.tasks.start(life.live))
            yield life.entered
        except BaseException as error:
            if life.entered is None or not isinstance(error, Exception):
                self._loop.post(life.give_up)
                raise
            told: _Error = (type(error), error, error.__traceback__)
            self._loop.call(lambda: life.leave(told))
            raise
        self._loop.call(lambda: life.leave((None, None, None)))

    def history(self, *, before: int | None = None, limit: int = 50) -> list[ScopeChange]:
        """Return the newest changes, oldest first. As `perdure.types.Scope.history`."""
        return self._loop.call(lambda: self._inner.history(before=before, limit=limit))

    def forget(self) -> bool:
        """Remove the scope with its history and all values. As `perdure.types.Scope.forget`."""
        return self._loop.call(self._inner.forget)


# What is read of a session, and of a view of one


S = TypeVar("S", bound="session.Session | view.SessionView")


class Rendered(Generic[S]):
    """What is read of a session, and what a model is shown; of a `SessionView`, too."""

    def __init__(self, loop: LoopThread, inner: S) -> None:
        self._loop = loop
        self._inner: S = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._inner.key

    @property
    def restore_report(self) -> RestoreReport:
        """How it came back; a document that loads later and is damaged is added when it does."""
        return self._inner.restore_report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first asked."""
        return WorkingMemory(self._loop, self._inner.memory)

    @property
    def state(self) -> States:
        """Named states; each loads when it is first asked for."""
        return States(self._loop, self._inner.state)

    def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items, oldest first; page back by the first one's seq."""
        return self._loop.call(lambda: self._inner.history(before=before, limit=limit))

    @overload
    def context(
        self,
        format: Listed | None = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any]: ...

    @overload
    def context(
        self,
        format: Separate,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> RenderedContext: ...

    def context(
        self,
        format: ContextFormat = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any] | RenderedContext:
        """Return what the model sees next, as a provider takes it."""
        return self._loop.read(lambda: self._inner.context(format, to=to, reasoning=reasoning))


@final
class LostSession:
    """A session that can be written no more, and the records of it that are only in memory.

    As `perdure.types.LostSession`, blocking.
    """

    def __init__(self, loop: LoopThread, inner: fork.LostSession) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._inner.key

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self._inner.id

    @property
    def epoch(self) -> int:
        """The number of the lease that was lost."""
        return self._inner.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._inner.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that the store had acknowledged."""
        return self._inner.durable_version

    @property
    def error(self) -> Exception | None:
        """What the store said when the session was lost."""
        return self._inner.error

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are only in memory."""
        return self._loop.read(self._inner.unsaved)

    def fork_unsaved(
        self, new_id: str, *, new_session: str | None = None, history: History = "full"
    ) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then."""
        return self._loop.call(
            lambda: self._inner.fork_unsaved(new_id, new_session=new_session, history=history)
        )

    def discard_unsaved(self) -> int:
        """Drop the records that are only in memory, and return how many."""
        return self._loop.call(self._inner.discard_unsaved)


@final
class Session(Rendered["session.Session"]):
    """One conversation and its state: ``with sessions.open("my-assistant") as session``.

    As `perdure.Session`, blocking. Opening the same id again shares the object, in any thread;
    leaving ``with`` only releases it, and autosave continues.
    """

    def __init__(self, loop: LoopThread, inner: session.Session) -> None:
        super().__init__(loop, inner)
        self._in_turn = TurnThread()

    def _repr_html_(self) -> str:
        return self._loop.read(self._inner._repr_html_)

    def __enter__(self) -> Self:
        self._loop.call(self._inner.__aenter__)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop.usable:  # else there is nothing left to let go of
            self._loop.call(lambda: self._inner.__aexit__(exc_type, exc, traceback))

    # what it is

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self._inner.id

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times, as of now."""
        return self._loop.read(lambda: self._inner.info)

    @property
    def epoch(self) -> int:
        """This holder's number, which is the fencing token."""
        return self._inner.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._inner.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that is durable."""
        return self._inner.durable_version

    @property
    def is_writable(self) -> bool:
        """Whether an append would be accepted: the session is open and held here."""
        return self._loop.read(lambda: self._inner.is_writable)

    @property
    def unsaved_age(self) -> float:
        """Seconds since the oldest change that is not durable, 0 when all is saved."""
        return self._loop.read(lambda: self._inner.unsaved_age)

    @property
    def autosave(self) -> AutosaveStatus:
        """When it saves itself: the setting, whether it is the manager's, and what is in force."""
        return self._loop.read(lambda: self._inner.autosave)

    @property
    def checkpoints(self) -> parts.CheckpointEngine:
        """Its checkpoints: labelled points to look at and to go back to."""
        return parts.CheckpointEngine(self._loop, self._inner.checkpoints)

    @property
    def events(self) -> parts.KernelEventStream:
        """Its kernel events: what an agent did, on the session's logical clock."""
        return parts.KernelEventStream(self._loop, self._inner.events)

    # changing it

    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items as one group, and return the new version.

        As `perdure.Session.append`. What was accepted is saved even if Ctrl-C comes before this
        returns. It belongs to the running turn in the thread that began it, and where its context
        was copied to, as by `asyncio.to_thread`; in other threads use the turn's `append`.
        """
        inner, scopes = self._inner, turns.get()
        return self._loop.do(lambda: inner._append(inner._entries(items), inner._turn_of(scopes)))

    def extend(
        self, history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
    ) -> Receipt:
        """Append another program's history as one group, and return once it is durable."""
        inner, scopes = self._inner, turns.get()
        self._loop.do(
            lambda: inner._append(inner._parsed(history, format, issuer), inner._turn_of(scopes))
        )
        return self.save()

    def describe(
        self,
        *,
        title: str | None = None,
        tags: list[str] | None = None,
        owner: str | None = None,
        **metadata: Any,
    ) -> int:
        """Change what is said about the session, and return the new version."""
        return self._loop.do(
            lambda: self._inner.describe(title=title, tags=tags, owner=owner, **metadata)
        )

    def attach(self, contributor: parts.Contributor | AsyncContributor) -> parts.Attachment:
        """Keep further state with this session: a plugin's, a tool's.

        As `perdure.Session.attach`. Plain methods of a contributor are called in a thread of
        their own, async ones in the manager's loop.
        """
        attached = self._loop.call(
            lambda: self._inner.attach(parts.as_async(self._inner, contributor))
        )
        return parts.Attachment(self._loop, attached)

    def turn(
        self,
        id: str | None = None,
        *,
        resume: bool = False,
        request: str | bytes | None = None,
        timeout: float | None = 600.0,
    ) -> Turn:
        """Return a turn to enter: ``with session.turn() as turn``."""
        inner = self._inner.turn(id, resume=resume, request=request, timeout=timeout)
        return Turn(self._loop, self, inner, self._in_turn)

    def save(self) -> Receipt:
        """Make everything that was appended durable, now, and return the proof.

        As `perdure.Session.save`. Ctrl-C ends the wait, not the save.
        """
        return self._loop.call(self._inner.save)

    def retract(self, *, after: int) -> int:
        """Take the conversation back to what it was at a record, and return the new version."""
        inner, scopes = self._inner, turns.get()
        return self._loop.call(lambda: inner._retract(after, scopes))

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are not durable: also of a session that was lost."""
        return self._loop.read(self._inner.unsaved)

    def retry(self) -> None:
        """Try again to save a quarantined session, now that the cause is mended."""
        self._loop.do(self._inner.retry)

    def discard_unsaved(self) -> int:
        """Drop the records that are not durable, and return how many; a way out of quarantine."""
        return self._loop.call(self._inner.discard_unsaved)

    def fork_unsaved(
        self, new_id: str, *, new_session: str | None = None, history: History = "full"
    ) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then."""
        return self._loop.call(
            lambda: self._inner.fork_unsaved(new_id, new_session=new_session, history=history)
        )

    def wait_durable(self, version: int | None = None) -> Receipt:
        """Wait until a version (None: the newest) is durable, without hurrying the save."""
        return self._loop.call(lambda: self._inner.wait_durable(version))

    def close(self) -> None:
        """Save, fold and let go of the session for everybody in this process.

        As `perdure.Session.aclose`.

        Raises:
            SessionError: This thread is in a turn of the session.
            UnsavedChangesError: Not everything could be made durable in time; it stays open.

        """
        self._in_turn.refuse(self.key, "closing the session")
        self._loop.call(self._inner.aclose)

    def plan_restore(
        self,
        target: Format | None = None,
        *,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
    ) -> RestorePlan:
        """Say what would come back after a kill at this moment, and what would be mended, and why.

        As `perdure.Session.plan_restore`.
        """
        return self._loop.call(
            lambda: self._inner.plan_restore(target, system_prompt=system_prompt, options=options)
        )

    def apply(self, plan: RestorePlan) -> int:
        """Do what a plan says, durably, and return the new version. As `perdure.Session.apply`."""
        return self._loop.call(lambda: self._inner.apply(plan))


@final
class SessionView(Rendered["view.SessionView"]):
    """A read-only view of a session, as of ``seq``, without a lease: from `SessionManager.load`."""

    @property
    def seq(self) -> int:
        """The last record that it shows."""
        return self._inner.seq

    @property
    def settled(self) -> bool:
        """False when a takeover was under way, so that the newest records may be missing."""
        return self._inner.settled

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times."""
        return self._inner.info

    @property
    def checkpoints(self) -> parts.CheckpointReader:
        """Its checkpoints, as of ``seq``."""
        return parts.CheckpointReader(self._loop, self._inner.checkpoints)

    @property
    def events(self) -> parts.KernelEventReader:
        """Its kernel events, as of ``seq``."""
        return parts.KernelEventReader(self._loop, self._inner.events)
