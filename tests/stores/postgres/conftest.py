"""One PostgreSQL server for this process's tests; each test has a schema of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest

from perdure.stores.postgres import PostgresStore
from tests.servers.postgres import Postgres, shared

OpenStore = Callable[..., Awaitable[PostgresStore]]


@pytest.fixture
def server() -> Postgres:
    """A server that is not to be harmed; it does not sync."""
    return shared()


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """A server that syncs each commit, and that one test may do anything to."""
    with Postgres(fsync=True) as server:
        yield server


@pytest.fixture
def schema() -> str:
    return f"t_{uuid4().hex}"


@pytest.fixture
async def open_store(server: Postgres, schema: str) -> AsyncIterator[OpenStore]:
    async with AsyncExitStack() as stack:

        async def open_one(owner: str | None = None, url: str = server.url) -> PostgresStore:
            store = PostgresStore(url, schema=schema, connections=4, owner=owner)
            await store.open()
            stack.push_async_callback(store.aclose)
            return store

        yield open_one


@pytest.fixture
async def store(open_store: OpenStore) -> PostgresStore:
    return await open_store("one")
