"""What a file store has while it is open: its folder, its place among the owners, its threads.

It belongs to the process that opened it; a forked child has to open one of its own.

Used from the event loop, but for `take`, which runs in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, final

import anyio
import anyio.to_thread

from perdure._lib.files import Folder, store_errors
from perdure._lib.files import open_private as open_root
from perdure._lib.platform import network_file_system, open_files_limit
from perdure._lib.threads import Threads
from perdure.errors import ConfigError, SessionError
from perdure.store import HeartbeatRequests
from perdure.stores.file.log import LogWriter, OpenFiles
from perdure.stores.file.owners import Owners
from perdure.stores.file.reader import ReadPlan

# The store's own folder: found, made if it may be, and checked before anything trusts it


_log = logging.getLogger("perdure")

HOME_VARIABLE = "PERDURE_HOME"

_warned: set[str] = set()


def resolve_root(root: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Return the absolute path of the store, and whether its parents may be made too.

    The argument, else ``PERDURE_HOME``, else the per-user data folder.
    """
    named = root if root is not None else os.environ.get(HOME_VARIABLE) or None
    if named is None:
        from platformdirs import user_data_dir

        return user_data_dir("perdure", appauthor=False), True
    path = os.path.expanduser(os.fspath(named))
    if not path or path.startswith("~"):
        message = (
            f"root={os.fspath(named)!r} names no folder: give a path, or leave it out for the "
            "per-user data folder"
        )
        raise ConfigError(message, root=os.fspath(named))
    return os.path.abspath(path), False


def is_local(path: str) -> bool:
    """Say whether a folder lies on this machine's own disk; warn once where it does not."""
    kind = network_file_system(path)
    if kind is not None and path not in _warned:
        _warned.add(path)
        _log.warning(
            "the store lies on a network file system, where locks and syncs may not hold: "
            "keep it on a local disk, or use a server store",
            extra={"path": path, "type": kind},
        )
    return kind is None


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

    async def beat(self) -> HeartbeatRequests:
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


# Waiting, without a thread, for what others are about to end


_POLL = 0.01
_SETTLE = 1.0
"""Seconds that a reader waits for a takeover to end."""


async def idle(writer: LogWriter) -> None:
    """Wait until an abandoned write of a session has ended."""
    while writer.lock.locked():  # noqa: ASYNC110  # a thread's lock: nothing to be woken by
        await anyio.sleep(_POLL)


async def settled(look: Callable[[], Awaitable[ReadPlan]]) -> ReadPlan:
    """Look where a log is until no takeover is under way, or for as long as a reader waits."""
    deadline = anyio.current_time() + _SETTLE
    pause = _POLL
    while True:
        found = await look()
        if found.settled or anyio.current_time() >= deadline:
            return found
        await anyio.sleep(pause)
        pause *= 2


# The sessions that a store holds: a writer for each, from its acquire to its end
