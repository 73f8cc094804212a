"""A locked file for each process that is here: it tells the dead from the living at once.

The lock ends with the process, however it ends; a forked child lets go of it. Blocking.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from typing import final

from perdure._lib.files import Folder
from perdure._lib.platform import try_lock

__all__ = ["Presence"]

_LOCK = ".lock"
_BELL = ".bell"
_TRIES = 50


@final
class Presence:
    """Be present in a folder under a name, as long as this object is not closed.

    Raises:
        BlockingIOError: Somebody else is present under that name.

    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._name = name
        self._folder = folder
        self._fd: int | None = self._take(_file_of(name))
        _present.add(self)

    def _take(self, file: str) -> int:
        for _ in range(_TRIES):  # who asks for it holds the lock for a moment
            fd = self._folder.open(file, os.O_RDWR | os.O_CREAT)
            if try_lock(fd) is not False:
                found = self._folder.stat(file)
                if found is not None and found.st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)
        raise BlockingIOError

    def close(self) -> None:
        """Leave. Closing twice is fine."""
        _present.discard(self)
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # what stays is swept by somebody else
                self._folder.remove_held(_file_of(self._name), fd)
            self._folder.close()

    def forked(self) -> None:
        """Let go in a forked child, which must not keep its parent present."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def is_present(self, name: str) -> bool | None:
        """Say whether somebody of that name is present; None where it cannot be told."""
        if name == self._name:
            return True
        try:
            fd = self._folder.open(_file_of(name), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two who ask at once do not take each other for its owner.
            free = try_lock(fd, shared=True)
        finally:
            os.close(fd)
        return None if free is None else not free

    def ring(self, name: str) -> None:
        """Tell somebody who is present that there is something to look at."""
        if self._folder.has(_file_of(name)):
            bell = _bell_of(_file_of(name))
            os.close(self._folder.open(bell, os.O_WRONLY | os.O_CREAT))
            self._folder.touch(bell, time.time())

    def rung(self) -> int:
        """Return a number that changes when somebody rings."""
        found = self._folder.stat(_bell_of(_file_of(self._name)))
        return found.st_mtime_ns if found is not None else 0

    def sweep(self) -> None:
        """Remove the files of those who have gone without leaving."""
        mine = _file_of(self._name)
        names = self._folder.names()
        for file in names:
            if file.endswith(_BELL) and file.removesuffix(_BELL) + _LOCK not in names:
                self._folder.remove(file)
        for file in names:
            if file == mine or not file.endswith(_LOCK):
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody else sweeps as well
                fd = self._folder.open(file, os.O_RDWR)
                # Held while its name goes: a new one of that name finds out and retries.
                if try_lock(fd) is True:
                    self._folder.remove_held(file, fd)
                else:
                    os.close(fd)


def _file_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + _LOCK


def _bell_of(file: str) -> str:
    return file.removesuffix(_LOCK) + _BELL


_present: weakref.WeakSet[Presence] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_present):
        one.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
