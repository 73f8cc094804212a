"""Read-only stores of sessions that are kept otherwise: in a bundle's file, or in a backup."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import final

from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import Documents, LeaseState, LogChunk, Store
from perdure.stores.delegate import DelegatingStore, ReadOnlyStore
from perdure.transfer import bundle

CHUNK = 500
"""Records that are given at a time."""


class SessionsView(DelegatingStore, ABC):
    """Read-only store of which a subclass gives the records; all else is the store's below."""

    def __init__(self, store: Store) -> None:
        super().__init__(ReadOnlyStore(store))

    @abstractmethod
    def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        """Yield a session's records, ``after < seq < before``, also from the newest on."""

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read a session's records under their original sequence numbers.

        Raises:
            CorruptRecordError: One is missing, or they are in disorder.

        """
        remaining = sys.maxsize if limit is None else limit
        end = sys.maxsize if before is None else before
        some, size = list[Record](), 0
        async with aclosing(self.records(key, after, end, reverse=reverse)) as records:
            async for record in records:
                some.append(record)
                size += len(record.payload)
                if size >= bundle.PART or len(some) >= min(CHUNK, remaining):
                    yield LogChunk(tuple(some))
                    remaining -= len(some)
                    some, size = [], 0
                    if not remaining:
                        return
        if some:
            yield LogChunk(tuple(some))


@final
class BundleView(SessionsView):
    """A bundle's session as a store has it, under any key.

    Args:
        store: The store that the session goes into, which has no such session.
        file: The bundle.

    """

    def __init__(self, store: Store, file: bundle.BundleFile) -> None:
        super().__init__(store)
        self._file = file

    def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        return self._file.records(after, before, reverse=reverse)

    async def head(self, key: SessionKey) -> int:
        return self._file.head

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read documents: they have the bundle's own key in them, and are none's of another."""
        have = self._file.documents
        if have.manifest is None or key != self._file.key:
            return Documents()
        wanted = have.found if names is None else names
        return Documents(have.manifest, {n: d for n, d in have.found.items() if n in wanted})

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return LeaseState(1, "", released=True)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._file.blob(name)
