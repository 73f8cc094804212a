"""A session that has left is out of memory at once, whichever way it left, on every store."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import anyio
import pytest

from perdure import (
    CorruptRecordError,
    LeaseLostError,
    Message,
    Session,
    SessionError,
    SessionManager,
    Shutdown,
    connect,
)
from perdure.autosave.tracked import Tracked
from perdure.session.contents import Contents
from perdure.session.internals import let_go
from perdure.store import Store, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.redis import RedisStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from tests.servers import postgres, s3, valkey

pytestmark = pytest.mark.anyio

KEY = "ab" * 32
Make = Callable[[], Store]


def in_memory(_place: Path) -> Make:
    backing = MemoryBacking()
    return lambda: MemoryStore(backing=backing)


def in_files(place: Path) -> Make:
    return lambda: FileStore(place / "root")


def in_sqlite(place: Path) -> Make:
    return lambda: SqliteStore(place / "sessions.db")


def encrypted(place: Path) -> Make:
    return lambda: EncryptedStore(FileStore(place / "root"), KEY)


def compressed(_place: Path) -> Make:
    backing = MemoryBacking()
    return lambda: CompressedStore(MemoryStore(backing=backing))


def in_postgres(place: Path) -> Make:
    url, schema = postgres.shared().url, postgres.schema_of(place)
    return lambda: PostgresStore(url, schema=schema, connections=2)


def in_redis(place: Path) -> Make:
    return lambda: RedisStore(f"{valkey.shared().url}?prefix={s3.prefix_of(place)}")


def in_s3(place: Path) -> Make:
    return lambda: s3.store_on(s3.shared(), place)


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new() -> Iterator[None]:
    """Have the collector look at what these tests make, not at all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


STORES = [in_memory, in_files, in_sqlite, encrypted, compressed, in_postgres, in_redis, in_s3]

Leave = Callable[[SessionManager, Session, Make], Awaitable[None]]


async def closed(_sessions: SessionManager, session: Session, _make: Make) -> None:
    await session.aclose()


async def lost(sessions: SessionManager, session: Session, make: Make) -> None:
    thief = make()
    await thief.open()
    await take_after(thief, session.key, after=session.epoch)
    session.append(Message.user("too late"))
    with pytest.raises(LeaseLostError):
        await session.save()
    await thief.aclose()
    await sessions.lost[0].discard_unsaved()


async def handed_over(sessions: SessionManager, session: Session, make: Make) -> None:
    left = anyio.Event()
    off = sessions.on("closed", lambda _: left.set())
    async with connect(make(), shutdown=Shutdown(signals=False)) as others:
        with anyio.fail_after(60):
            await others.open(session.id, wait=50)
            await left.wait()
    await anyio.wait_all_tasks_blocked()  # the other manager's own tasks end
    off()
    with pytest.raises(LeaseLostError):
        session.append(Message.user("too late"))


async def hibernated(_sessions: SessionManager, session: Session, _make: Make) -> None:
    await let_go(session)
    with pytest.raises(SessionError, match="idle"):
        session.append(Message.user("too late"))


async def deleted(sessions: SessionManager, session: Session, _make: Make) -> None:
    session.append(Message.user("unsaved"))
    await sessions.delete(session.id)


async def forked(sessions: SessionManager, session: Session, _make: Make) -> None:
    await sessions.fork(session.id, f"{session.id}-fork")
    async with sessions.open(f"{session.id}-fork") as fork:
        await fork.aclose()
    await session.aclose()


WAYS: list[Leave] = [closed, lost, handed_over, hibernated, deleted, forked]


def held() -> list[object]:
    """Return what is in memory of sessions that are open, or have left."""
    gc.collect()
    kinds = (Session, Tracked, Contents)
    return [one for one in gc.get_objects() if type(one) in kinds]


@pytest.mark.deep
@pytest.mark.parametrize("store", STORES)
async def test_a_session_that_left_is_out_of_memory(
    store: Callable[[Path], Make], tmp_path: Path
) -> None:
    make = store(tmp_path)
    before = {id(one) for one in held()}
    async with connect(make(), shutdown=Shutdown(signals=False)) as sessions:
        for leave in WAYS:
            session = await sessions.open(leave.__name__)
            async with session.turn():
                session.append(Message.user("x" * 1000))
            session.append(Message.assistant("changed once more"))
            await session.save()
            await leave(sessions, session, make)
            del session
            left = [one for one in held() if id(one) not in before]
            assert not left, f"{leave.__name__}: {left}"


async def test_a_session_that_could_not_be_opened_is_out_of_memory(tmp_path: Path) -> None:
    before = {id(one) for one in held()}
    async with connect(tmp_path / "a", shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("a") as session:
            session.memory.set("fact", "x")
            await session.aclose()
        del session
        (log,) = (tmp_path / "a").rglob("log/*.jsonl")
        log.write_bytes(log.read_bytes().replace(b'"n":1', b'"n":7', 1))
        for _ in range(3):
            with pytest.raises(CorruptRecordError):
                await sessions.open("a")
        left = [one for one in held() if id(one) not in before]
        assert not left


class Request:
    """What a server keeps in a context variable while it handles one."""


async def test_what_a_caller_s_context_holds_is_out_of_memory_while_saving_goes_on() -> None:
    request: ContextVar[Request | None] = ContextVar("request", default=None)
    kept: list[weakref.ref[Request]] = []

    async def handle(session: Session) -> None:
        request.set(mine := Request())
        kept.append(weakref.ref(mine))
        session.append(Message.user("hello"))
        await session.save()

    async with connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        unsaved = await sessions.open("unsaved", autosave=None)
        async with sessions.open("a") as session:
            async with anyio.create_task_group() as group:
                group.start_soon(handle, session)
            unsaved.append(Message.user("for a while"))
            with anyio.move_on_after(12):  # autosave has looked twice whether all is well
                while kept[0]() is not None:
                    await anyio.sleep(0.01)
                    gc.collect()
            assert kept[0]() is None
