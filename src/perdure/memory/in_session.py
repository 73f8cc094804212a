"""A storage of working memory that keeps its entries with a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

from perdure.memory.storage import MemoryInfo, MemoryItem

if TYPE_CHECKING:
    from perdure.memory.working import WorkingMemory

__all__ = ["Remembering", "SessionMemoryStorage"]


class Remembering(Protocol):
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

    def __init__(self, session: Remembering) -> None:
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
