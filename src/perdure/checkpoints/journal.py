"""What checkpoints need of a session: the door between them, which sessions and views implement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from perdure.checkpoints.chain import CheckpointChain, LogDigest
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.records.values import Types
from perdure.store import Store

T = TypeVar("T")


class RollbackEntries(msgspec.Struct, frozen=True):
    """What takes a session back, as long as nothing else is appended."""

    version: int
    """The session's version that it leads back from."""
    entries: tuple[Entry, ...]


class LogWalk(Protocol):
    """A way through what a session was; forwards, it reads the log once."""

    async def at(self, seq: int) -> dict[str, Any]:
        """Return what it was at a record, as plain JSON; messages by the record that brought them.

        Raises:
            ConfigError: The history before that record was pruned.

        """
        ...


class JournalReader(Protocol):
    """A session to read, open or not."""

    @property
    def key(self) -> SessionKey:
        """Whose it is."""
        ...

    @property
    def store(self) -> Store:
        """Where it lies; forks are followed."""
        ...

    @property
    def types(self) -> Types:
        """The application's types."""
        ...

    @property
    def head(self) -> int:
        """The last record that counts."""
        ...

    async def cut(self) -> int:
        """Return the last record that was pruned, 0 if none was."""
        ...

    async def chain(self) -> CheckpointChain:
        """Return the chain of its checkpoints; it changes as they do."""
        ...

    def walk(self) -> LogWalk:
        """Begin to go through what it was."""
        ...


class Journal(JournalReader, Protocol):
    """A session that is open to be written."""

    @property
    def version(self) -> int:
        """The newest record that was accepted."""
        ...

    @property
    def clock(self) -> int:
        """The newest time on its logical clock."""
        ...

    @property
    def token(self) -> int:
        """The number of the running turn, 0 outside of one."""
        ...

    async def digest(self) -> LogDigest:
        """Return the digest of its log since the last checkpoint of it.

        It is as of the newest record, and stays so until the caller awaits something.
        """
        ...

    def accept(self, entries: tuple[Entry, ...], *, captured: int | None = None) -> int:
        """Append entries as one group, *captured* being the last record a checkpoint covers."""
        ...

    async def save(self) -> object:
        """Make everything durable."""
        ...

    async def contribute(self) -> None:
        """Have those who hold a part of its state append what has changed."""
        ...

    async def way_back(self, seq: int) -> RollbackEntries:
        """Return what makes its context, memory and states those of a record again."""
        ...

    def going_back(self) -> None:
        """Ask those who hold a part of its state for nothing from now on."""
        ...

    async def gone_back(self) -> None:
        """Have them take over what is stored by now."""
        ...

    async def call(self, act: Callable[[], Awaitable[T]]) -> T:
        """Run something to its end; cancelling the caller cancels its wait only."""
        ...

    async def finish(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run something to its end, and wait for that, also if the caller is cancelled."""
        ...
