"""A store that notes what it is asked: whether a listing is one question, and reads few sessions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection

from perdure.records.keys import SessionKey
from perdure.store import ALL, Documents, LogChunk, SessionInfo, SessionQuery, Store
from perdure.stores.delegate import DelegatingStore


class NotedReads(DelegatingStore):
    """Forwards everything, and notes queries and the sessions that are read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.queries: list[SessionQuery] = []
        self.read: set[SessionKey] = set()
        self.reads = 0

    def forget(self) -> None:
        """Begin anew."""
        self.queries, self.read, self.reads = [], set(), 0

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        self.queries.append(query)
        return await super().sessions(query)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        self.read.add(key)
        self.reads += 1
        return await super().read_documents(key, names)

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        self.read.add(key)
        return super().read_log(key, after=after, before=before, limit=limit, reverse=reverse)
