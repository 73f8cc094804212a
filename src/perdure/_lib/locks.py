"""Files that a process holds locked while it lives: they tell live processes from dead ones."""

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

# Files that a process holds locked while it lives: they tell the dead from the living at once
#
# The lock ends with the process, however it ends; a forked child lets go of it. Blocking.


_TRIES = 50
_TO_ASK = os.O_RDONLY if os.name == "posix" else os.O_RDWR
"""On a file system that is read-only too, where locks need no right to write."""


@final
class LockedFile:
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
                status = self._folder.stat(self._name)
                if status is not None and status.st_ino == os.fstat(fd).st_ino:
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


_held: weakref.WeakSet[LockedFile] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_held):
        file.let_go()  # a child must not keep its parent alive


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# A locked file for each process that is here: it tells the dead from the living at once
#
# The lock ends with the process, however it ends; a forked child lets go of it. Blocking.


_LOCK = ".lock"
_BELL = ".bell"


@final
class Presence:
    """Be present in a folder under a name, as long as this object is not closed.

    Raises:
        BlockingIOError: Somebody else is present under that name.

    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._name = name
        self._folder = folder
        self._held = LockedFile(folder, _file_of(name))

    def close(self) -> None:
        """Leave. Closing twice is fine."""
        if self._held.remove():
            self._folder.close()

    def is_present(self, name: str) -> bool | None:
        """Say whether somebody of that name is present; None where it cannot be told."""
        return name == self._name or is_held(self._folder, _file_of(name))

    def notify(self, name: str) -> None:
        """Tell somebody who is present that there is something to look at."""
        if self._folder.has(_file_of(name)):
            bell = _bell_of(_file_of(name))
            os.close(self._folder.open(bell, os.O_WRONLY | os.O_CREAT))
            self._folder.touch(bell, time.time())

    def notified(self) -> int:
        """Return a number that changes when somebody rings."""
        count = self._folder.stat(_bell_of(_file_of(self._name)))
        return count.st_mtime_ns if count is not None else 0

    def sweep(self) -> None:
        """Remove the files of those who have gone without leaving."""
        own_name = _file_of(self._name)
        names = self._folder.names()
        for file in names:
            if file.endswith(_BELL) and file.removesuffix(_BELL) + _LOCK not in names:
                self._folder.remove(file)
        locks = [file for file in names if file.endswith(_LOCK) and file != own_name]
        for _ in unheld(self._folder, locks):
            pass


@final
class PresenceReader:
    """A look at who is present in a folder, by somebody who is not; None where there is none."""

    def __init__(self, folder: Folder | None) -> None:
        self._folder = folder

    def close(self) -> None:
        """Close the folder."""
        if self._folder is not None:
            self._folder.close()

    def is_present(self, name: str) -> bool | None:
        """Say whether somebody of that name is present; None where it cannot be told."""
        return None if self._folder is None else is_held(self._folder, _file_of(name))

    def notify(self, name: str) -> None:
        """Do nothing: who only looks has nothing to tell."""

    def notified(self) -> int:
        """Return 0: nobody rings for who is not present."""
        return 0


def _file_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + _LOCK


def _bell_of(file: str) -> str:
    return file.removesuffix(_LOCK) + _BELL


# Which process this is, told so that others on the machine can see that it has ended
#
# A process is named by the machine's boot, its namespace of process ids, its id and when it began:
# ids are used again, and each container counts its own. Where any of it is unknown, nothing is
# claimed.


_BEGAN = 19
"""Where a process's start stands in ``/proc/<pid>/stat``, behind its name."""


def this_process() -> str:
    """Return a name for this process that no other ever has; "" where there is none."""
    boot, space, began = boot_id(), _namespace(), _began(os.getpid())
    return f"{boot} {space} {os.getpid()} {began}" if boot and space and began else ""


def has_ended(process: str) -> bool:
    """Say whether a process has ended for certain; False also where that cannot be told."""
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
    """Return when a process began, "" if there is none, None if it cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[_BEGAN].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, IndexError):
        return None
