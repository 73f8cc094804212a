"""The exceptions that end a program, raised where nobody may raise them.

User code that the library calls, a hook for example, may raise KeyboardInterrupt, or
SystemExit by ``sys.exit``. In a task of the library it would end the tasks that save, on
trio the whole run without a word to the main task. So it is taken there, and goes to the
program as one would expect of the loop:

* asyncio: it leaves the loop from a callback, as Ctrl-C does. ``asyncio.run`` raises it, after
  it has cancelled every task, and each manager has saved.
* trio: the main task is interrupted as by Ctrl-C; whoever closes the manager raises the
  exception itself.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

__all__ = ["Exit", "exit_in", "interrupter"]

log: logging.Logger = logging.getLogger("perdure")

Exit = KeyboardInterrupt | SystemExit

_leaving: weakref.WeakSet[object] = weakref.WeakSet()
"""Loops that are about to be left: a second exception would cut what the first one's end saves."""


def exit_in(error: BaseException) -> Exit | None:
    """Return the exception that is meant to end the program, alone or in a group of others."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [exit_in(one) for one in error.exceptions]
        return next((one for one in found if one is not None), None)
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
            loop.call_soon_threadsafe(leave, error, is_wanted)
        return True

    def leave(error: Exit, is_wanted: Callable[[], bool]) -> None:
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
