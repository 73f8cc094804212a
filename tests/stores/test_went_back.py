"""Stores that come back without their newest data: told as what it is, and rescued from memory.

A failover to a standby that lagged behind, a server that kept its data in memory, an older backup.
"""

from __future__ import annotations

import copy
import logging
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import anyio
import obstore
import psycopg
import pytest

from perdure import (
    AcknowledgedRecordsLostError,
    LeaseOptions,
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
from tests.servers import postgres, s3, valkey
from tests.stores.s3.gateway import LOST, Gateway

deep = pytest.mark.deep
QUIET = Shutdown(signals=False)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")


class Place:
    """Somewhere that stores keep things, and that can go back to what it was."""

    def __init__(
        self,
        store: Callable[[], Store],
        keep: Callable[[], None],
        go_back: Callable[[], None],
        beats: Callable[[], object] | None = None,
    ) -> None:
        self.store = store
        self._keep = keep
        self._go_back = go_back
        self._beats = beats
        self._open = 0

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[SessionManager, None]:
        often = LeaseOptions(heartbeat=0.1) if self._beats is not None else LeaseOptions()
        manager = connect(self.store(), autosave=None, shutdown=QUIET, lease=often)
        async with manager as sessions:
            self._open += 1
            try:
                yield sessions
            finally:
                self._open -= 1

    async def keep(self) -> None:
        """Remember how it is; a bucket tells states apart that lie a heartbeat from one another."""
        self._keep()
        if self._beats is not None:
            await self._beat()

    async def go_back(self) -> None:
        """Go back; where only a heartbeat tells, wait until each owner's has."""
        self._go_back()
        for _ in range(2 if self._beats is not None else 0):  # the first one is over by the second
            await self._beat()

    async def _beat(self) -> None:
        assert self._beats is not None
        before = self._beats()
        with anyio.fail_after(60):
            while len(self._beats().items() - before.items()) < self._open:  # type: ignore[attr-defined]
                await anyio.sleep(0.02)


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


def files_in_place(tmp_path: Path) -> Place:
    """The same files, as a snapshot of the disk or ``rsync --inplace`` puts them back."""
    path, old = tmp_path / "data", tmp_path / "old"

    def go_back() -> None:
        for file in [file for file in path.rglob("*") if file.is_file()]:
            before = old / file.relative_to(path)
            if before.exists():
                with file.open("r+b") as there:
                    there.truncate(there.write(before.read_bytes()))
                shutil.copystat(before, file)
            else:
                file.unlink()

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

    def columns(name: str) -> str:
        query = (
            "SELECT column_name FROM information_schema.columns "
            "WHERE table_schema = %s AND table_name = %s AND is_generated = 'NEVER'"
        )
        return ", ".join(column for (column,) in server.run(query, schema, name))

    def keep() -> None:
        names = tables()
        server.run(f"CREATE SCHEMA old_{schema}")
        for name in names:
            server.run(f"CREATE TABLE old_{schema}.{name} AS TABLE {schema}.{name}")

    def go_back() -> None:
        names = tables()
        steps = [f"TRUNCATE {', '.join(f'{schema}.{name}' for name in names)}"]
        for name in names:
            row = f"INSERT INTO {schema}.{name} ({columns(name)}) OVERRIDING SYSTEM VALUE"
            steps.append(f"{row} SELECT {columns(name)} FROM old_{schema}.{name}")
        for _ in range(20):  # a heartbeat may lock the tables in another order
            with suppress(psycopg.errors.DeadlockDetected):
                server.run("; ".join(steps))  # in one transaction: it comes before, or behind
                return
        pytest.fail("each try met a deadlock")

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


def bucket(tmp_path: Path) -> Place:
    server, old = s3.shared(), dict[str, bytes]()
    client = server.client(s3.prefix_of(tmp_path))

    def names() -> list[str]:
        return [one["path"] for page in obstore.list(client) for one in page]

    def keep() -> None:
        old.update({name: bytes(obstore.get(client, name).bytes()) for name in names()})

    def go_back() -> None:
        obstore.delete(client, [name for name in names() if name not in old])
        for name, data in old.items():
            obstore.put(client, name, data, use_multipart=False)

    def beats() -> dict[str, object]:
        owners = [one for page in obstore.list(client, "owners/") for one in page]
        return {one["path"]: one["e_tag"] for one in owners}

    return Place(lambda: s3.store_on(server, tmp_path), keep, go_back, beats)


READ_WHEN_FOLDING = ("memory", "file", "file-in-place", "sqlite", "postgres", "redis")
"""Stores whose log a fold reads; in a bucket it reads none, and the session is refused later."""


@pytest.fixture(params=[*READ_WHEN_FOLDING, pytest.param("s3", marks=deep)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    makes: dict[str, Callable[[], Place]] = {
        "memory": memory,
        "file": lambda: files(tmp_path),
        "file-in-place": lambda: files_in_place(tmp_path),
        "sqlite": lambda: sqlite(tmp_path),
        "postgres": postgresql,
        "redis": redis,
        "s3": lambda: bucket(tmp_path),
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
        await place.keep()
        await say(session, "two")
        session.memory.set("color", "red")
        await say(session, "three")
        await place.go_back()
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
        await place.keep()
        session = await sessions.open("a")
        await say(session, "one")
        await say(session, "two")
        await place.go_back()
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
        await place.keep()
        session = await sessions.open("a")
        await say(session, "mine")
        await place.go_back()
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
        await place.keep()
        await say(session, "two")
        await place.go_back()
        await refused(session, "three")
        assert await session.discard_unsaved() == 1
        assert sessions.health().status == "ok"
    with pytest.raises(UnsavedChangesError, match="went back") as raised:
        async with place.connect() as sessions:
            session = await sessions.open("a")
            await say(session, "two")
            await place.go_back()
            await refused(session, "three")
    (lost,) = raised.value.facts["report"].lost
    assert lost.missing > 0


@deep
async def test_what_a_bucket_took_after_it_had_gone_back_is_rescued_too(tmp_path: Path) -> None:
    place = bucket(tmp_path)
    async with place.connect() as sessions:
        session = await sessions.open("a")
        await say(session, "one")
        await place.keep()
        await say(session, "two")
        place._go_back()
        await say(session, "three")  # before any heartbeat: the bucket cannot know
        for _ in range(2):
            await place._beat()
        error = await refused(session, "four")
        durable, missing = error.facts["durable"], error.facts["missing"]
        assert isinstance(durable, int)
        assert isinstance(missing, int)
        assert 0 < missing < durable
        await session.fork_unsaved("b")
        async with sessions.open("b") as rescue:
            assert said(rescue) == await shown(rescue) == ["one", "two", "three", "four"]


@deep
async def test_a_heartbeat_whose_answer_was_lost_costs_a_look_and_no_session(
    tmp_path: Path,
) -> None:
    with Gateway(s3.shared().port) as gateway:
        store = s3.store_on(s3.shared(), tmp_path, endpoint=gateway.endpoint)
        often = LeaseOptions(heartbeat=0.1)
        async with connect(store, autosave=None, shutdown=QUIET, lease=often) as sessions:
            session = await sessions.open("a")
            await say(session, "one")
            lost = anyio.Event()
            here = anyio.lowlevel.current_token()

            def fault(method: str, path: str) -> int | None:
                if method == "PUT" and "/owners/" in path and not lost.is_set():
                    anyio.from_thread.run_sync(lost.set, token=here)
                    return LOST
                return None

            gateway.fault = fault
            await lost.wait()
            for number in range(3):
                await say(session, str(number))
            assert sessions.health().lost == {}


@pytest.mark.parametrize("place", READ_WHEN_FOLDING, indirect=True)
async def test_documents_made_from_records_that_are_gone_are_not_stored(place: Place) -> None:
    async with place.connect() as sessions:
        session = await sessions.open("a")
        await say(session, "one")
        await place.keep()
        await say(session, "two")
        await place.go_back()
        with suppress(AcknowledgedRecordsLostError):
            await session.aclose()  # folds, and appends nothing
    async with place.connect() as sessions, sessions.open("a") as session:
        assert said(session) == await shown(session) == ["one"]
        await say(session, "other")
