"""Each store's heartbeat tells of the heartbeats of others, and who begins anew is told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.records.keys import SessionKey
from perdure.store import Store, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.redis import RedisStore
from perdure.stores.sqlite import SqliteStore
from tests.servers import postgres, s3, valkey

pytestmark = pytest.mark.anyio

KEY = SessionKey("agent")

Open = Callable[[str], Store]


def file(place: Path) -> Open:
    return lambda owner: FileStore(place / "store", owner=owner)


def sqlite(place: Path) -> Open:
    return lambda owner: SqliteStore(place / "store.db", owner=owner)


def memory(_: Path) -> Open:
    backing = MemoryBacking()
    return lambda owner: MemoryStore(owner=owner, backing=backing)


def on_postgres(place: Path) -> Open:
    schema = postgres.schema_of(place)
    return lambda owner: PostgresStore(postgres.shared().url, schema=schema, owner=owner)


def on_redis(place: Path) -> Open:
    url = f"{valkey.shared().url}?prefix={place.name}"
    return lambda owner: RedisStore(url, owner=owner)


def on_s3(place: Path) -> Open:
    return lambda owner: s3.store_on(s3.shared(), place, owner=owner)


@pytest.mark.parametrize("kind", [memory, file, sqlite, on_postgres, on_redis, on_s3])
async def test_others_are_told_of_until_they_leave(
    tmp_path: Path, kind: Callable[[Path], Open]
) -> None:
    made = kind(tmp_path)
    one, other = made("one"), made("other")
    await one.open()
    await other.open()
    await take_after(one, KEY, after=0)
    seen = [await told(other, KEY) for _ in range(2) if await one.heartbeat()]
    assert all(seen)
    assert seen[0] != seen[1]
    await one.aclose()
    again = made("one")
    await again.open()
    assert await told(other, KEY) not in (*seen, 0)  # nobody takes it for the one before
    await again.aclose()
    await other.aclose()


async def told(store: Store, key: SessionKey) -> int:
    """Return the counter of a session's holder, as the heartbeats tell it."""
    holder = await store.holder(key)
    assert holder is not None
    found = [beats for _ in range(4) if (beats := (await store.heartbeat()).beats) is not None]
    assert found, "none of four heartbeats told"
    counter = found[-1][holder.listed or holder.owner]
    assert counter == holder.beat
    assert store.owner not in found[-1]
    assert len(found[-1]) == 1
    return counter
