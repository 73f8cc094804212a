"""Hooks on the calls by which Python changes or looks at a disk.

They are put into a child process that is to be killed, stopped or watched, so that it can
happen at each single call, on every machine, without a debugger. The store knows nothing.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

CHANGING = (
    "fdatasync",
    "fsync",
    "ftruncate",
    "link",
    "mkdir",
    "open",
    "pwrite",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "write",
    "writev",
)
"""A process that dies between two of these leaves the disk as the first one did."""

LOOKING = ("access", "listdir", "read", "stat")
"""At these a process that is stopped can miss what others do meanwhile."""

Act = Literal["kill", "kill torn", "stop"]

Real = Callable[..., Any]


class Around(Protocol):
    """What runs in place of a call, and decides whether and how to make it."""

    def __call__(self, name: str, real: Real, *args: Any, **kwargs: Any) -> Any: ...


def install(names: tuple[str, ...], around: Around) -> None:
    """Put *around* in place of functions of `os`, in this process, for good."""
    for name in names:
        real = getattr(os, name, None)
        if real is not None:
            setattr(os, name, functools.wraps(real)(functools.partial(around, name, real)))


def changes(name: str, args: tuple[Any, ...]) -> bool:
    """Say whether a call changes the disk: opening does only where it creates."""
    return name in CHANGING and (name != "open" or bool(args[1] & os.O_CREAT))


class Tripwire:
    """Kill or stop this process just before its k-th call; 0 only counts.

    "kill torn" lets a write do half of its work first.
    """

    def __init__(self, at: int, act: Act, *, looking: bool = False) -> None:
        self.calls: list[str] = []
        self._at = at
        self._act = act
        self._looking = looking
        self._lock = threading.Lock()

    def install(self) -> None:
        """Count from now on."""
        install((*CHANGING, *LOOKING) if self._looking else CHANGING, self)

    def __call__(self, name: str, real: Real, *args: Any, **kwargs: Any) -> Any:
        if self._looking or changes(name, args):
            with self._lock:  # Two threads may call at once; only one is the k-th.
                self.calls.append(name)
                due = len(self.calls) == self._at
            if due:
                self._trip(name, real, args)
        return real(*args, **kwargs)

    def _trip(self, name: str, real: Real, args: tuple[Any, ...]) -> None:
        if self._act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if self._act == "kill torn" and name == "write":
            data = bytes(args[1])
            real(args[0], data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
