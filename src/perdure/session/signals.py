"""SIGTERM for one manager: begin the drain, and leave the exit status to whoever owns it.

Over somebody else's handler (a server's) the drain begins, and that handler runs.
Over the default action the body is cancelled, the manager closes, and the process
ends with the signal's status; it ends by the deadline even if the body does not.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import final

import anyio

from perdure._lib import signals

_STEP = 0.02
"""Seconds between two looks at whether other managers have closed."""

_cancelled: weakref.WeakSet[object] = weakref.WeakSet()
"""Bodies that SIGTERM has cancelled: managers of one body would cancel it once each."""


@final
class SignalWatch:
    """Watch for SIGTERM while it is installed. Made in the task whose program it ends.

    Args:
        patience: Seconds that closing may take.
        on_term: Called on the event loop when SIGTERM has come, each time.
        on_end: Called then, once, if it came over the default action.
        on_stopped: Called when it comes after the event loop has stopped, as the process ends.

    """

    def __init__(
        self,
        *,
        patience: float,
        on_term: Callable[[], None],
        on_end: Callable[[], None],
        on_stopped: Callable[[], None],
    ) -> None:
        self.patience: float = patience
        self.received: bool = False
        """Whether SIGTERM has come over the default action."""
        self.finished: bool = False
        self._on_term = on_term
        self._on_end = on_end
        self._on_stopped = on_stopped
        self._soon = _call_soon()
        self._body, self._cancel = _body()

    def install(self) -> None:
        """Start watching."""
        _cancelled.discard(self._body)
        signals.join(self)

    def uninstall(self) -> None:
        """Watch no more."""
        self.finished = True
        signals.leave(self)

    def cancel_body(self) -> None:
        """Have the body left, in its event loop; once, whoever asks."""
        if self._body not in _cancelled:
            _cancelled.add(self._body)
            self._cancel()

    async def end_process(self) -> None:
        """End the process when all managers have closed that were told to, or time is over.

        Those that the same body has opened close behind this one, and see to it then.
        """
        others = [watch for watch in signals.waited_for() if watch is not self]
        if any(isinstance(watch, SignalWatch) and watch._body is self._body for watch in others):
            return
        await self.end_process_by_force()

    async def end_process_by_force(self) -> None:
        """The same, though the body goes on."""
        self.finished = True
        with anyio.CancelScope(shield=True):
            # They are in other threads, too: no event of this loop tells of them.
            while signals.waited_for() and signals.time_left() > 0:  # noqa: ASYNC110
                await anyio.sleep(_STEP)
        signals.end_process()

    # in the signal handler

    def drain(self) -> bool:
        """Begin to drain, if the event loop runs."""
        return self._soon(self._on_term)

    def end(self) -> None:
        """Have the body left, and the process end."""
        self._soon(self._on_end)

    def rescue(self) -> None:
        """Keep what can be kept without the event loop."""
        self._on_stopped()


def _call_soon() -> Callable[[Callable[[], None]], bool]:
    """Return how a signal handler runs something in this event loop, and whether it can."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        post: Callable[[Callable[[], None]], object]
        post, is_running = trio.lowlevel.current_trio_token().run_sync_soon, None
    else:
        import asyncio

        loop = asyncio.get_running_loop()
        post, is_running = loop.call_soon_threadsafe, loop.is_running

    def soon(act: Callable[[], None]) -> bool:
        if is_running is not None and not is_running():
            return False
        try:
            post(act)
        except RuntimeError:  # closed
            return False
        return True

    return soon


def _body() -> tuple[object, Callable[[], object]]:
    """Return whose program SIGTERM ends, and what cancels it from a callback of its loop.

    On trio that is what Ctrl-C does there: no cancel scope has to stay open for it.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        in_main = threading.current_thread() is threading.main_thread()
        cancel = partial(signal.raise_signal, signal.SIGINT) if in_main else bool
        return trio.lowlevel.current_root_task(), cancel
    import asyncio

    task = asyncio.current_task()
    if task is None:
        return object(), bool
    return task, lambda: task.cancel("SIGTERM")
