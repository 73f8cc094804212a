"""A store around a store that counts the bytes handed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from perdure.cli.demo.wire import Written
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.store import Batch, Outcome, Store

__all__ = ["Counting"]


class Counting:
    """Count what the log and the documents of a store are given; everything else passes by."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.log: int = 0
        """Bytes of log lines so far, as framed."""
        self.documents: int = 0
        """Bytes of documents so far, with each manifest twice."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Pass it on, and count what was written."""
        outcomes = await self._store.append_many(batches)
        self.log += sum(outcome.written for outcome in outcomes)
        return outcomes

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Pass it on, and count it. A manifest is written as coming, then as done."""
        await self._store.write_documents(key, documents, manifest)
        manifests = 2 * len(msgspec.json.encode(manifest))
        self.documents += manifests + sum(map(len, documents.values()))

    @property
    def written(self) -> Written:
        """Both, as they are told to the parent."""
        return Written(self.log, self.documents)

    def store(self) -> Store:
        """Return itself as the port."""
        return cast("Store", self)
