"""When a session was saved last, as a listing asks for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from perdure.records.keys import SessionKey
from perdure.store import SessionQuery
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance._kit import append_ok, group, take


async def test_each_save_of_a_session_that_stays_open_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1.7e9
    monkeypatch.setattr(time, "time", lambda: now)
    store = SqliteStore(tmp_path / "data.db")
    await store.open()
    grant, other = await take(store, SessionKey("ada")), await take(store, SessionKey("bob"))
    await append_ok(store, other, other.head + 1, *group("hello"))
    head = await append_ok(store, grant, grant.head + 1, *group("hello"))
    for later in (1000.0, 1001.0, 5000.0):
        now = 1.7e9 + later
        head = await append_ok(store, grant, head + 1, *group("again"))
        (found,) = await store.sessions(SessionQuery(since=now - 100, newest_first=True))
        assert (found.key.agent, found.updated_at) == ("ada", now)
    await store.aclose()
