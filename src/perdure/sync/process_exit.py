"""The end of a process that did not close its managers: what they accepted is saved all the same.

The interpreter runs this before it waits for the other threads, while new ones can still be
started; an ordinary exit handler would come too late for a save. Each manager gets as long
as its own shutdown may take. Threads that are still at work keep their manager: it is flushed
now, and again when they have ended. So is one that such a thread makes after the main thread's end.
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, final

from perdure._lib import signals
from perdure.session.process_exit import THREAD

if TYPE_CHECKING:
    from perdure.sync.manager import SessionManager


log: logging.Logger = logging.getLogger("perdure")

_open: set[SessionManager] = set()
_registered = False
_main_has_ended = False


def remember(manager: SessionManager) -> None:
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
    # In the main thread this is an exit handler, behind which nobody waits any more.
    if _main_has_ended and threading.current_thread() is not threading.main_thread():
        _watch([manager])


def forget(manager: SessionManager) -> None:
    """A manager was closed."""
    _open.discard(manager)


def _watch(managers: list[SessionManager]) -> None:
    # No daemon, whoever makes it: the process has to wait.
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


# SIGTERM in a blocking program: begin the drain, and leave the exit to whoever owns it
#
# Over somebody else's handler the drain begins, and that handler runs. Over the default action the
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
        """Watch no more."""
        self.finished = True
        signals.leave(self)

    def end_process(self) -> NoReturn:
        """End the process when all managers have closed that were told to, or time is over."""
        while signals.waited_for() and signals.time_left() > 0:
            time.sleep(_STEP)
        signals.end_process()
        raise SystemExit(_BY_SIGNAL + signal.SIGTERM)  # where a signal takes its time

    # in the signal handler

    def drain(self) -> bool:
        """Begin to drain."""
        return self._drain()

    def end(self) -> SystemExit | None:
        """Have the blocks be left, or close without them."""
        if not self._in_main:
            self._close()
        if self.leaving or not self._in_main:
            return None
        return SystemExit(_BY_SIGNAL + signal.SIGTERM)

    def rescue(self) -> None:
        """Do nothing: it has a loop of its own, which runs."""
