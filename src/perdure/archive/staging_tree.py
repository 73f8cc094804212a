"""Staging tree next to the old one: files written through open folders, durable when complete.

What is written is checked against the manifest's entries: each size and each hash. Folders are
0700 and files 0600 while it is under way; their own modes come last. All of it blocks.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from typing import Final, final

from perdure._lib.files import Folder, write_all
from perdure._lib.ids import random_id
from perdure._lib.platform import sync_file
from perdure.archive.atomic_swap import LEFT, NEW, set_mode
from perdure.archive.entries import FileEntry, FolderEntry
from perdure.errors import CorruptRecordError, StoreUnavailableError

SPARE: Final = 16 * 1024 * 1024
"""Bytes that a disk has to have left behind a restore."""


@final
class StagingTree:
    """A tree that is being written into a home's own folder.

    Args:
        control: The home's own folder, which is open and ours alone.
        where: What it comes from, for errors.

    """

    def __init__(self, control: Folder, description: str) -> None:
        self.name: str = f"{LEFT}{random_id()}"
        self._description = description
        self._root = control.make(self.name, NEW)
        self._files: list[str] = []
        self._folders: list[FolderEntry] = []
        self._above: str = ""
        self._parent = self._root.enter()
        self._file: _File | None = None

    def folder(self, entry: FolderEntry) -> None:
        """Make a folder; the one above it is there."""
        parent, name = self._at(entry.path)
        parent.make(name).close()
        self._folders.append(entry)

    def begin(self, entry: FileEntry) -> None:
        """Begin with a file."""
        parent, name = self._at(entry.path)
        self._file = _File(entry, parent.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def write(self, data: bytes) -> None:
        """Write a piece of the file.

        Raises:
            CorruptRecordError: The file becomes longer than its entry says.

        """
        file = self._file
        assert file is not None
        if not file.write(data):
            raise self._corrupt(file.entry, "there is more of it than its size")

    def end(self) -> None:
        """End the file.

        Raises:
            CorruptRecordError: Its size or its hash is not that of its entry.

        """
        file = self._file
        assert file is not None
        self._file = None
        fault = file.end()
        if fault is not None:
            raise self._corrupt(file.entry, fault)
        self._files.append(file.entry.path)

    def unsynced(self) -> list[str]:
        """Return the files that were written, to be given to ``sync`` in parts."""
        return self._files

    def sync(self, paths: Sequence[str]) -> None:
        """Make files durable; several threads may do it, whose syncs a disk takes together."""
        for path in paths:
            *above, name = path.split("/")
            with self._root.enter(*above) as parent:
                fd = parent.open(name)
                try:
                    sync_file(fd)
                finally:
                    os.close(fd)

    def finish(self) -> None:
        """Give the folders their modes, and make their entries durable."""
        for entry in reversed(self._folders):
            with self._root.enter(*entry.path.split("/")) as folder:
                folder.sync()
            parent, name = self._at(entry.path)
            set_mode(parent, name, entry.mode)
        self._root.sync()

    def close(self) -> None:
        """Close what is open; the tree stays until it is committed, or removed by `recover`."""
        if self._file is not None:
            os.close(self._file.fd)
            self._file = None
        self._parent.close()
        self._root.close()

    def _at(self, path: str) -> tuple[Folder, str]:
        """Return the open parent folder of a path, and its name there."""
        above, _, name = path.rpartition("/")
        if above != self._above:
            parent = self._root.enter(*above.split("/")) if above else self._root.enter()
            self._parent.close()
            self._parent, self._above = parent, above
        return self._parent, name

    def _corrupt(self, entry: FileEntry, reason: str) -> CorruptRecordError:
        message = f"{self._description}: {entry.path!r} is damaged: {reason}; nothing was changed"
        return CorruptRecordError(message, where=self._description, path=entry.path)


class _File:
    def __init__(self, entry: FileEntry, fd: int) -> None:
        self.entry = entry
        self.fd = fd
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> bool:
        self._size += len(data)
        if self._size > self.entry.size:
            return False
        self._hash.update(data)
        write_all(self.fd, data)
        return True

    def end(self) -> str | None:
        """Close the file; return what is wrong with it."""
        entry = self.entry
        try:
            if self._size != entry.size:
                return f"{self._size} bytes of {entry.size}"
            if self._hash.hexdigest() != entry.sha256:
                return "its bytes do not match their hash"
            if hasattr(os, "fchmod"):
                os.fchmod(self.fd, entry.mode)
            if os.utime in os.supports_fd:
                os.utime(self.fd, ns=(entry.mtime, entry.mtime))
        finally:
            os.close(self.fd)
        return None


def require_room(home: Folder, wanted: int) -> None:
    """Refuse what the disk has no room for.

    Raises:
        StoreUnavailableError: The files would not fit; nothing was changed.

    """
    if not hasattr(os, "statvfs"):
        return
    status = os.statvfs(home.path)
    free = status.f_bavail * status.f_frsize
    if wanted + SPARE > free:
        message = (
            f"the archive's files take {wanted} bytes, and {home.path} has {free} left: make room, "
            "or restore into a folder on another disk; nothing was changed"
        )
        raise StoreUnavailableError(message, path=home.path, size=wanted, errno=errno.ENOSPC)
