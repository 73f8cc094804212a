"""A store whose large tables were split by the script in the guide goes on as it was."""

from __future__ import annotations

from pathlib import Path

import psycopg

from perdure.records.keys import SessionKey
from perdure.store import SessionQuery
from perdure.testing.conformance._kit import append_ok, group, read, take
from tests.servers.postgres import Postgres
from tests.stores.postgres.conftest import OpenStore

SCRIPT = Path(__file__).parents[3] / "docs" / "partition-postgres.sql"
KEYS = [SessionKey(f"agent-{number}") for number in range(40)]


async def test_a_partitioned_store_continues_where_it_was(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    first = await open_store("first")
    before = {}
    for key in KEYS:
        grant = await take(first, key)
        await append_ok(first, grant, 2, *group("before"))
        before[key] = await read(first, key)
        await first.release(key, grant.epoch)
    await first.aclose()

    with psycopg.connect(server.url) as connection:
        connection.execute(f'SET search_path = "{schema}"')
        connection.execute(SCRIPT.read_text())

    second = await open_store("second")
    for key in KEYS:
        assert await read(second, key) == before[key]
        grant = await take(second, key)
        await append_ok(second, grant, 4, *group("after"))
        assert len(await read(second, key)) == 4
    await second.scrub()
    assert await second.trim(KEYS[0], 2, 3)
    await second.delete(KEYS[1], 2)
    assert len(await second.sessions(SessionQuery(limit=100))) == len(KEYS) - 1
    with psycopg.connect(server.url) as connection:
        sql = f'SELECT count(DISTINCT tableoid) FROM "{schema}".commits'
        row = connection.execute(sql).fetchone()
    assert row is not None
    assert row[0] > 15
