"""Backups: as of one moment beside a writer, only what has come since, and what is gone stays gone."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import Limits, Message, Retention, SessionKey
from perdure.errors import ConfigError, CorruptRecordError, LeaseHeldError, StoreError
from perdure.records.chunks import name_of
from perdure.records.json import encode
from perdure.records.manifest import Manifest
from perdure.records.records import MESSAGE, Entry
from perdure.store import Held, Taken, Terms, open_read_only
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.conformance._kit import append_ok, take
from perdure.transfer import (
    backup,
    backups,
    follow_deletions,
    restore_backup,
    verify_backup,
    write_bundle,
)
from tests.pausing import PausingStore, meanwhile
from tests.transfer.sessions import fill

pytestmark = [pytest.mark.anyio, pytest.mark.deep]


@asynccontextmanager
async def opened(*urls: Any, first_to_read: bool = False) -> Any:
    async with AsyncExitStack() as stack:
        stores = []
        for place, url in enumerate(urls):
            store = perdure.store_for(url)
            await (open_read_only(store) if first_to_read and not place else store.open())
            stack.push_async_callback(store.aclose)
            stores.append(store)
        yield stores


async def back_up(source: Any, target: Any) -> Any:
    async with opened(source, target, first_to_read=True) as (here, there):
        done = await backup(here, there)
        seen = await verify_backup(there)
    assert (done.failed, seen.problems) == ({}, {})
    return done


async def restore(source: Any, target: Any) -> Any:
    async with opened(source, target, first_to_read=True) as (here, there):
        return await restore_backup(here, there)


async def bundles(url: Any, keys: list[SessionKey], folder: Path) -> list[bytes]:
    folder.mkdir()
    async with opened(url) as (store,):
        for place, key in enumerate(keys):
            await write_bundle(store, key, folder / str(place))
    return [(folder / str(place)).read_bytes() for place in range(len(keys))]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def texts(url: Any, id: str) -> list[str]:
    async with perdure.connect(url) as sessions:
        session = await sessions.load(id)
        assert session is not None
        items = await session.history(limit=100_000)
        return [item.value.text for item in items if isinstance(item.value, Message)]


async def test_every_session_comes_back_the_same(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    keys = await fill(source)
    done = await back_up(source, target)
    assert (done.sessions, done.written, done.there) == (13, 13, 0)
    again = await back_up(source, target)
    assert (again.written, again.there, again.records, again.bytes) == (0, 13, 0, 0)
    was = await bundles(source, keys, tmp_path / "was")
    shutil.rmtree(source)
    restored = await restore(target, source)
    assert (restored.written, restored.failed, restored.posted) == (13, {}, 1)
    assert await bundles(source, keys, tmp_path / "is") == was
    async with perdure.connect(source) as sessions, sessions.open("agent-0") as session:
        assert session.context()[-1].text == "posted"
    more = await restore(target, source)
    assert (more.written, list(more.failed)) == (0, ["agent-0"])  # which has gone on


@pytest.mark.parametrize("kind", ["file", "sqlite"])
async def test_what_was_durable_when_the_backup_began_is_in_it(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "source"
    url = str(place) if kind == "file" else f"sqlite:///{place}"
    said: dict[str, int] = {}

    async def talk(sessions: Any, id: str) -> None:
        async with sessions.open(id) as session:
            while True:
                async with session.turn():
                    session.append(Message.user(str(said.get(id, 0))), Message.assistant("yes"))
                await session.save()
                said[id] = said.get(id, 0) + 1

    async with perdure.connect(url) as sessions, anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(talk, sessions, f"agent-{number}")
        counts: list[dict[str, int]] = []
        for _ in range(3):
            before = sum(said.values())
            while len(said) < 3 or sum(said.values()) < before + 10:
                await anyio.sleep(0.01)
            counts.append(dict(said))
            await back_up(url, tmp_path / "target")
        group.cancel_scope.cancel()
    for one in tmp_path.glob("source*"):
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    restored = await restore(tmp_path / "target", url)
    assert restored.failed == {}
    for id, count in counts[-1].items():
        found = [text for text in await texts(url, id) if text != "yes"]
        assert len(found) >= count
        assert found == [str(n) for n in range(len(found))]  # none doubled, none out of order


async def test_a_run_writes_what_has_come_and_no_more(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    unfolded = Limits(fold_ratio=float("inf"))  # a fold meanwhile is more to write
    async with (
        perdure.connect(source, limits=unfolded) as sessions,
        sessions.open("ada") as session,
    ):
        for number in range(100):
            session.append(Message.user(f"{number} " + "x" * 5000))
        await session.save()
        first = await back_up(source, target)
        assert first.bytes > 500_000
        before = size_of(target)
        for _ in range(3):  # the session stays open: no lease changes hands
            session.append(Message.user("one more"))
            await session.save()
            done = await back_up(source, target)
            assert (done.written, done.records) == (1, 1)
            assert done.bytes < 2000
        assert size_of(target) - before < 20_000


async def test_a_run_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    async with perdure.connect(source) as sessions, sessions.open("ada") as session:
        for number in range(40):
            session.append(Message.user(f"{number} " + "x" * 100_000))
            await session.save()

    class Dying:
        """A store that fails in the midst of a session."""

        def __init__(self, store: Any) -> None:
            self.store, self.left = store, 3

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        async def append_many(self, batches: Any) -> Any:
            self.left -= 1
            if not self.left:
                raise StoreError("killed")
            return await self.store.append_many(batches)

    async with opened(source, target) as (here, there):
        killed = await backup(here, Dying(there))
        assert list(killed.failed) == ["ada"]
        assert (await verify_backup(there)).sessions == 0  # nothing half counts
    done = await back_up(source, target)
    assert 0 < done.records < 40  # the rest
    assert (await restore(target, tmp_path / "new")).written == 1
    key = [SessionKey("ada")]
    was = await bundles(source, key, tmp_path / "was")
    assert await bundles(tmp_path / "new", key, tmp_path / "is") == was


async def test_a_blob_that_the_last_run_did_not_come_to_is_copied_by_the_next() -> None:
    """It was killed behind the record that names it, or the source had lost it."""
    source, target, key = MemoryStore(), MemoryStore(), SessionKey("ada")
    await source.open()
    await target.open()
    data = b"what a tool returned"
    name = name_of(data)
    payload = encode(
        {"role": "tool", "tool_payload": {"perdure_tool_result_ref": {"sha256": name}}}
    )
    grant = await take(source, key)
    await append_ok(source, grant, 2, Entry(MESSAGE, payload, end=True))
    await source.put_blobs("", {name: data})
    await source.write_documents(key, {}, Manifest(key=key, epoch=grant.epoch, as_of_seq=2))
    await source.release(key, grant.epoch)

    killed = PausingStore(target)
    pause = killed.pause("put_blobs")
    async with anyio.create_task_group() as group:
        group.start_soon(backup, source, killed)
        await pause.reached.wait()
        group.cancel_scope.cancel()
    assert await target.blob_names("") == []
    assert (await backup(source, target)).failed == {}
    assert await target.blob_names("") == [name]

    other = MemoryStore()
    await other.open()
    await source.remove_blobs("", [name])
    await backup(source, other)
    await source.put_blobs("", {name: data})
    assert (await backup(source, other)).failed == {}
    assert await other.get_blob("", name) == data


async def test_what_was_forgotten_stays_forgotten(tmp_path: Path) -> None:
    source, old, target = tmp_path / "source", tmp_path / "old", tmp_path / "target"
    async with perdure.connect(source) as sessions:
        for id in ("ada", "bob"):
            async with sessions.open(id) as session:
                session.append(Message.user(f"the secret of {id}"))
    await back_up(source, old)
    await back_up(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.forget(id="bob")
    restored = await restore(target, source)  # of a backup that is older
    assert (restored.forgotten, restored.failed) == (["bob"], {})
    assert (await back_up(source, target)).forgotten == 1
    for path in target.rglob("*"):
        assert not path.is_file() or b"secret of bob" not in path.read_bytes()
    shutil.rmtree(source)
    assert (await restore(target, source)).sessions == 1
    # The list of what was forgotten came along: no older backup brings it back.
    assert (await restore(old, source)).forgotten == ["bob"]
    async with perdure.connect(source) as sessions:
        assert [info.key.agent for info in await sessions.list()] == ["ada"]


async def test_a_session_that_began_anew_replaces_the_one_of_its_name(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for text in ("the first", "the second"):
        async with perdure.connect(source) as sessions:
            await sessions.delete("ada")
            async with sessions.open("ada") as session:
                session.append(Message.user(text))
        await back_up(source, target)
    assert (await restore(target, tmp_path / "new")).failed == {}
    assert await texts(tmp_path / "new", "ada") == ["the second"]
    for path in target.rglob("*"):
        assert not path.is_file() or b"the first" not in path.read_bytes()


async def test_history_that_was_pruned_goes_from_the_backup(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for number in range(4):
        async with perdure.connect(source) as sessions, sessions.open("ada") as session:
            async with session.turn():
                session.append(Message.user(f"question {number}"), Message.assistant("yes"))
    await back_up(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.prune(Retention(keep_turns=1), id="ada")
    await back_up(source, target)
    assert (await restore(target, tmp_path / "new")).failed == {}
    assert await texts(tmp_path / "new", "ada") == await texts(source, "ada")
    logs = [path.read_bytes() for path in target.rglob("*.jsonl")]
    assert not any(b"question 0" in log for log in logs)
    assert any(b"question 3" in log for log in logs)


async def test_a_session_that_is_newer_than_the_backup_is_left_and_named(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for number in range(2):
        async with perdure.connect(source) as sessions, sessions.open("ada") as session:
            session.append(Message.user(f"question {number}"))
        if not number:
            await back_up(source, target)
    restored = await restore(target, source)
    assert list(restored.failed) == ["ada"]
    assert "newer than the backup" in restored.failed["ada"]
    assert await texts(source, "ada") == ["question 0", "question 1"]
    assert "restore the backup into an empty store" in restored.failed["ada"]
    assert (await restore(target, tmp_path / "new")).failed == {}
    assert await texts(tmp_path / "new", "ada") == ["question 0"]


async def test_damage_to_a_backup_is_found(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    await fill(source)
    await back_up(source, target)
    [log] = (target / "agents" / "agent-0" / "log").glob("*.jsonl")
    data = log.read_bytes()
    log.write_bytes(data.replace(b"question 0", b"quastion 0"))
    async with opened(target) as (there,):
        seen = await verify_backup(there)
    assert list(seen.problems) == ["agent-0"]
    restored = await restore(target, tmp_path / "new")  # all others come back
    assert (list(restored.failed), restored.written) == (["agent-0"], 12)
    assert (await back_up(source, target)).written == 1  # and the next run mends it
    assert (await restore(target, tmp_path / "new")).failed == {}


async def test_a_store_that_is_no_backup_is_refused(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    for place in (source, other):
        async with perdure.connect(place) as sessions, sessions.open("ada") as session:
            session.append(Message.user("Hello"))
    async with opened(source, other) as (here, there):
        with pytest.raises(ConfigError, match="has sessions of its own"):
            await backup(here, there)
        with pytest.raises(ConfigError, match="is no backup"):
            await restore_backup(there, here)


async def test_the_backup_of_an_encrypted_store_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    source = f"encrypted+{(tmp_path / 'source').as_uri()}"
    target = f"encrypted+{(tmp_path / 'target').as_uri()}"
    async with perdure.connect(source) as sessions, sessions.open("ada") as session:
        session.append(Message.user("the secret"))
    async with opened(source, tmp_path / "plain") as (here, there):
        with pytest.raises(ConfigError, match="put encrypted"):
            await backup(here, there)
    await back_up(source, target)
    for path in (tmp_path / "target").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"the secret" not in data
            assert bytes.fromhex("ab" * 32) not in data
            assert b"ab" * 32 not in data
    shutil.rmtree(tmp_path / "source")
    assert (await restore(target, source)).written == 1
    assert await texts(source, "ada") == ["the secret"]


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
async def test_one_run_writes_a_backup_at_a_time(kind: str, tmp_path: Path) -> None:
    backing, source = MemoryBacking(), MemoryStore()

    def place() -> Any:
        url = f"sqlite:///{tmp_path / 'backup.db'}" if kind == "sqlite" else tmp_path / "backup"
        return MemoryStore(backing=backing) if kind == "memory" else perdure.store_for(url)

    async with perdure.connect(source) as sessions:
        for id in ("a", "b"):
            async with sessions.open(id) as session:
                session.append(Message.user(f"{id} one"), Message.user(f"{id} two"))
    await source.open()
    first, second = PausingStore(place()), place()
    for store in (first, second):
        await store.open()
    done: list[Any] = []

    async def run(store: Any) -> None:
        done.append(await backup(source, store))

    pause = first.pause("acquire", lambda key, _: key == SessionKey("a"))
    async with anyio.create_task_group() as group:
        group.start_soon(run, first)
        await pause.reached.wait()
        for other in (first, second):
            with pytest.raises(LeaseHeldError, match="another run writes the backup in .*, by "):
                await backup(source, other, wait=0)
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} on|owner {first.owner}"):
            await follow_deletions(source, second, wait=0)
        pause.go()
    assert (done[0].failed, done[0].written) == ({}, 2)
    assert (await backup(source, second, wait=0)).there == 2
    assert (await verify_backup(second)).problems == {}
    pause = first.pause("acquire", lambda key, _: key == SessionKey("b"))
    async with perdure.connect(source) as sessions, sessions.open("b") as session:
        session.append(Message.user("b three"))
    await source.open()
    async with anyio.create_task_group() as group:  # cancelled, as by a signal
        group.start_soon(run, first)
        await pause.reached.wait()
        group.cancel_scope.cancel()
    assert (await backup(source, second, wait=0)).written == 1
    assert (await verify_backup(second)).problems == {}
    for store in (first, second):
        await store.aclose()


async def test_a_run_that_was_taken_for_dead_doubles_nothing() -> None:
    backing, source, new = MemoryBacking(), MemoryStore(), MemoryStore()
    async with perdure.connect(source) as sessions, sessions.open("a") as session:
        session.append(Message.user("one"), Message.user("two"))
    late, other = PausingStore(MemoryStore(backing=backing)), MemoryStore(backing=backing)
    for store in (source, late, other, new):
        await store.open()
    pause = late.pause("acquire", lambda key, _: key == SessionKey("a"))
    done: list[Any] = []

    async def run() -> None:
        done.append(await backup(source, late))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await pause.reached.wait()
        journal = await other.holder(backups.JOURNAL)
        assert journal is not None
        await other.release(backups.JOURNAL, journal.epoch)
        assert (await backup(source, other)).written == 1
        pause.go()
    assert done[0].failed == {}
    assert (await verify_backup(other)).problems == {}
    assert (await restore_backup(other, new)).failed == {}
    async with perdure.connect(new) as sessions:
        assert [message.text for message in (await sessions.load("a")).context()] == ["one", "two"]


async def test_a_fork_whose_parent_goes_during_a_run_is_whole_in_the_backup() -> None:
    backing, target, new = MemoryBacking(), MemoryStore(), MemoryStore()
    source = PausingStore(MemoryStore(backing=backing))
    for store in (source, target, new):
        await store.open()
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("one"))
        await sessions.fork("a", "f")
        pause = source.pause("head", lambda key: key == SessionKey("a"))
        done: list[Any] = []

        async def run() -> None:
            done.append(await backup(source, target))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await pause.reached.wait()
            await anyio.wait_all_tasks_blocked()
            await sessions.delete("a")
            async with sessions.open("a") as session:
                session.append(Message.user("again"))
                await session.save()
            pause.go()
    assert done[0].failed == {}
    assert (await verify_backup(target)).problems == {}
    assert (await restore_backup(target, new)).failed == {}
    async with perdure.connect(new) as sessions:
        for id, said in ("a", "again"), ("f", "one"):
            assert [message.text for message in (await sessions.load(id)).context()] == [said]


async def test_what_is_verified_beside_a_run_is_looked_at_again() -> None:
    source, backing = MemoryStore(), MemoryBacking()
    target, seen = MemoryStore(backing=backing), PausingStore(MemoryStore(backing=backing))
    async with perdure.connect(source) as sessions:
        async with sessions.open("a") as session:
            session.append(Message.user("one"))
        await sessions.fork("a", "f")
    for store in (source, target, seen):
        await store.open()
    assert (await backup(source, target)).failed == {}
    pause = seen.pause("read_documents", lambda key, *_: key == SessionKey("f"))

    async def gone() -> None:
        async with perdure.connect(source) as sessions:
            await sessions.delete("a")
        await source.open()
        assert (await backup(source, target)).forgotten == 1

    async def look() -> Any:
        return await verify_backup(seen)

    assert (await meanwhile(pause, look, gone)).problems == {}


async def keeps(store: MemoryStore) -> list[str]:
    """Return the sessions that a restore of a backup brings."""
    new = MemoryStore()
    await new.open()
    assert (await restore_backup(store, new)).failed == {}
    async with perdure.connect(new) as sessions:
        return sorted(info.key.agent for info in await sessions.list())


async def says(store: MemoryStore, *ids: str) -> None:
    async with perdure.connect(store) as sessions:
        for id in ids:
            async with sessions.open(id) as session:
                session.append(Message.user(f"of {id}"))
    await store.open()


async def backed_up(
    source: MemoryStore, *ids: str, backing: MemoryBacking | None = None
) -> MemoryStore:
    target = MemoryStore(backing=backing)
    await says(source, *ids)
    await target.open()
    assert (await backup(source, target)).failed == {}
    return target


@pytest.mark.parametrize("there", [False, True])
async def test_a_deletion_that_is_followed_leaves_what_was_renamed_in_the_backup(
    there: bool,
) -> None:
    source = MemoryStore()
    target = await backed_up(source, "zoe", "bob", *["zoe-2"] * there)
    async with perdure.connect(source) as sessions:
        if there:  # the backup has an earlier session of that name
            await sessions.forget("zoe-2")
        await sessions.rename("zoe", "zoe-1")
        await sessions.rename("zoe-1", "zoe-2")
        await sessions.forget("bob")
    await source.open()
    removed = {key.agent for key in await follow_deletions(source, target)}
    assert removed == {"zoe", "bob"}
    assert await keeps(target) == ["zoe-2"]
    assert (await verify_backup(target)).problems == {}
    new = MemoryStore()
    await new.open()
    await restore_backup(target, new)
    async with perdure.connect(new) as sessions:
        assert [message.text for message in (await sessions.load("zoe-2")).context()] == ["of zoe"]


async def test_a_session_that_is_renamed_before_a_run_reaches_it_stays_in_the_backup() -> None:
    source = MemoryStore()
    target = await backed_up(source, "bob", "zoe")
    pausing = PausingStore(source)
    pause = pausing.pause("holder", lambda key: key == SessionKey("zoe"))

    async def renamed() -> None:
        async with perdure.connect(source) as sessions:
            await sessions.rename("zoe", "zoe-2")
        await source.open()

    async def run() -> Any:
        return await backup(pausing, target)

    await pausing.open()
    report = await meanwhile(pause, run, renamed)
    assert (report.failed, report.forgotten) == ({}, 1)
    assert await keeps(target) == ["bob", "zoe-2"]


async def test_nothing_is_deleted_while_what_was_renamed_cannot_be_backed_up() -> None:
    source, backing = MemoryStore(), MemoryBacking()
    target = await backed_up(source, "bob", "zoe", backing=backing)
    async with perdure.connect(source) as sessions:
        await sessions.rename("zoe", "zoe-2")
        await sessions.forget("bob")
    await source.open()

    class Full(MemoryStore):
        async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
            if key == SessionKey("zoe-2"):
                raise StoreError("full")
            return await super().acquire(key, terms)

    full = Full(backing=backing)
    await full.open()
    with pytest.raises(StoreError, match="zoe-2: full"):
        await follow_deletions(source, full)
    report = await backup(source, full)
    assert set(report.failed) == {"bob", "zoe", "zoe-2"}
    assert "zoe-2 is not backed up" in report.failed["zoe"]
    assert await keeps(target) == ["bob", "zoe"]
    assert {key.agent for key in await follow_deletions(source, target)} == {"bob", "zoe"}
    assert await keeps(target) == ["zoe-2"]


async def remembers(store: MemoryStore, *ids: str) -> None:
    async with perdure.connect(store) as sessions:
        for id in ids:
            async with sessions.open(id) as session:
                session.memory.set("big", id * 50_000)
    await store.open()


async def blobs_of(store: MemoryStore) -> set[bytes]:
    """Return how the blobs begin that a backup has."""
    names = await store.blob_names("")
    return {(await store.get_blob("", name) or b"")[1:4] for name in names}


@pytest.mark.parametrize("what", ["forgotten", "begun anew"])
async def test_blobs_that_a_killed_run_did_not_collect_go_with_the_next_one(what: str) -> None:
    source, target = MemoryStore(), PausingStore(MemoryStore())
    await remembers(source, "ada", "bob")
    await target.open()
    await backup(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.forget("ada")
    if what == "begun anew":
        await says(source, "ada")
    await source.open()
    pause = target.pause("remove_blobs")
    async with anyio.create_task_group() as group:
        group.start_soon(backup, source, target)
        await pause.reached.wait()
        group.cancel_scope.cancel()
    assert await blobs_of(target) == {b"ada", b"bob"}
    assert (await backup(source, target)).failed == {}
    assert await blobs_of(target) == {b"bob"}
    # What is collected is not collected again.
    pause = target.pause("blob_names")
    assert (await backup(source, target)).failed == {}
    assert not pause.reached.is_set()


async def test_a_damaged_session_of_a_backup_is_named_by_each_run_until_blobs_can_be_collected() -> (
    None
):
    class Damaged(MemoryStore):
        async def read_log(self, key: SessionKey, **which: Any) -> AsyncGenerator[Any, None]:
            if key == SessionKey("bob") and not which.get("reverse"):
                raise CorruptRecordError("export it", path="here", offset=7)
            async with aclosing(super().read_log(key, **which)) as log:
                async for chunk in log:
                    yield chunk

    source, backing = MemoryStore(), MemoryBacking()
    target, damaged = MemoryStore(backing=backing), Damaged(backing=backing)
    await remembers(source, "ada", "bob", "eve")
    for store in (target, damaged):
        await store.open()
    await backup(source, target)
    async with perdure.connect(source) as sessions:
        await sessions.forget("ada")
    await source.open()
    with pytest.raises(
        StoreError, match=r"bob: .* is damaged: here at byte 7; .* into a new place"
    ):
        await follow_deletions(source, damaged)
    for _ in range(2):
        report = await backup(source, damaged)
        assert list(report.failed) == ["bob"]
        assert "no blob is removed" in report.failed["bob"]
    assert await blobs_of(target) == {b"ada", b"bob", b"eve"}
    assert await keeps(target) == ["bob", "eve"]
    assert (await backup(source, target)).failed == {}
    assert await blobs_of(target) == {b"bob", b"eve"}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("id", ["ada", "fork"])
async def test_pruned_history_that_a_store_still_has_is_in_no_backup(id: str, is_new: bool) -> None:
    class Keeping(MemoryStore):
        """A store that removes pruned records later, as files do."""

        async def trim(self, *_: Any) -> int:
            return 0

    async def turns(sessions: Any, id: str, *texts: str) -> None:
        async with sessions.open(id) as session:
            for text in texts:
                async with session.turn():
                    session.append(Message.user(text))

    source, target, new, again = Keeping(), MemoryStore(), MemoryStore(), MemoryStore()
    for store in (target, new, again):
        await store.open()
    keep = Retention(keep_turns=1)
    async with perdure.connect(source) as sessions:
        if id == "fork":  # its log begins with a record of what comes before
            await turns(sessions, "ada", "earlier 1", "earlier 2")
            assert (await sessions.prune(keep, id="ada")).pruned
            await sessions.fork("ada", "fork")
        await turns(sessions, id, "question 1", "question 2", "question 3")
        await source.open()
        if not is_new:
            assert (await backup(source, target)).failed == {}
        assert (await sessions.prune(keep, id=id)).pruned
        await source.open()
        assert (await backup(source, target)).failed == {}
        assert (await backup(source, target)).written == 0
        await turns(sessions, id, "question 4")
        await source.open()
        assert (await backup(source, target)).records < 10
    log = target.read_log(SessionKey(id))
    stored = b"".join([record.payload async for chunk in log for record in chunk.records])
    assert b"question 2" not in stored
    assert b"question 3" in stored
    assert (await verify_backup(target)).problems == {}
    assert (await restore_backup(target, new)).failed == {}
    async with perdure.connect(new) as sessions:
        view = await sessions.load(id)
        items = [item.value for item in await view.history(limit=99)]
        texts = [item.text for item in items if isinstance(item, Message)]
        assert texts == ["question 3", "question 4"]
        assert "question 1" in [message.text for message in view.context()]


async def test_what_a_killed_run_did_not_trim_goes_with_the_next_one() -> None:
    source, target = MemoryStore(), PausingStore(MemoryStore())
    await target.open()
    for text in ("the first", "the second"):
        async with perdure.connect(source) as sessions:
            await sessions.delete("ada")
            async with sessions.open("ada") as session:
                session.append(Message.user(text))
        await source.open()
        if text == "the first":
            await backup(source, target)
    pause = target.pause("trim")
    async with anyio.create_task_group() as group:
        group.start_soon(backup, source, target)
        await pause.reached.wait()
        group.cancel_scope.cancel()

    async def stored() -> bytes:
        log = target.read_log(SessionKey("ada"))
        return b"".join([record.payload async for chunk in log for record in chunk.records])

    assert b"the first" in await stored()
    assert (await backup(source, target)).failed == {}
    assert b"the first" not in await stored()
    assert (await verify_backup(target)).problems == {}
    assert (await backup(source, target)).written == 0
