"""Port through which checkpoints reach a session; sessions and views implement it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from perdure.checkpoints.chain import CheckpointChain, LogDigest
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.records.values import Types
from perdure.store import Store

T = TypeVar("T")


class RollbackEntries(msgspec.Struct, frozen=True):
    """Entries that roll a session back, valid until something else is appended."""

    version: int
    """The session's version that the rollback starts from."""
    entries: tuple[Entry, ...]


LogWalk: TypeAlias = Callable[[int], Awaitable[dict[str, Any]]]
"""Returns a session's state at a record as plain JSON, with messages by the record that brought
them. Going forward reads the log once. Raises HistoryPrunedError if the history before the record
was pruned."""


class JournalReader(Protocol):
    """Read access to a session, open or not."""

    @property
    def key(self) -> SessionKey:
        """The session's key."""

    @property
    def store(self) -> Store:
        """The session's store; it resolves forks."""

    @property
    def filled(self) -> Store:
        """The same, with the media of messages in place."""

    @property
    def types(self) -> Types:
        """The application's types."""

    @property
    def head(self) -> int:
        """The last record to read."""

    async def cut(self) -> int:
        """Return the last record that was pruned, 0 if none was."""

    async def chain(self) -> CheckpointChain:
        """Return the live chain of its checkpoints."""

    async def settle(self, seq: int) -> None:
        """Make the records up to one durable that were accepted."""

    async def require_same(self) -> None:
        """Raise if the session is gone, or not held any more: what it lacks then is no damage."""

    def walk(self) -> LogWalk:
        """Return a new walk through the session's past states."""


class Journal(JournalReader, Protocol):
    """A session that is open for writing."""

    @property
    def version(self) -> int:
        """The newest record that was accepted."""

    @property
    def clock(self) -> int:
        """The newest time on its logical clock."""

    @property
    def token(self) -> int:
        """The number of the running turn, 0 outside of one."""

    async def digest(self) -> LogDigest:
        """Return the digest of the log since the last checkpoint of the session itself.

        It is as of the newest record until the caller's next await.
        """

    def accept(self, entries: tuple[Entry, ...], *, captured: int | None = None) -> int:
        """Append entries as one group, *captured* being the last record a checkpoint covers."""

    async def save(self) -> object:
        """Make everything durable."""

    async def contribute(self) -> None:
        """Ask the contributors of state to append what has changed."""

    async def way_back(self, seq: int) -> RollbackEntries:
        """Return the entries that reset context, memory and states to those at a record."""

    def going_back(self) -> None:
        """Stop asking the contributors for changes, since a rollback is being written."""

    async def gone_back(self) -> None:
        """Ask the contributors to load the stored state, and resume asking them for changes."""

    async def call(self, act: Callable[[], Awaitable[T]]) -> T:
        """Run a function to completion; cancellation only stops the caller's wait."""

    async def finish(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run a function to completion and wait for it, even if the caller is cancelled."""
