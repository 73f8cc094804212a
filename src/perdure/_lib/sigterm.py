"""SIGTERM for all who watch it in this process: one handler, which tells each of them.

Several managers, in several threads and event loops, may come and go in any order; the
handler that was there before is put back when the last of them has left. What others put on
top of ours stays, and what was below is called. A forked child inherits nothing.

* Over somebody else's handler the watches are told to drain, and that handler runs.
* Over the default action they are also told to end the program. Whoever comes to the end last
  ends the process, with the signal's own status. Another SIGTERM changes nothing until the
  time is over that the first one gave; after that it ends the process at once.
* A watch whose event loop does not run any more cannot do anything: where there is no other,
  the signal has its default action.

Handlers are installed by the main thread alone. A watch from another thread is told what the
main thread's handler hears.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Protocol, final

__all__ = ["Watch", "end_process", "join", "leave", "time_left", "waited_for"]


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
    return [one for one in tuple(_watches) if one.received and not one.finished]


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
        running = [one for one in tuple(_watches) if one.drain()]
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL:
            _end(running)


def _end(running: list[Watch]) -> None:
    """Do what takes the place of the default action."""
    global _until  # noqa: PLW0603  # one signal handler a process
    news = [one for one in running if not one.received]
    if news:
        patience = max([one.patience for one in news])
        _until = max(_until, time.monotonic() + patience)
        for one in news:
            one.received = True
        for error in [one.end() for one in news]:
            if error is not None:
                raise error
    elif time_left() <= 0:
        for one in tuple(_watches):
            one.rescue()
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
    mine = isinstance(signal.getsignal(signal.SIGTERM), _Handler)
    _masks.before = None
    if mine:
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
