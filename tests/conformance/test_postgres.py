"""The shipped conformance suite on PostgreSQL, a schema for each test."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.postgres import PostgresStore
from perdure.testing.conformance import StoreConformance
from tests.servers.postgres import schema_of, shared


class TestPostgresStore(StoreConformance):
    """Stores of one test share a schema of this process's server."""

    on_trio = "deep"

    def make_store(self, place: Path, owner: str) -> PostgresStore:
        return PostgresStore(shared().url, schema=schema_of(place), connections=4, owner=owner)
