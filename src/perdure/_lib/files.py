"""Durable files below one folder, private folders, and the operating system's errors as perdure's.

A `Folder` is an open directory where the platform has them, so that a swapped link cannot redirect
a call; elsewhere it is a path. Every name is one step, no step follows a symbolic link, files are
made 0600 and folders 0700 independently of the umask. Everything blocks, and is meant to run in a
thread, except `read_part`, which reads large files by the event loop's own means.

Durable means: the bytes were synced before the name appeared, and the name was synced before the
call returned.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self, final

import anyio
import anyio.lowlevel
import anyio.to_thread

from perdure._lib.ids import random_id
from perdure._lib.logs import LogOnce, log_facts
from perdure._lib.loop import on_trio
from perdure._lib.platform import sync_data, sync_file, sync_folder
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    PerdureError,
    StoreUnavailableError,
)

CHUNK = 256 * 1024
MAX_BYTES = 1024 * 1024 * 1024
"""A larger file is not read as a whole: it may be all holes, and exhaust the memory."""

_POSIX = os.name == "posix"
"""True where a folder can be open, and an open file removed and replaced; not on Windows."""
_TRIES, _PAUSE = 40, 0.005
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_DIRECTORY = os.O_RDONLY | _PLAIN | getattr(os, "O_DIRECTORY", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe there does not block the open
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})

TEMPORARY = ".tmp"


class LinkFoundError(OSError):
    """A symbolic link is where a folder or file of the store should be."""


class NoFileError(OSError):
    """A pipe, a device or a folder is where a file of the store should be."""


class OthersWriteError(OSError):
    """Others can write to a folder or file that should be private to its user."""

    def __init__(self, path: str, mode: int) -> None:
        super().__init__(errno.EPERM, f"others can write to it (mode {mode:04o})", path)
        self.mode: int = mode


@contextlib.contextmanager
def skip_unreadable() -> Iterator[None]:
    """Skip what cannot be read or belongs to others; still raise OthersWriteError."""
    try:
        yield
    except OthersWriteError:
        raise
    except OSError:
        return


@final
class Folder:
    """One directory, and its files by name. Close it, or use it in a ``with``."""

    __slots__ = ("_fd", "owner", "path")

    def __init__(self, path: str, fd: int | None, owner: int | None = None) -> None:
        self.path: str = path
        """Its place when it was opened; for people, and for platforms without `dir_fd`."""
        self.owner: int | None = owner
        """The user it belongs to, if it and all below may be written by their users alone."""
        self._fd = fd

    @classmethod
    def root(cls, path: str) -> Self:
        """Open the folder at *path*, which may itself be reached by a link."""
        if not _POSIX:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            return cls(path, None)
        return cls(path, os.open(path, _DIRECTORY & ~getattr(os, "O_NOFOLLOW", 0)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it. Closing twice is fine."""
        fd = self._fd
        if fd is not None and fd >= 0:
            self._fd = -1  # later calls fail instead of reaching a reused descriptor
            os.close(fd)

    def _at(self, name: str) -> str:
        return name if self._fd is not None else os.path.join(self.path, name)

    # folders

    def enter(self, *names: str, act: Callable[[Folder, str], None] | None = None) -> Folder:
        """Open a folder below this one.

        Args:
            names: The steps to it.
            act: Called at each step, with the folder and the name of the next one.

        Raises:
            LinkFoundError: A step is a symbolic link.
            FileNotFoundError: A step is not there.
            OthersWriteError: It can be written by others, and should be private.

        """
        folder = self
        for name in names:
            try:
                if act is not None:
                    act(folder, name)
                step = folder._step(name)
            finally:
                if folder is not self:
                    folder.close()
            folder = step
        if folder is self:
            return Folder(self.path, None if self._fd is None else os.dup(self._fd), self.owner)
        return folder

    def make(self, *names: str) -> Folder:
        """Open a folder below this one, and make what is missing."""
        return self.enter(*names, act=Folder._mkdir)

    def sync_path(self, *names: str) -> None:
        """Make the entries that lead to a folder below this one durable."""
        self.enter(*names, act=lambda folder, _: folder.sync()).close()

    def _mkdir(self, name: str) -> None:
        try:
            os.mkdir(self._at(name), 0o700, dir_fd=self._fd)
        except FileExistsError:
            return
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise
        os.chmod(self._at(name), 0o700, dir_fd=self._fd)  # a umask may have taken our own rights
        self.sync()

    def _step(self, name: str) -> Folder:
        path = os.path.join(self.path, name)
        if self._fd is None:
            if os.path.islink(path):
                raise LinkFoundError(errno.ELOOP, "symbolic link", path)
            if not stat.S_ISDIR(os.stat(path).st_mode):  # one look: it may just be made
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            return Folder(path, None)
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=self._fd)
        except OSError as error:
            error.filename = path
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                status = self.stat(name)
                if status is not None and stat.S_ISLNK(status.st_mode):
                    raise LinkFoundError(errno.ELOOP, "symbolic link", path) from error
            raise
        if self.owner is None:
            return Folder(path, fd)
        try:
            status = os.fstat(fd)
            _require_others_cannot_write(status, path)
            if status.st_uid != self.owner:
                _warn_of_owner(status.st_uid, path)
        except BaseException:
            os.close(fd)
            raise
        return Folder(path, fd, status.st_uid)

    def names(self) -> list[str]:
        """List what is in it, in no order."""
        if self._fd is None:
            return os.listdir(self.path)
        # A descriptor of its own: threads that list one description would share its place.
        try:
            fd = os.open(".", _DIRECTORY, dir_fd=self._fd)
        except OSError as error:
            error.filename = self.path
            raise
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make its entries durable."""
        sync_folder(self._fd)

    # files

    def stat(self, name: str) -> os.stat_result | None:
        """Return what *name* is, a link not followed; None if it is not there."""
        try:
            return os.stat(self._at(name), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise

    def has(self, name: str) -> bool:
        """Return whether *name* exists; raise if that cannot be determined."""
        return self.stat(name) is not None

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file; a new one is private to its user.

        Raises:
            NoFileError: It is a pipe, a device or a folder, unless O_DIRECTORY asks for one.

        """
        return self._open(name, flags)[0]

    def _open(self, name: str, flags: int) -> tuple[int, os.stat_result]:
        path = os.path.join(self.path, name)
        try:
            fd = os.open(self._at(name), flags | _PLAIN | _NO_WAIT, 0o600, dir_fd=self._fd)
        except OSError as error:
            error.filename = path
            if error.errno == errno.ELOOP:
                raise LinkFoundError(errno.ELOOP, "symbolic link", path) from error
            raise
        # Of the descriptor: the name may lead to another file by now.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) and not flags & getattr(os, "O_DIRECTORY", 0):
            os.close(fd)
            raise NoFileError(errno.EINVAL, "no regular file", path)
        try:
            if flags & os.O_CREAT and hasattr(os, "fchmod"):
                os.fchmod(fd, 0o600)
            elif self.owner is not None:
                _require_others_cannot_write(status, path)
        except BaseException:
            os.close(fd)
            raise
        return fd, status

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None if it is not there.

        Raises:
            CorruptRecordError: It is larger than any file that is read as a whole.

        """
        try:
            fd, status = self._open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            if status.st_size > MAX_BYTES:
                path = os.path.join(self.path, name)
                raise CorruptRecordError(
                    f"{path} has {status.st_size} bytes, more than any file that belongs there: "
                    "restore it from a copy",
                    path=path,
                )
            return file.read()

    def write_temporary(self, data: bytes, *, durable: bool = True) -> str:
        """Write a new file under a name of its own, and return the name."""
        name = f".{random_id()}{TEMPORARY}"
        try:
            fd = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(fd, data)
                if durable:
                    sync_file(fd)
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # there is none, where none could be made
                self.remove(name)
            raise
        return name

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Replace the contents of *name* atomically: a reader sees the old or the new.

        The folder's entry is not synced: call `sync` after the last of several.
        """
        temporary = self.write_temporary(data, durable=durable)
        try:
            self.rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise

    def publish(self, name: str, data: bytes) -> bool:
        """Make *name* durable with these contents; return False if it exists.

        Of several concurrent callers exactly one succeeds, and no reader sees a part of it.
        """
        temporary = self.write_temporary(data)
        try:
            # A link fails where the name exists, so that one of several callers wins.
            if not self.link(temporary, name):
                return False
        except FileNotFoundError:
            return False  # another caller has already removed temporaries
        finally:
            self.remove(temporary)
        self.sync()
        return True

    def link(self, name: str, new: str) -> bool:
        """Give a file a second name; return False if that exists.

        On a file system without links it gets the new name instead of the old. The new name is
        taken first, so that of several callers one succeeds: a crash may leave it empty.
        """
        try:
            os.link(self._at(name), self._at(new), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                os.close(self.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            try:
                self.rename(name, new)
            except BaseException:
                self.remove(new)
                raise
        return True

    def rename(self, name: str, new: str, to: Folder | None = None) -> None:
        """Rename a file, replacing a file of the new name."""
        to = to or self
        old, target = self._at(name), to._at(new)  # noqa: SLF001  # another of our own kind
        _with_retries(lambda: os.replace(old, target, src_dir_fd=self._fd, dst_dir_fd=to._fd))  # noqa: SLF001

    def remove(self, name: str) -> bool:
        """Remove a file; return whether it existed."""
        try:
            _with_retries(lambda: os.unlink(self._at(name), dir_fd=self._fd))
        except FileNotFoundError:
            return False
        return True

    def remove_held(self, name: str, fd: int) -> None:
        """Remove a file that *fd* holds locked, and close *fd* in any case.

        No other process can lock a file that is being removed. Where an open file cannot be
        removed, another process may open it first, and then keeps it.
        """
        if not _POSIX:
            os.close(fd)
            with contextlib.suppress(PermissionError):
                self.remove(name)
            return
        try:
            self.remove(name)
        finally:
            os.close(fd)

    def remove_folder(self, name: str) -> bool:
        """Remove a folder if it is empty; return whether it no longer exists."""
        try:
            os.rmdir(self._at(name), dir_fd=self._fd)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                return False
            raise
        return True

    def remove_temporary(self, names: Iterable[str] | None = None) -> None:
        """Remove the temporary files of killed writers; only for the folder's single writer.

        *names* are those in the folder, if they were listed already.
        """
        for name in self.names() if names is None else names:
            if name.startswith(".") and name.endswith(TEMPORARY):
                try:
                    self.remove(name)
                except PermissionError:  # on Windows: its writer lives, and removes it
                    if _POSIX:
                        raise

    def touch(self, name: str, modified: float) -> None:
        """Set when a file was last modified, in seconds since 1970."""
        fd = self.open(name)
        try:
            place = fd if os.utime in os.supports_fd else self._at(name)
            os.utime(place, (modified, modified))
        finally:
            os.close(fd)


def _with_retries(act: Callable[[], None]) -> None:
    """Retry what fails on Windows while a reader has the file open, which is brief."""
    for _ in range(0 if _POSIX else _TRIES):
        try:
            return act()
        except PermissionError:
            time.sleep(_PAUSE)
    return act()


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file that a user named, to read it; blocks for no pipe.

    Raises:
        ConfigError: It is a pipe, a device or a folder.

    """
    fd = os.open(path, os.O_RDONLY | _NO_WAIT | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise ConfigError(
        f"{os.fspath(path)} is a pipe or a device: name a file, or write what comes from it into "
        "one first",
        path=os.fspath(path),
    )


def read_line(file: IO[bytes], limit: int) -> bytes | None:
    """Return the next line, nothing at the end of the file, and None for one over the limit."""
    line = file.readline(limit + 1)
    return None if len(line) > limit else line


def write_all(fd: int, data: bytes | bytearray) -> int:
    """Write all of *data*, continuing after partial writes; return its size."""
    done = os.write(fd, data)
    if done < len(data):
        remaining = memoryview(data)
        while done < len(data):
            done += os.write(fd, remaining[done:])
    return done


async def read_part(opener: Callable[[str, int], int], start: int, stop: int) -> bytes:
    """Return a part of a large file, read in pieces by the event loop's own file objects.

    aiofiles on asyncio, trio's files on trio. The file is open only during the call, so
    that a reader abandoned between two parts leaks nothing. A part is read to its end even
    when it is cancelled: an abandoned read would race the close.
    """

    def open_there(name: str, flags: int) -> int:
        fd = opener(name, flags)
        os.lseek(fd, start, os.SEEK_SET)  # in the thread that opens it: each call is a hop
        return fd

    pieces: list[bytes] = []
    with anyio.CancelScope(shield=True):
        opened: Any
        if on_trio():
            import trio

            opened = await trio.open_file("part", "rb", 0, opener=open_there)
        else:
            import aiofiles

            opened = aiofiles.open("part", "rb", 0, opener=open_there)
        async with opened as file:
            while start < stop:
                piece = await file.read(min(CHUNK, stop - start))
                if not piece:
                    break
                pieces.append(piece)
                start += len(piece)
    await anyio.lowlevel.checkpoint_if_cancelled()
    return b"".join(pieces)


# The operating system's errors as perdure's: what failed, where, and how to fix it


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room: what was written stays, and the rest may follow later."""

READ_ONLY_CURE = "to read what is there as it is, connect with read_only=True"

_CURES = {
    errno.ENOSPC: "free some room on the disk; saving continues by itself",
    errno.EDQUOT: "the quota is used up: free some room; saving continues by itself",
    errno.EFBIG: "a limit on the size of files was met: raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only: mount it writable, or choose another place",
    errno.EACCES: "make the folder belong to this user (chown, chmod u+rwx), or choose another",
    errno.EPERM: "make the folder belong to this user (chown, chmod u+rwx), or choose another",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine: raise its limit",
    errno.EIO: "the disk reports an error: look at it before anything else",
    errno.ENOTDIR: "a file is where a folder should be: move it away",
    errno.ENOENT: "a folder was removed while it was in use: open the session again",
}
_AT_OPEN = {
    errno.ENOSPC: "free some room on the disk",
    errno.EDQUOT: "the quota is used up: free some room",
}
_READABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
"""Errors that prevent opening a store to write, but may allow reading it."""


def store_error(error: OSError, doing: str, place: str) -> PerdureError:
    """Return the error to raise for *error*, which occurred while *doing* something to *place*."""
    path = error.filename if isinstance(error.filename, str) else place
    if isinstance(error, LinkFoundError):
        return ConfigError(
            f"cannot {doing} {place}: {path} is a symbolic link, which could lead anywhere; put "
            "a real folder there, or make the store's own folder the link",
            path=path,
        )
    if isinstance(error, NoFileError):
        return ConfigError(
            f"cannot {doing} {place}: {path} is a pipe, a device or a folder: restore the file "
            "from a copy",
            path=path,
        )
    if isinstance(error, OthersWriteError):
        # It can happen to a store in use: unsaved changes are saved once it is fixed.
        return StoreUnavailableError(
            f"cannot {doing} {place}: {path} can be written by others (mode {error.mode:04o}), "
            f"{_WHY}: chmod -R go-w {path}, and run perdure check",
            path=path,
            mode=error.mode,
        )
    code = error.errno or 0
    cure = _CURES.get(code, "look at the cause")
    if doing == "open":
        cure = _AT_OPEN.get(code, cure)
        if code in _READABLE:
            cure = f"{cure}; {READ_ONLY_CURE}"
    at = "" if path == place else f" at {path}"
    return StoreUnavailableError(
        f"cannot {doing} {place}: {error.strerror or error}{at}: {cure}",
        path=path,
        errno=error.errno,
    )


@contextlib.contextmanager
def store_errors(doing: str, place: str) -> Iterator[None]:
    """Raise the operating system's errors as perdure's, with the original as the cause."""
    try:
        yield
    except OSError as error:
        raise store_error(error, doing, place) from error


@final
class NewFile:
    """A new file that appears under its name only when complete, and never replaces one.

    It may be closed while a thread is still to write: a native cancellation leaves that thread
    running, and its descriptor's number may be another file's by then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._buffer = bytearray()
        self.size: int = 0
        """Bytes that were written."""
        self._folder = Folder.root(str(path.absolute().parent))
        self._temporary = f".{random_id()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._fd = self._folder.open(self._temporary, flags)

    def add(self, data: bytes) -> int:
        """Buffer bytes, and return how many are buffered."""
        self._buffer += data
        return len(self._buffer)

    async def take(self, data: bytes) -> None:
        """Buffer bytes; write them in a thread once they are many."""
        if self.add(data) >= PART:
            await anyio.to_thread.run_sync(self.write)

    def write(self) -> None:
        """Write the buffered bytes."""
        with self._lock:
            if self._fd < 0:
                return  # closed: no one waits for this
            data, self._buffer = self._buffer, bytearray()
            self.size += write_all(self._fd, data)

    def publish(self) -> int:
        """Make it durable, and give it its name; return its size in bytes.

        Raises:
            ConfigError: The name is taken.

        """
        with self._lock:
            self.write()
            if self._fd < 0:
                return 0
            # The bytes before the name, and the name before this returns.
            sync_data(self._fd)
            if not self._folder.link(self._temporary, self._path.name):
                raise ConfigError(
                    f"{self._path} is there already: choose a new file, or remove it",
                    path=str(self._path),
                )
            self._folder.sync()
            return self.size

    def close(self) -> None:
        """Close it; discard it unless it was published."""
        with self._lock:
            fd, self._fd = self._fd, -1
            os.close(fd)
            self._folder.remove(self._temporary)
            self._folder.close()


PART = 1024 * 1024
"""Bytes of a new file that are buffered."""


@contextlib.asynccontextmanager
async def new_file(path: Path) -> AsyncIterator[NewFile]:
    """Write a new file, which is published when the block ends well; blocking parts in threads."""
    new = await anyio.to_thread.run_sync(NewFile, path)
    try:
        yield new
        await anyio.to_thread.run_sync(new.publish)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(new.close)


# Folders that only their user may write to


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_log = logging.getLogger("perdure")
_foreign = LogOnce()


def open_private(path: str, *, parents: bool = False, make: bool = True) -> Folder:
    """Open a private folder, and with ``make`` create it if only its last component is missing.

    Each folder that is entered from it must be private too.

    Raises:
        ConfigError: It is not a folder, or others can write to it.
        StoreUnavailableError: Its parent is missing, or it cannot be made or opened.

    """
    if make:
        _make(path, parents=parents)
    try:
        folder = Folder.root(path)
    except FileNotFoundError as error:
        raise StoreUnavailableError(
            f"there is no store at {path}: see that the path is right, and the disk mounted",
            path=path,
            errno=errno.ENOENT,
        ) from error
    except NotADirectoryError as error:
        raise ConfigError(
            f"{path} is a file, not a folder: move it away, or choose another folder", path=path
        ) from error
    try:
        _require_private(folder, path)
    except BaseException:
        folder.close()
        raise
    return folder


def _make(path: str, *, parents: bool) -> None:
    try:
        if parents:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # a umask may have taken our own rights
    except FileExistsError:
        return
    except FileNotFoundError as error:
        parent = os.path.dirname(path)
        raise StoreUnavailableError(
            f"{path} cannot be made, since {parent} is not there: make it (mkdir -p), mount the "
            "volume that it belongs to, or choose another folder",
            path=path,
            errno=errno.ENOENT,
        ) from error
    except NotADirectoryError as error:
        raise ConfigError(f"{path} is below a file: choose another folder", path=path) from error
    with Folder.root(os.path.dirname(path)) as above:
        above.sync()


def _require_private(folder: Folder, path: str) -> None:
    status = folder.stat(".") if _POSIX else None
    if status is None:
        return
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if mode & _OTHERS_WRITE:
        cure = f"chmod go-w {path}"
        if user not in {0, status.st_uid} or mode & stat.S_ISVTX:  # such as /tmp, which all share
            cure = f"use a folder of your own below it, such as {os.path.join(path, 'perdure')}"
        raise ConfigError(
            f"{path} can be written by others (mode {mode:04o}), {_WHY}: {cure}",
            path=path,
            mode=mode,
        )
    folder.owner = status.st_uid
    _warn_of_owner(status.st_uid, path)


_WHY = "who could then change what is kept there"


def _require_others_cannot_write(status: os.stat_result, path: str) -> None:
    if status.st_mode & _OTHERS_WRITE:
        raise OthersWriteError(path, stat.S_IMODE(status.st_mode))


def _warn_of_owner(owner: int, path: str) -> None:
    """Warn once of a folder that another user can change; root can change everything anyway."""
    user = os.geteuid()
    if owner not in {0, user} and _foreign.first((path, owner)):
        log_facts(
            _log,
            logging.WARNING,
            "%(path)s belongs to user %(owner)s, who can change what is kept there, while user "
            "%(user)s runs this program: run it as that user, or chown -R %(user)s %(path)s",
            path=path,
            owner=owner,
            user=user,
        )


# Notification of new entries in a folder, without polling


_MOVED_TO = 0x80
_ONLYDIR = 0x01000000
_MUCH = 65536


@final
class FolderWatch:
    """A watch that is notified when an entry is moved into a folder, as by `Folder.replace`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def wait(self) -> None:
        """Wait for a notification since the last `drain`, or for the end of the watch.

        One task at a time: a second one gets ``anyio.BusyResourceError``.
        """
        if self._fd >= 0:
            try:
                await anyio.wait_readable(self._fd)
            except anyio.ClosedResourceError:
                return

    def drain(self) -> None:
        """Discard the notifications so far: call it before you list the folder."""
        try:
            while os.read(self._fd, _MUCH):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """End the watch, on the event loop that waits for it. Closing twice is fine."""
        if self._fd >= 0:
            anyio.notify_closing(self._fd)
        self.drop()

    def drop(self) -> None:
        """End the watch where no event loop waits for it, such as in a forked child."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def watch_folder(path: str) -> FolderWatch | None:
    """Watch a folder; return None where the platform has no notifications."""
    if sys.platform != "linux":  # pragma: no cover  # one has to look there
        return None
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        if libc.inotify_add_watch(fd, os.fsencode(path), _MOVED_TO | _ONLYDIR) < 0:
            os.close(fd)
            return None
    except (ImportError, OSError, AttributeError):  # no such call in this C library
        return None
    return FolderWatch(fd)
