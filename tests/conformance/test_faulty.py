"""Wrappers that inject nothing are a store like the one that they wrap."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.conformance import LogConformance, ReaderConformance
from perdure.testing.faulty import FaultyStore, SwitchedStore
from tests.conformance.parts import all_but


class Faulty:
    """In both wrappers, which hand on in one way, with faults that never come."""

    on_trio = "never"

    def make_store(self, place: Path, owner: str) -> Store:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        inner = FaultyStore(MemoryStore(owner=owner, backing=backing), nth=10**9, how="crash")
        return SwitchedStore(inner)


class TestFaultyStore(Faulty, LogConformance, ReaderConformance):
    """The calls that it does not hand on as all others."""


@pytest.mark.deep
class TestRestOfFaultyStore(Faulty, *all_but(LogConformance, ReaderConformance)):
    """The rest of the suite."""
