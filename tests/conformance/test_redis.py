"""The shipped conformance suite on the Redis store, with a server that keeps slots apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.stores.redis import RedisStore
from perdure.testing.conformance import StoreConformance
from tests.servers import free_port
from tests.servers.valkey import Valkey, valkey

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
CLUSTER = ("--cluster-enabled", "yes", "--cluster-port")
"""A cluster of one: it refuses a script whose keys lie in several slots."""


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with valkey(*DURABLE, *CLUSTER, str(free_port())) as server:
        assert server.say("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK"
        while b"cluster_state:ok" not in server.ask("CLUSTER", "INFO"):
            pass
        yield server


class TestRedisStore(StoreConformance):
    """Stores of one test share a prefix; each is an owner of its own."""

    on_trio = "deep"

    @pytest.fixture(autouse=True)
    def _server(self, server: Valkey) -> None:
        self.server = server
        self.prefixes: dict[Path, str] = {}

    def make_store(self, place: Path, owner: str) -> RedisStore:
        prefix = self.prefixes.setdefault(place, uuid4().hex)
        return RedisStore(f"{self.server.url}?prefix={prefix}", owner=owner)
