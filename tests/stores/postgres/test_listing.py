"""Listings are bounded by their indexes, however many sessions there are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perdure.records.keys import SessionKey
from perdure.store import SessionQuery
from perdure.stores.postgres import PostgresStore, documents
from perdure.stores.postgres.schema import Statements
from perdure.testing.conformance._kit import KEY, take
from tests.servers.postgres import Postgres


class Explaining:
    """A connection that keeps the plans of queries, and has no rows."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.plan = ""

    def execute(self, query: bytes, values: object, **_: object) -> list[Any]:
        self.plan = "\n".join(
            row[0] for row in self._connection.execute(b"EXPLAIN " + query, values)
        )
        return []


@pytest.mark.parametrize(
    "query",
    [
        SessionQuery(newest_first=True, after=SessionKey("many-300"), after_at=1.7e9 + 300),
        SessionQuery(newest_first=True, since=1.7e9 + 7990),
        SessionQuery(newest_first=True, owner="ann-3", before=1.7e9 + 300),
    ],
    ids=["page", "since", "owner and before"],
)
async def test_a_page_and_a_range_of_time_begin_in_the_index(
    server: Postgres, schema: str, store: PostgresStore, query: SessionQuery
) -> None:
    await take(store)
    server.run(
        f"""INSERT INTO "{schema}".sessions (tenant, agent, session, epoch, updated_at, belongs)
        SELECT s.tenant, 'many-' || n, 'default', 1, to_timestamp(1.7e9 + n), 'ann-' || n % 10
        FROM "{schema}".sessions AS s, generate_series(1, 8000) AS n"""
    )
    server.run(f'ANALYZE "{schema}".sessions')
    with server.connect() as connection:
        explaining = Explaining(connection)
        documents.list_sessions(explaining, Statements(schema), query)  # type: ignore[arg-type]
    (index,) = [
        line for line in explaining.plan.splitlines() if "Index Cond" in line and "step" in line
    ]
    assert ")::double" not in index


@pytest.mark.parametrize("prefix", ["a", "app/", "a\ud7ff", "a\U0010ffff", "\U0010ffff"])
async def test_all_that_begins_with_a_prefix_is_listed(store: PostgresStore, prefix: str) -> None:
    ends = ["", "x", "\U0010ffff", "\U0010ffff" * 200 + "x"]
    keys = [SessionKey(f"{prefix}{end}") for end in ends]
    for key in [*keys, SessionKey("A"), SessionKey("b"), SessionKey("\uffff")]:
        await take(store, key)
    assert {info.key for info in await store.sessions(SessionQuery(prefix=prefix))} == set(keys)


async def test_a_range_of_time_may_be_infinite(store: PostgresStore) -> None:
    await take(store)
    for since, before in ((-math.inf, math.inf), (-1e300, 1e300)):
        query = SessionQuery(newest_first=True, since=since, before=before)
        assert [info.key for info in await store.sessions(query)] == [KEY]
    assert not await store.sessions(SessionQuery(since=math.inf))
    assert not await store.sessions(SessionQuery(before=-math.inf))
