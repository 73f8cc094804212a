"""What the server is set up to do is read from it, said, and refused where it loses data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import LeaseOptions, Message, OwnerMismatchError, Shutdown, connect
from perdure.errors import ConfigError, StoreUnavailableError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.records.records import MESSAGE
from perdure.store import Batch, PendingItem, SessionQuery, Status, take_after
from perdure.stores.redis import RedisStore
from perdure.stores.redis.connection import RedisCall
from perdure.testing.conformance._kit import (
    KEY,
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from tests.servers import LONG, free_port
from tests.servers.valkey import Valkey, valkey
from tests.stores.redis.conftest import OpenStore, hasty


async def test_a_sentinel_is_refused_with_the_cure(tmp_path: Path) -> None:
    sentinel = Valkey(tmp_path)
    try:
        sentinel.start_as_sentinel()
        for db in ("0", "3"):
            with pytest.raises(ConfigError, match=r"is a Sentinel.*Name the primary"):
                await RedisStore(sentinel.url.removesuffix("0") + db).open()
    finally:
        sentinel.kill()


@pytest.mark.deep
async def test_a_cluster_of_several_primaries_is_refused_with_the_cure() -> None:
    ports = free_port(), free_port()
    modes = [("--cluster-enabled", "yes", "--cluster-port", str(port)) for port in ports]
    with valkey(*modes[0]) as one, valkey(*modes[1]) as two:
        assert one.say("CLUSTER", "ADDSLOTSRANGE", "0", "8191") == b"+OK"
        assert two.say("CLUSTER", "ADDSLOTSRANGE", "8192", "16383") == b"+OK"
        assert one.say("CLUSTER", "MEET", "127.0.0.1", str(two.port), str(ports[1])) == b"+OK"
        with anyio.fail_after(LONG):
            while b"cluster_size:2" not in one.ask("CLUSTER", "INFO"):
                await anyio.sleep(0.05)
        with pytest.raises(ConfigError, match=r"a cluster with 2 primaries.*use PostgreSQL or S3"):
            await RedisStore(one.url).open()


@pytest.mark.parametrize(
    ("settings", "query", "durability"),
    [
        ({"appendonly": "yes", "appendfsync": "always"}, "", "fsync"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "", "fsync"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "?wait=no", "fsync every second"),
        ({"appendonly": "yes", "appendfsync": "no"}, "", "written, synced by the system"),
        (
            {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "yes"},
            "",
            "fsync, but not during a rewrite",
        ),
        ({"appendonly": "no", "save": ""}, "", "memory"),
        ({"appendonly": "no", "save": "3600 1"}, "", "memory, with snapshots"),
    ],
)
async def test_durability_is_what_the_server_does(
    own_server: Valkey, settings: dict[str, str], query: str, durability: str
) -> None:
    for name, value in settings.items():
        assert own_server.say("CONFIG", "SET", name, value) == b"+OK"
    store = RedisStore(own_server.url + query)
    assert store.capabilities.durability == "unknown"
    await store.open()
    assert store.capabilities.durability == durability
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    assert tuple(entries(await read(store))) == group("a")
    await store.aclose()
    async with connect(own_server.url + query, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("told") as session:
            session.append(Message.user("hello"))
            assert (await session.save()).durability == durability


@pytest.mark.deep
async def test_ok_waits_for_a_server_that_syncs_once_a_second() -> None:
    with valkey("--appendonly", "yes", "--appendfsync", "everysec") as server:
        store = RedisStore(f"{server.url}?timeout={LONG}")
        await store.open()
        grant = await take(store)
        server.say("CONFIG", "SET", "appendfsync", "no")  # it syncs no more: no OK either
        with hasty(store, 1.0):
            outcome = await append(store, grant, 2, *group("a"), *group("b"))
            assert outcome.status is Status.IN_DOUBT
            for connection in list(store._link._all):  # the next one has not written anything yet
                connection.invalidate("by a test")
            outcome = await append(store, grant, 2, *group("a"))  # sent again: it still waits
            assert outcome.status is Status.IN_DOUBT
            with pytest.raises(StoreUnavailableError, match="not synced"):
                await store.release(KEY, grant.epoch)
        server.say("CONFIG", "SET", "appendfsync", "always")
        await append_ok(store, grant, 2, *group("a"), *group("b"))
        assert tuple(entries(await read(store))) == group("a") + group("b")
        await store.aclose()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_is_refused(own_server: Valkey, policy: str) -> None:
    own_server.say("CONFIG", "SET", "maxmemory-policy", policy)
    store = RedisStore(own_server.url)
    with pytest.raises(ConfigError, match="maxmemory-policy noeviction"):
        await store.open()
    own_server.say("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config")
    told_by_info = RedisStore(own_server.url.replace("//", "//app:pw@"))
    with pytest.raises(ConfigError, match=policy):
        await told_by_info.open()
    own_server.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await store.open()
    await store.aclose()


async def test_where_config_is_forbidden_durability_is_unknown(
    own_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.say("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config", "-info")
    store = RedisStore(own_server.url.replace("//", "//app:pw@"))
    await store.open()
    assert store.capabilities.durability == "unknown"
    assert "evicts" in caplog.text
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    await store.aclose()


async def test_a_full_memory_refuses_for_the_time_being(own_server: Valkey) -> None:
    store = RedisStore(own_server.url)
    await store.open()
    grant = await take(store)
    own_server.say("CONFIG", "SET", "maxmemory", "1")
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.TRANSIENT
    assert "memory is full" in str(outcome.error)
    assert await store.head(KEY) == 1
    own_server.say("CONFIG", "SET", "maxmemory", "0")
    await append_ok(store, grant, 2, *group("a"))
    await store.aclose()


async def test_a_user_who_may_not_write_is_told_so(own_server: Valkey) -> None:
    own_server.say("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-evalsha")
    store = RedisStore(own_server.url.replace("//", "//app:pw@"))
    await store.open()
    with pytest.raises(StoreUnavailableError, match="may not do this"):
        await take_after(store, KEY, after=0)
    (outcome,) = await store.append_many([Batch(KEY, 1, 2, group("a"))])
    assert outcome.status is Status.TRANSIENT
    await store.aclose()


async def test_what_was_removed_leaves_the_servers_file(own_server: Valkey) -> None:
    store = RedisStore(own_server.url)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a-word-to-forget"))
    kept = await take(store, key := SessionKey("kept"))
    await append_ok(store, kept, 2, *group("a-word-to-keep"))
    await store.delete(KEY, grant.epoch)

    def on_disk(word: bytes) -> bool:
        files = (own_server.folder / "appendonlydir").iterdir()
        return any(word in file.read_bytes() for file in files)

    assert on_disk(b"a-word-to-forget")
    own_server.say("CONFIG", "SET", "rdbcompression", "no")
    await store.scrub()
    assert not on_disk(b"a-word-to-forget")
    assert on_disk(b"a-word-to-keep")
    own_server.kill()
    own_server.start()
    assert tuple(entries(await read(store, key))) == group("a-word-to-keep")
    await store.aclose()


async def test_a_scrub_that_is_forbidden_says_what_to_run(own_server: Valkey) -> None:
    own_server.say("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-bgrewriteaof")
    store = RedisStore(own_server.url.replace("//", "//app:pw@"))
    await store.open()
    with pytest.raises(StoreUnavailableError, match="BGREWRITEAOF"):
        await store.scrub()
    await store.aclose()


async def test_the_listing_is_made_anew_from_the_sessions(
    open_store: OpenStore, server: Valkey, url: str
) -> None:
    store, neighbor = await open_store(), await open_store("n", url + ":x")
    keys = [SessionKey(f"agent {n}", tenant=tenant) for n in range(30) for tenant in ("", "t")]
    for key in keys:
        await take(store, key)
    gone = SessionKey("agent 3")
    await store.delete(gone, 1)
    await take(neighbor, SessionKey("somebody else's"))
    before = [await store.sessions(SessionQuery(tenant=tenant)) for tenant in ("", "t")]
    prefix = url.partition("prefix=")[2]
    waiting = [SessionKey("a/{b}:c", "s", "t"), SessionKey("agent 1")]
    for key in waiting:
        await store.enqueue(key, [PendingItem("op", MESSAGE, b"{}", 1.0)])
    for name in ("{@}:sessions", "{@t}:sessions", "tenants", "posted"):
        assert server.say("DEL", f"{prefix}:{name}") == b":1"
    assert await store.sessions() == await store.sessions_with_pending_items() == []
    assert await store.rebuild_directory() == len(keys) - 1
    assert [await store.sessions(SessionQuery(tenant=tenant)) for tenant in ("", "t")] == before
    assert await store.tenants() == ["", "t"]
    assert await store.sessions_with_pending_items() == sorted(waiting)


@pytest.mark.parametrize("between", [0, 1, 2])
async def test_a_session_that_begins_anew_beside_its_deletion_is_listed(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, between: int
) -> None:
    """What no listing has is not migrated, and its blobs are taken for garbage."""
    store, other = await open_store("one"), await open_store("other")
    grant = await take(store)
    write, steps = store._link.write, [0]

    async def then_take(calls: Sequence[RedisCall]) -> list[Any]:
        replies = await write(calls)
        if steps[0] == between:
            await take(other)
        steps[0] += 1
        return list(replies)

    monkeypatch.setattr(store._link, "write", then_take)
    await store.delete(KEY, grant.epoch)
    if steps[0] <= between:
        await take(other)
    assert [(one.key, one.epoch) for one in await other.sessions()] == [(KEY, 2)]


async def test_a_store_may_be_closed_in_another_task_than_it_was_opened_in(url: str) -> None:
    store = RedisStore(url)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.open)
    assert await store.sessions() == []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.aclose)
    with pytest.raises(StoreUnavailableError, match="not open"):
        await store.sessions()
    await store.open()
    assert await store.sessions() == []
    await store.aclose()


async def test_a_long_log_is_read_in_parts_both_ways(open_store: OpenStore) -> None:
    store = await open_store()
    grant = await take(store)
    head = grant.head
    for n in range(60):
        head = await append_ok(store, grant, head + 1, *group(*(f"{n}-{'x' * 5000}" for _ in "ab")))
    chunks = [chunk async for chunk in store.read_log(KEY)]
    assert len(chunks) > 2
    forward = [record for chunk in chunks for record in chunk.records]
    assert [record.seq for record in forward] == list(range(1, head + 1))
    assert (await read(store, reverse=True))[::-1] == forward


async def test_one_write_may_hold_good_and_bad_batches(open_store: OpenStore) -> None:
    store = await open_store()
    grant = await take(store)
    bad = Batch(KEY, grant.epoch, 2, (*group("a"), group("b")[0]._replace(payload=b"a\nb")))
    good = await take(store, SessionKey("good"))
    outcomes = await store.append_many([bad, Batch(good.key, good.epoch, 2, group("b"))])
    assert [outcome.status for outcome in outcomes] == [Status.PERMANENT, Status.OK]
    assert await store.head(KEY) == 1


async def test_the_rights_that_the_page_names_are_enough(own_server: Valkey) -> None:
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text(encoding="utf-8")
    rights = re.findall(r"`([^`]*\+@read[^`]*)`|`(\+config\|get)`|`(\+bgrewriteaof)`", page)
    words = [word for one in rights for word in "".join(one).split()]
    assert "+bgrewriteaof" in words
    own_server.say("ACL", "SETUSER", "app", "on", ">pw", "~mine:*", "&mine:*", *words)
    store = RedisStore(own_server.url.replace("//", "//app:pw@") + "?prefix=mine")
    await store.open()
    assert store.capabilities.durability == "fsync"
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("a"))
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    assert (await store.read_documents(KEY)).found
    await store.put_blobs("", {name_of(b"a"): b"a"})
    assert await store.get_blob("", name_of(b"a")) == b"a"
    assert (await store.sweep("", (), 0)).quarantined == 1
    assert (await store.sweep("", (), 0)).removed == 1
    await store.wait_for_notification(LONG)
    assert await store.enqueue(KEY, [PendingItem("op", "message", b"1", 1.0)]) == 1
    assert (await store.heartbeat()).mail == (KEY,)
    await store.ack(KEY, grant.epoch, ["op"])
    assert await store.trim(KEY, grant.epoch, 2) > 0
    assert await store.rebuild_directory() == 1
    assert [info.key for info in await store.sessions()] == [KEY]
    await store.delete(KEY, grant.epoch)
    assert await store.tenants() == []
    await store.scrub()
    await store.aclose()
    neighbor = RedisStore(own_server.url.replace("//", "//app:pw@") + "?prefix=yours")
    with pytest.raises(StoreUnavailableError, match="may not do this"):
        await neighbor.open()
    await neighbor.aclose()


async def test_a_server_that_may_evict_later_on_is_told(own_server: Valkey) -> None:
    told: list[object] = []
    lease = LeaseOptions(heartbeat=0.05, ttl=5)
    async with connect(own_server.url, lease=lease, shutdown=Shutdown(signals=False)) as sessions:
        sessions.on("store_warned", told.append)
        assert sessions.health().status == "ok"
        own_server.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with anyio.fail_after(60):
            while sessions.health().status == "ok":
                await anyio.sleep(0.05)
        (reason,) = sessions.health().reasons
        assert "maxmemory-policy noeviction" in reason
        async with sessions.open("a") as session:  # saving goes on
            session.append(Message.user("Hello"))
            await session.save()
        own_server.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
        with anyio.fail_after(60):
            while sessions.health().status != "ok":
                await anyio.sleep(0.05)
        assert [event.reason for event in told] == [reason]  # type: ignore[attr-defined]


async def test_what_no_index_has_is_listed_once_they_were_rebuilt(own_server: Valkey) -> None:
    store = RedisStore(own_server.url)
    await store.open()
    for name in ("old", "new", "other"):
        grant = await take(store, SessionKey(name))
        about = About(owner="bob" if name == "other" else "ann")
        batch = Batch(grant.key, grant.epoch, 2, group("a"), turns=1, about=about)
        assert [outcome.status for outcome in await store.append_many([batch])] == [Status.OK]
    await store.aclose()
    assert own_server.ask("DEL", "perdure:{@}:owned", "perdure:{@}:recent").strip() == b":2"
    store = RedisStore(own_server.url)
    await store.open()
    assert await store.rebuild_directory() == 3
    newest = await store.sessions(SessionQuery(newest_first=True))
    assert [info.key.agent for info in newest] == ["other", "new", "old"]
    mine = await store.sessions(SessionQuery(newest_first=True, owner="ann"))
    assert [info.key.agent for info in mine] == ["new", "old"]
    grant = await take(store, SessionKey("old"))
    await store.delete(grant.key, grant.epoch)
    for index in ("owned", "recent"):
        left = own_server.ask("ZRANGE", f"perdure:{{@}}:{index}", "0", "-1")
        assert (b"new" in left, b"old" in left) == (True, False)
    await store.aclose()


async def test_an_owner_s_label_that_changes_leaves_the_index(
    own_server: Valkey,
) -> None:
    async with connect(RedisStore(own_server.url), shutdown=Shutdown(signals=False)) as sessions:
        session = await sessions.open("chat", owner="ann")
        assert [info.key.agent for info in await sessions.list(owner="ann")] == ["chat"]
        session.describe(owner="bob")
        await session.save()
        assert [info.key.agent for info in await sessions.list(owner="bob")] == ["chat"]
        await session.aclose()
        with pytest.raises(OwnerMismatchError):
            await sessions.open("chat", owner="eve")
        owned = own_server.ask("ZRANGE", "perdure:{@}:owned", "0", "-1")
        assert (b"bob" in owned, b"ann" in owned, b"eve" in owned) == (True, False, False)
        assert await sessions.delete("chat")
        assert b"bob" not in own_server.ask("ZRANGE", "perdure:{@}:owned", "0", "-1")
