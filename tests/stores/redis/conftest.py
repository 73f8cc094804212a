"""One Valkey server for this process's tests; each test has a prefix of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from uuid import uuid4

import msgspec
import pytest

from perdure.stores.redis import RedisStore
from tests.servers.valkey import Valkey, valkey

OpenStore = Callable[..., Awaitable[RedisStore]]


@pytest.fixture(scope="session")
def server() -> Iterator[Valkey]:
    """A server that syncs each write."""
    with valkey() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Valkey]:
    """A server that one test may do anything to."""
    with valkey() as server:
        yield server


@pytest.fixture
def url(server: Valkey) -> str:
    return f"{server.url}?prefix={uuid4().hex}"


@pytest.fixture
async def open_store(url: str) -> AsyncIterator[OpenStore]:
    async with AsyncExitStack() as stack:

        async def open_one(owner: str | None = None, at: str = url) -> RedisStore:
            store = RedisStore(at, owner=owner)
            await store.open()
            stack.push_async_callback(store.aclose)
            return store

        yield open_one


@pytest.fixture
async def store(open_store: OpenStore) -> RedisStore:
    return await open_store("one")


@contextmanager
def hasty(store: RedisStore, seconds: float) -> Iterator[None]:
    """Let an open store give its server this long to answer; before and behind, it is patient."""
    link = store._link
    patient = link.settings
    link.settings = msgspec.structs.replace(patient, timeout=seconds)
    yield
    link.settings = patient
