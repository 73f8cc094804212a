"""SIGTERM: begin the drain, and leave the exit status to whoever owns it.

Over somebody else's handler (a server's) the drain begins, and that handler runs.
Over the default action the body is cancelled, the manager closes, and the process
ends with the signal's status; it ends by the deadline even if the body does not.
Only in the main thread, never in a notebook, and only between enter and exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["SignalWatch"]


class SignalWatch:
    """Watch for SIGTERM while it is installed."""

    def __init__(self, on_term: Callable[[], None], cancel_body: Callable[[], None]) -> None:
        self._on_term = on_term
        self._cancel_body = cancel_body
        self._previous: Any = None
        self._soon: Callable[[Callable[[], None]], object] | None = None
        self.received: bool = False
        """Whether SIGTERM has come over the default action."""

    def install(self) -> None:
        """Start watching, where that is possible and polite."""
        if threading.current_thread() is not threading.main_thread() or "ipykernel" in sys.modules:
            return
        self._soon = _call_soon()
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous is None:  # installed by something that is not Python: leave it
            self._soon = None
            return
        signal.signal(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Put back what was there, unless somebody has put something on top."""
        if self._soon is None:
            return
        self._soon = None
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def end_process(self) -> None:
        """End the process with SIGTERM's own status."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._soon is None:  # somebody restored us after our exit
            return
        previous = self._previous
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing left to drain
            self._soon(self._on_term)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL and not self.received:
            self.received = True
            with contextlib.suppress(RuntimeError):
                self._soon(self._cancel_body)


def _call_soon() -> Callable[[Callable[[], None]], object]:
    """Return how a signal handler runs something in the running loop."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        soon: Callable[[Callable[[], None]], object]
        soon = trio.lowlevel.current_trio_token().run_sync_soon
        return soon
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe


def body_canceller() -> Callable[[], None]:
    """Return what cancels the task that is running now, from a callback of its loop.

    On trio that is what Ctrl-C does there: no cancel scope has to stay open for it.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return lambda: signal.raise_signal(signal.SIGINT)
    import asyncio

    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None:
            task.cancel("SIGTERM")

    return cancel
