"""Sessions of perdure's own at the command line: scopes are shown, and what locks a store goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.records.keys import BACKUP_JOURNAL, SessionKey, keyring_of
from perdure.store import Store, take_after
from tests.cli.conftest import Command

QUIET = Shutdown(signals=False)
LOCKS = pytest.mark.parametrize("key", [keyring_of(""), keyring_of("a"), BACKUP_JOURNAL], ids=str)


@asynccontextmanager
async def opened(url: str | Path) -> AsyncIterator[Store]:
    store = perdure.store_for(url)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


def put(url: str | Path, key: SessionKey) -> None:
    """Begin a session in the store itself, which refuses no id."""

    async def begin() -> None:
        async with opened(url) as store:
            await store.release(key, (await take_after(store, key, after=0)).epoch)

    anyio.run(begin)


def is_there(url: str | Path, key: SessionKey) -> bool:
    async def look() -> bool:
        async with opened(url) as store:
            holder = await store.holder(key)
            return holder is not None and not holder.deleted

    return anyio.run(look)


def fill(url: str | Path, *, tenant: str = "") -> None:
    async def talk() -> None:
        async with perdure.connect(url, shutdown=QUIET) as sessions:
            async with sessions.open("ada", tenant=tenant) as session:
                session.append(Message.user("hi"))

    anyio.run(talk)


@LOCKS
def test_a_repair_unlocks_a_store_that_only_looks_encrypted_or_like_a_backup(
    key: SessionKey, command: Command, store: Path
) -> None:
    put(store, key)
    assert command("ls", "--store", store).status == 2
    ran = command("check", "--repair", "--store", store)
    assert ran.status == 0
    assert f"{key}: removed: this store is neither encrypted nor a backup" in ran.out
    assert command("show", "ada", "--store", store).status == 0
    fill(store)
    assert command("check", "--repair", "--store", store, "--json").json["unlocked"] == []


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_repair_keeps_the_keys_of_an_encrypted_store(
    tenant: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "5a" * 32)
    place = tmp_path / "store"
    fill(f"encrypted+file:{place}", tenant=tenant)
    assert command("check", "--repair", "--store", place).status == 2
    own = [path for path in place.rglob("keys/*") if "perdure=3akeyring" not in path.parts]
    for document in own:  # lost, so that only the records show that they are sealed
        document.unlink()
    assert own
    assert command("check", "--repair", "--store", place).status == 2
    assert is_there(place, keyring_of(""))
    assert is_there(place, keyring_of(tenant))


@pytest.mark.parametrize("sessions", [0, 1])
def test_a_repair_keeps_the_journal_of_a_backup(
    sessions: int, command: Command, tmp_path: Path, store: Path
) -> None:
    source = store
    if not sessions:
        source = tmp_path / "empty"
        anyio.run(_begin, source)
    place = tmp_path / "backup"
    assert command("backup", source, place).status == 0
    assert command("check", "--repair", "--store", place).status == 2
    assert is_there(place, BACKUP_JOURNAL)


async def _begin(place: Path) -> None:
    async with perdure.connect(place, shutdown=QUIET):
        pass


@LOCKS
@pytest.mark.parametrize("act", ["show", "forget", "rebuild", "export"])
def test_no_command_takes_the_id_of_what_a_store_is(
    act: str, key: SessionKey, command: Command, store: Path
) -> None:
    ran = command(act, key.agent, "--session", key.session, "--store", store)
    assert ran.status == 2
    assert "perdure's own" in ran.err


def test_a_scope_is_shown_exported_imported_and_forgotten_by_its_id(
    command: Command, tmp_path: Path
) -> None:
    async def like() -> None:
        async with perdure.connect(tmp_path / "one", shutdown=QUIET) as sessions:
            await sessions.scope("user:bob").set("likes", "tea")

    anyio.run(like)
    scope = ("perdure:scope", "--session", "user:bob", "--store")
    assert "likes" in command("show", *scope, tmp_path / "one").out
    bundle = tmp_path / "scope.jsonl"
    assert (
        command("export", "--layout", "bundle", "--out", bundle, *scope, tmp_path / "one").status
        == 0
    )
    assert command("import", bundle, "--store", tmp_path / "two").status == 0
    assert "likes" in command("show", *scope, tmp_path / "two").out
    assert command("forget", *scope, tmp_path / "two").status == 0
    assert command("show", *scope, tmp_path / "two").status == 1
    assert (
        command("import", bundle, "--id", "perdure:scope", "--store", tmp_path / "two").status == 2
    )
