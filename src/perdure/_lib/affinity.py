"""Where an object belongs: one event loop, one thread, one process.

Cheap enough for every call: a thread id, a fork counter and the running loop are
compared, nothing is looked up by name.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Literal

Stray = Literal["fork", "thread", "loop"]

_forks = 0


def _forked() -> None:
    global _forks  # noqa: PLW0603  # counted once per fork, by the interpreter
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Affinity:
    """Remember the loop, thread and process that made this; ask ``stray`` before use."""

    __slots__ = ("_forks", "_thread", "loop", "running")

    def __init__(self) -> None:
        self._forks = _forks
        self._thread = threading.get_ident()
        self.running: Callable[[], object] = _running_loop()
        """Returns the loop that the caller runs in, None in a forked child."""
        self.loop: object = self.running()
        """Where this was made: who is at home if ``running() is loop``, most cheaply asked."""

    def stray(self) -> Stray | None:
        """Return how the caller is elsewhere, None when it is at home."""
        # No two threads run the same loop: who runs it is in its thread.
        if self.running() is self.loop is not None and self._forks == _forks:
            return None
        if self._forks != _forks:
            return "fork"
        if self._thread != threading.get_ident():
            return "thread"
        return None if self.running() is self.loop else "loop"


def _running_loop() -> Callable[[], object]:
    """Return a function that returns the running loop, None when there is none."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        lowlevel = trio.lowlevel
        forks = _forks

        def token() -> object:
            here = forks == _forks and lowlevel.in_trio_run()
            return lowlevel.current_trio_token() if here else None

        return token
    # Knows a forked child by itself.
    from asyncio import _get_running_loop

    return _get_running_loop
