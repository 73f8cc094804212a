"""What the file store's tests share: stores on one root, and a disk that fails on purpose."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.model.keys import SessionKey
from perdure.stores.file import FileStore

KEY = SessionKey("agent")


def log_folder(root: Path, key: SessionKey = KEY) -> Path:
    """Return where a default session's segments lie."""
    return root / "agents" / key.agent / "log"


def segments(root: Path) -> list[str]:
    """List the segments of the one session, in order."""
    names = [path.name for path in log_folder(root).iterdir()]
    return sorted(names, key=lambda name: tuple(map(int, name.removesuffix(".jsonl").split("-"))))


def contents(root: Path) -> dict[str, bytes]:
    """Return every file below a folder, but the owners' heartbeats."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "owners" not in path.parts
    }


class Disk:
    """A real disk whose writes and syncs fail when told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        """Bytes that may still be written, None for no limit."""
        self.full = errno.ENOSPC
        self.bad_syncs = 0
        """How many of the next syncs of data fail."""
        self.failed: list[int] = []
        """The inodes whose sync failed."""
        self.before_write: Callable[[], None] | None = None
        self.before_sync: Callable[[], None] | None = None
        self._write, self._sync = os.write, os.fdatasync
        patch.setattr(os, "write", self.write)
        patch.setattr(os, "fdatasync", self.sync)

    def write(self, fd: int, data: bytes) -> int:
        act, self.before_write = self.before_write, None
        if act:
            act()
        if self.room is None:
            return self._write(fd, data)
        if self.room == 0:
            raise OSError(self.full, os.strerror(self.full))
        done = self._write(fd, bytes(data)[: self.room])
        self.room -= done
        return done

    def sync(self, fd: int) -> None:
        act, self.before_sync = self.before_sync, None
        if act:
            act()
        inode = os.fstat(fd).st_ino
        assert inode not in self.failed, "a file whose sync failed was synced again"
        if self.bad_syncs:
            self.bad_syncs -= 1
            self.failed.append(inode)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)


def store_on(root: Path, owner: str | None = None) -> FileStore:
    """Return a store on the test's root."""
    return FileStore(root / "store", owner=owner)
