"""The blocking session manager, `connect`, and saving when the process ends without closing it.

The manager keeps an event loop in a thread of its own. Closing runs there, so that a second Ctrl-C
ends the wait and not the closing.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, final

import anyio
import msgspec
from anyio import to_thread

from perdure import _connect
from perdure._connect import DEFAULT
from perdure._lib import signals
from perdure._lib.loop import in_event_loop
from perdure.autosave.options import INHERIT, KEEP, Inherit
from perdure.errors import SessionClosedError, StoreError
from perdure.providers.context_fit import Format
from perdure.records.keys import DEFAULT_SESSION
from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
from perdure.restore.report import RestorePlan
from perdure.session.rebuild import RebuildReport
from perdure.session.shutdown import THREAD
from perdure.sync.loop import HookThread, LoopThread, closed
from perdure.sync.session import LostSession, Scope, Session, SessionView

if TYPE_CHECKING:
    from perdure.autosave.options import Autosave, AutosaveStatus, EngineOptions, Shutdown
    from perdure.autosave.reports import Health, ShutdownReport
    from perdure.formats.state import StateStorage
    from perdure.lease import LeaseOptions, OnHeld
    from perdure.records.checkpoints import Checkpoint
    from perdure.records.keys import SessionKey
    from perdure.session import manager, session
    from perdure.session.delete import ForgetReport
    from perdure.session.fork import Fork, History
    from perdure.session.inbox import PostReceipt
    from perdure.session.options import Limits
    from perdure.session.prune import PruneReport
    from perdure.session.retention import Retention
    from perdure.session.runtime import EventName
    from perdure.store import DeadLetter, SessionInfo, Store


log: logging.Logger = logging.getLogger("perdure")

_open: set[SessionManager] = set()
_registered = False
_main_has_ended = False


def save_at_exit(manager: SessionManager) -> None:
    """Save what a manager accepted, should the process end before it is closed."""
    global _registered, _main_has_ended  # noqa: PLW0603  # once a process
    _open.add(manager)
    if not _registered:
        _registered = True
        # What concurrent.futures uses too; where it is missing, what comes later may do.
        register = getattr(threading, "_register_atexit", atexit.register)
        try:
            import concurrent.futures.thread  # noqa: F401  # its hook runs after ours: closing needs it

            register(_at_exit)
        except RuntimeError:
            _main_has_ended = True
    # In the main thread this is an exit handler, after which no thread is waited for.
    if _main_has_ended and threading.current_thread() is not threading.main_thread():
        _watch([manager])


def _watch(managers: list[SessionManager]) -> None:
    # Never a daemon: the process must wait for it.
    threading.Thread(target=_when_they_end, args=(managers,), name=THREAD, daemon=False).start()


def _at_exit() -> None:
    global _main_has_ended  # noqa: PLW0603  # once a process
    _main_has_ended = True
    managers = [manager for manager in tuple(_open) if manager._is_here]
    if not managers:
        return
    if _at_work():
        _each(managers, lambda manager: manager.flush(manager._patience))
        _watch(managers)
    else:
        _each(managers, lambda manager: manager.close())


def _when_they_end(managers: list[SessionManager]) -> None:
    for thread in _at_work():
        thread.join()
    _each(
        [manager for manager in managers if manager in _open],
        lambda manager: manager.flush(manager._patience),
    )


def _at_work() -> list[threading.Thread]:
    """Return the threads that the interpreter will wait for."""
    own_threads = {threading.main_thread(), threading.current_thread()}
    threads = [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread not in own_threads
    ]
    return [thread for thread in threads if thread.name != THREAD]


def _each(managers: list[SessionManager], act: Callable[[SessionManager], object]) -> None:
    """Act on all of them at once, and wait no longer than the most patient one."""
    if not managers:
        return
    threads = [
        threading.Thread(target=_guarded, args=(act, manager), daemon=True) for manager in managers
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + max([manager._patience for manager in managers])
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))


def _guarded(act: Callable[[SessionManager], object], manager: SessionManager) -> None:
    try:
        act(manager)
    except Exception:
        log.exception("saving at the end of the process failed")


# SIGTERM in a blocking program
#
# Over another handler the drain begins, and that handler runs. Over the default action the
# main thread gets a SystemExit, as Ctrl-C gives it a KeyboardInterrupt: blocks are left, the
# manager closes, and leaving its ``with`` ends the process with the signal's own status. A manager
# that another thread has connected is closed.


_BY_SIGNAL = 128
"""What shells add to a signal's number for an exit status."""
_STEP = 0.02
"""Seconds between two looks at whether other managers have closed."""


@final
class TermWatch:
    """Watch for SIGTERM between ``install`` and ``uninstall``.

    Args:
        patience: Seconds that closing may take.
        drain: Begins the drain; returns whether it could.
        close: Begins to close, without waiting.

    """

    def __init__(
        self, *, patience: float, drain: Callable[[], bool], close: Callable[[], object]
    ) -> None:
        self.patience: float = patience
        self.received: bool = False
        """Whether SIGTERM has come over the default action."""
        self.finished: bool = False
        self.leaving: bool = False
        """Whether the block is being left, which ends the process then."""
        self._drain = drain
        self._close = close
        self._in_main = threading.current_thread() is threading.main_thread()

    def install(self) -> None:
        """Start watching."""
        signals.join(self)

    def uninstall(self) -> None:
        """Stop watching."""
        self.finished = True
        signals.leave(self)

    def end_process(self) -> NoReturn:
        """End the process when all notified managers have closed, or their time is over."""
        while signals.waited_for() and signals.time_left() > 0:
            time.sleep(_STEP)
        signals.end_process()
        raise SystemExit(_BY_SIGNAL + signal.SIGTERM)  # where a signal takes its time

    # in the signal handler

    def drain(self) -> bool:
        """Begin to drain."""
        return self._drain()

    def end(self) -> SystemExit | None:
        """Raise SystemExit to leave the blocks, or close without that."""
        if not self._in_main:
            self._close()
        if self.leaving or not self._in_main:
            return None
        return SystemExit(_BY_SIGNAL + signal.SIGTERM)

    def rescue(self) -> None:
        """Do nothing: it has a loop of its own, which runs."""


T = TypeVar("T")


_PATIENCE = 1.0
"""Seconds to wait for threads that have nothing left to do but to end."""


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
            stacklevel=2,
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
    )
    return SessionManager(inner)


@final
class SessionManager:
    """Keep the sessions of one process, for blocking code. As `perdure.SessionManager`.

    Any thread may use it. A process that ends without closing it still saves what it accepted.
    """

    def __init__(self, inner: manager.SessionManager) -> None:
        self._inner = inner
        self._loop = LoopThread("perdure")
        self._hooks = HookThread("perdure hooks", self._on_exit)
        self._exit: BaseException | None = None
        self._shared: weakref.WeakValueDictionary[SessionKey, Session]
        self._shared = weakref.WeakValueDictionary()
        self._closing = False
        self._report: Future[ShutdownReport] = Future()
        self._signals = TermWatch(
            patience=inner._shutdown.deadline + inner._shutdown.hard_grace,
            drain=lambda: self._loop.post(self._drain_soon),
            close=lambda: self._loop.post(self._begin_close),
        )
        signals = inner._shutdown.signals
        inner._shutdown = msgspec.structs.replace(inner._shutdown, signals=False)  # ours sees to it
        try:
            self._loop.call(self._start)
        except BaseException:
            self._loop.post(self._loop.stop)
            raise
        save_at_exit(self)
        if signals:
            self._signals.install()

    async def _start(self) -> None:
        await self._inner
        if self._inner._connected is not None:
            self._inner._connected.runtime.host.on_exit = self._on_exit
            self._inner._connected.at_exit.leave_to_owner()  # see `exiting`

    def _drain_soon(self) -> None:
        if not self._closing:
            self._inner.drain()

    def _on_exit(self, error: BaseException) -> None:
        """A hook has raised what is meant to end the program: interrupt it, as Ctrl-C would."""
        if self._exit is None:
            self._exit = error
            if not self._closing:
                _thread.interrupt_main()

    def __repr__(self) -> str:
        return repr(self._inner)

    def _repr_html_(self) -> str:
        return self._loop.read(self._inner._repr_html_)

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
        self._signals.leaving = True
        report = self.close()
        if self._signals.received:
            self._signals.end_process()
        if exc_type is None or issubclass(exc_type, Exception):
            report.raise_if_unsaved()

    # sessions

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
        autosave: Autosave | Inherit | None = KEEP,
    ) -> Session:
        """Open a session to write: ``with sessions.open("my-assistant") as session``.

        As `perdure.SessionManager.open`: everybody in this process who opens the same id shares
        one object, in whichever thread. Leaving ``with`` lets go of it; autosave owns it from
        then on.
        """

        async def opened() -> Session:
            inner = await self._inner.open(
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
                autosave=autosave,
            )
            return self._share(inner)

        return self._loop.call(opened)

    def _share(self, inner: session.Session) -> Session:
        """Return the one object for a session, in the loop's thread."""
        shared = self._shared.get(inner.key)
        if shared is None or shared._inner is not inner:
            shared = self._shared[inner.key] = Session(self._loop, inner)
        return shared

    def post(
        self,
        id: str,
        *items: Any,
        key: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> PostReceipt:
        """Post items to a session, durably, whichever process holds it; it need not exist yet.

        As `perdure.SessionManager.post`.
        """
        return self._loop.call(
            lambda: self._inner.post(id, *items, key=key, session=session, tenant=tenant)
        )

    def dead_letters(
        self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = ""
    ) -> tuple[DeadLetter, ...]:
        """Return the posted items of a session that could not be delivered, with their bytes.

        As `perdure.SessionManager.dead_letters`.
        """
        return self._loop.call(lambda: self._inner.dead_letters(id, session=session, tenant=tenant))

    def retry_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Post dead letters again, after the waiting items; return how many there were.

        As `perdure.SessionManager.retry_dead_letters`.
        """
        return self._loop.call(
            lambda: self._inner.retry_dead_letters(id, keys, session=session, tenant=tenant)
        )

    def drop_dead_letters(
        self,
        id: str,
        keys: Collection[str] | None = None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> int:
        """Remove dead letters permanently; return how many there were.

        As `perdure.SessionManager.drop_dead_letters`.
        """
        return self._loop.call(
            lambda: self._inner.drop_dead_letters(id, keys, session=session, tenant=tenant)
        )

    def load(
        self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = "", context: bool = True
    ) -> SessionView | None:
        """Read a session without a lease, as of now; None if there is none.

        As `perdure.SessionManager.load`.
        """
        view = self._loop.call(
            lambda: self._inner.load(id, session=session, tenant=tenant, context=context)
        )
        return None if view is None else SessionView(self._loop, view)

    def scope(
        self, id: str, *, tenant: str = "", owner: str | None = None, wait: float = 10.0
    ) -> Scope:
        """Return values that sessions share. As `perdure.SessionManager.scope`."""
        return Scope(self._loop, self._inner.scope(id, tenant=tenant, owner=owner, wait=wait))

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
        return self._loop.call(
            lambda: self._inner.list_scopes(
                tenant=tenant, owner=owner, prefix=prefix, after=after, limit=limit
            )
        )

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
    ) -> list[SessionInfo]:
        """List sessions by id; pass the last one as ``after`` for the next page.

        As `perdure.SessionManager.list`.
        """
        return self._loop.call(
            lambda: self._inner.list(
                tenant=tenant,
                owner=owner,
                tag=tag,
                prefix=prefix,
                after=after,
                limit=limit,
                newest_first=newest_first,
            )
        )

    def exists(self, id: str, *, session: str = DEFAULT_SESSION, tenant: str = "") -> bool:
        """Say whether there is such a session."""
        return self._loop.call(lambda: self._inner.exists(id, session=session, tenant=tenant))

    # all of them

    def on(self, event: EventName, hook: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``hook`` at each event, and return what takes it off again.

        Hooks run in threads of their own and may use this API: ``before_save`` before a due
        save, which waits for it, with the session; all others in the events' order, with facts. A
        hook that fails is logged.

        Raises:
            ConfigError: There is no such event.

        """

        async def ask(inner: session.Session) -> None:
            await to_thread.run_sync(hook, self._share(inner), abandon_on_cancel=True)

        def schedule(facts: object) -> None:
            self._hooks.schedule(hook, facts)

        relay = ask if event == "before_save" else schedule
        off = self._loop.do(lambda: self._inner.on(event, relay))
        return lambda: self._loop.do(off)

    def flush(self, deadline: float | None = None) -> bool:
        """Save every session now, and say whether all that was appended is durable.

        As `perdure.SessionManager.flush`.
        """
        return self._loop.call(lambda: self._inner.flush(deadline))

    def health(self) -> Health:
        """Say how saving goes: for readiness probes, never for liveness.

        As `perdure.SessionManager.health`.
        """
        return self._loop.do(self._inner.health)

    @property
    def shutdown_report(self) -> ShutdownReport | None:
        """What became of every unsaved record, once the manager has been closed."""
        return self._inner.shutdown_report

    @property
    def lost(self) -> tuple[LostSession, ...]:
        """Sessions that others have taken over. As `perdure.SessionManager.lost`."""
        return self._loop.read(
            lambda: tuple([LostSession(self._loop, session) for session in self._inner.lost])
        )

    @property
    def autosave(self) -> AutosaveStatus:
        """When sessions without settings of their own save themselves, and what is in force now."""
        return self._loop.read(lambda: self._inner.autosave)

    def tune(
        self,
        autosave: Autosave | Inherit | None = INHERIT,
        *,
        id: str | None = None,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
    ) -> None:
        """Change the autosave settings of one session, or of all without settings of their own.

        As `perdure.SessionManager.tune`.
        """
        self._loop.do(lambda: self._inner.tune(autosave, id=id, session=session, tenant=tenant))

    def drain(self) -> None:
        """Begin to stop: open no more sessions, save every change as it comes; turns continue.

        As `perdure.SessionManager.drain`.
        """
        self._loop.do(self._inner.drain)

    def close(self, deadline: float | None = None) -> ShutdownReport:
        """Drain, flush, fold, release and stop, within the shutdown deadline.

        Ctrl-C ends the wait, not the closing.

        Returns:
            What was saved, and what could not be: ``report.raise_if_unsaved()``.

        """
        if not self._report.done():
            with contextlib.suppress(SessionClosedError):  # the loop's end is what it waits for
                self._loop.call(lambda: self._closed(deadline))
            self._hooks.finish(_PATIENCE)
            self._loop.join(_PATIENCE)
        self._signals.uninstall()
        _open.discard(self)
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
            self._loop.tasks.start_soon(self._close, deadline)

    async def _close(self, deadline: float | None) -> None:
        try:
            self._report.set_result(await self._inner.aclose(deadline))
        except Exception as error:  # noqa: BLE001  # raised by close
            self._report.set_exception(error)
        finally:
            self._loop.stop()

    # for the end of the process

    @property
    def _is_here(self) -> bool:
        """Whether this process has its thread, and did not get it by a fork."""
        return not self._loop.forked

    @property
    def _patience(self) -> float:
        shutdown = self._inner._shutdown
        return shutdown.deadline + shutdown.hard_grace + _PATIENCE

    def fork(
        self,
        id: str,
        new_id: str,
        *,
        at: int | str | Checkpoint | None = None,
        history: History = "full",
        session: str = DEFAULT_SESSION,
        new_session: str | None = None,
        tenant: str = "",
        wait: float = 10.0,
    ) -> Fork:
        """Fork a session: a new one begins with its history, and both continue independently.

        As `perdure.SessionManager.fork`.
        """
        return self._loop.call(
            lambda: self._inner.fork(
                id,
                new_id,
                at=at,
                history=history,
                session=session,
                new_session=new_session,
                tenant=tenant,
                wait=wait,
            )
        )

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
        """Make a session with all of another one's history and state; what is in progress, too.

        As `perdure.SessionManager.copy`.
        """
        return self._loop.call(
            lambda: self._inner.copy(
                id, new_id, session=session, new_session=new_session, tenant=tenant, wait=wait
            )
        )

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
        """Give a session another id; if it is open in this process, open it again.

        As `perdure.SessionManager.rename`.
        """
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

    def delete(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> bool:
        """Remove a session and all that it owns; False if there was none.

        As `perdure.SessionManager.delete`.
        """
        return self._loop.call(
            lambda: self._inner.delete(
                id, session=session, tenant=tenant, on_held=on_held, wait=wait
            )
        )

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
        """Remove sessions and everything that only they reach, and say what was kept and why.

        As `perdure.SessionManager.forget`.
        """
        return self._loop.call(
            lambda: self._inner.forget(
                id=id,
                session=session,
                tenant=tenant,
                owner=owner,
                tag=tag,
                dry_run=dry_run,
                on_held=on_held,
                wait=wait,
            )
        )

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
        """Remove the history that a retention lets go, and the sessions that have expired.

        As `perdure.SessionManager.prune`.
        """
        return self._loop.call(
            lambda: self._inner.prune(
                retention,
                id=id,
                session=session,
                tenant=tenant,
                dry_run=dry_run,
                on_held=on_held,
                wait=wait,
            )
        )

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
        """Return what opening a session would use, repair, strip and rebuild, and why.

        As `perdure.SessionManager.plan_restore`.
        """
        return self._loop.call(
            lambda: self._inner.plan_restore(
                id,
                target=target,
                system_prompt=system_prompt,
                options=options,
                session=session,
                tenant=tenant,
            )
        )

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
        """Rebuild a session's working context, and all its other documents, from its log.

        As `perdure.SessionManager.rebuild_working_context`.
        """
        return self._loop.call(
            lambda: self._inner.rebuild_working_context(
                id, dry_run=dry_run, session=session, tenant=tenant, on_held=on_held, wait=wait
            )
        )
