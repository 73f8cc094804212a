"""Locked files: a process holds them while it lives, so that others see at once whether it does.

A lock ends with its process, however that ends; a forked child releases its copy. All calls block.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import final

from perdure._lib.files import Folder
from perdure._lib.platform import boot_id, try_lock

_TRIES = 50
_TO_ASK = os.O_RDONLY if os.name == "posix" else os.O_RDWR
"""Also on a read-only file system, where locks need no write permission."""


@final
class LockedFile:
    """A file that this process holds locked until `remove`.

    Raises:
        BlockingIOError: Another process holds it.

    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._fd: int | None = self._take()
        _held.add(self)

    def _take(self) -> int:
        for _ in range(_TRIES):  # a process that checks it holds the lock briefly
            fd = self._folder.open(self._name, os.O_RDWR | os.O_CREAT)
            if try_lock(fd) is not False:
                # It may have been removed between the open and the lock: a lock on that file proves
                # nothing.
                status = self._folder.stat(self._name)
                if status is not None and status.st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)
        raise BlockingIOError

    def remove(self) -> bool:
        """Remove its name, then release it; return whether it was held."""
        _held.discard(self)
        fd, self._fd = self._fd, None
        if fd is None:
            return False
        with contextlib.suppress(OSError):  # a leftover is swept later
            self._folder.remove_held(self._name, fd)
        return True

    def let_go(self) -> None:
        """Release it and leave the file, for another process to sweep."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def is_held(folder: Folder, name: str) -> bool | None:
    """Return whether a live process holds a file; None if unknown."""
    try:
        fd = folder.open(name, _TO_ASK)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None
    try:
        # Shared, so that two concurrent checks do not take each other for the holder.
        free = try_lock(fd, shared=True)
    finally:
        os.close(fd)
    return None if free is None else not free


def unheld(folder: Folder, names: Iterable[str]) -> Iterator[str]:
    """Yield the files that no live process holds, and remove each after it was processed."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            fd = folder.open(name, os.O_RDWR)
            # Locked until its name is removed: a new owner of that name notices and retries.
            if try_lock(fd) is not True:
                os.close(fd)
                continue
            try:
                yield name
            except BaseException:
                os.close(fd)
                raise
            folder.remove_held(name, fd)


_held: weakref.WeakSet[LockedFile] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_held):
        file.let_go()  # a child must not keep its parent alive


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Presence in a folder: a locked file for each process


_LOCK = ".lock"
_BELL = ".bell"


@final
class Presence:
    """The processes that are present in a folder, and this one under a name until it is closed.

    Args:
        folder: Where, which this closes; None if there is none, so that nothing is known of any
            process.
        name: This process's own, "" for one that only looks: no other sees or notifies it.

    Raises:
        BlockingIOError: Another process is present under that name.

    """

    def __init__(self, folder: Folder | None, name: str = "") -> None:
        self._name = name
        self._folder = folder
        self._held: LockedFile | None = None
        if folder is None or not name:
            return
        try:
            self._held = LockedFile(folder, _file_of(name))
        except BaseException:
            folder.close()
            raise

    def close(self) -> None:
        """End the presence. Closing twice is fine."""
        if self._held is not None:
            self._held.remove()
        if self._folder is not None:
            self._folder.close()

    def is_present(self, name: str) -> bool | None:
        """Return whether a process is present under that name; None if unknown."""
        if self._folder is None:
            return None
        return name == self._name or is_held(self._folder, _file_of(name))

    def notify(self, name: str) -> None:
        """Notify a present process that there is something new."""
        if self._folder is not None and self._folder.has(_file_of(name)):
            bell = _file_of(name, _BELL)
            os.close(self._folder.open(bell, os.O_WRONLY | os.O_CREAT))
            self._folder.touch(bell, time.time())

    def notified(self) -> int:
        """Return a number that changes with each notification."""
        bell = _file_of(self._name, _BELL)
        count = None if self._folder is None else self._folder.stat(bell)
        return count.st_mtime_ns if count is not None else 0

    def sweep(self) -> None:
        """Remove the files of processes that ended without closing."""
        if self._folder is None:
            return
        own_name = _file_of(self._name)
        names = self._folder.names()
        for file in names:
            if file.endswith(_BELL) and file.removesuffix(_BELL) + _LOCK not in names:
                self._folder.remove(file)
        locks = [file for file in names if file.endswith(_LOCK) and file != own_name]
        for _ in unheld(self._folder, locks):
            pass


def _file_of(name: str, ending: str = _LOCK) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + ending


# Process identity
#
# A process is named by the machine's boot id, its pid namespace, its pid and its start time: pids
# are reused, and each container counts its own. Where any of these is unknown, nothing is claimed.


_BEGAN = 19
"""The index of a process's start time in ``/proc/<pid>/stat``, after its name."""


def this_process() -> str:
    """Return a name for this process that no other process ever has; "" if unknown."""
    boot, space, began = boot_id(), _namespace(), _began(os.getpid())
    return f"{boot} {space} {os.getpid()} {began}" if boot and space and began else ""


def has_ended(process: str) -> bool:
    """Return whether a process has certainly ended; False also if unknown."""
    parts = process.split(" ")
    if len(parts) != 4 or parts[:2] != [boot_id(), _namespace()] or not parts[2].isdigit():
        return False
    began = _began(int(parts[2]))
    return began is not None and began != parts[3]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> str | None:
    """Return the start time of a process, "" if there is no such process, None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[_BEGAN].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, IndexError):
        return None
