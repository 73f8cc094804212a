"""The end of a process that did not close its managers: what they accepted is saved all the same.

The interpreter runs this before it waits for the other threads, while new ones can still be
started; an ordinary exit handler would come too late for a save. Each manager gets as long
as its own shutdown may take. Threads that are still at work keep their manager: it is flushed
now, and again when they have ended. So is one that such a thread makes after the main thread's end.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.session.process_exit import THREAD

if TYPE_CHECKING:
    from perdure.sync.manager import SessionManager

__all__ = ["forget", "remember"]

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
    managers = [one for one in tuple(_open) if one._is_here]
    if not managers:
        return
    if _at_work():
        _each(managers, lambda one: one.flush(one._patience))
        _watch(managers)
    else:
        _each(managers, lambda one: one.close())


def _when_they_end(managers: list[SessionManager]) -> None:
    for thread in _at_work():
        thread.join()
    _each([one for one in managers if one in _open], lambda one: one.flush(one._patience))


def _at_work() -> list[threading.Thread]:
    """Return the threads that the interpreter will wait for."""
    mine = {threading.main_thread(), threading.current_thread()}
    threads = [one for one in threading.enumerate() if not one.daemon and one not in mine]
    return [one for one in threads if one.name != THREAD]


def _each(managers: list[SessionManager], act: Callable[[SessionManager], object]) -> None:
    """Act on all of them at once, and wait no longer than the most patient one."""
    if not managers:
        return
    threads = [threading.Thread(target=_guarded, args=(act, one), daemon=True) for one in managers]
    for thread in threads:
        thread.start()
    end = time.monotonic() + max([one._patience for one in managers])
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))


def _guarded(act: Callable[[SessionManager], object], manager: SessionManager) -> None:
    try:
        act(manager)
    except Exception:
        log.exception("saving at the end of the process failed")
