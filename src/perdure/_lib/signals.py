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
from typing import Any, Protocol, final

# SIGTERM for all who watch it in this process: one handler, which tells each of them
#
# Several managers, in several threads and event loops, may come and go in any order; the handler
# that was there before is put back when the last of them has left. What others put on top of ours
# stays, and what was below is called. A forked child inherits nothing.
# * Over somebody else's handler the watches are told to drain, and that handler runs. * Over the
# default action they are also told to end the program. Whoever comes to the end last ends the
# process, with the signal's own status. Another SIGTERM changes nothing until the time is over
# that the first one gave; after that it ends the process at once. * A watch whose event loop does
# not run any more cannot do anything: where there is no other, the signal has its default action.
# Handlers are installed by the main thread alone. A watch from another thread is told what the
# main thread's handler hears.


class Watch(Protocol):
    """Who is told of SIGTERM. All of it is called in the signal handler but the attributes."""

    patience: float
    """Seconds that coming to an end may take."""
    received: bool
    """Whether SIGTERM has come over the default action; set by the handler."""
    finished: bool
    """Whether nobody has to wait for it any more."""

    def drain(self) -> bool:
        """Have everything saved as it comes; False if the event loop does not run any more."""
        ...

    def end(self) -> BaseException | None:
        """Have the program end; return what is to be raised in the main thread, if anything."""
        ...

    def rescue(self) -> None:
        """Keep now what can be kept: the process ends, and the event loop does not run."""


_watches: dict[Watch, None] = {}
_until = 0.0
"""When the time is over that SIGTERM gave, once it has come over the default action."""
_ending = False


def join(watch: Watch) -> None:
    """Tell a watch of SIGTERM from here on; never in a notebook, whose kernel needs it."""
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
    """Tell a watch no more; after the last one, put back what was there before."""
    _watches.pop(watch, None)
    if not _watches and _in_main_thread() and time_left() <= 0:
        _put_back()


def time_left() -> float:
    """Return for how long those who were told of SIGTERM may still go on."""
    return _until - time.monotonic()


def waited_for() -> list[Watch]:
    """Return those who were told to end, and have not come to their end."""
    return [watch for watch in tuple(_watches) if watch.received and not watch.finished]


def end_process() -> None:
    """End the process with SIGTERM's own status; from any thread."""
    global _ending  # noqa: PLW0603  # the process ends once
    _ending = True
    if _in_main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)  # else the handler does it


@final
class _Handler:
    """The handler, over whatever was there before."""

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
    """Do what takes the place of the default action."""
    global _until  # noqa: PLW0603  # one signal handler a process
    news = [watch for watch in running if not watch.received]
    if news:
        patience = max([watch.patience for watch in news])
        _until = max(_until, time.monotonic() + patience)
        for watch in news:
            watch.received = True
        for error in [watch.end() for watch in news]:
            if error is not None:
                raise error
    elif time_left() <= 0:
        for watch in tuple(_watches):
            watch.rescue()
        end_process()


def _put_back() -> None:
    current = below = signal.getsignal(signal.SIGTERM)
    while isinstance(below, _Handler):
        below = below.previous
    if below is not current:
        signal.signal(signal.SIGTERM, below)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# A forked child has the handler, and nobody to tell: it gets back what was there before. A signal
# that comes earlier would be forgotten with whatever Python handlers had not seen yet, so none
# is let in around the fork.

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


# The exceptions that end a program, raised where nobody may raise them
#
# User code that the library calls, a hook for example, may raise KeyboardInterrupt, or SystemExit
# by ``sys.exit``. In a task of the library it would end the tasks that save, on trio the whole run
# without a word to the main task. So it is taken there, and goes to the program as one would
# expect of the loop:
# * asyncio: it leaves the loop from a callback, as Ctrl-C does. ``asyncio.run`` raises it, after
# it has cancelled every task, and each manager has saved. * trio: the main task is interrupted as
# by Ctrl-C; whoever closes the manager raises the exception itself.


log: logging.Logger = logging.getLogger("perdure")

Exit = KeyboardInterrupt | SystemExit

_leaving: weakref.WeakSet[object] = weakref.WeakSet()
"""Loops that are about to be left: a second exception would cut what the first one's end saves."""


def exit_in(error: BaseException) -> Exit | None:
    """Return the exception that is meant to end the program, alone or in a group of others."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    if isinstance(error, BaseExceptionGroup):
        exit_error = [exit_in(exception) for exception in error.exceptions]
        return next((exception for exception in exit_error if exception is not None), None)
    return None


def interrupter() -> Callable[[Exit, Callable[[], bool]], bool]:
    """Return what ends the program that runs this loop, if that is still wanted when it can.

    It returns False if the program is not told the exception itself.

    Raises:
        RuntimeError: No event loop is running here.

    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return partial(_interrupt_main, trio.lowlevel.current_trio_token().run_sync_soon)
    import asyncio

    loop = asyncio.get_running_loop()

    def interrupt(error: Exit, is_wanted: Callable[[], bool]) -> bool:
        if loop in _leaving:
            _tell(error)
        else:
            _leaving.add(loop)
            loop.call_soon_threadsafe(at_once, error, is_wanted)
        return True

    def at_once(error: Exit, is_wanted: Callable[[], bool]) -> None:
        _leaving.discard(loop)
        if is_wanted():
            raise error
        _tell(error)

    return interrupt


def _interrupt_main(
    soon: Callable[..., object], error: Exit, is_wanted: Callable[[], bool]
) -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and is_wanted() and callable(signal.getsignal(signal.SIGINT)):
        # In a task of trio's own: where we are now, its handler may raise at once.
        soon(signal.raise_signal, signal.SIGINT)
    else:
        _tell(error)
    return False


def _tell(error: Exit) -> None:
    log.error("a hook has ended the program, which ends already", exc_info=error)
