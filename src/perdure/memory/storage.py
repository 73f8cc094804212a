"""Where an agent's working memory is kept: the port, and what goes through it.

Two implementations come with perdure: `perdure.memory.storage.SessionMemoryStorage`, which
keeps entries with a session, and `perdure.formats.FileMemoryStorage`, which keeps them in a
folder of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

import msgspec

if TYPE_CHECKING:
    from perdure.memory.working_memory import WorkingMemory


# Where an agent's working memory is kept: the port, and what goes through it
#
# Two implementations come with perdure: `perdure.memory.storage.SessionMemoryStorage`, which
# keeps entries with a session, and `perdure.formats.FileMemoryStorage`, which keeps them in a
# folder of its own.


class MemoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """One entry with its value."""

    key: str
    value: Any
    description: str = ""
    scope: str = "session"
    priority: str = "normal"
    """low, normal, high or critical."""
    pinned: bool = False
    created_at: int | None = None
    """Milliseconds since 1970; None for now."""
    last_accessed_at: int | None = None
    """Milliseconds since 1970; None for now."""


class MemoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an entry without its value."""

    key: str
    description: str = ""
    scope: str = "session"
    size_bytes: int = 0
    """Of the value's JSON."""
    base_priority: str = "normal"
    pinned: bool = False
    created_at: int = 0
    """Milliseconds since 1970."""
    last_accessed_at: int = 0
    """Milliseconds since 1970."""
    sha256: str | None = None
    """Of a large value's JSON, in hex; None for one that is kept with the index."""
    is_loaded: bool = True
    """Whether reading the value needs nothing of the store."""


class MemoryStorage(Protocol):
    """Keep the entries of one agent's working memory.

    Nothing is loaded before it is asked for, and what was not loaded is never overwritten.
    A change counts at once; it is durable when ``flush`` has returned.
    """

    async def get(self, key: str) -> MemoryItem | None:
        """Return an entry, None if there is none; it counts as used now."""
        ...

    async def set(self, item: MemoryItem) -> None:
        """Keep an entry, in place of the one that has its key.

        Raises NotStorableError for a value that cannot be kept.
        """
        ...

    async def delete(self, key: str) -> None:
        """Forget an entry; no error if there is none."""
        ...

    async def has(self, key: str) -> bool:
        """Say whether there is an entry; it does not count as used."""
        ...

    async def entries(self, *, scope: str | None = None) -> list[MemoryInfo]:
        """Return what is known of the entries, oldest first; of one scope, or of all."""
        ...

    async def clear(self, *, scope: str | None = None) -> None:
        """Forget the entries of one scope, or all."""
        ...

    async def size(self) -> int:
        """Return how many bytes the values' JSON has together."""
        ...

    async def flush(self) -> None:
        """Return when everything is durable."""
        ...

    async def aclose(self) -> None:
        """Flush, and give up what is held open."""
        ...


# A storage of working memory that keeps its entries with a session


class MemoryOwner(Protocol):
    """What has a working memory that is saved with it: a session."""

    @property
    def memory(self) -> WorkingMemory:
        """Its working memory."""
        ...

    async def save(self) -> Any:
        """Make everything durable."""
        ...


@final
class SessionMemoryStorage:
    """Keep entries as ``session.memory`` does: lazy, and saved with the session.

    Args:
        session: Whose memory it is.

    """

    def __init__(self, session: MemoryOwner) -> None:
        self._session = session

    def __repr__(self) -> str:
        return "<SessionMemoryStorage>"

    async def get(self, key: str) -> MemoryItem | None:
        """Return an entry, None if there is none; it counts as used now."""
        return await self._session.memory.item(key)

    async def set(self, item: MemoryItem) -> None:
        """Keep an entry, in place of the one that has its key; errors as ``session.memory``."""
        self._session.memory.put(item)

    async def delete(self, key: str) -> None:
        """Forget an entry; what is not there is not noted, either."""
        if await self.has(key):
            self._session.memory.drop(key)

    async def has(self, key: str) -> bool:
        """Say whether there is an entry; it does not count as used."""
        return key in await self._session.memory.keys()

    async def entries(self, *, scope: str | None = None) -> list[MemoryInfo]:
        """Return what is known of the entries, oldest first; reads no value."""
        entries = await self._session.memory.entries()
        return [entry for entry in entries if scope is None or entry.scope == scope]

    async def clear(self, *, scope: str | None = None) -> None:
        """Forget the entries of one scope, or all."""
        for entry in await self.entries(scope=scope):
            self._session.memory.drop(entry.key)

    async def size(self) -> int:
        """Return how many bytes the values' JSON has together."""
        return sum(entry.size_bytes for entry in await self._session.memory.entries())

    async def flush(self) -> None:
        """Save the session."""
        await self._session.save()

    async def aclose(self) -> None:
        """Save the session, which belongs to somebody else and stays open."""
        await self.flush()
