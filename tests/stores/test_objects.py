"""The object store at its seam: what it asks of a bucket, and when."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from examples.own_bucket import TableBucket
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.stores import ObjectStore


class Closing(TableBucket):
    """A bucket that tells when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()
        super().close()


async def test_a_bucket_is_made_in_a_thread(tmp_path: Path) -> None:
    """Connecting blocks; the event loop goes on meanwhile."""
    loop, made = threading.get_ident(), list[int]()

    def make() -> TableBucket:
        made.append(threading.get_ident())
        return TableBucket(tmp_path / "x.db")

    store = ObjectStore(make, location="x")
    await store.open()
    await store.aclose()
    assert len(made) == 1
    assert made[0] != loop


async def test_a_bucket_that_was_made_too_late_is_closed(tmp_path: Path) -> None:
    """Cancelled while it connects: nothing is left open, and nothing is closed under its user."""
    begun, cancelled, made = anyio.Event(), threading.Event(), list[Closing]()

    def make() -> Closing:
        anyio.from_thread.run_sync(begun.set)
        cancelled.wait(10)
        made.append(Closing(tmp_path / "x.db"))
        made_one.set()
        return made[0]

    made_one = threading.Event()
    store = ObjectStore(make, location="x")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.open)
        await begun.wait()
        tasks.cancel_scope.cancel()
    cancelled.set()
    await anyio.to_thread.run_sync(made_one.wait, 10)
    assert await anyio.to_thread.run_sync(made[0].closed.wait, 10)
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.heartbeat()


async def test_a_bucket_that_keeps_no_conditions_is_closed(tmp_path: Path) -> None:
    made = list[Closing]()

    class Careless(Closing):
        def create(self, name: str, data: bytes) -> str | None:
            self.put(name, data)
            return "tag"

    def make() -> Closing:
        made.append(Careless(tmp_path / "x.db"))
        return made[0]

    with pytest.raises(ConfigError, match="If-None-Match"):
        await ObjectStore(make, location="x").open()
    assert made[0].closed.is_set()


async def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ObjectStore(lambda: TableBucket(tmp_path / "file" / "x.db"), location="x")
    with pytest.raises(StoreUnavailableError, match=r"file/x\.db"):
        await store.open()
