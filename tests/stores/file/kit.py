"""What the file store's tests share: stores on one root, and a disk that fails on purpose."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from perdure.records.keys import SessionKey
from perdure.records.records import open_sealed, seal
from perdure.stores.file import FileStore
from perdure.stores.file.leases import FileOwner, LeaseFile
from perdure.stores.file.log import LogWriter

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


def lease_of(owner: FileOwner, epoch: int = 2) -> LeaseFile:
    """Return the lease that a taker publishes."""
    return LeaseFile(format=1, key=KEY, epoch=epoch, **msgspec.structs.asdict(owner))


def rewrite_lease(path: Path, **changes: object) -> None:
    """Change what a lease says."""
    lease = msgspec.json.decode(open_sealed(path.read_bytes()) or b"")
    path.write_bytes(seal(msgspec.json.encode({**lease, **changes})))


def writers() -> int:
    """Return how many sessions' writers are in memory."""
    gc.collect()
    return sum(type(one) is LogWriter for one in gc.get_objects())


def open_folders(root: Path) -> set[str]:
    """Return the folders of agents of which this process has a file open."""
    here, agents = Path("/proc/self/fd"), root.resolve() / "agents"
    if sys.platform != "linux":
        pytest.skip("Linux alone tells in /proc which files are open")
    found = set()
    for one in here.iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            path = one.readlink()
            if path.is_relative_to(agents) and path != agents:
                found.add(path.relative_to(agents).parts[0])
    return found


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
        self.remembers = True
        """Whether memory still shows what a failed sync has lost; else it does when asked."""
        self.before_write: Callable[[], None] | None = None
        self.before_sync: Callable[[], None] | None = None
        self._lasting: dict[int, int] = {}
        self._write, self._sync = os.write, os.fdatasync
        patch.setattr(os, "write", self.write)
        patch.setattr(os, "fdatasync", self.sync)
        patch.setattr(os, "posix_fadvise", self.forget, raising=False)

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
        self._lasting[inode] = os.fstat(fd).st_size

    def forget(self, fd: int, *_: int) -> None:
        """Drop what memory holds of a file: what a failed sync has lost is seen to be lost."""
        inode = os.fstat(fd).st_ino
        if inode in self.failed and not self.remembers:
            os.ftruncate(fd, self._lasting.get(inode, 0))

    def cut(self, folder: Path) -> None:
        """Cut the power: of files whose sync failed, only what lasts is there."""
        for path in folder.iterdir():
            inode = path.stat().st_ino
            if inode in self.failed:
                os.truncate(path, self._lasting.get(inode, 0))


def store_on(root: Path, owner: str | None = None) -> FileStore:
    """Return a store on the test's root."""
    return FileStore(root / "store", owner=owner)


STEPS = ("link", "listdir", "mkdir", "open", "rename", "stat", "unlink")
"""The calls by which a store sees, or changes, what others do to a folder."""


class Halted:
    """A call of a store that halts before its n-th step on the disk, once."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int) -> None:
        self.reached = threading.Event()
        """The step has come, or the call has ended without it."""
        self.go = threading.Event()
        self._left = nth
        self._loop = threading.get_ident()
        for name in STEPS:
            patch.setattr(os, name, partial(self._step, getattr(os, name)))

    def _step(self, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if threading.get_ident() != self._loop and not self.reached.is_set():
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                assert self.go.wait(60)
        return real(*args, **options)

    @property
    def is_before_the_end(self) -> bool:
        """Whether the call had so many steps."""
        return self._left == 0


async def amid(
    nth: int, call: Callable[[], Awaitable[Any]], then: Callable[[], Awaitable[Any]]
) -> tuple[Any, Any, bool]:
    """Do something before the n-th step of a call, or after it if it has fewer.

    Returns what came of both, and whether it had so many.
    """
    results: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        halted = Halted(patch, nth)

        async def run() -> None:
            try:
                results.append(await call())
            finally:
                halted.reached.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.to_thread.run_sync(halted.reached.wait)
            try:
                meanwhile = await then()
            finally:
                halted.go.set()
    return results[0], meanwhile, halted.is_before_the_end
