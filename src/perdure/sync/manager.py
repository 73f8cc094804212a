"""The blocking session manager, `connect`, and saving when the process ends without closing it.

The manager keeps an event loop in a thread of its own. Closing runs there, so that a second Ctrl-C
ends the wait and not the closing.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

import anyio
from anyio import to_thread

from perdure import _connect
from perdure._connect import DEFAULT
from perdure._lib import signals
from perdure._lib.loop import in_event_loop
from perdure._lib.misnamed import Misnamed
from perdure._lib.options import names_options
from perdure.autosave.options import INHERIT, KEEP
from perdure.errors import SessionClosedError, StoreError
from perdure.records.keys import DEFAULT_SESSION, session_key
from perdure.session.events import typed_by_event
from perdure.sync.loop import HookThread, LoopThread, closed
from perdure.sync.mirror import attribute, awaited, done, read, read_attribute
from perdure.sync.session import LostSession, Scope, Session, SessionView

if TYPE_CHECKING:
    from perdure import (
        Autosave,
        EngineOptions,
        LeaseOptions,
        Limits,
        Retention,
        SessionKey,
        Shutdown,
    )
    from perdure.checkpoints import Checkpoint
    from perdure.formats import StateStorage
    from perdure.lease import OnDamage, OnHeld
    from perdure.providers.context_fit import Format
    from perdure.restore import WorkingContextSnapshotBootstrapOptions
    from perdure.session import fork, manager, session
    from perdure.session.connected import ManagerParts
    from perdure.session.events import EventName
    from perdure.store import SessionInfo, Store
    from perdure.types import (
        AutosaveStatus,
        DeadLetter,
        ForgetReport,
        Fork,
        Health,
        Inherit,
        PostReceipt,
        PruneReport,
        RebuildReport,
        RestorePlan,
        ShutdownReport,
    )


_BY_SIGNAL = 128 + signal.SIGTERM
"""The status that shells make of it."""


@names_options
def connect(
    url: str | os.PathLike[str] | Store | StateStorage | None = None,
    *,
    autosave: Autosave | None = DEFAULT,
    lease: LeaseOptions = DEFAULT,
    shutdown: Shutdown = DEFAULT,
    limits: Limits = DEFAULT,
    types: Sequence[Any] = (),
    engine: EngineOptions | None = None,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    retention: Retention | None = None,
) -> SessionManager:
    """Connect at once: ``with perdure.sync.connect(…) as sessions``.

    The arguments are those of `perdure.connect`.

    Raises:
        ConfigError: The URL or an option is invalid.
        StoreUnavailableError: The store cannot be reached or written.

    Warns:
        RuntimeWarning: An event loop runs in this thread, which each call would block.

    """
    # A notebook's cells may block its loop.
    if in_event_loop() and "ipykernel" not in sys.modules:
        warnings.warn(
            "perdure.sync blocks the event loop that runs in this thread: use `perdure` in async "
            "code, or perdure.sync in a thread of its own, such as by anyio.to_thread.run_sync",
            RuntimeWarning,
            stacklevel=3,  # past the check of the options' names
        )
    inner = _connect.connect(
        url,
        autosave=autosave,
        lease=lease,
        shutdown=shutdown,
        limits=limits,
        types=types,
        engine=engine,
        config=config,
        read_only=read_only,
        retention=retention,
    )
    return SessionManager(inner)


@final
class SessionManager:
    """Keep the sessions of one process, for blocking code. As `perdure.SessionManager`.

    Any thread may use it. A process that ends without closing it still saves what it accepted.
    """

    def __init__(self, inner: manager.SessionManager) -> None:
        self._inner = inner
        self._loop = LoopThread("perdure:loop")
        self._hooks = HookThread("perdure:hooks", self._on_exit)
        self._exit: BaseException | None = None
        self._shared: weakref.WeakValueDictionary[SessionKey, Session]
        self._shared = weakref.WeakValueDictionary()
        self._closing = False
        self._report: Future[ShutdownReport] = Future()
        self._is_left = False
        """True while its block is being left, which ends the process after SIGTERM."""
        self._in_main = threading.current_thread() is threading.main_thread()
        inner._by_owner = self.close
        try:
            self._loop.call(self._start)
        except BaseException:
            self._loop.post(self._loop.stop)
            raise
        if self._parts is not None:
            self._parts.signals.raising = self._leave_block
            self._parts.install()  # in this thread: only the main one installs a handler

    @property
    def _parts(self) -> ManagerParts | None:
        return self._inner._connected

    async def _start(self) -> None:
        await self._inner
        if self._parts is not None:
            self._parts.runtime.host.on_exit = self._on_exit

    def _leave_block(self) -> SystemExit | None:
        """SIGTERM has come: have the main thread leave its blocks, as Ctrl-C would."""
        if not self._in_main:  # another thread's are not left: it is closed under them
            self._loop.post(self._begin_close)
            return None
        return None if self._is_left else SystemExit(_BY_SIGNAL)

    def _on_exit(self, error: BaseException) -> None:
        """A hook has raised what is meant to end the program: interrupt it, as Ctrl-C would."""
        if self._exit is None:
            self._exit = error
            if not self._closing:
                _thread.interrupt_main()

    def __repr__(self) -> str:
        return repr(self._inner)

    @read
    def _repr_html_(self) -> str:
        """The manager as a small table, for notebooks."""

    def __enter__(self) -> Self:
        if self._report.done():
            raise closed()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop.forked:  # the parent's manager
            return
        self._is_left = True
        report = self.close()
        if self._parts is not None and self._parts.signals.received:
            signals.wait_for_others()
            signals.end_process()
            raise SystemExit(_BY_SIGNAL)  # where a signal takes its time
        if exc_type is None or issubclass(exc_type, Exception):
            report.raise_if_unsaved()

    # sessions

    if not TYPE_CHECKING:
        create = Misnamed("with sessions.open(id) as session")
        get = Misnamed("with sessions.open(id) as session, or sessions.load(id)")

    @names_options
    def open(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        owner: str | None = None,
        tags: Sequence[str] = (),
        create: bool = True,
        new: bool = False,
        on_held: OnHeld = "handover",
        wait: float = 10.0,
        force: bool = False,
        strict: bool = False,
        on_damage: OnDamage = "raise",
        autosave: Autosave | Inherit | None = KEEP,
    ) -> Session:
        """Open a session to write: ``with sessions.open("my-assistant") as session``.

        As `perdure.SessionManager.open`: everybody in this process who opens the same id shares
        one object, in whichever thread. Leaving ``with`` lets go of it; autosave owns it from
        then on.
        """
        thread = threading.get_ident()

        async def opened() -> Session:
            opening = self._inner.open(
                id,
                session=session,
                tenant=tenant,
                owner=owner,
                tags=tags,
                create=create,
                new=new,
                on_held=on_held,
                wait=wait,
                force=force,
                strict=strict,
                on_damage=on_damage,
                autosave=autosave,
            )
            wanted = opening._wanted
            shared = self._shared.get(wanted.key)
            in_turn = shared is not None and shared._turn_thread == thread
            return self._share(await opening._opener.open(wanted, in_turn=in_turn))

        return self._loop.call(opened)

    def _share(self, inner: session.Session) -> Session:
        """Return the one object for a session, in the loop's thread."""
        shared = self._shared.get(inner.key)
        if shared is None or shared._inner is not inner:
            shared = self._shared[inner.key] = Session(self._loop, inner)
        return shared

    @awaited
    def post(
        self,
        id: str,
        *items: Any,
        key: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> PostReceipt:
        """Post items to a session, durably, whichever process holds it; it need not exist yet."""

    @awaited
    def dead_letters(
        self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = ""
    ) -> tuple[DeadLetter, ...]:
        """Return the posted items of a session that could not be delivered, with their bytes."""

    @awaited
    def retry_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Post dead letters again, after the waiting items; return how many there were."""

    @awaited
    def drop_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Remove dead letters permanently; return how many there were."""

    def load(
        self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = "", context: bool = True
    ) -> SessionView | None:
        """Read a session without a lease, as of now; None if there is none."""
        view = self._loop.call(
            lambda: self._inner.load(id, session=session, tenant=tenant, context=context)
        )
        return None if view is None else SessionView(self._loop, view)

    def scope(
        self, id: str, *, tenant: str = "", owner: str | None = None, wait: float = 10.0
    ) -> Scope:
        """Return values that sessions share. As `perdure.SessionManager.scope`."""
        return Scope(self._loop, self._inner.scope(id, tenant=tenant, owner=owner, wait=wait))

    @awaited
    def list_scopes(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        prefix: str = "",
        after: SessionInfo | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        """List scopes by id. As `perdure.SessionManager.list_scopes`."""

    @awaited
    def list(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionInfo | None = None,
        limit: int = 100,
        newest_first: bool = False,
        since: float | None = None,
        before: float | None = None,
    ) -> list[SessionInfo]:
        """List sessions by id; pass the last one as ``after`` for the next page."""

    @awaited
    def exists(self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = "") -> bool:
        """Say whether there is such a session."""

    # all of them

    @typed_by_event(Session)
    def on(self, event: EventName, hook: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``hook`` at each event, and return what takes it off again.

        Hooks run in threads of their own and may use this API: ``before_save`` before a due
        save, which waits for it, with the session; all others in the events' order, with their
        payloads, which `perdure.events` has. A hook that fails is logged.

        Raises:
            ConfigError: There is no such event.

        """

        async def ask(inner: session.Session) -> None:
            await to_thread.run_sync(hook, self._share(inner), abandon_on_cancel=True)

        def schedule(facts: object) -> None:
            self._hooks.schedule(hook, facts)

        relay: Callable[[Any], object] = ask if event == "before_save" else schedule
        off = self._loop.do(lambda: self._inner.on(event, relay))
        return lambda: self._loop.do(off)

    @awaited
    def flush(self, deadline: float | None = None) -> bool:
        """Save every session now, and say whether all that was appended is durable."""

    @done
    def health(self) -> Health:
        """Say how saving goes: for readiness probes, never for liveness."""

    @property
    @attribute
    def shutdown_report(self) -> ShutdownReport | None:
        """The fate of every unsaved record, once the manager has been closed."""

    @property
    def lost(self) -> tuple[LostSession, ...]:
        """Sessions that others have taken over. As `perdure.SessionManager.lost`."""
        return self._loop.read(
            lambda: tuple([LostSession(self._loop, session) for session in self._inner.lost])
        )

    @property
    @read_attribute
    def autosave(self) -> AutosaveStatus:
        """The autosave settings of sessions without their own, and those in force now."""

    @done
    def tune(
        self,
        autosave: Autosave | Inherit | None = INHERIT,
        *,
        id: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> None:
        """Change the autosave settings of one session, or of all without settings of their own."""

    @done
    def drain(self) -> None:
        """Begin to stop: open no more sessions, save every change as it comes; turns continue."""

    def close(self, deadline: float | None = None) -> ShutdownReport:
        """Drain, flush, fold, release and stop, within the shutdown deadline.

        Ctrl-C ends the wait, not the closing.

        Returns:
            What was saved, and what could not be: ``report.raise_if_unsaved()``.

        """
        if not self._report.done():
            with contextlib.suppress(SessionClosedError):  # the loop's end is what it waits for
                self._loop.call(lambda: self._closed(deadline))
            if self._parts is not None:
                self._hooks.finish(self._parts.closing.time_left())
                self._loop.join(self._parts.closing.time_left())
        if self._parts is not None:
            self._parts.signals.uninstall()  # here, where the handler was installed
        if self._exit is not None:
            error, self._exit = self._exit, None
            raise error
        if not self._report.done():
            raise StoreError("the thread of this manager has failed; stderr says how")
        return self._report.result()

    async def _closed(self, deadline: float | None) -> None:
        """Begin to close, unless that has begun, and wait for the loop's end."""
        self._begin_close(deadline)
        await anyio.sleep_forever()

    def _begin_close(self, deadline: float | None = None) -> None:
        if not self._closing:
            self._closing = True
            self._loop.tasks.start_soon(self._close, deadline, name="perdure:close")

    async def _close(self, deadline: float | None) -> None:
        try:
            self._report.set_result(await self._inner.aclose(deadline))
        except Exception as error:  # noqa: BLE001  # raised by close
            self._report.set_exception(error)
        finally:
            self._loop.stop()

    @awaited
    def fork(
        self,
        id: str,
        new_id: str,
        *,
        at: int | str | Checkpoint | None = None,
        history: fork.History = "full",
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        wait: float = 10.0,
    ) -> Fork:
        """Fork a session: a new one begins with its history, and both continue independently."""

    @awaited
    def copy(
        self,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        wait: float = 10.0,
    ) -> Fork:
        """Make a session with all of another one's history and state; what is in progress, too."""

    def rename(
        self,
        id: str,
        new_id: str,
        *,
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> Fork:
        """Give a session another id; if it is open in this process, open it again."""
        shared = self._loop.do(lambda: self._shared.get(session_key(id, session, tenant)))
        if shared is not None:
            shared._refuse_in_turn("renaming the session")
        return self._loop.call(
            lambda: self._inner.rename(
                id,
                new_id,
                session=session,
                new_session=new_session,
                tenant=tenant,
                on_held=on_held,
                wait=wait,
            )
        )

    @awaited
    def delete(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> bool:
        """Remove a session and all that it owns; False if there was none."""

    @awaited
    def forget(
        self,
        id: str | None = None,
        *,
        session: str | None = None,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        dry_run: bool = False,
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> ForgetReport:
        """Remove sessions and everything that only they reach, and say what was kept and why."""

    @awaited
    def prune(
        self,
        retention: Retention,
        *,
        id: str | None = None,
        session: str | None = None,
        tenant: str = "",
        dry_run: bool = False,
        on_held: OnHeld = "raise",
        wait: float = 0.0,
    ) -> PruneReport:
        """Remove the history that a retention lets go, and the sessions that have expired."""

    @awaited
    def plan_restore(
        self,
        id: str,
        *,
        target: Format | None = None,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> RestorePlan:
        """Return what opening a session would use, repair, strip and rebuild, and why."""

    @awaited
    def rebuild_working_context(
        self,
        id: str,
        *,
        dry_run: bool = False,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "raise",
        wait: float = 0.0,
    ) -> RebuildReport:
        """Rebuild a session's working context, and all its other documents, from its log."""
