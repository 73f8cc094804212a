"""The end of a process that did not close its managers: what they accepted is saved all the same.

The interpreter runs this before it waits for the other threads, while new ones can still be
started; an ordinary exit handler would come too late for a save. Each manager gets as long
as its own shutdown may take. Threads that are still at work keep their manager: it is flushed
now, and again when they have ended.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook runs after ours: closing needs it
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


def remember(manager: SessionManager) -> None:
    """Save what a manager accepted, should the process end before it is closed."""
    global _registered  # noqa: PLW0603  # once a process
    if not _registered:
        _registered = True
        # What concurrent.futures uses too; where it is missing, what comes later may do.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_at_exit)
    _open.add(manager)


def forget(manager: SessionManager) -> None:
    """A manager was closed."""
    _open.discard(manager)


def _at_exit() -> None:
    managers = [one for one in tuple(_open) if one._is_here]
    if not managers:
        return
    if _at_work():
        _each(managers, lambda one: one.flush(one._patience))
        threading.Thread(target=_when_they_end, args=(managers,), name=THREAD).start()
    else:
        _each(managers, lambda one: one.close())


def _when_they_end(managers: list[SessionManager]) -> None:
    for thread in _at_work():
        thread.join()
    _each(managers, lambda one: one.flush(one._patience))


def _at_work() -> list[threading.Thread]:
    """Return the threads that the interpreter will wait for."""
    mine = {threading.main_thread(), threading.current_thread()}
    threads = [one for one in threading.enumerate() if not one.daemon and one not in mine]
    return [one for one in threads if one.name != THREAD]


def _each(managers: list[SessionManager], act: Callable[[SessionManager], object]) -> None:
    """Act on all of them at once, and wait no longer than the most patient one."""
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
