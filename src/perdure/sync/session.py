"""Sessions, views, and all that is kept with a session, in blocking style.

Any thread may use them. Plain values are read as they are; everything else is done in the manager's
own thread, one call at a time.

Plain methods of a contributor are called in threads of their own, so they may take their time and
use the blocking API; a save waits for them, as long as ``EngineOptions(capture_timeout=…)``
allows. A contributor that was written for the async API is awaited in the manager's loop.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast, final, overload

import anyio
from anyio import to_thread

from perdure._lib.misnamed import Misnamed
from perdure._lib.task_scope import enter, turns
from perdure.archive import archives
from perdure.archive.limits import ArchiveLimits
from perdure.checkpoints import engine, events
from perdure.errors import SessionError
from perdure.memory import state, working_memory
from perdure.session import base, contributors, fork, partial as streamed, scope, session
from perdure.sync.mirror import Mirror, attribute, awaited, done, read, read_attribute

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from perdure import EncodedRecord, Message, SessionKey
    from perdure.archive import ArchiveRestored, ArchiveSaved
    from perdure.archive.save import Progress
    from perdure.checkpoints import (
        Checkpoint,
        CheckpointState,
        Difference,
        KernelEvent,
        RolledBack,
        Verification,
    )
    from perdure.checkpoints.replay import ReplayReport, TimelineRow
    from perdure.memory.working_memory import MemoryInfo
    from perdure.providers import Issuer, ReasoningPolicy, RenderedContext
    from perdure.providers.context_fit import Format
    from perdure.records.archives import Archive
    from perdure.records.records import Record
    from perdure.restore import WorkingContextSnapshotBootstrapOptions
    from perdure.session.contents import ContextFormat, Listed, Separate
    from perdure.session.contributors import Contributor as AsyncContributor
    from perdure.sync.loop import LoopThread
    from perdure.types import (
        AutosaveStatus,
        Fork,
        HistoryItem,
        Receipt,
        RestoreContext,
        RestorePlan,
        RestoreReport,
        ScopeChange,
        SessionDocument,
    )


# A turn in blocking style: one task of the loop runs it from start to end, for any waiting thread


T = TypeVar("T")
V = TypeVar("V", bound=working_memory.WorkingMemory | state.States)


_Error = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


@final
class PartialReply(Mirror[streamed.PartialReply]):
    """A reply that is being streamed into a turn. As `perdure.types.PartialReply`, blocking."""

    @property
    @attribute
    def text(self) -> str:
        """The text so far."""

    @property
    @attribute
    def complete(self) -> bool:
        """True once the stream has said that the reply ends; text alone is always complete."""

    @property
    @attribute
    def message(self) -> Message | None:
        """The message that was appended when the block was left; None before, and for no reply."""

    @done
    def add(self, event: Any) -> str:
        """Add what the stream has brought, and return the text in it, which may be empty."""

    def __enter__(self) -> Self:
        self._loop.do(self._inner.__enter__)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._loop.forked:  # else it is the parent's reply
            self._loop.do(partial(self._inner.__exit__, exc_type, exc, traceback))


@final
class Turn(Mirror[base.Turn]):
    """One turn of a session: ``with session.turn() as turn``. As `perdure.Turn`, blocking."""

    def __init__(self, loop: LoopThread, session: Session, inner: base.Turn) -> None:
        super().__init__(loop, inner)
        self._session = session
        self._life = _BlockTask(loop, inner)

    @property
    @attribute
    def id(self) -> str:
        """The given id, or ``turn_0001`` and so on; numbering continues after a restore."""

    @property
    @attribute
    def number(self) -> int:
        """The turn's number in the session; 0 before it has begun."""

    @property
    @attribute
    def replayed(self) -> bool:
        """True if a turn of this id has ended before: there is nothing left to do in it."""

    @property
    @attribute
    def resumed(self) -> bool:
        """True if it continues an interrupted attempt, whose messages are ``messages``."""

    @property
    @attribute
    def messages(self) -> tuple[Any, ...]:
        """The messages of a turn that is replayed, or of an interrupted attempt of this id."""

    def __enter__(self) -> Self:
        self._inner._entered = True  # even if it is refused before it begins
        self._session._refuse_in_turn("beginning another")
        self._life.begin()
        self._session._turn_thread = threading.get_ident()
        self._scope = enter(self._inner, turns)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session._turn_thread = 0
        self._scope.leave()
        if not self._loop.forked:  # else it is the parent's turn
            self._life.end((exc_type, exc, traceback))

    @done
    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items to this turn, from any thread while it runs; return the new version."""

    @awaited
    def extend(
        self, history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
    ) -> Receipt:
        """Append another program's history to this turn, and return once it is durable."""

    def partial(
        self,
        format: Format | None = None,
        *,
        issuer: Issuer | str | None = None,
        every: float = 1.0,
    ) -> PartialReply:
        """Return a reply to stream into this turn: ``with turn.partial("openai") as reply``."""
        make = partial(self._inner.partial, format, issuer=issuer, every=every)
        return PartialReply(self._loop, self._loop.do(make))

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


class _BlockTask:
    """A block's task: it enters what the block is of, waits for the block's end, and leaves it."""

    def __init__(self, loop: LoopThread, inner: AbstractAsyncContextManager[Any]) -> None:
        self._loop = loop
        self._inner = inner
        self.entered: Any = None
        """The result of entering it."""
        self._scope: anyio.CancelScope | None = None
        self._error: Exception | None = None
        self._given_up = False
        self._told: _Error = (None, None, None)

    # in the block's thread

    def begin(self) -> None:
        """Enter it."""
        try:
            self._loop.call(lambda: self._loop.tasks.start(self._live))
        except BaseException:
            # Ctrl-C may come when it has just begun.
            self._loop.post(self.give_up)
            raise

    def end(self, error: _Error) -> None:
        """Leave it."""
        try:
            self._loop.call(lambda: self._leave(error))
        except BaseException as raised:
            if not isinstance(raised, Exception):  # Ctrl-C, perhaps before the exit was sent
                self._loop.post(lambda: self._request_exit(error))
            raise

    # in the loop's thread

    async def _live(self, *, task_status: TaskStatus[None]) -> None:
        self._over = anyio.Event()
        self._left = anyio.Event()
        with anyio.CancelScope() as self._scope:
            if self._given_up:
                return
            self.entered = await self._inner.__aenter__()
            try:
                task_status.started()
                await self._over.wait()
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

    async def _leave(self, error: _Error) -> None:
        """Leave it; cancelling this ends the wait only."""
        self._request_exit(error)
        await self._left.wait()
        if self._error is not None:
            raise self._error

    def _request_exit(self, error: _Error) -> None:
        """Make the task leave it, unless it already does."""
        if not self._over.is_set():
            self._told = error
            self._over.set()

    def give_up(self) -> None:
        """Interrupt it: its caller has not received it."""
        self._given_up = True
        if self._scope is not None:
            self._scope.cancel()


# Working memory, named states and scopes in blocking style


class KeyedValues(Mirror[V]):
    """Values of a session by their keys."""

    @awaited
    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""

    @done
    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""


@final
class WorkingMemory(KeyedValues[working_memory.WorkingMemory]):
    """A session's working memory: ``session.memory``."""

    @done
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

    @awaited
    def keys(self) -> list[str]:
        """Return the keys, oldest entry first."""

    @awaited
    def entries(self) -> list[MemoryInfo]:
        """Return what is known of the entries, oldest first; reads no value."""

    @awaited
    def search(
        self, query: str, *, scope: str | None = None, limit: int = 10, values: bool = False
    ) -> list[MemoryInfo]:
        """Return the entries that a query's words are found in, the best first."""


@final
class States(KeyedValues[state.States]):
    """A session's named states: ``session.state``."""

    @done
    def set(self, key: str, value: Any) -> int:
        """Keep a value under a key, and return the session's version."""

    @awaited
    def keys(self) -> list[str]:
        """Return the keys in order."""

    def typed(self, key: str, type: type[T]) -> TypedState[T]:
        """Return one key's value as a type: ``session.state.typed("app", MyState)``.

        As ``session.state.typed`` of `perdure.Session`.
        """
        return TypedState(self._loop, self._inner.typed(key, type))


@final
class TypedState(Mirror[state.TypedState[T]], Generic[T]):
    """One named state as a type; made by ``session.state.typed``."""

    @awaited
    def get(self) -> T | None:
        """Return the value, None if there is none."""

    @done
    def set(self, value: T) -> int:
        """Keep a value, and return the session's version."""

    @done
    def drop(self) -> int:
        """Forget it (no error if it is not there), and return the session's version."""


@final
class Scope(Mirror[scope.Scope]):
    """Values that many sessions share: ``sessions.scope("user:ada")``. As `perdure.types.Scope`."""

    @property
    @attribute
    def id(self) -> str:
        """The scope's id."""

    @awaited
    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""

    @awaited
    def values(self, prefix: str = "") -> dict[str, Any]:
        """Return all values by their keys, or those whose keys begin with a prefix."""

    @awaited
    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys in order; reads no value."""

    @awaited
    def set(self, key: str, value: Any) -> None:
        """Store a value under a key. As `perdure.types.Scope.set`."""

    @awaited
    def delete(self, *keys: str) -> None:
        """Delete keys (no error if one does not exist). As `perdure.types.Scope.delete`."""

    @awaited
    def update(self, values: Mapping[str, Any], *, delete: Collection[str] = ()) -> None:
        """Store several values and delete others: all or none. As `perdure.types.Scope.update`."""

    @contextmanager
    def edit(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Read, change and store values with no change between. As `perdure.types.Scope.edit`."""
        life = _BlockTask(self._loop, self._inner.edit(prefix))
        life.begin()
        try:
            yield life.entered
        except BaseException as error:
            if isinstance(error, Exception):
                life.end((type(error), error, error.__traceback__))
            else:  # Ctrl-C
                self._loop.post(life.give_up)
            raise
        life.end((None, None, None))

    @awaited
    def history(self, *, before: int | None = None, limit: int = 50) -> list[ScopeChange]:
        """Return the newest changes, oldest first. As `perdure.types.Scope.history`."""

    @awaited
    def forget(self) -> bool:
        """Remove the scope with its history and all values. As `perdure.types.Scope.forget`."""


# Its checkpoints and kernel events


class CheckpointReader(Mirror[engine.CheckpointReader]):
    """The checkpoints of a session, to read: ``view.checkpoints``."""

    @awaited
    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that was not pruned, None if there is none."""

    @awaited
    def get(self, id: int) -> Checkpoint | None:
        """Return a checkpoint, without the state that it leads to; None for an unknown id."""

    @awaited
    def states(self) -> list[Checkpoint]:
        """Return all checkpoints that were not pruned, by id, without the states."""

    @awaited
    def restore(self, id: int) -> CheckpointState | None:
        """Return a checkpoint with a copy of its state, None for an unknown id; changes nothing."""

    @awaited
    def diff(self, a: int, b: int) -> Difference:
        """Return what was added, removed and changed from one checkpoint's state to another's."""

    @awaited
    def verify(self) -> Verification:
        """Look through the chain, the log and the states for anything changed or lost."""


@final
class CheckpointEngine(CheckpointReader):
    """A session's checkpoints: ``session.checkpoints``."""

    _inner: engine.CheckpointEngine

    @awaited
    def create(self, label: str, state: Any = None) -> Checkpoint:
        """Make a checkpoint, durable when this returns."""

    @awaited
    def rollback(self, id: int, *, replay: bool = False) -> RolledBack:
        """Go back to a checkpoint; everything is durable when this returns."""

    @contextmanager
    def guard(self, label: str) -> Iterator[Checkpoint]:
        """Make a checkpoint, and go back to it if the block fails."""
        checkpoint = self.create(label)
        try:
            yield checkpoint
        except BaseException as error:
            self._loop.call(partial(self._inner._undo, checkpoint.id, error))
            raise

    @awaited
    def prune(self, *, keep: int | Collection[int]) -> tuple[int, ...]:
        """Let go of checkpoints, and return their ids; nothing else ever does."""


class KernelEventReader(Mirror[events.KernelEventReader]):
    """The kernel events of a session, to read: ``view.events``."""

    @awaited
    def read(self, *, after: int = 0, before: int | None = None) -> list[KernelEvent]:
        """Return the durable events with ``after < seq < before``, by their times."""

    @awaited
    def replay(
        self,
        *,
        since: int | None = None,
        on_row: Callable[[TimelineRow], object] | None = None,
        strict: bool = False,
    ) -> ReplayReport:
        """Feed the durable events to a dry run, and return what it saw.

        As ``events.replay`` of a `perdure.SessionView`; ``on_row`` is called in the loop's thread.
        """


@final
class KernelEventStream(KernelEventReader):
    """A session's kernel events: ``session.events``."""

    @done
    def emit(
        self, kind: str, label: str | None = None, detail: dict[str, Any] | None = None
    ) -> KernelEvent:
        """Append an event, and return it. As ``session.events.emit`` of `perdure.Session`."""


# Contributors: owners of further state, with plain methods or async ones


class Contributor(Protocol):
    """An owner of state that is kept with a session.

    A contributor whose state changes its form raises ``version``, and has a method
    ``migrate(state, from_version)``, which returns the state in the form of
    ``from_version + 1``; it is called once for each step.
    """

    @property
    def name(self) -> str:
        """Its name: its state is in ``plugins/<name>.json``."""
        ...

    @property
    def version(self) -> int:
        """The version of its state's form, from 1 up."""
        ...

    def capture(self) -> Any:
        """Return the state: JSON, or what a session's state can hold; None for none."""
        ...

    def restore(self, state: Any, context: RestoreContext) -> None:
        """Restore a stored state; called once, and only if there is one."""
        ...


@final
class Attachment(Mirror[contributors.Attachment]):
    """An attached contributor; made by `Session.attach`."""

    @property
    def contributor(self) -> Contributor | AsyncContributor:
        """The contributor that was attached."""
        inner = self._inner.contributor
        return inner.contributor if isinstance(inner, ContributorAdapter) else inner

    @done
    def changed(self) -> None:
        """Report that the state has changed: it is captured soon, even if nothing is appended.

        Not needed for changes within a turn, or before an explicit save.
        """

    @done
    def detach(self) -> None:
        """Stop capturing. The stored state stays; changes since the last capture are not saved."""


class ContributorAdapter:
    """An async contributor that wraps a blocking one."""

    def __init__(self, contributor: Contributor) -> None:
        self.contributor: Contributor = contributor
        self._step: Callable[[Any, int], Any] | None = getattr(contributor, "migrate", None)
        self.migrate: Callable[[Any, int], Awaitable[Any]] | None
        self.migrate = None if self._step is None else self._migrate

    @property
    def name(self) -> str:
        """The contributor's own."""
        return self.contributor.name

    @property
    def version(self) -> int:
        """The contributor's own."""
        return self.contributor.version

    async def capture(self) -> Any:
        """Capture the state in a worker thread."""
        return await to_thread.run_sync(self.contributor.capture, abandon_on_cancel=True)

    async def restore(self, state: Any, context: RestoreContext) -> None:
        """Restore the state in a worker thread."""
        await to_thread.run_sync(self.contributor.restore, state, context)

    async def _migrate(self, state: Any, from_version: int) -> Any:
        assert self._step is not None
        return await to_thread.run_sync(self._step, state, from_version)


def as_async(
    inner: session.Session, contributor: Contributor | AsyncContributor
) -> AsyncContributor:
    """Return a contributor as an async one: the same object each time."""
    if inspect.iscoroutinefunction(contributor.capture):
        return cast("AsyncContributor", contributor)
    attached = inner._contributors._attached.values() if inner._contributors else ()
    for attachment in attached:
        if (
            isinstance(attachment.contributor, ContributorAdapter)
            and attachment.contributor.contributor is contributor
        ):
            return attachment.contributor
    return ContributorAdapter(cast("Contributor", contributor))


# What is read of a session, and of a view of one


S = TypeVar("S", bound=session.Session | session.SessionView)
A = TypeVar("A", bound=session.Session | fork.LostSession)


class Rendered(Mirror[S]):
    """The readable parts of a `Session` or a `SessionView`, and the context for a model."""

    @property
    @attribute
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""

    @property
    @attribute
    def restore_report(self) -> RestoreReport:
        """The report of its restore; a document that is damaged is added when it loads later."""

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first asked."""
        return WorkingMemory(self._loop, self._inner.memory)

    @property
    def state(self) -> States:
        """Named states; each loads when it is first asked for."""
        return States(self._loop, self._inner.state)

    @awaited
    def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items, oldest first; page back by the first one's seq."""

    @overload
    def context(
        self,
        format: None = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Message]: ...

    @overload
    def context(
        self,
        format: Listed,
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

    @read
    def context(
        self,
        format: ContextFormat = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any] | RenderedContext:
        """Return what the model sees next, as a provider takes it."""


class Appended(Mirror[A]):
    """The records that were appended to a session, durable or not."""

    @property
    @attribute
    def id(self) -> str:
        """The id that it was opened with."""

    @property
    @attribute
    def epoch(self) -> int:
        """This holder's number, which is the fencing token."""

    @property
    @attribute
    def version(self) -> int:
        """The seq of the newest record that was accepted."""

    @property
    @attribute
    def durable_version(self) -> int:
        """The seq of the newest record that is durable."""

    @read
    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are not durable: also of a session that was lost."""

    @awaited
    def fork_unsaved(
        self, new_id: str, *, new_session: str | None = None, history: fork.History = "full"
    ) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then."""

    @awaited
    def discard_unsaved(self) -> int:
        """Drop the records that are not durable, and return how many; a way out of quarantine."""


@final
class LostSession(Appended[fork.LostSession]):
    """A session that can be written no more, and the records of it that are only in memory.

    As `perdure.types.LostSession`, blocking.
    """

    @property
    @attribute
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""

    @property
    @attribute
    def error(self) -> Exception | None:
        """The store's error when the session was lost."""


@final
class Session(Rendered[session.Session], Appended[session.Session]):
    """One conversation and its state: ``with sessions.open("my-assistant") as session``.

    As `perdure.Session`, blocking. Opening the same id again shares the object, in any thread;
    leaving ``with`` only releases it, and autosave continues.
    """

    def __init__(self, loop: LoopThread, inner: session.Session) -> None:
        super().__init__(loop, inner)
        self._turn_thread = 0  # which has a turn: one at a time

    @read
    def _repr_html_(self) -> str:
        """The session as a small table, for notebooks."""

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
    @read_attribute
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times, as of now."""

    @property
    @read_attribute
    def is_writable(self) -> bool:
        """True if an append would be accepted: the session is open and held here."""

    @property
    @read_attribute
    def unsaved_age(self) -> float:
        """Seconds since the oldest change that is not durable, 0 when all is saved."""

    @property
    @read_attribute
    def autosave(self) -> AutosaveStatus:
        """Its autosave: the setting, whether it is the manager's, and the one in force."""

    @property
    def checkpoints(self) -> CheckpointEngine:
        """Its checkpoints: labelled points to look at and to go back to."""
        return CheckpointEngine(self._loop, self._inner.checkpoints)

    @property
    def events(self) -> KernelEventStream:
        """Its kernel events: what an agent did, on the session's logical clock."""
        return KernelEventStream(self._loop, self._inner.events)

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

    @done
    def describe(
        self,
        *,
        title: str | None = None,
        tags: list[str] | None = None,
        owner: str | None = None,
        **metadata: Any,
    ) -> int:
        """Change what is said about the session, and return the new version."""

    def attach(self, contributor: Contributor | AsyncContributor) -> Attachment:
        """Keep further state with this session: a plugin's, a tool's.

        As `perdure.Session.attach`. Plain methods of a contributor are called in a thread of
        their own, async ones in the manager's loop.
        """
        attached = self._loop.call(lambda: self._inner.attach(as_async(self._inner, contributor)))
        return Attachment(self._loop, attached)

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
        return Turn(self._loop, self, inner)

    def _refuse_in_turn(self, what: str) -> None:
        """Raise if this thread has a turn: it would wait for its own turn's end."""
        if self._turn_thread == threading.get_ident():
            raise SessionError(
                f"session {self.key}: this thread already is in a turn; end it before {what}",
                key=str(self.key),
            )

    @awaited
    def save(self) -> Receipt:
        """Make everything that was appended durable, now, and return the proof.

        As `perdure.Session.save`. Ctrl-C ends the wait, not the save.
        """

    def retract(self, *, after: int) -> int:
        """Take the conversation back to what it was at a record, and return the new version."""
        inner, scopes = self._inner, turns.get()
        return self._loop.call(lambda: inner._retract(after, scopes))

    @done
    def retry(self) -> None:
        """Try again to save a quarantined session, now that the cause is mended."""

    @awaited
    def wait_durable(self, version: int | None = None) -> Receipt:
        """Wait until a version (None: the newest) is durable, without hurrying the save."""

    if not TYPE_CHECKING:
        add_message = Misnamed("session.append(Message.user(…))")
        messages = Misnamed("session.context(), or session.history()")

    def close(self) -> None:
        """Save, fold and let go of the session for everybody in this process.

        As `perdure.Session.aclose`.

        Raises:
            SessionError: This thread is in a turn of the session.
            UnsavedChangesError: Not everything could be made durable in time; it stays open.

        """
        self._refuse_in_turn("closing the session")
        self._loop.call(self._inner.aclose)

    @awaited
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

    @awaited
    def apply(self, plan: RestorePlan) -> int:
        """Do what a plan says, durably, and return the new version. As `perdure.Session.apply`."""


@final
class SessionView(Rendered[session.SessionView]):
    """A read-only view of a session, as of ``seq``, without a lease: from `SessionManager.load`."""

    @property
    @attribute
    def seq(self) -> int:
        """The last record that it shows."""

    @property
    @attribute
    def settled(self) -> bool:
        """False when a takeover was under way, so that the newest records may be missing."""

    @property
    @attribute
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times."""

    @property
    def checkpoints(self) -> CheckpointReader:
        """Its checkpoints, as of ``seq``."""
        return CheckpointReader(self._loop, self._inner.checkpoints)

    @property
    def events(self) -> KernelEventReader:
        """Its kernel events, as of ``seq``."""
        return KernelEventReader(self._loop, self._inner.events)


@final
class Archives(Mirror[archives.Archives]):
    """The files of an agent's home folder, kept with a session. As `perdure.archive.Archives`.

    Args:
        session: An open session; or one that was loaded, to look and to export.
        home: The home folder. Default: the agent's own, where the store keeps one for it.
        paths: ``persist_paths``: folders in it, among them hidden ones that are to be kept.
        whole: Whether everything visible is archived; else only these paths.
        limits: How large an archive may be.
        wait: Seconds to wait for another process that saves or restores the same home.

    Raises:
        ConfigError: A path is absolute, or leaves the home folder.

    """

    def __init__(
        self,
        session: Session | SessionView,
        home: str | os.PathLike[str] | None = None,
        *,
        paths: Sequence[str] = (),
        whole: bool = True,
        limits: ArchiveLimits = ArchiveLimits(),  # noqa: B008  # frozen
        wait: float = 60.0,
    ) -> None:
        inner = archives.Archives(
            session._inner, home, paths=paths, whole=whole, limits=limits, wait=wait
        )
        super().__init__(session._loop, inner)

    @property
    @attribute
    def home(self) -> str | None:
        """The home folder; None where none was given, and the store keeps none for the agent."""

    @awaited
    def all(self) -> list[Archive]:
        """Return the archives that are listed, newest first."""

    @awaited
    def latest(self) -> Archive | None:
        """Return the newest archive, None if there is none."""

    @awaited
    def find(self, name: str | None = None) -> Archive:
        """Return the archive with this id, or the newest with this label; None: the newest.

        Raises:
            ConfigError: There is no such archive.

        """

    @awaited
    def save(
        self, *, label: str = "", keep: int = archives.KEPT, progress: Progress = None
    ) -> ArchiveSaved:
        """Archive the home folder; what it returns is durable, and was read back.

        As `perdure.archive.Archives.save`. ``progress`` is called in the loop's thread.
        """

    @awaited
    def restore(
        self, name: str | None = None, *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Make the home folder what it was. As `perdure.archive.Archives.restore`."""

    @awaited
    def resume(self, *, progress: Progress = None) -> ArchiveRestored:
        """Bring the newest archive back at a start. As `perdure.archive.Archives.resume`."""

    @awaited
    def verify(self, name: str | None = None) -> Archive:
        """Read all of an archive, and return which it was. As `perdure.archive.Archives.verify`."""

    @awaited
    def write(self, path: str | os.PathLike[str], name: str | None = None) -> int:
        """Write an archive into a new file. As `perdure.archive.Archives.write`."""

    @awaited
    def read(
        self, path: str | os.PathLike[str], *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Make the home folder what a file holds. As `perdure.archive.Archives.read`."""
