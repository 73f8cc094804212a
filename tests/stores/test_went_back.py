"""Stores that come back without their newest data: told as what it is, and rescued from memory.

A failover to a standby that lagged behind, a server that kept its data in memory, an older backup.
"""

from __future__ import annotations

import copy
import logging
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from perdure import (
    AcknowledgedRecordsLostError,
    Message,
    Session,
    SessionManager,
    Shutdown,
    UnsavedChangesError,
    connect,
)
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.redis import RedisStore
from perdure.stores.sqlite import SqliteStore
from tests.servers import postgres, valkey

QUIET = Shutdown(signals=False)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")


class Place:
    """Somewhere that stores keep things, and that can go back to what it was."""

    def __init__(
        self, store: Callable[[], Store], keep: Callable[[], None], go_back: Callable[[], None]
    ) -> None:
        self.store = store
        self.keep = keep
        self.go_back = go_back

    def connect(self) -> SessionManager:
        return connect(self.store(), autosave=None, shutdown=QUIET)


def memory() -> Place:
    backing, old = MemoryBacking(), {}

    def keep() -> None:
        old.update(copy.deepcopy(backing.sessions))

    def go_back() -> None:
        backing.sessions.clear()
        backing.sessions.update(copy.deepcopy(old))

    return Place(lambda: MemoryStore(backing=backing), keep, go_back)


def files(tmp_path: Path) -> Place:
    path, old = tmp_path / "data", tmp_path / "old"

    def go_back() -> None:
        for child in path.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        shutil.copytree(old, path, dirs_exist_ok=True)

    return Place(lambda: FileStore(path), lambda: shutil.copytree(path, old) and None, go_back)


def sqlite(tmp_path: Path) -> Place:
    path, old = tmp_path / "a.db", tmp_path / "old.db"

    def copied(source: Path, target: Path) -> None:
        one, other = sqlite3.connect(source), sqlite3.connect(target)
        one.backup(other)
        one.close()
        other.close()

    return Place(lambda: SqliteStore(path), lambda: copied(path, old), lambda: copied(old, path))


def postgresql() -> Place:
    server, schema = postgres.shared(), f"t_{uuid4().hex}"

    def tables() -> list[str]:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        return [name for (name,) in server.run(query, schema)]

    def keep() -> None:
        names = tables()
        server.run(f"CREATE SCHEMA old_{schema}")
        for name in names:
            server.run(f"CREATE TABLE old_{schema}.{name} AS TABLE {schema}.{name}")

    def go_back() -> None:
        names = tables()
        server.run(f"TRUNCATE {', '.join(f'{schema}.{name}' for name in names)}")
        for name in names:
            row = f"INSERT INTO {schema}.{name} OVERRIDING SYSTEM VALUE"
            server.run(f"{row} SELECT * FROM old_{schema}.{name}")

    return Place(lambda: PostgresStore(server.url, schema=schema), keep, go_back)


def redis() -> Place:
    server, prefix, old = valkey.shared(), uuid4().hex, uuid4().hex

    def names(begin: str) -> list[str]:
        return [name for name in server.ask("KEYS", f"*{begin}*").decode().split() if begin in name]

    def keep() -> None:
        for name in names(prefix):
            server.say("COPY", name, name.replace(prefix, old))

    def go_back() -> None:
        for name in names(prefix):
            server.say("DEL", name)
        for name in names(old):
            server.say("RENAME", name, name.replace(old, prefix))

    return Place(lambda: RedisStore(f"{server.url}?prefix={prefix}"), keep, go_back)


@pytest.fixture(params=["memory", "file", "sqlite", "postgres", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    makes: dict[str, Callable[[], Place]] = {
        "memory": memory,
        "file": lambda: files(tmp_path),
        "sqlite": lambda: sqlite(tmp_path),
        "postgres": postgresql,
        "redis": redis,
    }
    return makes[request.param]()


def said(session: object) -> list[object]:
    return [message.content for message in session.context()]  # type: ignore[attr-defined]


async def shown(session: Session) -> list[object]:
    return [item.value.content for item in await session.history()]


async def say(session: Session, text: str) -> None:
    session.append(Message.user(text))
    await session.save()


async def refused(session: Session, text: str) -> AcknowledgedRecordsLostError:
    with pytest.raises(AcknowledgedRecordsLostError, match=r"fork_unsaved\(new_id\)") as raised:
        await say(session, text)
    return raised.value


async def test_acknowledged_records_that_are_gone_are_told_and_rescued(place: Place) -> None:
    told: list[object] = []
    async with place.connect() as sessions:
        sessions.on("lost", told.append)
        session = await sessions.open("a")
        await say(session, "one")
        session.memory.set("color", "blue")
        await session.save()
        place.keep()
        await say(session, "two")
        session.memory.set("color", "red")
        await say(session, "three")
        place.go_back()
        await refused(session, "four")
        with pytest.raises(AcknowledgedRecordsLostError, match=r"fork_unsaved\(new_id\)"):
            session.append(Message.user("five"))

        health = sessions.health()
        assert (health.status, health.lost) == ("degraded", {"a": 4})
        assert "acknowledged" in health.reasons[0]
        (event,) = told
        assert (event.missing, event.unsaved) == (3, 1)  # type: ignore[attr-defined]

        del session  # whoever has the manager alone is helped as well
        (lost,) = sessions.lost
        assert isinstance(lost.error, AcknowledgedRecordsLostError)
        await lost.fork_unsaved("b")
        assert sessions.health().status == "ok"
        async with sessions.open("b") as rescue:
            assert said(rescue) == await shown(rescue) == ["one", "two", "three", "four"]
            assert await rescue.memory.get("color") == "red"
        async with sessions.open("a") as session:  # goes on with what the store has
            assert said(session) == await shown(session) == ["one"]
            await say(session, "other")
    async with place.connect() as sessions:
        async with sessions.open("b") as rescue:
            assert said(rescue) == await shown(rescue) == ["one", "two", "three", "four"]
        async with sessions.open("a") as session:
            assert said(session) == ["one", "other"]


async def test_a_session_that_is_gone_is_made_again_from_memory(place: Place) -> None:
    async with place.connect() as sessions:
        async with sessions.open("before") as other:
            await say(other, "stays")
        place.keep()
        session = await sessions.open("a")
        await say(session, "one")
        await say(session, "two")
        place.go_back()
        error = await refused(session, "three")
        assert error.facts["durable"] == session.durable_version
        await session.fork_unsaved("b")
        async with sessions.open("b") as rescue:
            assert said(rescue) == await shown(rescue) == ["one", "two", "three"]
        async with sessions.open("a") as again:
            assert said(again) == []
            await say(again, "new")


async def test_what_others_have_written_since_is_not_touched(place: Place) -> None:
    async with place.connect() as sessions, place.connect() as others:
        async with sessions.open("before") as other:
            await say(other, "stays")
        place.keep()
        session = await sessions.open("a")
        await say(session, "mine")
        place.go_back()
        theirs = await others.open("a")  # under the same epoch, from the same record on
        await say(theirs, "theirs")
        await refused(session, "mine 2")
        await session.fork_unsaved("b")
        async with sessions.open("b") as rescue:
            assert said(rescue) == await shown(rescue) == ["mine", "mine 2"]
        await say(theirs, "theirs 2")
        assert said(theirs) == await shown(theirs) == ["theirs", "theirs 2"]


async def test_what_is_gone_is_named_until_somebody_decides(place: Place) -> None:
    async with place.connect() as sessions:
        session = await sessions.open("a")
        await say(session, "one")
        place.keep()
        await say(session, "two")
        place.go_back()
        await refused(session, "three")
        assert await session.discard_unsaved() == 1
        assert sessions.health().status == "ok"
    with pytest.raises(UnsavedChangesError, match="went back") as raised:
        async with place.connect() as sessions:
            session = await sessions.open("a")
            await say(session, "two")
            place.go_back()
            await refused(session, "three")
    (lost,) = raised.value.facts["report"].lost
    assert lost.missing > 0
