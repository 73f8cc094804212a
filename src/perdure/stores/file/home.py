"""What a file store has while it is open: its folder, its place among the owners, its threads.

It belongs to the process that opened it; a forked child has to open one of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, final

import anyio
import anyio.to_thread

from perdure._lib.files import Folder
from perdure._lib.os_errors import store_errors
from perdure._lib.platform import open_files_limit
from perdure._lib.threads import Threads
from perdure.errors import SessionError
from perdure.store import Asked
from perdure.stores.file.open_files import OpenFiles
from perdure.stores.file.owners import Owners
from perdure.stores.file.place import is_local, open_root, resolve_root

__all__ = ["PARALLELISM", "Home", "open_home"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PARALLELISM = 16
"""Appends at a time. A sync waits for the disk, not for the processor, and those that wait
together share the disk's own commits."""

_MOST_OPEN = 256
"""Sessions whose log and folder are kept open: two files each."""


@final
class Home:
    """An open folder and who we are in it."""

    def __init__(self, root: Folder, owners: Owners, *, read_only: bool) -> None:
        self.root: Folder = root
        self._read_only = read_only
        self.owners: Owners = owners
        self.files: OpenFiles = OpenFiles(min(_MOST_OPEN, open_files_limit() // 4))
        self.appends: Threads = Threads(PARALLELISM, name="perdure append")
        self._beats = anyio.CapacityLimiter(1)
        self._others = anyio.CapacityLimiter(PARALLELISM)
        self._pid = os.getpid()

    @property
    def mine(self) -> bool:
        """Whether this is the process that opened it; not so in a forked child."""
        return self._pid == os.getpid()

    async def hop(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Do something that blocks in a thread; cancelled, it goes on there to its end.

        Raises:
            SessionError: It would write, and the store was opened only to be read.

        """
        if self._read_only and doing != "read":
            message = f"cannot {doing} {self.root.path}: it was opened only to be read"
            raise SessionError(message, path=self.root.path)
        return await self._hop(self._others, doing, function, *args)

    async def beat(self) -> Asked:
        """Renew the heartbeat, behind nothing else: whoever is late with it loses its leases."""
        return await self._hop(self._beats, "write", self.owners.heartbeat)

    async def _hop(
        self, limiter: anyio.CapacityLimiter, doing: str, function: Callable[[*Ts], T], *args: *Ts
    ) -> T:
        with store_errors(doing, self.root.path):
            return await anyio.to_thread.run_sync(
                function, *args, abandon_on_cancel=True, limiter=limiter
            )

    async def aclose(self) -> None:
        """Close every file; nothing of it may be in use."""
        self.appends.close()
        self.owners.hush()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._leave)

    def _leave(self) -> None:
        self.files.close_all()
        self.owners.close()
        self.root.close()


async def open_home(
    wanted: str | os.PathLike[str] | None, owner: str, *, read_only: bool = False
) -> Home:
    """Open the folder, make it if only it is missing, and become known as an owner.

    One that is only read is neither made nor written to.

    Raises:
        ConfigError: It is no folder, or others can write to it.
        StoreUnavailableError: It cannot be made, read or written.

    """
    path, parents = resolve_root(wanted)
    gone = False
    entered: list[tuple[Folder, Owners]] = []

    def enter() -> tuple[Folder, Owners]:
        found = _look(path, owner) if read_only else _enter(path, parents, owner)
        entered.append(found)
        if gone:
            _leave(entered)
        return found

    try:
        with store_errors("open", path):
            root, owners = await anyio.to_thread.run_sync(enter)
    except BaseException:  # a native cancellation, which passes every shield
        gone = True
        _leave(entered)
        raise
    return Home(root, owners, read_only=read_only)


def _leave(entered: list[tuple[Folder, Owners]]) -> None:
    with contextlib.suppress(IndexError):  # taken by whoever noticed first
        root, owners = entered.pop()
        owners.close()
        root.close()


def _enter(path: str, parents: bool, owner: str) -> tuple[Folder, Owners]:  # noqa: FBT001  # from a thread
    root = open_root(path, parents=parents)
    try:
        return root, Owners(root, owner, local=is_local(path))
    except BaseException:
        root.close()
        raise


def _look(path: str, owner: str) -> tuple[Folder, Owners]:
    root = open_root(path, make=False)
    try:
        return root, Owners(root, owner, local=is_local(path), read_only=True)
    except BaseException:
        root.close()
        raise
