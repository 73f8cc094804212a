"""The directory of sessions: ids out of folders, and what their documents say of them."""

from __future__ import annotations

import os
import sys
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from perdure.records.keys import SessionKey
from perdure.store import SessionQuery
from perdure.stores.file import FileStore
from perdure.testing.conformance._kit import append_ok, group, manifest_of, take
from tests.stores.file.kit import KEY


async def folded(store, key: SessionKey, about: bytes) -> int:
    grant = await take(store, key)
    head = await append_ok(store, grant, grant.head + 1, *group("a"))
    new = {"session.json": about}
    manifest = manifest_of(grant, head, new, counters={"turns": 3})
    await store.write_documents(key, new, manifest)
    return head


async def test_a_session_without_a_fold_is_listed_with_its_times(store) -> None:
    await take(store)
    (info,) = await store.sessions()
    assert (info.key, info.epoch, info.head, info.title) == (KEY, 1, 1, None)
    assert info.created_at is not None
    assert info.updated_at is not None
    assert info.created_at - 10 < info.updated_at


async def test_one_bad_folder_hides_no_other(store, root: Path) -> None:
    for name in ("a", "b", "c", "d"):
        await folded(store, SessionKey(name), b"{}")
    agents = root / "agents"
    (agents / "a/manifest-1.json").write_bytes(b"damaged")
    (agents / "b/log/1-0.jsonl").write_bytes(b"damaged\n")
    (agents / "c").rename(agents / "moved")
    (agents / "Not ours").mkdir()
    (agents / "=zz").mkdir()
    (agents / "file").write_bytes(b"")
    (agents / "empty").mkdir()
    listed = [info.key.agent for info in await store.sessions()]
    assert listed == ["a", "b", "d", "moved"]


async def test_ids_that_are_only_hashed_come_out_of_the_files(store) -> None:
    long = "Ü" * 400
    keys = [SessionKey(long, "x" * 300), SessionKey(long, "y"), SessionKey("s", "z" * 1000)]
    for key in keys:
        await folded(store, key, b"{}")
    assert [info.key for info in await store.sessions()] == sorted(keys)
    assert [info.key for info in await store.sessions(SessionQuery(prefix="ÜÜÜ"))] == sorted(
        keys[:2]
    )


async def test_no_limit_below_one_gives_anything(store) -> None:
    await take(store)
    assert await store.sessions(SessionQuery(limit=0)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone a name is any bytes")
async def test_names_that_are_no_text_hide_nothing(store, root: Path) -> None:
    await folded(store, KEY, b"{}")
    strange = os.fsencode(root) + b"/%s/\xff\xfe~"
    for place in (b"agents", b"tenants", b"agents/agent/sessions", b"blobs", b"owners"):
        os.makedirs(strange % place, mode=0o700)
    for place in (b"agents/agent", b"agents/agent/log"):
        with open(strange % place, "wb"):
            pass
    assert [info.key for info in await store.sessions()] == [KEY]
    assert await store.tenants() == [""]
    assert await store.sessions_with_pending_items() == []
    assert await store.blob_names("") == []
    assert (await take(store)).epoch == 2
    (root / "agents/agent/manifest-1.json").write_bytes(b"damaged")
    assert (await store.read_documents(KEY)).damaged == ("session.json",)
    await store.delete(KEY, 2)
    await store.scrub()
    assert await store.sessions() == []


async def test_names_that_no_session_may_have_hide_nothing(store, root: Path) -> None:
    """Whoever can put a folder there can put any: control characters, half a pair, nothing."""
    await folded(store, KEY, b"{}")
    for name in ("=0a", "=7f", "=00", "=ed=a0=80", "=", "=zz", "con"):
        for place in ("agents", "agents/agent/sessions", "tenants"):
            for below in ("log", "agents/x/log", "inbox-1"):
                (root / place / name / below).mkdir(parents=True, mode=0o700, exist_ok=True)
            (root / place / name / "log/1-0.jsonl").touch()
    assert [info.key for info in await store.sessions()] == [KEY]
    for tenant in await store.tenants():
        await store.sessions(SessionQuery(tenant=tenant))
    assert await store.sessions_with_pending_items() == []
    await store.scrub()


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_newest_pages_are_those_of_all_that_there_is(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Whatever the times of the logs are, and of those that were only opened."""

    async def judge() -> None:
        root = tmp_path / os.urandom(8).hex()
        keys = [SessionKey("a"), SessionKey("a", "x"), *map(SessionKey, "bcd")]
        store = FileStore(root)
        await store.open()
        async with aclosing(store):
            for key in keys:
                await folded(store, key, b"{}")
            for key in data.draw(st.sets(st.sampled_from(keys))):
                await take(store, key)  # opened again, which is no activity
            for log in sorted(root.rglob("*.jsonl")):
                at = data.draw(st.integers(1, 6))
                os.utime(log, (at, at))
            listed = await store.sessions(SessionQuery(limit=100))
            query = SessionQuery(
                newest_first=True,
                limit=data.draw(st.integers(1, 6)),
                since=data.draw(st.none() | st.integers(1, 6)),
                before=data.draw(st.none() | st.integers(1, 7)),
            )
            while page := await store.sessions(query):
                assert page == query.page(listed)
                query = query.after_page(page[-1])
            assert query.page(listed) == []

    anyio.run(judge)
