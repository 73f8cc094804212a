"""What a store has while it is open: its threads, its connections, and its lock as an owner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import anyio
import msgspec

from perdure._lib.files import Folder
from perdure._lib.platform import host_name
from perdure._lib.presence import Onlooker, Presence
from perdure._lib.threads import Threads
from perdure.errors import ConfigError, SessionError, StoreUnavailableError, UnsupportedVersionError
from perdure.stores.sqlite import leases
from perdure.stores.sqlite.connecting import format_of, pragma
from perdure.stores.sqlite.engine import Engine
from perdure.stores.sqlite.integrity import reindex
from perdure.stores.sqlite.place import look_at, make_ready
from perdure.stores.sqlite.readers import Readers
from perdure.stores.sqlite.sql import MIGRATIONS
from perdure.stores.sqlite.trouble import troubles

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Opened", "enter", "enter_read_only", "mended"]

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 4
_LISTEN = 0.1
"""Seconds between two looks whether somebody rang."""


class Opened(msgspec.Struct, frozen=True):
    """One thread that writes, a few that read."""

    path: str
    engine: Engine
    readers: Readers
    presence: Presence | Onlooker
    writes: Threads
    reads: Threads
    pid: int
    heard: list[int]
    """What the bell showed last."""
    read_only: bool = False

    async def write(
        self,
        doing: str,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a function in a transaction of its own, durably; it goes on when cancelled.

        Raises:
            SessionError: The store was opened only to be read.

        """
        if self.read_only:
            message = f"cannot {doing} {self.path}: it was opened only to be read"
            raise SessionError(message, path=self.path)

        def work() -> T:
            with self.engine.transaction() as con:
                return function(con, *args, **options)

        with troubles(doing, self.path):
            return await self.writes.run(work)

    async def read(
        self,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a function that looks at one moment of the database."""

        def work() -> T:
            with self.readers.snapshot() as con:
                return function(con, *args, **options)

        with troubles("read", self.path):
            return await self.reads.run(work)

    async def ring(self, owner: str) -> None:
        """Have an owner look for letters now, if it is there; else at its next heartbeat."""
        with contextlib.suppress(OSError):
            await self.reads.run(self.presence.ring, owner)

    async def news(self, at_most: float) -> None:
        """Wait until somebody rings, or that long."""
        with anyio.move_on_after(at_most):
            while True:
                rung = await self.reads.run(self.presence.rung)
                if rung != self.heard[0]:
                    self.heard[0] = rung
                    return
                await anyio.sleep(_LISTEN)

    async def scrub(self) -> None:
        """Write the database anew, and empty the write-ahead log."""
        with troubles("scrub", self.path):
            await self.writes.run(_scrub, self.engine)

    async def aclose(self) -> None:
        """Close everything, behind what is still being written."""
        with anyio.CancelScope(shield=True):
            await self.writes.run(_leave, self)
        self.writes.close()
        self.reads.close()


async def enter(path: str, owner: str, timeout: float) -> Opened:  # noqa: ASYNC109  # SQLite's own
    """Open a database as an owner."""
    writes = Threads(1, name="perdure sqlite write", prompt=True)
    entered: list[tuple[Engine, Presence]] = []
    try:
        with troubles("open", path):
            await writes.run(lambda: entered.append(_enter(path, owner, timeout)))
    except BaseException:  # cancelled, perhaps: then it is still being opened
        writes.start(_leave_again, entered, then=bool)  # behind that, in the same thread
        writes.close()
        raise
    ((engine, presence),) = entered
    reads = Threads(_READERS, name="perdure sqlite read")
    readers = Readers(path, timeout)
    return Opened(path, engine, readers, presence, writes, reads, os.getpid(), [0])


def _enter(path: str, owner: str, timeout: float) -> tuple[Engine, Presence]:
    owners = make_ready(path)
    try:
        presence = Presence(owners, owner)
    except BlockingIOError:
        owners.close()
        message = (
            f"owner id {owner!r} is in use by another process or store object at {path}: leave "
            "owner out, or give each its own"
        )
        raise ConfigError(message, owner=owner) from None
    engine = Engine(path, timeout)
    try:
        with engine.transaction() as con:
            leases.enter(con, owner, host_name(), os.getpid(), presence)
        presence.sweep()
    except BaseException:
        engine.close()
        presence.close()
        raise
    return engine, presence


def _leave_again(entered: list[tuple[Engine, Presence]]) -> None:
    for engine, presence in entered:
        engine.close()
        presence.close()


async def enter_read_only(path: str, timeout: float) -> Opened:  # noqa: ASYNC109
    """Open a database that is there, to read it."""
    writes = Threads(1, name="perdure sqlite close", prompt=True)
    readers = Readers(path, timeout, read_only=True)
    with troubles("read", path):
        owners = await writes.run(_look, path, readers)
    reads = Threads(_READERS, name="perdure sqlite read")
    engine = Engine(path, timeout)  # connects when it writes, which is never
    looking = Onlooker(owners)
    return Opened(path, engine, readers, looking, writes, reads, os.getpid(), [0], read_only=True)


def _look(path: str, readers: Readers) -> Folder | None:
    owners = look_at(path)
    try:
        with readers.snapshot() as con:
            _require_newest(con, path)
    except BaseException:
        readers.close()
        if owners is not None:
            owners.close()
        raise
    return owners


def mended(path: str, timeout: float) -> list[str]:
    """Make a database's indexes anew, and return what that does not mend. Blocking."""
    owners = look_at(path)
    if owners is not None:
        owners.close()
    return reindex(path, timeout)


def _require_newest(con: sqlite3.Connection, path: str) -> None:
    found = format_of(con, path)
    if found < len(MIGRATIONS):
        message = (
            f"{path} has format {found}, and this release reads {len(MIGRATIONS)}: open it once to "
            "write, which brings it there"
        )
        raise UnsupportedVersionError(message, path=path, format=found)


def _scrub(engine: Engine) -> None:
    con = engine.connection
    con.execute("VACUUM")
    ((busy, *_),) = pragma(con, "wal_checkpoint(TRUNCATE)")
    if busy:
        message = (
            f"the write-ahead log of {engine.path} is in use and could not be emptied: scrub "
            "again when nobody reads"
        )
        raise StoreUnavailableError(message, path=engine.path)


def _leave(here: Opened) -> None:
    here.readers.close()
    here.engine.close()
    here.presence.close()
