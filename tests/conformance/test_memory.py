"""The shipped conformance suite on the memory store."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    """Stores of one test share a backing, as processes share a disk."""

    def make_store(self, place: Path, owner: str) -> MemoryStore:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        return MemoryStore(owner=owner, backing=backing)
