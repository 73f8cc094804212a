"""SIGTERM in a blocking program: begin the drain, and leave the exit to whoever owns it.

Over somebody else's handler the drain begins, and that handler runs. Over the default action
the main thread gets a SystemExit, as Ctrl-C gives it a KeyboardInterrupt: blocks are left, the
manager closes, and leaving its ``with`` ends the process with the signal's own status. A manager
that another thread has connected is closed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn, final

from perdure._lib import sigterm

__all__ = ["TermWatch"]

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
        sigterm.join(self)

    def uninstall(self) -> None:
        """Watch no more."""
        self.finished = True
        sigterm.leave(self)

    def end_process(self) -> NoReturn:
        """End the process when all managers have closed that were told to, or time is over."""
        while sigterm.waited_for() and sigterm.time_left() > 0:
            time.sleep(_STEP)
        sigterm.end_process()
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
