"""A wrapper that injects nothing is a store like the one that it wraps."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.conformance import LogConformance, ReaderConformance, StoreConformance
from perdure.testing.faulty import FaultyStore


class Faulty:
    """Wrapped twice, with faults that never come."""

    on_trio = "never"

    def make_store(self, place: Path, owner: str) -> Store:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        inner = FaultyStore(MemoryStore(owner=owner, backing=backing), nth=10**9, how="crash")
        return FaultyStore(inner, fail_on="append_many", nth=10**9)


class TestFaultyStore(Faulty, LogConformance, ReaderConformance):
    """The calls that it does not hand on as all others."""


@pytest.mark.deep
class TestAllOfFaultyStore(Faulty, StoreConformance):
    """All of the suite."""
