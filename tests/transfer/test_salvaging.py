"""Salvage and backup beyond files: an S3 bucket with a lost object, PostgreSQL with a lost row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message, SessionKey
from perdure.errors import CorruptRecordError
from perdure.store import Store
from perdure.stores.postgres import PostgresStore
from perdure.transfer import (
    backup,
    read_bundle,
    restore_backup,
    salvage,
    verify_backup,
    write_bundle,
)
from tests.servers import postgres, s3, valkey
from tests.stores.redis.test_damage import names_of, rewrite

pytestmark = [pytest.mark.anyio, pytest.mark.deep]


async def _fill(store: Store) -> None:
    async with perdure.connect(store, autosave=None) as sessions:
        async with sessions.open("ada") as session:
            for number in range(5):
                session.append(Message.user(f"question {number}"))
                await session.save()


async def _salvaged(store: Store, folder: Path) -> tuple[Any, list[str]]:
    """Salvage the session into files; return the report, and what it says there."""
    await store.open()
    with pytest.raises(CorruptRecordError, match="`perdure export ada --salvage --out FILE`"):
        await write_bundle(store, SessionKey("ada"), folder / "refused")
    found = await salvage(store, SessionKey("ada"), folder / "left")
    await store.aclose()
    new = perdure.store_for(folder / "new")
    await new.open()
    await read_bundle(new, folder / "left")
    await new.aclose()
    async with perdure.connect(folder / "new") as sessions:
        view = await sessions.load("ada")
        assert view is not None
        items = await view.history()
        return found, [one.value.text for one in items if isinstance(one.value, Message)]


LEFT = ["question 0", "question 1", "question 3", "question 4"]


async def test_a_damaged_row_of_postgres_loses_only_itself(tmp_path: Path) -> None:
    server = postgres.shared()
    schema = postgres.schema_of(tmp_path)
    await _fill(PostgresStore(server.url, schema=schema))
    [(first, lines)] = server.run(
        f"SELECT first, lines FROM {schema}.commits WHERE position('question 2'::bytea IN lines) > 0"
    )
    changed = bytes(lines).replace(b"question 2", b"quastion 2")
    server.run(f"UPDATE {schema}.commits SET lines = %s WHERE first = %s", changed, first)
    found, texts = await _salvaged(PostgresStore(server.url, schema=schema), tmp_path)
    assert [(run.first, run.last) for run in found.missing] == [(first, first)]
    assert texts == LEFT


async def test_a_damaged_entry_of_redis_loses_only_itself(tmp_path: Path) -> None:
    server = valkey.shared()
    url = f"{server.url}?prefix={postgres.schema_of(tmp_path)}"
    await _fill(perdure.store_for(url))
    log = names_of(url).session_keys(SessionKey("ada")).log

    def change(_: int, id: bytes, epoch: bytes, lines: bytes) -> tuple[bytes, bytes, bytes]:
        return id, epoch, lines.replace(b"question 2", b"quastion 2")

    rewrite(server, log, change)
    found, texts = await _salvaged(perdure.store_for(url), tmp_path)
    assert [run.first == run.last for run in found.missing] == [True]
    assert texts == LEFT


async def test_a_damaged_object_of_a_bucket_loses_only_itself(tmp_path: Path) -> None:
    server = s3.shared()
    await _fill(s3.store_on(server, tmp_path))
    client = server.client(s3.prefix_of(tmp_path))
    hurt = 0
    for listed in [one for page in client.list() for one in page]:
        data = bytes(client.get(listed["path"]).bytes())
        if b"question 2" in data and "/log" in listed["path"]:
            client.put(listed["path"], data.replace(b"question 2", b"quastion 2"))
            hurt += 1
    assert hurt == 1
    found, texts = await _salvaged(s3.store_on(server, tmp_path), tmp_path)
    assert [run.first == run.last for run in found.missing] == [True]
    assert texts == LEFT


async def test_a_backup_in_a_bucket_brings_the_store_back(tmp_path: Path) -> None:
    server = s3.shared()
    source, target = perdure.store_for(tmp_path / "source"), s3.store_on(server, tmp_path)
    await target.open()
    for _ in range(2):
        await _fill(source)
        await source.open()
        done = await backup(source, target)
        await source.aclose()
        assert (done.written, done.failed) == (1, {})
    assert (await verify_backup(target)).problems == {}
    new = perdure.store_for(tmp_path / "new")
    await new.open()
    restored = await restore_backup(target, new)
    assert (restored.written, restored.failed) == (1, {})
    await new.aclose()
    await target.aclose()
