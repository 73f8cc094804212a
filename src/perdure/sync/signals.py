"""SIGTERM in a blocking program: begin the drain, and leave the exit to whoever owns it.

Over somebody else's handler the drain begins, and that handler runs. Over the default action
the main thread gets a SystemExit, as Ctrl-C gives it a KeyboardInterrupt: blocks are left, the
manager closes, and leaving its ``with`` ends the process with the signal's own status.
Only when connected in the main thread, and never in a notebook.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, final

__all__ = ["TermWatch"]

_BY_SIGNAL = 128
"""What shells add to a signal's number for an exit status."""


@final
class TermWatch:
    """Watch for SIGTERM between ``install`` and ``uninstall``."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._previous: Any = None
        self._watching = False
        self.received: bool = False
        """Whether SIGTERM has come over the default action."""

    def install(self) -> None:
        """Start watching, where that is possible and polite."""
        if threading.current_thread() is not threading.main_thread() or "ipykernel" in sys.modules:
            return
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous is not None:  # else something that is not Python has it: leave it
            self._watching = True
            signal.signal(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Put back what was there, unless this is another thread or somebody is on top."""
        self._watching = False
        if threading.current_thread() is not threading.main_thread() or self._previous is None:
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def end_process(self) -> NoReturn:
        """End the process with SIGTERM's own status."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(_BY_SIGNAL + signal.SIGTERM)  # where a signal takes its time

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._watching:
            self._drain()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL and not self._watching:  # closed in another thread
            self.end_process()
        elif self._previous == signal.SIG_DFL and not self.received:
            self.received = True
            raise SystemExit(_BY_SIGNAL + number)
