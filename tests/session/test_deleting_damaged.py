"""Deleting and forgetting what cannot be read: it works, and others keep what they reach."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from perdure import (
    CorruptRecordError,
    LeaseHeldError,
    Message,
    SessionError,
    Shutdown,
    connect,
    store_for,
)
from perdure.records.keys import SessionKey
from perdure.records.messages import EncodedRecord
from perdure.session.manager import SessionManager
from tests.references import fork_as_before

QUIET = Shutdown(signals=False)

Damage = Callable[[str], None]
"""Damages the log of an agent after some bytes of it, and removes its documents."""


def flip(data: bytes, said: bytes) -> bytes:
    at = data.index(said)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def in_files(root: Path, said: bytes, id: str) -> None:
    folder = root / "agents" / id
    log = min((folder / "log").glob("*.jsonl"))
    log.write_bytes(flip(log.read_bytes(), said))
    for path in folder.glob("manifest*"):
        path.unlink()


def in_sqlite(path: Path, said: bytes, id: str, *, is_folded: bool = False) -> None:
    with contextlib.closing(sqlite3.connect(path)) as con, con:
        query = "SELECT id FROM session WHERE agent = ? AND session = 'default'"
        ((session,),) = con.execute(query, (id,)).fetchall()
        rows = con.execute("SELECT rowid, data FROM log WHERE session = ?", (session,)).fetchall()
        row, data = next((row, data) for row, data in rows if said in data)
        con.execute("UPDATE log SET data = ? WHERE rowid = ?", (flip(data, said), row))
        if is_folded:
            return
        con.execute("DELETE FROM manifest WHERE session = ?", (session,))
        con.execute("DELETE FROM document WHERE session = ?", (session,))


@pytest.fixture(params=["file", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    files = request.param == "file"
    return str(tmp_path / "store") if files else f"sqlite:///{tmp_path / 'data.db'}"


@pytest.fixture(params=[b"epoch", b"before"], ids=["first record", "a message"])
def damage(request: pytest.FixtureRequest, where: str, tmp_path: Path) -> Damage:
    if where.startswith("sqlite"):
        return partial(in_sqlite, tmp_path / "data.db", request.param)
    return partial(in_files, tmp_path / "store", request.param)


def opened(where: str) -> SessionManager:
    return connect(where, shutdown=QUIET, autosave=None)


async def converse(where: str, *ids: str) -> None:
    async with opened(where) as sessions:
        for id in ids:
            async with sessions.open(id, owner=f"{id}'s owner") as session:
                session.append(Message.user("before"), Message.assistant("said"))


async def ids(sessions: SessionManager) -> list[str]:
    return [info.key.agent for info in await sessions.list()]


async def test_a_damaged_session_is_deleted(where: str, damage: Damage) -> None:
    await converse(where, "ada", "bob")
    async with opened(where) as sessions:
        await sessions.fork("ada", "fork")
        await sessions.post("ada", Message.user("posted"))
    damage("ada")
    async with opened(where) as sessions:
        with pytest.raises(CorruptRecordError):
            await sessions.load("ada")
        assert await sessions.delete("ada")
        assert not await sessions.delete("ada")
        assert await ids(sessions) == ["bob", "fork"]
    async with opened(where) as sessions:
        fork = await sessions.load("fork")
        assert fork is not None
        assert [message.text for message in fork.context()] == ["before", "said"]
        async with sessions.open("ada", create=True) as session:
            assert session.context() == []


async def test_a_damaged_session_is_forgotten_with_what_was_posted_to_it(
    where: str, damage: Damage, tmp_path: Path
) -> None:
    await converse(where, "ada", "bob")
    async with opened(where) as sessions:
        await sessions.post("ada", Message.user("p0sted"))
    damage("ada")
    async with opened(where) as sessions:
        tried = await sessions.forget("ada", dry_run=True)
        assert await ids(sessions) == ["ada", "bob"]
        report = await sessions.forget("ada")
        assert report.sessions == tried.sessions == (SessionKey("ada"),)
        for one in (report, tried):
            (kept,) = one.kept
            assert (kept.what, kept.of) == ("blobs", SessionKey("ada"))
            assert "perdure check --gc" in kept.why
        assert await ids(sessions) == ["bob"]
    folder = tmp_path / "store" / "agents" / "ada"
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in left if b"said" in path.read_bytes()]
    assert not [path for path in left if b"p0sted" in path.read_bytes()]


def blob_of(text: str) -> tuple[str, bytes]:
    return hashlib.sha256(text.encode()).hexdigest(), text.encode()


async def refer(sessions: SessionManager, id: str, *names: str) -> None:
    async with sessions.open(id) as session:
        for name in names:
            session.append(EncodedRecord("app:blob", msgspec.json.encode({"blob": name})))


async def test_blobs_that_nobody_can_know_stay_until_a_sweep(where: str, damage: Damage) -> None:
    """What others reach stays in any case."""
    shared, alone = blob_of("shared"), blob_of("alone")
    store = store_for(where)
    await store.open()
    for name, data in (shared, alone):
        await store.put_blobs("", {name: data})
    await store.aclose()
    await converse(where, "ada")
    async with opened(where) as sessions:
        await refer(sessions, "ada", shared[0], alone[0])
        await refer(sessions, "bob", shared[0])
    damage("ada")
    async with opened(where) as sessions:
        await sessions.forget("ada")
    store = store_for(where)
    await store.open()
    assert {shared[0], alone[0]} <= set(await store.blob_names(""))
    await store.aclose()


async def test_no_damaged_log_is_set_aside_where_another_session_is_refused(
    where: str, damage: Damage, tmp_path: Path
) -> None:
    await converse(where, "ada")
    async with opened(where) as others, others.open("ada", session="held") as held:
        held.append(Message.user("theirs"))
        await held.save()
        damage("ada")
        async with opened(where) as sessions:
            with pytest.raises(LeaseHeldError):
                await sessions.forget("ada", on_held="raise", wait=0)
            assert len(await sessions.list()) == 2
    assert not list(tmp_path.rglob("*.damaged"))


async def test_a_damaged_session_is_not_renamed_or_copied(where: str, damage: Damage) -> None:
    await converse(where, "ada")
    damage("ada")
    async with opened(where) as sessions:
        for act in (sessions.rename, sessions.copy, sessions.fork):
            with pytest.raises(CorruptRecordError, match=r"damaged.*perdure export .*--salvage"):
                await act("ada", "bob")
            assert await ids(sessions) == ["ada"]


async def test_a_fork_of_a_release_before_keeps_what_it_reads(where: str, tmp_path: Path) -> None:
    """Its note is lost with the damaged log of its parent; it is looked for all the same."""
    await converse(where, "ada")
    store = store_for(where)
    await store.open()
    await fork_as_before(store, "ada", "child")
    await store.aclose()
    async with opened(where) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("later"))
    if where.startswith("sqlite"):
        in_sqlite(tmp_path / "data.db", b"later", "ada", is_folded=True)
    else:
        folder = tmp_path / "store" / "agents" / "ada"
        log = max((folder / "log").glob("*.jsonl"))
        log.write_bytes(flip(log.read_bytes(), b"later"))
    async with opened(where) as sessions:
        with pytest.raises(SessionError, match="is read by child"):
            await sessions.delete("ada")
        with pytest.raises(SessionError, match="is read by child"):
            await sessions.forget("ada")
        assert await sessions.load("child")
        assert await sessions.delete("child")
        assert await sessions.delete("ada")
