"""What the tests of the S3 store share: one server, a prefix for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from perdure.stores.s3 import S3Store
from tests.servers.s3 import S3Server, prefix_of, shared, store_on
from tests.stores.s3.gateway import Gateway

OpenS3 = Callable[..., Awaitable[S3Store]]


@pytest.fixture
def server() -> S3Server:
    return shared()


@pytest.fixture
def gateway(server: S3Server) -> Iterator[Gateway]:
    with Gateway(server.port) as gateway:
        yield gateway


@pytest.fixture
def raw(server: S3Server, tmp_path: Path) -> Any:
    """The driver's own client, at this test's prefix."""
    return server.client(prefix_of(tmp_path))


@pytest.fixture
async def open_store(server: S3Server, tmp_path: Path) -> AsyncIterator[OpenS3]:
    """Open stores that share this test's prefix."""
    async with AsyncExitStack() as stack:

        async def open_one(owner: str = "one", **options: Any) -> S3Store:
            store = store_on(server, tmp_path, owner=owner, **options)
            await store.open()
            stack.push_async_callback(store.aclose)
            return store

        yield open_one
