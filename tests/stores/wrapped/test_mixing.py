"""Encryption belongs to the store: nothing plain gets into one, and none is made of a plain one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Message, Shutdown, connect
from perdure.errors import ConfigError
from perdure.records.chunks import name_of
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.redis import RedisStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from tests.golden.reader import HERE
from tests.servers import postgres, s3, valkey

KEY = "5a" * 32
NO_SIGNALS = Shutdown(signals=False)


@pytest.fixture(params=["file", "sqlite", "postgres", "redis", "s3"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    place = tmp_path / "kept"
    return {
        "file": lambda: FileStore(place),
        "sqlite": lambda: SqliteStore(place / "store.db"),
        "postgres": lambda: PostgresStore(postgres.shared().url, schema=postgres.schema_of(place)),
        "redis": lambda: RedisStore(f"{valkey.shared().url}?prefix={s3.prefix_of(place)}"),
        "s3": lambda: s3.store_on(s3.shared(), place),
    }[request.param]


async def say(store: Store, text: str) -> None:
    async with connect(store, shutdown=NO_SIGNALS) as sessions:
        async with sessions.open("ada") as ada, ada.turn():
            ada.append(Message.user(text))


async def test_an_encrypted_store_is_refused_without_its_key(inner: Callable[[], Store]) -> None:
    await say(EncryptedStore(inner(), KEY), "sealed")
    for read_only in (False, True):
        for plain in (inner(), CompressedStore(inner())):
            with pytest.raises(ConfigError, match=r"is encrypted: put encrypted\+ before"):
                await connect(plain, shutdown=NO_SIGNALS, read_only=read_only)
    async with connect(EncryptedStore(inner(), KEY), shutdown=NO_SIGNALS) as sessions:
        async with sessions.open("ada") as ada:
            assert [one.text for one in ada.context()] == ["sealed"]


async def test_a_sealed_session_that_was_copied_into_a_plain_store_is_refused(
    tmp_path: Path,
) -> None:
    """Nothing marks the store; the session's own manifest says that it has a key."""
    await say(EncryptedStore(FileStore(tmp_path / "sealed"), KEY), "sealed")
    async with connect(FileStore(tmp_path / "plain"), shutdown=NO_SIGNALS) as sessions:
        shutil.copytree(tmp_path / "sealed" / "agents" / "ada", tmp_path / "plain/agents/ada")
        with pytest.raises(ConfigError, match="session ada is encrypted"):
            await sessions.load("ada")
        with pytest.raises(ConfigError, match="session ada is encrypted"):
            await sessions.open("ada")


@pytest.mark.parametrize("how", ["session of a tenant", "post", "blob"])
async def test_whatever_comes_first_marks_the_store(how: str) -> None:
    backing = MemoryBacking()
    store = EncryptedStore(MemoryStore(backing=backing), KEY)
    async with connect(store, shutdown=NO_SIGNALS) as sessions:
        if how == "post":
            await sessions.post("ada", Message.user("hello"), tenant="acme")
        elif how == "blob":
            await store.put_blobs("acme", {name_of(b"b"): b"b"})
        else:
            await sessions.open("ada", tenant="acme")
        assert await store.tenants() == ["acme"]
    with pytest.raises(ConfigError, match="is encrypted"):
        await connect(MemoryStore(backing=backing), shutdown=NO_SIGNALS)


async def test_a_plain_store_is_not_encrypted_from_some_day_on(inner: Callable[[], Store]) -> None:
    await say(inner(), "plain")
    for read_only in (False, True):
        with pytest.raises(ConfigError, match=r"perdure migrate SOURCE encrypted\+TARGET"):
            await connect(EncryptedStore(inner(), KEY), shutdown=NO_SIGNALS, read_only=read_only)
    async with connect(inner(), shutdown=NO_SIGNALS) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert [one.text for one in view.context()] == ["plain"]


@pytest.mark.parametrize("what", ["post", "blob"])
async def test_a_plain_post_or_blob_makes_a_store_plain(what: str) -> None:
    backing = MemoryBacking()
    store = MemoryStore(backing=backing)
    async with connect(store, shutdown=NO_SIGNALS) as sessions:
        if what == "post":
            await sessions.post("ada", Message.user("hello"))
        else:
            await store.put_blobs("acme", {name_of(b"b"): b"b"})
    with pytest.raises(ConfigError, match="in plain text"):
        await connect(EncryptedStore(MemoryStore(backing=backing), KEY), shutdown=NO_SIGNALS)


PACKED: list[Callable[[Store], Store]] = [
    lambda inner: EncryptedStore(inner, KEY, compression="zstd"),
    lambda inner: EncryptedStore(CompressedStore(inner), KEY),
    lambda inner: CompressedStore(EncryptedStore(inner, KEY)),
]


@pytest.mark.parametrize("around", PACKED, ids=["packed first", "packed below", "packed above"])
async def test_an_encrypted_store_may_be_packed(
    around: Callable[[Store], Store], tmp_path: Path
) -> None:
    for text in ("first " * 100, "then " * 100):
        await say(around(FileStore(tmp_path)), text)
    async with connect(around(FileStore(tmp_path)), shutdown=NO_SIGNALS) as sessions:
        async with sessions.open("ada") as ada:
            assert [one.text for one in ada.context()] == ["first " * 100, "then " * 100]
    with pytest.raises(ConfigError, match="is encrypted"):
        await connect(FileStore(tmp_path), shutdown=NO_SIGNALS)


def perdure(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure.cli", *arguments],
        env={**os.environ, "PERDURE_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.deep
async def test_the_cure_that_is_named_cures(tmp_path: Path) -> None:
    plain, sealed = f"file:{tmp_path / 'plain'}", f"encrypted+file:{tmp_path / 'sealed'}"
    await say(FileStore(tmp_path / "plain"), "CANARY-4d1e")
    done = perdure("migrate", plain, sealed)
    assert done.returncode == 0, done.stderr
    store = EncryptedStore(FileStore(tmp_path / "sealed"), KEY)
    async with connect(store, shutdown=NO_SIGNALS) as sessions:
        async with sessions.open("ada") as ada:
            assert [one.text for one in ada.context()] == ["CANARY-4d1e"]
    for path in filter(Path.is_file, (tmp_path / "sealed").rglob("*")):
        assert b"CANARY-4d1e" not in path.read_bytes()
    done = perdure("migrate", plain, f"file:{tmp_path / 'sealed'}")
    assert (done.returncode, "is encrypted" in done.stderr) == (2, True), done
    done = perdure("migrate", plain, f"encrypted+{plain}")
    assert (done.returncode, "is not encrypted" in done.stderr) == (2, True), done


async def test_a_store_of_before_the_mark_is_known_by_its_keys(tmp_path: Path) -> None:
    shutil.copytree(HERE / "encrypted" / "store", tmp_path / "kept")
    keyring = tmp_path / "kept" / "agents" / "perdure=3akeyring"
    shutil.rmtree(keyring)  # a store with no blob, post or fold had none
    key = (HERE / "encrypted" / "key").read_text("ascii")
    store = EncryptedStore(FileStore(tmp_path / "kept"), key)
    await store.open()
    assert await store.tenants() == [""]
    await store.aclose()
