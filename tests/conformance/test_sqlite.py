"""The shipped conformance suite on the SQLite store."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance import StoreConformance


class TestSqliteStore(StoreConformance):
    """Stores of one test share a database; each has its own connections and owner's lock."""

    def make_store(self, place: Path, owner: str) -> SqliteStore:
        return SqliteStore(place / "kept" / "sessions.db", owner=owner)
