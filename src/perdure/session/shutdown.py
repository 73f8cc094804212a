"""Stopping managers, in one way for every cause.

`ManagerShutdown.stop` drains, waits for turns, closes the intake, saves, spills, folds, releases
the leases, reports and closes the store, by a deadline that was made where the close began. Four
roads lead there:

* `SessionManager.aclose`, which leaving ``async with`` calls.
* SIGTERM, which `perdure._lib.signals` receives: `SignalWatch` has the manager drain, and over the
  default action its body cancelled. If that does not close it, `ManagerParts._end` does.
* The end of the event loop under an open manager: its host tears it down.
* The end of the interpreter, once the main thread has ended: other threads still run, and new ones
  may start, so `ExitHandler` can close a manager as usual. How depends on its event loop:

  * It was stopped and not closed (``loop.run_until_complete``, ``python -m asyncio``, a notebook
    that is shut down): it is run once more, in a thread of ours, until the manager is closed.
  * It runs in another thread, as that of ``perdure.sync``: nothing is done while other threads are
    at work; after them a loop in a daemon thread, which would be cut off, is asked to close it.
  * It was closed, or it is trio's, which cannot be run again: what is left is spilled.

  The exit never waits longer than the deadline. `_last` runs after all threads, and spills what is
  still left. The outcome is printed to stderr.

`perdure.sync` closes by the same calls, in the thread of its loop.
"""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import anyio
import msgspec
from anyio import to_thread

from perdure._lib import signals
from perdure._lib.logs import log_facts
from perdure._lib.loop import on_trio, post_to_loop
from perdure._lib.tasks import was_cancelled
from perdure.autosave.deadline import Deadline
from perdure.autosave.reports import ShutdownReport, Unsaved
from perdure.autosave.tracked import State, Tracked
from perdure.errors import UnsupportedVersionError
from perdure.records.keys import SessionKey
from perdure.session import spill as spilling
from perdure.session.events import Drain
from perdure.session.lifecycle import SessionLifecycle, left
from perdure.session.runtime import Runtime

if TYPE_CHECKING:
    import asyncio

    from perdure.records.records import Entry


log: logging.Logger = logging.getLogger("perdure")

_LOOKS: Final = 100
"""Looks at most at a session that is being changed, until it is at rest."""


class ManagerShutdown:
    """The stop of one manager, done once, however often it is asked for."""

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle) -> None:
        self.runtime = runtime
        self._lifecycle = lifecycle
        self.begun: bool = False
        """True once the stop itself has begun; its time may be running before."""
        self.deadline: Deadline | None = None
        """By when everything is over, once a close has begun."""
        self._ran: anyio.Event = anyio.Event()
        self.done: anyio.Event = anyio.Event()
        self.report: ShutdownReport | None = None
        """The outcome for everything; from then on only the store is left to close."""
        self.error: Exception | None = None
        """The error for which the store was not closed."""
        self._closed = False
        runtime.host.at_end(self.done.set)  # every waiter returns, however it ended
        self._spilled: set[_Id] = set()
        """The records that are durable in spill files."""

    def drain(self) -> None:
        """Save every change at once, and open nothing new; turns continue."""
        if self.runtime.draining:
            return
        self.runtime.draining = True
        sessions = len(self._lifecycle.sessions)
        log_facts(log, logging.INFO, "draining", sessions=sessions)
        for pending_load in self.runtime.pending_loads.values():
            if pending_load.scope is not None:
                pending_load.scope.cancel()  # its waiters are refused in any case
        self.runtime.saver.begin_drain()
        self.runtime.hooks.emit(Drain(sessions=sessions))

    def begin(self, seconds: float | None = None) -> Deadline:
        """Return the deadline of the close, which begins here unless it has begun; in any thread.

        Args:
            seconds: What the caller gives it: this counts if it is over sooner.

        """
        deadline = self.deadline
        # Until the stop begins, a caller with less time may still bring the end forward.
        if deadline is None or not self.begun:
            new = Deadline.of(self.runtime.shutdown, self.runtime.clock(), seconds)
            if deadline is None or new.end < deadline.end:
                self.deadline = deadline = new
        return deadline

    def time_left(self) -> float:
        """Return the seconds until the deadline; from any thread."""
        return max(self.begin().end - self.runtime.clock(), 0.0)

    def stop(self, deadline: Deadline) -> None:
        """Stop in the manager's own task, unless that has begun; `done` is set at the end."""
        if self.begun or self.done.is_set():
            return
        # Before the task exists: a signal handler may ask for the deadline at any point.
        self.deadline, self.begun = deadline, True
        try:
            self.runtime.host.spawn(self._run)
        except BaseException:
            self.begun = False
            raise

    async def torn_down(self) -> None:
        """Stop because the loop is ending, under a manager that is open, or closing."""
        if self.runtime.home.stray() == "fork":
            self.done.set()  # the records are the parent's
        if self.done.is_set():
            return
        self.stop(self.begin())
        await self._ran.wait()
        if not self.done.is_set():  # cut with all that ran: there is still time left
            await self._run()
        self.report_rest({})  # no caller gets the report

    async def _run(self) -> None:
        try:
            if self.report is None:
                self.report = await self._shut_down(self.begin())
            await self.close_store()
        except BaseException as error:
            # Cancelled, it is not done: `torn_down` runs it once more.
            if not was_cancelled(error):
                self.done.set()
            raise
        else:
            self.done.set()
        finally:
            self._ran.set()

    async def _shut_down(self, deadline: Deadline) -> ShutdownReport:
        clock, start = self.runtime.clock, self.runtime.clock()
        # 1. Save changes at once, open nothing new. Turns continue.
        self.drain()
        # 2. Wait for turns.
        with deadline.scope("turns"):  # and loads under way
            for pending_load in list(self.runtime.pending_loads.values()):
                await pending_load.done.wait()
            for session in list(self._lifecycle.sessions.values()):
                await session._turns.pass_by(session.key)
        # 3. Accept nothing more, save all, and keep in files what the store did not take.
        report = await self._spill(await self.runtime.saver.aclose(deadline), deadline)
        # 4. Fold and release what is durable. Other leases are kept: a save in doubt may still
        # land.
        here = self._lifecycle.sessions.values()
        clean = [session for session in here if session._tracked.clean]
        await self._lifecycle.let_go(clean, "shutdown", deadline)
        # 5. From now on objects of all sessions raise.
        for session in here:
            if session._closed_by is None:
                session._close_with(left(session.key, "shutdown"))
        report = msgspec.structs.replace(report, duration=clock() - start)
        log_facts(
            log,
            logging.INFO,
            "stopped",
            clean=report.clean,
            saved=report.saved,
            not_durable=len(report.not_durable),
            duration=report.duration,
        )
        return report

    async def close_store(self) -> None:
        """Close the store, once, in what is left of the time."""
        if self._closed:
            return
        store = self.runtime.store
        with self.begin().scope("store") as scope:
            try:
                await store.aclose()
            except Exception as error:  # noqa: BLE001  # for the task that closes
                self.error = error
        self._closed = True
        if scope.cancelled_caught:
            message = "the store did not close in time"
            log_facts(log, logging.WARNING, message, location=store.location)

    async def _spill(self, report: ShutdownReport, deadline: Deadline) -> ShutdownReport:
        """Keep in local files what the store would not take."""
        folder, is_named = self.runtime.spill_folder, self.runtime.shutdown.spill is not None
        # What was lost goes to a folder that was named; else the user of `sessions.lost` decides.
        tracked = [t for t in self._to_spill() if is_named or t.end is not State.LOST]
        if folder is None or not tracked:
            return report
        left = deadline.end - self.runtime.clock()
        own = anyio.CapacityLimiter(1)  # the disk may hang in all other threads
        await to_thread.run_sync(self._spill_all, folder, tracked, left, limiter=own)
        return _with_spilled(report, self._spilled, None if is_named else folder)

    def _spill_all(self, folder: str, tracked: Sequence[Tracked], seconds: float = 0.0) -> None:
        """Spill what is in no file yet; blocking, but a disk that hangs is not waited for."""
        until, written = time.monotonic() + seconds, set[_Id]()
        remaining = [unsaved for unsaved in tracked if _id(unsaved) not in self._spilled]
        write = partial(self._spill_one, folder)
        for unsaved, outcome in spilling.completed(folder, remaining, write, seconds):
            session = str(unsaved.key)
            if isinstance(outcome, Exception):  # the others' are to be kept all the same
                log_facts(log, logging.ERROR, "spill failed", outcome, session=session)
            else:
                written.add(_id(unsaved))
                log_facts(log, logging.WARNING, "spilled", session=session, path=outcome)
        # One sync of the folder for all files: only after it do they count as kept.
        folders, left = [folder] if written else [], until - time.monotonic()
        for _, error in spilling.completed(folder, folders, spilling.settle, left):
            if error is None:
                self._spilled |= written
            else:
                log_facts(log, logging.ERROR, "spill failed", error, path=folder)

    def _spill_one(self, folder: str, tracked: Tracked) -> str:
        """Write a session's spill file, and return its path."""
        store, key, epoch = self.runtime.store, tracked.key, tracked.epoch
        base, pending = _unsaved_of(tracked)
        header = spilling.SpillHeader(
            spilling.FORMAT, key, epoch, base, store.owner, store.begun_at(key, epoch)
        )
        return spilling.write(folder, header, spilling.transformed(store, header, pending))

    # the end of the process

    def pending(self) -> dict[str, int]:
        """Return how many records each session has that are not durable."""
        counts: Counter[str] = Counter()
        for tracked in self._rest():
            counts[str(tracked.key)] += tracked.version - tracked.durable
        return counts

    def report_rest(self, before: dict[str, int]) -> None:
        """Spill what will not be saved any more, and print the outcome to stderr.

        Args:
            before: The `pending` that saving began with.

        """
        folder = self.runtime.spill_folder
        if folder is not None:
            self._spill_all(folder, self._to_spill())
        if self.runtime.durability == "memory":
            return  # which has nothing to lose
        kept = {
            str(session.key): session.version - session.durable
            for session in self._rest()
            if _id(session) in self._spilled
        }
        lost = {key: n for key, n in self.pending().items() if key not in kept}
        saved = {key: n for key, n in before.items() if key not in kept and key not in lost}
        message = f"no one closed the manager of {self.runtime.store.location}"
        if saved:
            _print(f"{message}: saved {_named(saved)} at exit")
        if kept:
            _print(
                f"{message}, and it could not save any more: kept {_named(kept)} in {folder}; "
                "the next open of the session appends it"
            )
        if lost:
            _print(
                f"{message}: LOST {_named(lost)} at exit. Close it, with `async with connect(…)` "
                "or `await sessions.aclose()`, which say why something cannot be saved"
            )

    def _rest(self) -> list[Tracked]:
        """Return what has records that are not durable, or that others have lost us."""
        tracked = [session._tracked for session in self._lifecycle.sessions.values()]
        unsaved = [t for t in tracked if t.version > t.durable and t.end is not State.LOST]
        return unsaved + [t for t in self.runtime.saver.lost if t.pending]

    def _to_spill(self) -> list[Tracked]:
        return [t for t in self._rest() if t.pending and not _is_refused(t)]


def _unsaved_of(tracked: Tracked) -> tuple[int, tuple[Entry, ...]]:
    """Return the durable record before a session's unsaved ones, and these; from any thread."""
    base, pending = tracked.durable, tuple(tracked.pending)
    for _ in range(_LOOKS):  # the event loop, if it runs, may apply a save just now
        if (tracked.durable, base + len(pending)) == (base, tracked.version):
            break
        base, pending = tracked.durable, tuple(tracked.pending)
    return base, pending


def _with_spilled(report: ShutdownReport, spilled: set[_Id], folder: str | None) -> ShutdownReport:
    """Return a report of which what is in files is safe, unless they are in the default folder.

    That may vanish with the machine: there it is reported as it was, with the folder.
    """
    lists: dict[str, tuple[Unsaved, ...]] = {}
    safe: list[Unsaved] = []
    for name in ("unsaved", "in_doubt", "quarantined", "lost"):
        left: list[Unsaved] = []
        for entry in getattr(report, name):
            if _id(entry) not in spilled:
                left.append(entry)
            elif folder is not None:
                left.append(msgspec.structs.replace(entry, kept_in=folder))
            elif entry.missing:  # a file has what was unsaved, not what a store has lost
                left.append(entry)
            else:
                safe.append(entry)
        lists[name] = tuple(left)
    clean = not any(lists.values())
    return msgspec.structs.replace(report, **lists, spilled=tuple(safe), clean=clean)


_Id = tuple[SessionKey, int, int]
"""A session and its unsaved records: one may have been lost more than once."""


def _id(session: Unsaved | Tracked) -> _Id:
    return session.key, session.durable, session.version


def _is_refused(tracked: Tracked) -> bool:
    """Return whether the store would refuse a session's records again, wherever they were kept.

    Not so where a newer release has changed the format: that takes them from a file.
    """
    quarantined = tracked.end is State.QUARANTINED
    return quarantined and not isinstance(tracked.last_error, UnsupportedVersionError)


_cancelled: weakref.WeakSet[object] = weakref.WeakSet()
"""Bodies that SIGTERM has cancelled: managers of one body would cancel it once each."""


@final
class SignalWatch:
    """Watch for SIGTERM while it is installed. Made in the task whose program it ends.

    Args:
        closing: The manager's: it is drained when SIGTERM has come, each time.
        on_end: Called on the event loop, once, if it came over the default action.

    Attributes:
        raising: Called in the signal handler then: what to raise, for a body that is no task.

    """

    def __init__(self, closing: ManagerShutdown, on_end: Callable[[], None]) -> None:
        self.received: bool = False
        """True once SIGTERM has come over the default action."""
        self.finished: bool = False
        self.heard: bool = False
        """True once the event loop has turned since."""
        self.raising: Callable[[], BaseException | None] = lambda: None
        self._closing = closing
        self._on_end = on_end
        self._post = post_to_loop()
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
        if signals.waited_for():  # in other threads, too: no event of this loop reports them
            own = anyio.CapacityLimiter(1)
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(signals.wait_for_others, limiter=own)
        signals.end_process()

    # in the signal handler

    def drain(self) -> bool:
        """Begin to drain, if the event loop runs."""
        loop = _asyncio_loop(self._closing.runtime.loop)
        return (loop is None or loop.is_running()) and self._soon(self._closing.drain)

    def begin(self) -> float:
        """Begin the deadline, unless it has begun; return the seconds that are left."""
        return self._closing.time_left()

    def end(self) -> BaseException | None:
        """Have the body left, and the process end."""
        self._soon(self._hear)
        return self.raising()

    def _hear(self) -> None:
        self.heard = True
        self._on_end()

    def _soon(self, act: Callable[[], None]) -> bool:
        try:
            self._post(act)
        except RuntimeError:  # the loop was closed
            return False
        return True

    def rescue(self) -> None:
        """Keep what can be kept without the event loop."""
        self._closing.report_rest({})


def _body() -> tuple[object, Callable[[], object]]:
    """Return whose program SIGTERM ends, and what cancels it from a callback of its loop.

    On trio that is what Ctrl-C does there: no cancel scope has to stay open for it.
    """
    if on_trio():
        import trio

        in_main = threading.current_thread() is threading.main_thread()
        cancel = partial(signal.raise_signal, signal.SIGINT) if in_main else bool
        return trio.lowlevel.current_root_task(), cancel
    import asyncio

    task = asyncio.current_task()
    if task is None:
        nobody = partial(bool)
        return nobody, nobody
    return task, lambda: task.cancel("SIGTERM")


NAMED: Final = 5
"""Sessions that a line names."""
THREAD: Final = "perdure:exit"
"""The name of threads that wait for the others: no thread waits for them."""
_POLL: Final = 0.02

_open: dict[ExitHandler, None] = {}
_registered = False
_main_has_ended = False


@final
class ExitHandler:
    """One manager's part: watch from `install` to `uninstall` for the end of the process.

    Args:
        closing: The manager's.
        close: Closes it, on its event loop.
        by_owner: Closes it instead, by a call that blocks, for one that is never left open.

    """

    def __init__(
        self,
        closing: ManagerShutdown,
        close: Callable[[], Awaitable[object]],
        by_owner: Callable[[], object] | None = None,
    ) -> None:
        self.closing: ManagerShutdown = closing
        self._close = close
        self._loop: Any = closing.runtime.loop
        self._thread = threading.current_thread()
        self.by_owner = by_owner

    def install(self) -> None:
        """Start watching; in the thread that connects."""
        _open[self] = None
        is_main = threading.current_thread() is threading.main_thread()
        if not (_register() or is_main):  # else an exit handler, which no thread outlives
            _watch([self])

    def uninstall(self) -> None:
        """Watch no more."""
        _open.pop(self, None)

    @property
    def is_ours(self) -> bool:
        """Return whether this process is the one that connected."""
        return self.closing.runtime.home.stray() != "fork"

    @property
    def is_running(self) -> bool:
        """Return whether the event loop runs, in any thread."""
        loop = _asyncio_loop(self._loop)
        if loop is not None:
            return loop.is_running()
        # Trio's, which says nothing; a guest of the main thread's has stopped by now.
        is_alive = self._thread.is_alive() and self._thread is not threading.main_thread()
        return is_alive and self.closing.runtime.host.running

    def begin(self) -> Callable[[], object] | None:
        """Begin to close in another thread; return what a thread of ours has to do, if anything."""
        if self.by_owner is not None:
            return self.by_owner
        loop = _asyncio_loop(self._loop)
        if loop is None:
            return self._on_trio if self.is_running else None
        if loop.is_closed():
            return None
        if loop.is_running():
            from asyncio import run_coroutine_threadsafe

            return lambda: run_coroutine_threadsafe(self._closed(), loop).result()
        return lambda: loop.run_until_complete(self._closed())

    async def _closed(self) -> None:
        from asyncio import sleep

        await self._close()
        await sleep(0)  # what waits for the end of our tasks hears of it

    def _on_trio(self) -> None:
        import trio

        trio.from_thread.run(self._close, trio_token=self._loop)

    def release_threads(self) -> None:
        """End anyio's threads that wait for the end of a loop that does not run any more.

        They are no daemons: the process would wait for them for ever.
        """
        for thread in threading.enumerate():
            stop = getattr(thread, "stop", bool)
            is_over = getattr(thread, "stopping", False)  # it was stopped before, and ends just now
            if _is_anyios(thread) and getattr(thread, "loop", None) is self._loop and not is_over:
                stop()


def _register() -> bool:
    """Have our hooks called; False if the main thread has come to its end before."""
    global _registered, _main_has_ended  # noqa: PLW0603  # once a process
    if not _registered:
        _registered = True
        atexit.register(_last)
        # What concurrent.futures uses too; where it is missing, what comes later may do.
        register = getattr(threading, "_register_atexit", atexit.register)
        try:
            import concurrent.futures.thread  # noqa: F401  # its hook runs after ours: closing needs it

            register(_before_threads_end)
        except RuntimeError:
            _main_has_ended = True
    return not _main_has_ended


def _before_threads_end() -> None:
    global _main_has_ended  # noqa: PLW0603  # once a process
    _main_has_ended = True
    if _open:
        spilling.keep_thread()
    remaining = _close_due(tuple(_open))
    if remaining:
        _watch(remaining)


def _watch(handlers: Sequence[ExitHandler]) -> None:
    # No daemon thread: the process has to wait.
    threading.Thread(
        target=_close_behind_others, args=(handlers,), name=THREAD, daemon=False
    ).start()


def _close_behind_others(handlers: Sequence[ExitHandler]) -> None:
    while handlers := _close_due(handlers):
        time.sleep(_POLL)


def _close_due(handlers: Sequence[ExitHandler]) -> list[ExitHandler]:
    """Close each whose loop has stopped, or all if no thread is at work that could use them.

    Returns those that are left open.
    """
    at_work = _at_work()
    handlers = [handler for handler in handlers if handler in _open and handler.is_ours]
    remaining = [handler for handler in handlers if at_work and handler.is_running]
    due = [handler for handler in handlers if handler not in remaining]
    if due:
        _close(due)
    return remaining


def _at_work() -> list[threading.Thread]:
    """Return the threads that the interpreter will wait for, and that have not only to wait."""
    own_threads = {threading.main_thread(), threading.current_thread()}
    return [
        thread
        for thread in threading.enumerate()
        if not (
            thread.daemon or thread in own_threads or thread.name == THREAD or _is_anyios(thread)
        )
    ]


def _is_anyios(thread: threading.Thread) -> bool:
    return type(thread).__module__.startswith("anyio.")


def _close(handlers: Sequence[ExitHandler]) -> None:
    """Close all of them at once, and wait no longer than the latest deadline; then spill."""
    # Of one that its owner closes, only what could not be saved is reported.
    before = {
        handler: handler.closing.pending() if handler.by_owner is None else {}
        for handler in handlers
    }
    threads: list[threading.Thread] = []
    for handler in handlers:
        act = handler.begin()
        if act is not None:
            thread = threading.Thread(target=_guarded, args=(act,), name=THREAD, daemon=True)
            threads.append(thread)
            thread.start()
    for thread in threads:
        thread.join(max([handler.closing.time_left() for handler in handlers]))
    for handler in handlers:
        if not handler.is_ours:
            continue
        if not handler.is_running:
            handler.release_threads()
        handler.uninstall()
        handler.closing.report_rest(before[handler])


def _guarded(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception:
        log.exception("saving at the end of the process failed")


def _last() -> None:
    """Spill what is left, once no thread can be started any more."""
    for handler in tuple(_open):
        handler.uninstall()
        if handler.is_ours:
            handler.closing.report_rest({})


def _named(counts: dict[str, int]) -> str:
    records, names = sum(counts.values()), sorted(counts)
    parts = [f"{name} ({counts[name]})" for name in names[:NAMED]]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    noun = "record" if records == 1 else "records"
    return f"{records} {noun} of {', '.join(parts)}{more}"


def _print(line: str) -> None:
    try:
        if sys.stderr is not None:  # pythonw has none
            sys.stderr.write(f"perdure: {line}\n")
            sys.stderr.flush()
            return
    except (OSError, ValueError):  # it was closed: a log may still take the line
        pass
    log.warning("%s", line)


def _asyncio_loop(loop: object) -> asyncio.AbstractEventLoop | None:
    """Return the loop if it is asyncio's; None for trio's token."""
    import asyncio

    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None
