"""SIGTERM for all who watch it in this process, and the exceptions that end a program."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final, Protocol, final

from perdure._lib.loop import on_trio

# SIGTERM: one handler, which notifies every watch of this process
#
# Several managers, in several threads and event loops, may join and leave in any order; when the
# last one leaves, the previous handler is restored. A handler installed over ours stays, and the
# handler below ours is called. A forked child inherits nothing.
# * Over another handler, the watches drain, and that handler runs.
# * Over the default action, they also end the program. The last watch to finish ends the process,
#   with the signal's own status. A second SIGTERM changes nothing until the first one's time is
#   over; after that it ends the process at once. So it does if no event loop has heard of the first
#   one since: something blocks them all.
# * A watch whose event loop has stopped cannot do anything: if there is no other, the signal has
#   its default action.
# Only the main thread installs handlers. A watch from another thread is notified by the main
# thread's handler.


class Watch(Protocol):
    """A receiver of SIGTERM. The signal handler calls its methods."""

    received: bool
    """True if SIGTERM has come over the default action; set by the handler."""
    finished: bool
    """True if it has finished, so that the process need not wait for it."""
    heard: bool
    """True once its event loop has begun to do what `end` asked for."""

    def drain(self) -> bool:
        """Begin to save every change as it comes; False if the event loop has stopped."""
        ...

    def begin(self) -> float:
        """Begin the time that finishing may take, unless it has begun; return what is left."""
        ...

    def end(self) -> BaseException | None:
        """Begin to end the program; return what to raise in the main thread, if anything."""
        ...

    def rescue(self) -> None:
        """Save what can be saved now, within seconds: the process ends, and it has not finished.

        From any thread.
        """


_watches: dict[Watch, None] = {}
_until = 0.0
"""End of the time that SIGTERM gave, once it has come over the default action."""
_received_at = 0.0
"""The time at which it first came so."""
_ending = False
BLOCKED: Final = 2.0
"""Seconds without a turn of an event loop from which on it counts as blocked."""
_POLL = 0.02
"""Seconds between two looks at whether others have finished: they are in other threads."""


def join(watch: Watch) -> None:
    """Notify a watch of SIGTERM from now on; never in a notebook, whose kernel needs it."""
    if "ipykernel" in sys.modules:
        return
    if _in_main_thread():
        current = signal.getsignal(signal.SIGTERM)
        if current is None:  # installed by something that is not Python: leave it
            return
        if not isinstance(current, _Handler):
            signal.signal(signal.SIGTERM, _Handler(current))
    _watches[watch] = None


def leave(watch: Watch) -> None:
    """Stop notifying a watch; after the last one, restore the previous handler."""
    _watches.pop(watch, None)
    if not _watches and _in_main_thread() and time_left() <= 0:
        _put_back()


def time_left() -> float:
    """Return how many seconds the notified watches still have."""
    return _until - time.monotonic()


def waited_for() -> list[Watch]:
    """Return the watches that were notified and have not finished."""
    return [watch for watch in tuple(_watches) if watch.received and not watch.finished]


def wait_for_others() -> None:
    """Wait until all that were notified have finished, or their time is over; then rescue them."""
    while waited_for() and time_left() > 0:
        time.sleep(_POLL)
    for watch in waited_for():  # its loop hangs, or it spills just now
        watch.rescue()


def end_process() -> None:
    """End the process with SIGTERM's own status; from any thread."""
    global _ending  # noqa: PLW0603  # the process ends once
    _ending = True
    if _in_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)  # else the handler does it
    if _in_main_thread():
        # The first process of a container is still here: the kernel drops what has its default
        # action there. What a shell makes of the signal is its status then.
        os._exit(128 + signal.SIGTERM)


@final
class _Handler:
    """The signal handler, which remembers the previous one."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _ending:
            end_process()
            return
        running = [watch for watch in tuple(_watches) if watch.drain()]
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL:
            _end(running)


def _end(running: list[Watch]) -> None:
    """Do what replaces the default action."""
    global _until, _received_at  # noqa: PLW0603  # one signal handler a process
    news = [watch for watch in running if not watch.received]
    if news:
        _received_at = time.monotonic()
        # Before they count as notified: who waits for them looks at the time next.
        _until = max(_until, time.monotonic() + max([watch.begin() for watch in news]))
        for watch in news:
            watch.received = True
        # All of them begin to end before one raises.
        for error in [watch.end() for watch in news]:
            if error is not None:
                raise error
    elif time_left() <= 0 or _are_blocked():
        for watch in tuple(_watches):
            watch.rescue()
        end_process()


def _are_blocked() -> bool:
    """Return whether no event loop has turned since the signal came: nothing will be saved."""
    waiting = waited_for()
    is_late = time.monotonic() - _received_at >= BLOCKED
    return is_late and bool(waiting) and not any(watch.heard for watch in waiting)


def _put_back() -> None:
    current = below = signal.getsignal(signal.SIGTERM)
    while isinstance(below, _Handler):
        below = below.previous
    if below is not current:
        signal.signal(signal.SIGTERM, below)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# A forked child has the handler, but no watches: it restores the previous handler. A signal that
# arrived before that would be lost with the signals that Python had not handled yet, so SIGTERM is
# blocked around the fork.

_masks = threading.local()


def _before_fork() -> None:
    own_handler = isinstance(signal.getsignal(signal.SIGTERM), _Handler)
    _masks.before = None
    if own_handler:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    global _until, _ending
    _watches.clear()
    _until, _ending = 0.0, False
    _put_back()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


# Exceptions that end the program, raised by user code in a task of the library
#
# A hook, for example, may raise KeyboardInterrupt, or SystemExit by ``sys.exit``. In a task of the
# library it would end the tasks that save; on trio it would end the whole run without notice to the
# main task. So it is caught there, and passed to the program as the loop would:
# * asyncio: it leaves the loop from a callback, as Ctrl-C does. ``asyncio.run`` raises it after it
#   has cancelled every task and each manager has saved.
# * trio: the main task is interrupted as by Ctrl-C; closing the manager raises the exception.


log: logging.Logger = logging.getLogger("perdure")

Exit = KeyboardInterrupt | SystemExit

_leaving: weakref.WeakSet[object] = weakref.WeakSet()
"""Loops that are about to be left: a second exception would cut what the first one's end saves."""


def exit_in(error: BaseException) -> Exit | None:
    """Return the exception that ends the program, alone or in a group of others."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    if isinstance(error, BaseExceptionGroup):
        exit_error = [exit_in(exception) for exception in error.exceptions]
        return next((exception for exception in exit_error if exception is not None), None)
    return None


def interrupter() -> Callable[[Exit, Callable[[], bool]], bool]:
    """Return a function that ends the program that runs this loop, if it is still wanted then.

    It returns False if the program does not get the exception itself.

    Raises:
        RuntimeError: No event loop is running here.

    """
    if on_trio():
        import trio

        return partial(_interrupt_main, trio.lowlevel.current_trio_token().run_sync_soon)
    import asyncio

    loop = asyncio.get_running_loop()

    def interrupt(error: Exit, is_wanted: Callable[[], bool]) -> bool:
        if loop in _leaving:
            _log_exit(error)
        else:
            _leaving.add(loop)
            loop.call_soon_threadsafe(at_once, error, is_wanted)
        return True

    def at_once(error: Exit, is_wanted: Callable[[], bool]) -> None:
        _leaving.discard(loop)
        if is_wanted():
            raise error
        _log_exit(error)

    return interrupt


def _interrupt_main(
    soon: Callable[..., object], error: Exit, is_wanted: Callable[[], bool]
) -> bool:
    if _in_main_thread() and is_wanted() and callable(signal.getsignal(signal.SIGINT)):
        # In a task of trio's own: where we are now, its handler may raise at once.
        soon(signal.raise_signal, signal.SIGINT)
    else:
        _log_exit(error)
    return False


def _log_exit(error: Exit) -> None:
    log.error("a hook has ended the program, which ends already", exc_info=error)
