"""Files that a process holds locked while it lives: they tell the dead from the living at once.

The lock ends with the process, however it ends; a forked child lets go of it. Blocking.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import final

from perdure._lib.files import Folder
from perdure._lib.platform import try_lock

__all__ = ["HeldFile", "is_held", "unheld"]

_TRIES = 50
_TO_ASK = os.O_RDONLY if os.name == "posix" else os.O_RDWR
"""On a file system that is read-only too, where locks need no right to write."""


@final
class HeldFile:
    """A file of this process's, from here to `remove`.

    Raises:
        BlockingIOError: Somebody else holds it.

    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._fd: int | None = self._take()
        _held.add(self)

    def _take(self) -> int:
        for _ in range(_TRIES):  # who asks for it holds the lock for a moment
            fd = self._folder.open(self._name, os.O_RDWR | os.O_CREAT)
            if try_lock(fd) is not False:
                found = self._folder.stat(self._name)
                if found is not None and found.st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)
        raise BlockingIOError

    def remove(self) -> bool:
        """Let go of it, its name first; say whether it was held."""
        _held.discard(self)
        fd, self._fd = self._fd, None
        if fd is None:
            return False
        with contextlib.suppress(OSError):  # what stays is swept
            self._folder.remove_held(self._name, fd)
        return True

    def let_go(self) -> None:
        """Let go of it and leave it there, for somebody else to sweep."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def is_held(folder: Folder, name: str) -> bool | None:
    """Say whether a living process holds a file; None where that cannot be told."""
    try:
        fd = folder.open(name, _TO_ASK)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None
    try:
        # Shared, so that two who ask at once do not take each other for its holder.
        free = try_lock(fd, shared=True)
    finally:
        os.close(fd)
    return None if free is None else not free


def unheld(folder: Folder, names: Iterable[str]) -> Iterator[str]:
    """Give those files that no living process holds, and remove each when its turn is over."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # somebody else sweeps as well
            fd = folder.open(name, os.O_RDWR)
            # Held while its name goes: a new one of that name finds out and retries.
            if try_lock(fd) is not True:
                os.close(fd)
                continue
            try:
                yield name
            except BaseException:
                os.close(fd)
                raise
            folder.remove_held(name, fd)


_held: weakref.WeakSet[HeldFile] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_held):
        one.let_go()  # a child must not keep its parent alive


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
