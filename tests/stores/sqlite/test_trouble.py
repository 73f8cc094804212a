"""Trouble: another writer, a full disk, a failed sync, a fork. Nothing is lost or doubled."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from perdure._lib.locks import Presence
from perdure._lib.loop import Threads
from perdure.errors import (
    CorruptRecordError,
    LeaseHeldError,
    LeaseLostError,
    SessionError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import (
    Batch,
    Held,
    Outcome,
    PendingItem,
    SessionQuery,
    Status,
    Taken,
    Terms,
    take_after,
)
from perdure.stores.sqlite import SqliteStore, connections, leases
from perdure.stores.sqlite.engine import TOGETHER
from perdure.stores.sqlite.errors import InDoubtError, perdure_error
from perdure.testing.conformance._kit import (
    KEY,
    append,
    append_ok,
    entries,
    group,
    read,
    take,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "x.db"


async def opened(path: Path, **options: Any) -> SqliteStore:
    store = SqliteStore(path, **options)
    await store.open()
    return store


async def test_a_page_of_nothing_is_empty(path: Path) -> None:
    store = await opened(path)
    await take(store)
    assert len(await store.sessions(SessionQuery(limit=1))) == 1
    assert await store.sessions(SessionQuery(limit=0)) == []
    await store.aclose()


async def test_one_commit_takes_no_more_than_its_share_of_what_waits(path: Path) -> None:
    store = await opened(path)
    await take(store)
    statements: list[str] = []
    store._database.engine.connection.set_trace_callback(statements.append)
    keys = [SessionKey(f"agent-{n}") for n in range(2 * TOGETHER)]
    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(partial(take_after, store, key, after=0))
    assert statements.count("COMMIT") >= 2
    await store.aclose()


async def test_writes_that_wait_together_are_one_commit_and_fail_alone(path: Path) -> None:
    store = await opened(path)
    keys = [SessionKey(f"agent-{n}") for n in range(30)]
    held = await take_after(store, keys[7], after=0)
    statements: list[str] = []
    store._database.engine.connection.set_trace_callback(statements.append)
    grants: dict[SessionKey, int] = {}
    refused: list[SessionKey] = []

    async def acquire(key: SessionKey) -> None:
        try:
            grants[key] = (await take_after(store, key, after=0)).epoch
        except LeaseHeldError:
            refused.append(key)

    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(acquire, key)
    assert refused == [keys[7]]
    assert grants == dict.fromkeys(set(keys) - {keys[7]}, 1)
    statements.clear()
    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(store.release, key, held.epoch)
    assert 1 <= statements.count("COMMIT") <= 5
    for key in keys:
        holder = await store.holder(key)
        assert holder is not None
        assert holder.released
        assert len(await read(store, key)) == 1
    await store.aclose()


async def test_while_another_process_writes_it_is_transient(path: Path) -> None:
    store = await opened(path, timeout=0.01)
    grant = await take(store)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.TRANSIENT
    assert isinstance(outcome.error, StoreUnavailableError)
    assert isinstance(outcome.error.__cause__, sqlite3.Error)
    assert len(await read(store)) == 1  # readers wait for nobody
    with pytest.raises(StoreUnavailableError, match="another process"):
        await store.heartbeat()
    other.execute("ROLLBACK")
    other.close()
    await append_ok(store, grant, 2, *group("a"))
    assert tuple(entries(await read(store))) == group("a")
    await store.aclose()


async def test_who_may_not_have_a_session_is_told_so_while_another_process_writes(
    path: Path,
) -> None:
    store, holder = await opened(path, timeout=0.01), await opened(path)
    await take(holder)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = await store.acquire(KEY, Terms(me=store.owner))
    assert answer == Held(await store.holder(KEY))
    other.execute("ROLLBACK")
    other.close()
    for one in (store, holder):
        await one.aclose()


@pytest.mark.parametrize("rival", ["writes", "takes it"])
async def test_who_takes_a_session_sees_what_another_process_wrote_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, rival: str
) -> None:
    store, dead, other = await opened(path), await opened(path), await opened(path)
    await take(dead)
    await dead.aclose()
    looked: list[str] = []
    is_present = Presence.is_present

    def write_first(self: Presence, owner: str) -> bool | None:
        """Have the other process write between the first read of an acquire and its first write."""
        if self is store._database.presence:
            looked.append(owner)
            if len(looked) == 1:
                with other._database.engine.transaction() as con:
                    if rival == "writes":
                        con.execute("UPDATE session SET updated_at = 7.0")
                    else:
                        terms, presence = Terms(me=other.owner), other._database.presence
                        leases.acquire(con, KEY, terms, other.owner, presence, 1.0)
        return is_present(self, owner)

    monkeypatch.setattr(Presence, "is_present", write_first)
    answer = await store.acquire(KEY, Terms(me=store.owner))
    assert len(looked) == 2
    if rival == "writes":
        assert isinstance(answer, Taken)
        assert answer.epoch == 2
    else:
        assert isinstance(answer, Held)
        assert answer.holder is not None
        assert (answer.holder.owner, answer.holder.epoch) == (other.owner, 2)
    for one in (store, other):
        await one.aclose()


async def test_a_full_disk_loses_nothing(path: Path) -> None:
    store = await opened(path)
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    con = store._database.engine.connection
    (pages,) = con.execute("PRAGMA page_count").fetchone()
    con.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    outcome = await append(store, grant, 3, *group("b" * 100_000))
    assert outcome.status is Status.TRANSIENT
    assert "free some room" in str(outcome.error)
    assert tuple(entries(await read(store))) == group("a")
    con.execute("PRAGMA max_page_count = 1000000").fetchall()
    await append_ok(store, grant, 3, *group("b" * 100_000))
    assert tuple(entries(await read(store))) == group("a") + group("b" * 100_000)
    await store.aclose()


class FailingCommit:
    """A connection whose next commit fails, before or after it took effect."""

    def __init__(self, con: sqlite3.Connection, *, applied: bool) -> None:
        self._con = con
        self._applied = applied

    def __getattr__(self, name: str) -> Any:
        return getattr(self._con, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if not statement.startswith(("COMMIT", "INSERT INTO save")):
            return self._con.execute(statement, *values)
        if self._applied:
            self._con.execute(statement, *values)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error


@pytest.mark.parametrize("applied", [True, False])
async def test_a_commit_that_fails_is_in_doubt_for_all_that_share_it(
    path: Path, applied: bool
) -> None:
    store = await opened(path)
    database = store._database
    engine = database.engine
    engine._con = FailingCommit(engine.connection, applied=applied)  # type: ignore[assignment]
    keys = [SessionKey(f"agent-{n}") for n in range(8)]
    writes = [
        database.shared.add(
            partial(
                leases.acquire,
                key=key,
                terms=Terms(me="me", after=0),
                owner="me",
                presence=database.presence,
                at=0.0,
            )
        )
        for key in keys
    ]
    for write in writes:
        await database.writes.run(database.shared.run, write)
    assert [type(write.error) for write in writes] == [InDoubtError] * 8
    assert [await store.holder(key) is not None for key in keys] == [applied] * 8
    assert (await take_after(store, keys[0], after=int(applied))).epoch == 1 + applied
    await store.aclose()


@pytest.mark.parametrize("together", [0.02, 0.0])
async def test_a_write_that_a_ctrl_c_kept_from_the_thread_keeps_back_no_later_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, together: float
) -> None:
    monkeypatch.setattr("perdure.stores.sqlite.engine._TOGETHER_SECONDS", together)
    store = await opened(path)
    items = [PendingItem(name, "message", b"{}", 1.0) for name in ("cut", "next")]

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Threads, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await store.enqueue(KEY, items[:1])
    store._database.shared.add(partial(leases.remove_owner, owner="other"))  # and just before
    assert await store.enqueue(KEY, items[1:]) == 1
    grant = await take_after(store, KEY, after=0)
    received = await store.receive(KEY, grant.epoch)
    assert received[-1:] == items[1:]
    assert not store._database.shared._waiting
    await store.heartbeat()
    await store.aclose()


@pytest.mark.parametrize("applied", [False, True])
async def test_a_commit_that_fails_is_in_doubt_and_never_doubled(path: Path, applied: bool) -> None:
    store = await opened(path)
    keys = [KEY, SessionKey("other")]
    grants = [await take(store, key) for key in keys]
    engine = store._database.engine
    engine._con = FailingCommit(engine.connection, applied=applied)  # type: ignore[assignment]
    batches = [Batch(one.key, one.epoch, 2, group("a", "b")) for one in grants]
    outcomes = await store.append_many(batches)
    assert {one.status for one in outcomes} == {Status.IN_DOUBT}
    for _ in range(2):
        outcomes = await store.append_many(batches)
        assert {one.status for one in outcomes} == {Status.OK}
    for grant in grants:
        await append_ok(store, grant, 4, *group("c"))
        assert tuple(entries(await read(store, grant.key))) == group("a", "b") + group("c")
    await store.aclose()


async def test_batches_are_begun_without_a_task_and_wait_for_the_writer(path: Path) -> None:
    store = await opened(path)
    grant = await take(store)
    outcomes: list[Outcome] = []
    batch = Batch(KEY, grant.epoch, 2, group("a", "b"))
    assert store.begin_append([batch], outcomes.extend)
    assert store.begin_append([batch, Batch(KEY, grant.epoch, 4, group("c"))], outcomes.extend)
    with anyio.fail_after(60):
        while len(outcomes) < 3:
            await anyio.sleep(0.001)
    assert [one.status for one in outcomes] == [Status.OK] * 3
    assert tuple(entries(await read(store))) == group("a", "b") + group("c")
    await store.aclose()
    assert not store.begin_append([batch], outcomes.extend)


async def test_the_same_session_twice_in_one_call(path: Path) -> None:
    store = await opened(path)
    grant = await take(store)
    batches = [Batch(KEY, grant.epoch, 2, group("a")), Batch(KEY, grant.epoch, 3, group("b"))]
    outcomes = await store.append_many(batches)
    assert [one.status for one in outcomes] == [Status.OK, Status.OK]
    assert tuple(entries(await read(store))) == group("a") + group("b")
    await store.aclose()


async def test_a_write_whose_caller_has_gone_is_not_begun(path: Path) -> None:
    store = await opened(path, timeout=60.0)
    grant = await take(store)
    other = sqlite3.connect(path, isolation_level=None)
    async with anyio.create_task_group() as stay:
        async with anyio.create_task_group() as leave:
            await locked_out(store, other)
            stay.start_soon(store.heartbeat)
            leave.start_soon(store.enqueue, KEY, [PendingItem("left", "message", b"{}", 1.0)])
            leave.start_soon(store.release, KEY, grant.epoch)
            await anyio.wait_all_tasks_blocked()
            leave.cancel_scope.cancel()
        stay.start_soon(store.enqueue, KEY, [PendingItem("stayed", "message", b"{}", 1.0)])
        await anyio.wait_all_tasks_blocked()
        other.execute("ROLLBACK")
    other.close()
    assert [item.op_id for item in await store.receive(KEY, grant.epoch)] == ["stayed"]
    await append_ok(store, grant, 2, *group("a"))
    await store.aclose()


async def test_writes_that_waited_for_another_process_together_fail_together(path: Path) -> None:
    store = await opened(path, timeout=1.0)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begun: list[str] = []
    store._database.engine.connection.set_trace_callback(begun.append)
    failed: list[StoreUnavailableError] = []

    async def post(number: int) -> None:
        with pytest.raises(StoreUnavailableError, match="another process") as raised:
            await store.enqueue(KEY, [PendingItem(f"op-{number}", "message", b"{}", 1.0)])
        failed.append(raised.value)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(post, number)
    assert len(failed) == 20
    assert len(begun) <= 2
    other.execute("ROLLBACK")
    other.close()
    await store.enqueue(KEY, [PendingItem("op-20", "message", b"{}", 1.0)])
    await store.aclose()


async def locked_out(store: SqliteStore, other: sqlite3.Connection) -> None:
    """Have another connection keep the store's thread waiting, with a write that nobody awaits."""
    begun = threading.Event()
    store._database.engine.connection.set_trace_callback(lambda _: begun.set())
    other.execute("BEGIN IMMEDIATE")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.heartbeat)
        assert await anyio.to_thread.run_sync(begun.wait, 60.0)
        tasks.cancel_scope.cancel()


async def test_another_process_that_writes_does_not_keep_the_store_from_being_closed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, watcher = await opened(path, timeout=30.0), await opened(path)
    await take(store)
    other = sqlite3.connect(path, isolation_level=None)
    await locked_out(store, other)
    with anyio.move_on_after(0.01):
        await store.aclose()
    holder = await watcher.holder(KEY)
    assert holder is not None
    assert holder.alive  # it is not closed yet
    assert "the database was busy while the store was closed" in caplog.text
    other.execute("ROLLBACK")
    other.close()
    with anyio.fail_after(60):
        while holder is not None and holder.alive:
            await anyio.sleep(0.001)
            holder = await watcher.holder(KEY)
    await watcher.aclose()


async def test_a_trim_keeps_the_rest_readable_from_both_ends(path: Path) -> None:
    store = await opened(path)
    grant = await take(store)
    head = grant.head
    for text in "abcdef":
        head = await append_ok(store, grant, head + 1, *group(text))
    whole = await read(store)
    assert await store.trim(KEY, grant.epoch, 4) > 0
    assert await store.trim(KEY, grant.epoch, 4) == 0
    head = await append_ok(store, grant, head + 1, *group("g"))
    whole += await read(store, after=7)
    assert await read(store) == whole[3:]
    assert await read(store, reverse=True) == whole[3:][::-1]
    assert await read(store, after=2, limit=2) == whole[3:5]
    assert await store.trim(KEY, grant.epoch, head + 1) > 0
    assert await read(store) == []
    assert await store.head(KEY) == head
    await append_ok(store, grant, head + 1, *group("h"))
    assert tuple(entries(await read(store))) == group("h")
    again = await take(store)
    assert (again.head, again.created) == (head + 2, False)
    await store.aclose()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
async def test_a_forked_child_keeps_its_hands_off(path: Path) -> None:
    store = await opened(path)
    here = store._database
    here.pid = -1
    with pytest.raises(StoreUnavailableError, match="another process"):
        await store.head(KEY)
    (outcome,) = await store.append_many([Batch(KEY, 1, 1, group("a"))])
    assert outcome.status is Status.TRANSIENT
    here.pid = os.getpid()
    await store.aclose()


async def test_a_removed_session_leaves_nothing_in_any_file(path: Path) -> None:
    store = await opened(path)
    secret = "CANARY" * 3000
    grant = await take(store)
    await append_ok(store, grant, 2, *group(secret))
    await append_ok(store, grant, 3, *group("CANARY small"))
    other = await take(store, SessionKey("kept"))
    await append_ok(store, other, 2, *group("kept"))
    assert any(b"CANARY" in one.read_bytes() for one in files(path))
    await store.delete(KEY, grant.epoch)
    await store.scrub()
    assert not any(b"CANARY" in one.read_bytes() for one in files(path))
    assert path.with_name("x.db-wal").stat().st_size == 0
    assert tuple(entries(await read(store, SessionKey("kept")))) == group("kept")
    await store.aclose()


def files(path: Path) -> list[Path]:
    return [one for one in path.parent.rglob("*") if one.is_file()]


def test_each_error_says_what_to_do() -> None:
    for code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL):
        error = sqlite3.OperationalError("it is so")
        error.sqlite_errorcode = code
        said = perdure_error(error, "write", "/x.db")
        assert isinstance(said, StoreUnavailableError)
        assert "/x.db" in str(said)
        assert "look at the cause" not in str(said)
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT_INDEX
    assert isinstance(perdure_error(error, "read", "/x.db"), CorruptRecordError)


async def test_who_is_wanted_hears_of_it_before_the_next_heartbeat(path: Path) -> None:
    store, other = await opened(path), await opened(path)
    grant = await take(store)
    await store.wait_for_notification(0.01)
    holder = await other.holder(KEY)
    assert holder is not None
    await other.request_handover(KEY, holder)
    with anyio.fail_after(60):
        await store.wait_for_notification(3600)
    assert (await store.heartbeat()).handovers == (KEY,)
    await other.enqueue(KEY, [PendingItem("op", "message", b'"hi"', 1.0)])
    with anyio.fail_after(60):
        await store.wait_for_notification(3600)
    assert (await store.heartbeat()).mail == (KEY,)
    assert [one.op_id for one in await store.receive(KEY, grant.epoch)] == ["op"]
    for one in (store, other):
        await one.aclose()


def _unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SQLite fail to make its files beside the database, as on a disk mounted read-only."""
    really = connections.connect

    def connect(
        path: str, *, uri_parameters: str = "mode=rw", **options: Any
    ) -> sqlite3.Connection:
        if uri_parameters == "mode=ro":
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error
        return really(path, uri_parameters=uri_parameters, **options)

    monkeypatch.setattr(connections, "connect", connect)


async def test_what_is_read_without_locks_and_changed_meanwhile_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(path)
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    await store.aclose()
    reading = SqliteStore(path)
    with monkeypatch.context() as patched:
        _unshared(patched)
        await reading.open_read_only()
        assert tuple(entries(await read(reading))) == group("a")
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

        def looks(con: sqlite3.Connection) -> None:
            con.execute("SELECT count(*) FROM log").fetchall()
            other.execute("UPDATE session SET updated_at = 0")

        with pytest.raises(StoreUnavailableError, match="changed while it was read"):
            await reading._database.read(looks)
        other.close()
        assert tuple(entries(await read(reading))) == group("a")  # a new look is right again
    with pytest.raises(SessionError, match="opened read-only"):
        await reading.heartbeat()
    await reading.aclose()


async def test_a_read_only_store_is_not_made(path: Path) -> None:
    for where in (path.parent, path):
        with pytest.raises(StoreUnavailableError, match="there is no"):
            await SqliteStore(path).open_read_only()
        assert not where.exists()
        path.parent.mkdir(mode=0o700, exist_ok=True)


def test_what_kept_sqlite_from_opening_a_file_is_found_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"there")
    assert "check the disk" in str(perdure_error(error, "read", str(path)))
    path.unlink()
    assert "chown" in str(perdure_error(error, "read", str(path)))

    def failing(code: int) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

        return fail

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", failing(errno.EIO))
        said = str(perdure_error(error, "read", str(path)))
    assert "the disk reports an error" in said
    assert "chown" not in said
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(errno.EMFILE))
        assert "ulimit -n" in str(perdure_error(error, "read", str(path)))


async def test_a_session_that_was_only_posted_to_cannot_be_changed(path: Path) -> None:
    store = await opened(path)
    await store.enqueue(KEY, [PendingItem("op-1", "message", b"{}", 1.0)])
    with pytest.raises(LeaseLostError):
        await store.trim(KEY, 0, 1)
    await store.aclose()


async def test_what_is_deleted_is_overwritten_in_the_file(path: Path) -> None:
    store = await opened(path)
    assert store._database.engine.connection.execute("PRAGMA secure_delete").fetchone() == (1,)
    await store.aclose()


async def test_requests_to_an_owner_that_has_ended_are_removed(path: Path) -> None:
    first, second = await opened(path), await opened(path)
    await take(first)
    holder = await second.holder(KEY)
    assert holder is not None
    await second.request_handover(KEY, holder)
    await first.aclose()
    await second.aclose()
    await (await opened(path)).aclose()  # removes the owners that have ended
    con = sqlite3.connect(path)
    assert con.execute("SELECT count(*) FROM letter").fetchone() == (0,)
    con.close()


async def test_a_listing_shows_damage_only_where_there_is_some(path: Path) -> None:
    store = await opened(path)
    grant = await take(store)
    await store.write_documents(KEY, {}, Manifest(key=KEY, epoch=grant.epoch, as_of_seq=1))
    assert [info.damaged for info in await store.sessions()] == [False]
    await store.aclose()
