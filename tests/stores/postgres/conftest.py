"""One PostgreSQL server for this process's tests; each test has a schema of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from uuid import uuid4

import msgspec
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


@contextmanager
def hasty(store: PostgresStore, seconds: float) -> Iterator[None]:
    """Let an open store give its server this long to answer; before and behind, it is patient."""
    calls = store._opened
    assert calls is not None
    patient = calls.connections._settings
    calls._timeout = seconds
    calls.connections._settings = msgspec.structs.replace(patient, timeout=seconds)
    yield
    calls._timeout = patient.timeout
    calls.connections._settings = patient
