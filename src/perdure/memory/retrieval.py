"""Retrieval: which memories go back into a working context.

The newest episodes, and the weightiest facts; the same memory always gives the same
bundle, so that a context that is rebuilt twice is the same twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import final

from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.memory.items import EpisodicItem, MemoryBundle, SemanticItem, items_of

__all__ = ["Retriever", "select"]

ReadLines = Callable[[str], Awaitable[Sequence[bytes]]]
"""Return the lines of a memory document, by the document's name."""


def select(
    episodic: Sequence[EpisodicItem],
    semantic: Sequence[SemanticItem],
    *,
    max_episodic: int,
    max_semantic: int,
) -> MemoryBundle:
    """Return the newest episodes in their order, and facts by weight, then by age.

    >>> select([], [], max_episodic=3, max_semantic=20)
    MemoryBundle(episodic=(), semantic=())
    """
    newest = tuple(episodic[-max_episodic:]) if max_episodic > 0 else ()
    # The newest of equally weighty facts first; the sort is stable.
    newest_first = list(reversed(semantic))
    newest_first.sort(key=lambda item: -item.salience)
    return MemoryBundle(newest, tuple(newest_first[: max(max_semantic, 0)]))


@final
class Retriever:
    """Fetch memories from a session's long-term memory."""

    def __init__(self, read: ReadLines) -> None:
        self._read = read

    async def retrieve(self, max_episodic: int, max_semantic: int) -> MemoryBundle:
        """Return what a working context is rebuilt with.

        Raises:
            CorruptRecordError: A memory is damaged.
            StoreUnavailableError: The store cannot be reached.

        """
        return select(
            await self.episodic(),
            await self.semantic(),
            max_episodic=max_episodic,
            max_semantic=max_semantic,
        )

    async def episodic(self) -> list[EpisodicItem]:
        """Return all episodes, oldest first."""
        return items_of(await self._read(EPISODIC), EpisodicItem)

    async def semantic(self) -> list[SemanticItem]:
        """Return all facts, oldest first."""
        return items_of(await self._read(SEMANTIC), SemanticItem)
