"""What others do to the same rows meanwhile, and what is left of those who are gone."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from perdure.errors import StoreError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import Draft, Held, Taken, Terms, take_after
from perdure.stores.postgres import PostgresStore, connections, log
from perdure.testing.conformance._kit import KEY, append_ok, group, manifest_of, take
from perdure.testing.conformance.inbox import posted
from tests.servers import LONG
from tests.servers.postgres import Postgres
from tests.stores.postgres.conftest import OpenStore
from tests.stores.postgres.test_faults import end_connections


async def test_a_listener_that_was_cut_off_again_and_again_comes_back_as_soon(
    server: Postgres, schema: str, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def at_once(attempt: int, **_: float) -> float:
        failures.append(attempt)
        return 0.01

    monkeypatch.setattr(connections, "backoff", at_once)
    store = await open_store("one")
    with anyio.fail_after(LONG):
        await store.wait_for_notification(LONG * 2)  # it listens now
        for _ in range(3):
            end_connections(server, schema)
            await store.wait_for_notification(LONG * 2)
    assert failures == [1, 1, 1]


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_session_that_begins_anew_under_a_reader_is_not_damaged(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, *, reverse: bool
) -> None:
    monkeypatch.setattr(log, "PAGE_ROWS", 2)
    grant = await take(store)
    for seq in range(2, 8):
        await append_ok(store, grant, seq, *group("first life"))
    found: list[Record] = []
    async for chunk in store.read_log(KEY, reverse=reverse):
        if not found:
            await store.delete(KEY, grant.epoch)
            grant = await take(store)
            for seq in range(2, 8):
                await append_ok(store, grant, seq, *group("second life"))
        found += chunk.records
    assert {record.epoch for record in found} == {1}
    assert len(found) == 2


async def test_blobs_that_meet_another_transaction_are_put_all_the_same(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    """A deadlock. Whoever begins to wait last finds it, and is let go: here the store."""
    quick = f"{server.url}?timeout=60&options=-c%20deadlock_timeout%3D20ms"
    store = await open_store("one", quick)
    blobs = {name_of(data): data for data in (b"1", b"2", b"3")}
    first, second, third = sorted(blobs)
    await store.put_blobs("", blobs)
    lock = f"SELECT 1 FROM {schema}.blobs WHERE name = %s FOR UPDATE".encode()

    async def until_waiting(count: int) -> None:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with anyio.fail_after(LONG):
            while server.run(f"{query} AND query LIKE %s", f"%{schema}%blobs%") != [(count,)]:
                await anyio.sleep(0.005)

    with server.connect() as one, server.connect() as other:
        one.execute(b"SET deadlock_timeout = '60s'")
        async with anyio.create_task_group() as tasks:
            with one.transaction():
                one.execute(lock, (third,))
                with other.transaction():
                    other.execute(lock, (second,))
                    tasks.start_soon(store.put_blobs, "", blobs)
                    await until_waiting(1)  # it has the first, and wants the second
                    async with anyio.create_task_group() as waiting:
                        waiting.start_soon(anyio.to_thread.run_sync, one.execute, lock, (first,))
                        await until_waiting(2)
                        other.execute(b"ROLLBACK")  # it gets the second, and wants the third
    assert await store.blob_names("") == [first, second, third]


async def test_only_inboxes_in_which_something_waits_are_listed(store: PostgresStore) -> None:
    keys = [SessionKey(f"agent {n}") for n in range(5)]
    for key in keys:
        await store.enqueue(key, posted("a", "b"))
    for key in keys[::2]:
        grant = await take(store, key)
        await store.ack(key, grant.epoch, ["a", "b"])
    assert await store.sessions_with_pending_items() == keys[1::2]


async def test_what_was_asked_of_an_owner_who_is_gone_is_forgotten(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    gone, store = await open_store("gone"), await open_store("one")
    await take(gone)
    await take(gone, SessionKey("kept"))
    await store.enqueue(KEY, posted("a"))
    assert server.run(f"SELECT owner FROM {schema}.requests") == [("gone",)]
    server.run(f"UPDATE {schema}.owners SET seen = now() - interval '8 days' WHERE owner = 'gone'")
    await open_store("another")
    assert server.run(f"SELECT count(*) FROM {schema}.requests") == [(0,)]
    assert server.run(f"SELECT count(*) FROM {schema}.owners WHERE owner = 'gone'") == [(0,)]


async def until_locked(server: Postgres, schema: str, count: int) -> None:
    """Wait until this many connections wait for a lock on a session's row."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with anyio.fail_after(LONG):
        while server.run(f"{query} AND query LIKE %s", f"%{schema}%sessions%") != [(count,)]:
            await anyio.sleep(0.005)


async def test_a_fold_that_ends_as_its_session_is_taken_is_read_with_it(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    """It changes nothing that the take looks at."""
    store, other = await open_store("one"), await open_store("other")
    grant = await take(store)
    end = await append_ok(store, grant, 2, *group("a", "b"))
    answers: list[Held | Taken] = []

    async def fold() -> None:
        documents = {"session.json": b"folded"}
        await store.write_documents(KEY, documents, manifest_of(grant, end, documents))

    async def open_other() -> None:
        answers.append(await other.acquire(KEY, Terms(me="other", after=1, names=None)))

    async with anyio.create_task_group() as tasks:
        with server.connect() as third, third.transaction():
            third.execute(f"SELECT 1 FROM {schema}.sessions FOR UPDATE".encode())
            tasks.start_soon(fold)
            await until_locked(server, schema, 1)
            tasks.start_soon(open_other)
            await until_locked(server, schema, 2)
    (taken,) = answers
    assert isinstance(taken, Taken)
    assert taken.found is not None
    assert taken.found.documents == await other.read_documents(KEY)
    assert list(taken.found.documents.found) == ["session.json"]
    assert [record.seq for record in taken.found.records or ()] == [4]


async def race(
    store: PostgresStore, key: SessionKey, after: int, answers: list[Held | Taken]
) -> None:
    answers.append(await store.acquire(key, Terms(me=store.owner, after=after)))


@pytest.mark.parametrize("life", ["held", "never", "posted to", "a draft"])
async def test_who_loses_a_race_is_told_who_won(
    server: Postgres, schema: str, open_store: OpenStore, life: str
) -> None:
    stores = [await open_store(f"racer-{number}") for number in range(4)]
    draft = Draft(source=SessionKey("source"), generation=1, up_to=1, purpose="fork")
    for round_ in range(8):
        key, answers = SessionKey(f"agent-{round_}"), list[Held | Taken]()
        after = 1 if life in {"held", "a draft"} else 0
        if after:
            await take_after(stores[0], key, after=0, draft=draft if life == "a draft" else None)
        if life == "posted to":
            await stores[0].enqueue(key, posted("early"))

        async with anyio.create_task_group() as tasks:
            with server.connect() as third, third.transaction():
                third.execute(f"SELECT 1 FROM {schema}.sessions FOR UPDATE".encode())
                for store in stores:
                    tasks.start_soon(race, store, key, after, answers)
                if life != "never":
                    await until_locked(server, schema, len(stores))
        (taken,) = [answer for answer in answers if isinstance(answer, Taken)]
        assert (taken.epoch, taken.created) == (after + 1, life != "held")
        waiting = await stores[0].receive(key, taken.epoch)
        assert [item.op_id for item in waiting] == (["early"] if life == "posted to" else [])
        holder = await stores[0].holder(key)
        held = [answer for answer in answers if isinstance(answer, Held)]
        assert held == [Held(holder)] * 3


async def test_what_began_before_another_was_refused_has_begun_once(
    server: Postgres, schema: str, open_store: OpenStore
) -> None:
    """Those that share a transaction are repeated one by one."""
    store = await open_store("one")
    keys = [SessionKey(f"agent-{number}") for number in range(30)]
    for key in keys[::3]:
        grant = await take_after(store, key, after=0)
        await store.release(key, grant.epoch)
    server.run(f"ALTER TABLE {schema}.sessions ADD CHECK (agent <> 'agent-9' OR epoch < 2)")
    found: dict[SessionKey, Held | Taken | StoreError] = {}

    async def open_one(key: SessionKey) -> None:
        terms = Terms(me=store.owner, new=key not in keys[::3])
        try:
            found[key] = await store.acquire(key, terms)
        except StoreError as error:
            found[key] = error

    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(open_one, key)
    assert isinstance(found.pop(keys[9]), StoreError)
    for place, key in enumerate(keys):
        answer = found.get(key)
        assert (place == 9) == (answer is None)
        if answer is not None:
            assert isinstance(answer, Taken)
            assert answer.epoch == (1 if place % 3 else 2)
