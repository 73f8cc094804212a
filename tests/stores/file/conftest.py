"""Stores that are closed behind each test, on one root, and the disk below them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure.stores.file import FileStore
from tests.stores.file.kit import Disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def open_store(root: Path) -> AsyncIterator[Callable[[str], Awaitable[FileStore]]]:
    async with AsyncExitStack() as stack:

        async def open_one(owner: str) -> FileStore:
            store = FileStore(root, owner=owner)
            await store.open()
            stack.push_async_callback(store.aclose)
            return store

        yield open_one


@pytest.fixture
async def store(open_store: Callable[[str], Awaitable[FileStore]]) -> FileStore:
    return await open_store("one")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)
