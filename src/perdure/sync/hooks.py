"""Hooks of blocking code: called in a thread of their own, in the order of the events.

A hook may take its time and may use the blocking API; the loop never waits for it, except
for ``before_save``. When the manager has closed, what has happened until then is still told.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, final

__all__ = ["HookThread"]

log: logging.Logger = logging.getLogger("perdure")


@final
class HookThread:
    """Call functions one after another; the thread starts with the first of them.

    What is meant to end the program (``sys.exit`` in a hook) goes to ``on_exit``.
    """

    def __init__(self, name: str, on_exit: Callable[[BaseException], object]) -> None:
        self._name = name
        self._on_exit = on_exit
        self._told: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, hook: Callable[[Any], object], facts: object) -> None:
        """Have ``hook(facts)`` called; from the loop's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._told.put(lambda: hook(facts))

    def finish(self, timeout: float) -> None:
        """Wait until everything was told; a hook that closes its own manager does not wait."""
        self._told.put(None)
        if self._thread not in {None, threading.current_thread()}:
            assert self._thread is not None
            self._thread.join(timeout)

    def _work(self) -> None:
        while (tell := self._told.get()) is not None:
            try:
                tell()
            except (KeyboardInterrupt, SystemExit) as error:
                self._on_exit(error)  # it would end this thread without a word
            except BaseException:  # it would end this thread, and no hook would be called again
                log.exception("a hook failed")
