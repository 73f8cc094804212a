"""A home folder, read for an archive: no link is followed, and nothing waits on a pipe.

Everything here blocks, and is meant for hops into a thread: `scan` is a generator that goes on
where it stopped. It holds a piece of one file, and an open folder for each step of the path.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from io import FileIO
from typing import Final

import msgspec

from perdure._lib.files import Folder, LinkFoundError
from perdure.archive.entries import CHUNK_BYTES, Entry, FileEntry, FolderEntry, mode_of, name_of
from perdure.archive.limits import CONTROL, ArchiveLimits, Checker, too_large
from perdure.archive.selection import Selection
from perdure.errors import ConfigError, NotStorableError

# Which part of a home folder an archive has: what is visible, and what ``persist_paths`` name


TRIES: Final = 3
"""How often a file is read that changes meanwhile."""
_ENTERED: Final = 0o700
"""The mode of a folder of which only a part is archived: its own is not kept."""
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)


class FileChunk(msgspec.Struct, frozen=True):
    """A piece of the file whose entry comes next."""

    name: str
    data: bytes


class ArchiveSkipped(msgspec.Struct, frozen=True):
    """What an archive passes over; a restore leaves it where it is."""

    path: str
    why: str


class ScannedEntry(msgspec.Struct, frozen=True):
    """An entry, and whether it changed while it was read."""

    entry: Entry
    changing: bool = False


Found = FileChunk | ScannedEntry | ArchiveSkipped


def scan(home: Folder, selection: Selection, limits: ArchiveLimits) -> Iterator[Found]:
    """Give what a home folder has, parents first, in the order of names.

    Raises:
        ConfigError: A path that is named leads through a symbolic link.
        NotStorableError: A name is one that an archive cannot have; TooLargeError: over a limit.

    """
    yield from _Scan(home, selection, limits).folder(home, "")


class _Scan:
    def __init__(self, home: Folder, selection: Selection, limits: ArchiveLimits) -> None:
        self._selection = selection
        self._limit = limits.file_bytes
        self._checker = Checker(home.path, limits, refusal=NotStorableError)
        status = home.stat(".")
        self._device = None if status is None else status.st_dev

    def folder(self, folder: Folder, above: str) -> Iterator[Found]:
        for name in sorted(folder.names()):
            path = f"{above}/{name}" if above else name
            if path == CONTROL:
                continue
            status = folder.stat(name)
            if status is None:
                continue  # removed meanwhile
            fate = self._selection.fate(path)
            reason = self._passed_over(fate, status)
            if reason is not None:
                self._require_no_link(path, status)
                yield ArchiveSkipped(path, reason)
            elif stat.S_ISDIR(status.st_mode):
                mode = mode_of(status.st_mode, folder=True) if fate == "taken" else _ENTERED
                yield from self._inner(folder, name, FolderEntry(path, mode))
            elif fate == "taken":
                self._checker.require_path(path)
                yield from self._file(folder, name, path)

    def _passed_over(self, fate: str, status: os.stat_result) -> str | None:
        if fate in {"hidden", "system", "unnamed"}:
            return fate
        if stat.S_ISLNK(status.st_mode):
            return "a symbolic link"
        if stat.S_ISDIR(status.st_mode):
            return None if status.st_dev == self._device else "another file system"
        return None if stat.S_ISREG(status.st_mode) else "no regular file"

    def _require_no_link(self, path: str, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode) and self._selection.leads_through(path):
            message = (
                f"persist_paths: {path!r} is a symbolic link, and may lead out of the home folder: "
                "name the folder itself"
            )
            raise ConfigError(message, option="persist_paths", path=path)

    def _inner(self, folder: Folder, name: str, entry: FolderEntry) -> Iterator[Found]:
        try:
            inner = folder.enter(name)
        except (FileNotFoundError, NotADirectoryError, LinkFoundError):
            yield ArchiveSkipped(entry.path, "changed while it was read")
            return
        with inner:
            self._checker.add(entry)
            yield ScannedEntry(entry)
            yield from self.folder(inner, entry.path)

    def _file(self, folder: Folder, name: str, path: str) -> Iterator[Found]:
        for remaining in reversed(range(TRIES)):
            fd = _opened(folder, name, path)
            if fd is None:
                yield ArchiveSkipped(path, "changed while it was read")
                return
            with FileIO(fd) as file:
                before = os.fstat(fd)
                reading = _Reading(file, path, self._limit)
                yield from reading
                changing = _marks(before) != _marks(os.fstat(fd))
            if not changing or not remaining:
                entry = reading.entry(before)
                self._checker.add(entry)
                yield ScannedEntry(entry, changing)
                return


def _opened(folder: Folder, name: str, path: str) -> int | None:
    """Open a file that was a regular one a moment ago; None if it is no more."""
    try:
        fd = folder.open(name, _READ)
    except (FileNotFoundError, LinkFoundError):
        return None
    except PermissionError as error:
        message = f"{folder.path}/{name} cannot be read: {error.strerror}; chmod u+r it"
        raise NotStorableError(message, path=path) from error
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


class _Reading:
    """One file, read a chunk at a time."""

    def __init__(self, file: FileIO, path: str, limit: int) -> None:
        self._file = file
        self._path = path
        self._limit = limit
        self._hash = hashlib.sha256()
        self._size = 0
        self._chunks: list[str] = []

    def __iter__(self) -> Iterator[FileChunk]:
        while data := self._chunk():
            self._hash.update(data)
            self._size += len(data)
            if self._size > self._limit:
                raise too_large(self._path, "its bytes:", self._size, "file_bytes", self._limit)
            name = name_of(data)
            self._chunks.append(name)
            yield FileChunk(name, data)

    def _chunk(self) -> bytes:
        parts: list[bytes] = []
        remaining = CHUNK_BYTES
        while remaining and (part := self._file.read(remaining)):
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts)

    def entry(self, status: os.stat_result) -> FileEntry:
        """Return the entry of what was read."""
        return FileEntry(
            self._path,
            self._size,
            self._hash.hexdigest(),
            mode_of(status.st_mode, folder=False),
            status.st_mtime_ns,
            tuple(self._chunks) if len(self._chunks) > 1 else (),
        )


def _marks(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
