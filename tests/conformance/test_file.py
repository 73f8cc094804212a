"""The shipped conformance suite on the file store."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.file import FileStore
from perdure.testing.conformance import StoreConformance


class TestFileStore(StoreConformance):
    """Stores of one test share a root; each has an owner's lock of its own."""

    def make_store(self, place: Path, owner: str) -> FileStore:
        return FileStore(place / "root", owner=owner)
