"""Stopping a manager: drain, seal, flush, fold, release, report. Always within a deadline."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, final

import anyio
import msgspec
from anyio import to_thread

from perdure._lib import signals
from perdure._lib.tasks import each, was_cancelled
from perdure.autosave.reports import ShutdownReport, Unsaved
from perdure.autosave.tracked import State, Tracked
from perdure.errors import SessionClosedError, UnsupportedVersionError
from perdure.lineage.store import followed
from perdure.records.keys import SessionKey
from perdure.session import process_exit
from perdure.session import spill as spilling
from perdure.session.base import SessionBase
from perdure.session.lifecycle import SessionLifecycle
from perdure.session.runtime import Runtime

if TYPE_CHECKING:
    from perdure.session.manager import SessionManager

log: logging.Logger = logging.getLogger("perdure")

SPILLERS: Final = 8
"""Spill files that are written at once: a disk syncs several about as fast as one."""


class ManagerShutdown:
    """The shutdown of one manager, done once, however often it is asked for."""

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle) -> None:
        self.runtime = runtime
        self._lifecycle = lifecycle
        self.begun: bool = False
        self._until = 0.0
        """When the deadline is over, once the shutdown has begun."""
        self._ran: anyio.Event = anyio.Event()
        self.done: anyio.Event = anyio.Event()
        self.report: ShutdownReport | None = None
        runtime.host.at_end(self.done.set)  # whatever has ended it: nobody waits in vain
        self._kept: set[_Id] = set()
        """What is in a spill file."""

    def drain(self) -> None:
        """Save every change at once, and open nothing new; turns continue."""
        if self.runtime.draining:
            return
        self.runtime.draining = True
        for pending_load in self.runtime.pending_loads.values():
            pending_load.scope.cancel()  # a load: whoever waits for it is refused in any case
        self.runtime.saver.begin_drain()
        self.runtime.hooks.emit("drain", None)

    def begin(self, deadline: float | None) -> None:
        """Start the shutdown in the manager's own task, unless it has begun."""
        if not (self.begun or self.done.is_set()):
            self._begin(deadline)
            try:
                self.runtime.host.spawn(self._run)
            except BaseException:
                self.begun = False
                raise

    def _begin(self, deadline: float | None = None) -> None:
        total = self.runtime.shutdown.deadline if deadline is None else deadline
        self.begun, self._until = True, self.runtime.clock() + total

    async def torn_down(self) -> None:
        """Save what can be saved: the loop is ending under a manager that is open, or closing."""
        if not self.begun:
            self._begin()
            await self._run()
        await self._ran.wait()
        if not self.done.is_set():  # cut with all that ran: there is still time left
            await self._run()
        self.done.set()
        self.tell_rest({})  # nobody gets the report
        await self.runtime.store.aclose()  # nobody else may

    async def _run(self) -> None:
        try:
            self.report = await self._shut_down()
        except BaseException as error:
            if not was_cancelled(error):
                self.done.set()
            raise
        else:
            self.done.set()
        finally:
            self._ran.set()

    async def _shut_down(self) -> ShutdownReport:
        options, clock, start = self.runtime.shutdown, self.runtime.clock, self.runtime.clock()
        self.drain()
        await self._turns_end(min(options.turn_grace, self._left()))
        self.runtime.saver.seal()
        grace = options.hard_grace
        report = await self.runtime.saver.aclose(deadline=self._left(), hard_grace=grace)
        report = await self._spill(report)
        await self._let_go(self._until + grace)
        self._close_all()
        return msgspec.structs.replace(report, duration=clock() - start)

    def _left(self) -> float:
        return max(self._until - self.runtime.clock(), 0.0)

    async def _spill(self, report: ShutdownReport) -> ShutdownReport:
        """Keep in local files what the store would not take."""
        folder, is_named = self.runtime.spill_folder, self.runtime.shutdown.spill is not None
        unsaved_sessions = report.unsaved + report.in_doubt
        tracked = [
            session._tracked
            for session in map(self.runtime.sessions.get, _keys(unsaved_sessions))
            if session
        ]
        refused = map(self.runtime.sessions.get, _keys(report.quarantined))
        tracked += [
            session._tracked for session in refused if session and not _is_refused(session._tracked)
        ]
        if is_named:  # else what becomes of it is up to whoever looks at `sessions.lost`
            tracked += [lost for lost in self.runtime.saver.lost if lost.pending]
        if folder is None or not tracked:
            return report
        spilled: set[_Id] = set()

        async def spill(unsaved: Tracked) -> None:
            if await to_thread.run_sync(self._spill_one, folder, unsaved):
                spilled.add((unsaved.key, unsaved.durable, unsaved.version))

        await each(tracked, spill, at_once=SPILLERS)
        settled = await to_thread.run_sync(_settled, folder)
        self._kept = spilled if settled else set()
        return (_with_spilled if is_named else _with_folder)(report, self._kept, folder)

    def _spill_one(self, folder: str, tracked: Tracked) -> bool:
        key, epoch, base = tracked.key, tracked.epoch, tracked.durable
        try:
            entries = spilling.sealed(
                self.runtime.store, key, epoch=epoch, base=base, entries=tracked.pending
            )
            path = spilling.write(
                folder,
                key,
                epoch=epoch,
                base=base,
                entries=entries,
                owner=self.runtime.store.owner,
                begun=followed(self.runtime.store).begun_at(key, epoch),
            )
        except Exception as error:  # the others' are to be kept all the same
            log.exception("spill failed", extra={"session": str(key)}, exc_info=error)
            return False
        log.warning("spilled", extra={"session": str(key), "path": path})
        return True

    # the end of the process

    def pending(self) -> dict[str, int]:
        """Return how many records each session has that are not durable."""
        counts: dict[str, int] = {}
        for tracked in self._rest():
            counts[str(tracked.key)] = (
                counts.get(str(tracked.key), 0) + tracked.version - tracked.durable
            )
        return counts

    def tell_rest(self, before: dict[str, int]) -> None:
        """Spill what will not be saved any more, and print the outcome to stderr.

        Args:
            before: The `pending` that saving began with.

        """
        folder, tracked = self.runtime.spill_folder, self._rest()
        news = [
            tracked_session
            for tracked_session in tracked
            if _id_of(tracked_session) not in self._kept and tracked_session.pending
        ]
        news = [tracked_session for tracked_session in news if not _is_refused(tracked_session)]
        if folder is not None:
            spilled = {
                _id_of(tracked_session)
                for tracked_session in news
                if self._spill_one(folder, tracked_session)
            }
            if spilled and _settled(folder):
                self._kept |= spilled
        if self.runtime.durability == "memory":
            return  # which has nothing to lose
        counts = {
            str(tracked_session.key): tracked_session.version - tracked_session.durable
            for tracked_session in tracked
            if _id_of(tracked_session) in self._kept
        }
        lost = {key: n for key, n in self.pending().items() if key not in counts}
        saved = {key: n for key, n in before.items() if key not in counts and key not in lost}
        process_exit.tell(
            self.runtime.store.location, saved=saved, counts=counts, folder=folder, lost=lost
        )

    def _rest(self) -> list[Tracked]:
        open_here = [tracked._tracked for tracked in self.runtime.sessions.values()]
        unsaved = [
            tracked
            for tracked in open_here
            if tracked.version > tracked.durable and tracked.end is not State.LOST
        ]
        return unsaved + [tracked for tracked in self.runtime.saver.lost if tracked.pending]

    async def _turns_end(self, grace: float) -> None:
        """Give open turns, and loads under way, time to come to their end."""
        with anyio.move_on_after(grace):
            for pending_load in list(self.runtime.pending_loads.values()):
                await pending_load.done.wait()
            for session in list(self.runtime.sessions.values()):
                await session._turns_idle()

    async def _let_go(self, at_most: float) -> None:
        """Fold and release every session that is durable; others' leases expire."""
        clean = [session for session in self.runtime.sessions.values() if session._tracked.clean]
        at_once = self.runtime.store.capabilities.parallelism
        with anyio.CancelScope(deadline=self._until):
            await each(clean, self._fold, at_once=at_once)
        with anyio.CancelScope(deadline=at_most):
            await each(clean, self._lifecycle.release, at_once=at_once)

    def _close_all(self) -> None:
        """Make every further call on a session that is still held raise that it is closed."""
        for session in self.runtime.sessions.values():
            if session._closed_by is None:
                message = f"session {session.key} is closed with its manager: call connect(…) again"
                session._close_with(SessionClosedError(message, key=str(session.key)))

    async def _fold(self, session: SessionBase) -> None:
        if session._tail_records:
            await self._lifecycle.fold(session)


def _settled(folder: str) -> bool:
    """Make spill files durable; False if that fails, and then they may be lost."""
    try:
        spilling.settle(folder)
    except OSError as error:
        log.exception("spill failed", extra={"path": folder}, exc_info=error)
        return False
    return True


def _with_folder(report: ShutdownReport, spilled: set[_Id], folder: str) -> ShutdownReport:
    """Print what a default folder holds: it may vanish with the machine, so it is reported."""
    lists = {
        name: tuple(
            [
                msgspec.structs.replace(entry, kept_in=folder) if _id(entry) in spilled else entry
                for entry in getattr(report, name)
            ]
        )
        for name in ("unsaved", "in_doubt", "quarantined")
    }
    return msgspec.structs.replace(report, **lists)


def _with_spilled(report: ShutdownReport, spilled: set[_Id], _folder: str) -> ShutdownReport:
    lists: dict[str, tuple[Unsaved, ...]] = {}
    remaining: list[Unsaved] = []
    for name in ("unsaved", "in_doubt", "quarantined", "lost"):
        ones: tuple[Unsaved, ...] = getattr(report, name)
        # A file has what was unsaved, not what a store has lost: that is still to be told.
        safe = [entry for entry in ones if _id(entry) in spilled and not entry.missing]
        remaining += safe
        lists[name] = tuple([entry for entry in ones if entry not in safe])
    clean = not any(lists.values())
    return msgspec.structs.replace(report, **lists, spilled=tuple(remaining), clean=clean)


_Id = tuple[SessionKey, int, int]
"""Which records of which session: one may have been lost more than once."""


def _id(unsaved: Unsaved) -> _Id:
    return unsaved.key, unsaved.durable, unsaved.version


def _id_of(tracked: Tracked) -> _Id:
    return tracked.key, tracked.durable, tracked.version


def _is_refused(tracked: Tracked) -> bool:
    """Say whether the store would refuse a session's records again, wherever they were kept.

    Not so where a newer release has changed the format: that takes them from a file.
    """
    quarantined = tracked.end is State.QUARANTINED
    return quarantined and not isinstance(tracked.last_error, UnsupportedVersionError)


def _keys(ones: tuple[Unsaved, ...]) -> list[SessionKey]:
    return [entry.key for entry in ones]


# SIGTERM for one manager: begin the drain, and leave the exit status to whoever owns it


_STEP = 0.02
"""Seconds between two looks at whether other managers have closed."""

_cancelled: weakref.WeakSet[object] = weakref.WeakSet()
"""Bodies that SIGTERM has cancelled: managers of one body would cancel it once each."""


@final
class SignalWatch:
    """Watch for SIGTERM while it is installed. Made in the task whose program it ends.

    Args:
        patience: Seconds that closing may take.
        on_term: Called on the event loop when SIGTERM has come, each time.
        on_end: Called then, once, if it came over the default action.
        on_stopped: Called when it comes after the event loop has stopped, as the process ends.

    """

    def __init__(
        self,
        *,
        patience: float,
        on_term: Callable[[], None],
        on_end: Callable[[], None],
        on_stopped: Callable[[], None],
    ) -> None:
        self.patience: float = patience
        self.received: bool = False
        """Whether SIGTERM has come over the default action."""
        self.finished: bool = False
        self._on_term = on_term
        self._on_end = on_end
        self._on_stopped = on_stopped
        self._soon = _call_soon()
        self._body, self._cancel = _body()

    def install(self) -> None:
        """Start watching."""
        _cancelled.discard(self._body)
        signals.join(self)

    def uninstall(self) -> None:
        """Watch no more."""
        self.finished = True
        signals.leave(self)

    def cancel_body(self) -> None:
        """Cancel the body, in its event loop; once, however often it is asked for."""
        if self._body not in _cancelled:
            _cancelled.add(self._body)
            self._cancel()

    async def end_process(self) -> None:
        """End the process when all managers that had to close have done so, or time is over.

        Those that the same body has opened close after this one, and see to it then.
        """
        others = [watch for watch in signals.waited_for() if watch is not self]
        if any(isinstance(watch, SignalWatch) and watch._body is self._body for watch in others):
            return
        await self.end_process_by_force()

    async def end_process_by_force(self) -> None:
        """The same, although the body continues."""
        self.finished = True
        with anyio.CancelScope(shield=True):
            # They are in other threads, too: no event of this loop tells of them.
            while signals.waited_for() and signals.time_left() > 0:  # noqa: ASYNC110
                await anyio.sleep(_STEP)
        signals.end_process()

    # in the signal handler

    def drain(self) -> bool:
        """Begin to drain, if the event loop runs."""
        return self._soon(self._on_term)

    def end(self) -> None:
        """Have the body left, and the process end."""
        self._soon(self._on_end)

    def rescue(self) -> None:
        """Keep what can be kept without the event loop."""
        self._on_stopped()


def _call_soon() -> Callable[[Callable[[], None]], bool]:
    """Return how a signal handler runs something in this event loop, and whether it can."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        post: Callable[[Callable[[], None]], object]
        post, is_running = trio.lowlevel.current_trio_token().run_sync_soon, None
    else:
        import asyncio

        loop = asyncio.get_running_loop()
        post, is_running = loop.call_soon_threadsafe, loop.is_running

    def soon(act: Callable[[], None]) -> bool:
        if is_running is not None and not is_running():
            return False
        try:
            post(act)
        except RuntimeError:  # closed
            return False
        return True

    return soon


def _body() -> tuple[object, Callable[[], object]]:
    """Return whose program SIGTERM ends, and what cancels it from a callback of its loop.

    On trio that is what Ctrl-C does there: no cancel scope has to stay open for it.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        in_main = threading.current_thread() is threading.main_thread()
        cancel = partial(signal.raise_signal, signal.SIGINT) if in_main else bool
        return trio.lowlevel.current_root_task(), cancel
    import asyncio

    task = asyncio.current_task()
    if task is None:
        return object(), bool
    return task, lambda: task.cancel("SIGTERM")


# The end of a manager as a killed process has it: for tests of what comes after


async def kill(manager: SessionManager) -> None:
    """Kill a manager, but leave the process alive; what it had not saved is lost.

    Saves that are with the store are cancelled: as in a real crash, they may have arrived.
    Callers that wait for a save, or use a session of the manager afterwards, get an error.
    """
    connected = manager._connected
    if connected is None or connected.closing.report is not None:
        return
    runtime, closing = connected.runtime, connected.closing
    connected.signals.uninstall()
    runtime.draining = True
    closing.begun = True
    await runtime.host.aclose()
    for session in runtime.sessions.values():
        message = f"session {session.key} ended with its manager's crash: open it again"
        session._close_with(SessionClosedError(message, key=str(session.key)))
    # Its host has ended: this only takes stock, and lets nobody wait in vain.
    closing.report = await runtime.saver.aclose(deadline=0, hard_grace=0)
    closing.done.set()
    await runtime.store.aclose()
