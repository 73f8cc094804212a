"""The object store at its seam: what it asks of a bucket, and when."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from examples.own_bucket import TableBucket
from perdure import Message, Retention, Shutdown, connect
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.store import Terms
from perdure.stores import ObjectStore
from perdure.stores.objects.bucket import ListedObject
from perdure.testing.conformance._kit import KEY


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


async def test_a_tenant_of_a_long_name_has_media(tmp_path: Path) -> None:
    """Names of objects do not hold all of it: an object of its own does."""
    tenant = "https://customers.example.org/" + "acme/" * 20
    store = ObjectStore(lambda: TableBucket(tmp_path / "x.db"), location="x")
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada", tenant=tenant) as session, session.turn():
            session.append(Message.user("?", image_urls=["data:image/png;base64," + "A" * 99_996]))
        assert await store.tenants() == [tenant]


class Refusing(TableBucket):
    """A bucket that refuses one head which lets go of a session."""

    is_armed = False

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        if self.is_armed and b'"released":true' in data:
            self.is_armed = False
            raise StoreUnavailableError("not now", unwritten=True)
        return super().replace(name, data, tag)


@pytest.mark.parametrize("act", ["release", "delete"])
async def test_a_session_that_was_not_let_go_of_for_once_is_there_for_others_when_they_ask(
    act: str, tmp_path: Path
) -> None:
    bucket = Refusing(tmp_path / "x.db")
    first = ObjectStore(lambda: bucket, location="x")
    second = ObjectStore(lambda: TableBucket(tmp_path / "x.db"), location="x")
    quiet = Shutdown(signals=False)
    async with connect(first, shutdown=quiet) as one, connect(second, shutdown=quiet) as two:
        session = await one.open("agent")
        session.append(Message.user("hello"))
        await session.save()
        bucket.is_armed = True
        if act == "release":
            await session.aclose()
        else:
            with pytest.raises(StoreUnavailableError, match="not now"):
                await one.delete("agent")
        assert not bucket.is_armed
        theirs = await two.open("agent", wait=60)
        assert [message.text for message in theirs.context()] == ["hello"]


class SlowInbox(TableBucket):
    """A bucket that is slow to list an inbox."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked, self.go = threading.Event(), threading.Event()

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        if prefix.startswith("inbox/"):
            self.asked.set()
            self.go.wait(10)
        return super().pages(prefix, after)


async def test_a_session_whose_taker_has_gone_before_all_was_read_is_let_go_of(
    tmp_path: Path,
) -> None:
    bucket = SlowInbox(tmp_path / "x.db")
    store = ObjectStore(lambda: bucket, location="x")
    await store.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.acquire, KEY, Terms(me=store.owner))
        assert await anyio.to_thread.run_sync(bucket.asked.wait, 10)
        tasks.cancel_scope.cancel()
    bucket.go.set()
    with anyio.fail_after(10):
        while (holder := await store.holder(KEY)) is None or not holder.released:
            await anyio.lowlevel.checkpoint()
    await store.aclose()


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


async def test_what_an_older_release_went_on_with_does_not_expire(tmp_path: Path) -> None:
    """It wrote a session's entry in the directory once: the fold tells when it was used."""
    path, quiet = tmp_path / "x.db", Shutdown(signals=False)

    def store() -> ObjectStore:
        return ObjectStore(lambda: TableBucket(path), location="x")

    async with connect(store(), shutdown=quiet) as sessions, sessions.open("ada") as ada:
        async with ada.turn():
            ada.append(Message.user("used today"))
    with contextlib.closing(sqlite3.connect(path)) as table, table:
        table.execute("UPDATE object SET time = time - 40 * 86400 WHERE name LIKE 'dir/%'")
    async with connect(store(), shutdown=quiet) as sessions:
        report = await sessions.prune(Retention(expire_days=30), dry_run=True)
        assert report.expired == ()
