"""A migration makes forks, copies and renames of an earlier release plain: each has its own log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import Message, Retention, SessionManager, Shutdown, connect, store_for
from perdure.cli.check import audit
from perdure.errors import SessionError
from perdure.memory.ledger import change_entry
from perdure.records.keys import SessionKey
from perdure.records.records import BASE, EFFECT, ENDING, FORK
from perdure.session.internals import accept, ledger_of
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.transfer import backup, migrate, read_bundle, restore_backup, write_bundle
from tests.pausing import PausingStore
from tests.references import copy_as_before, fork_as_before, say_as_before
from tests.session.lives import converse, looks

QUIET = Shutdown(signals=False)


async def look(sessions: SessionManager, id: str) -> dict[str, Any]:
    view = await sessions.load(id)
    assert view is not None
    return await looks(view)


async def moved(backings: tuple[MemoryBacking, MemoryBacking]) -> Any:
    source, target = [MemoryStore(backing=backing) for backing in backings]
    await source.open()
    await target.open()
    done = await migrate(source, target)
    await source.aclose()
    await target.aclose()
    return done


async def test_what_referred_to_others_is_plain_behind_a_migration() -> None:
    backings = MemoryBacking(), MemoryBacking()
    old = MemoryStore(backing=backings[0])
    async with connect(old, shutdown=QUIET) as sessions:
        await converse(sessions, "parent", "one", "two", "large " + "x" * 3000)
        async with sessions.open("parent") as session:
            accept(session, (change_entry(EFFECT, "begun", at=1.0),))
            await session.aclose()
        await converse(sessions, "was", "named")
        await converse(sessions, "pruned", "one", "two", "three")
        await sessions.prune(Retention(keep_turns=1), id="pruned")
    await old.open()
    await fork_as_before(old, "parent", "unfolded")
    await fork_as_before(old, "parent", "fork")
    await say_as_before(old, "fork", "mine", "and mine")
    await fork_as_before(old, "fork", "fork of it")
    await copy_as_before(old, "fork", "copy")
    await copy_as_before(old, "was", "is", moved=True)
    await fork_as_before(old, "pruned", "fork of the rest")
    await old.aclose()
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        ids = [info.key.agent for info in await sessions.list()]
        before = {id: await look(sessions, id) for id in ids}
        assert len(ids) == 9
    done = await moved(backings)
    assert (done.copied, done.failed) == (9, {})
    async with connect(MemoryStore(backing=backings[1]), shutdown=QUIET) as sessions:
        assert {id: await look(sessions, id) for id in ids} == before
        raw = sessions._store.inner
        for id in ids:
            base = await sessions._store.base_of(SessionKey(id))
            assert base is None or (base.at, base.parent, base.kept) == (0, None, "")
            log = raw.read_log(SessionKey(id))
            kinds = {record.kind async for chunk in log for record in chunk.records}
            assert not kinds & {BASE, ENDING, FORK}
            seen = await audit(sessions._store, SessionKey(id))
            assert [found.detail for found in seen.findings if found.problem] == []
            assert (await sessions.rebuild_working_context(id, dry_run=True)).wrong == ()
    done = await moved(backings)
    assert (done.there, done.failed) == (9, {})
    old = MemoryStore(backing=backings[0])
    await old.open()
    for id in ids:
        await say_as_before(old, id, "later")
    await old.aclose()
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        before = {id: await look(sessions, id) for id in ids}
    done = await moved(backings)
    assert (done.continued, done.copied, done.failed) == (9, 0, {})
    assert (await moved(backings)).there == 9
    async with connect(MemoryStore(backing=backings[1]), shutdown=QUIET) as sessions:
        await sessions.delete("parent")
        del before["parent"]
        assert {id: await look(sessions, id) for id in before} == before
        async with sessions.open("fork") as session:
            assert (await ledger_of(session)).effects() == ()  # it stayed with the parent
            session.append(Message.user("on"))


@pytest.mark.parametrize("keep", [0, 1])
async def test_history_that_the_source_has_pruned_goes_from_the_target(keep: int) -> None:
    backings = MemoryBacking(), MemoryBacking()
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "two", "large " + "x" * 3000)
        await sessions.fork("a", "fork")
    assert (await moved(backings)).copied == 2
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        await sessions.prune(Retention(keep_turns=keep), id="a")
        before = {id: await look(sessions, id) for id in ("a", "fork")}
    done = await moved(backings)
    assert (done.copied, done.there, done.failed) == (1, 1, {})
    async with connect(MemoryStore(backing=backings[1]), shutdown=QUIET) as sessions:
        assert {id: await look(sessions, id) for id in before} == before
    assert (await moved(backings)).there == 2


async def test_a_session_of_which_the_source_has_pruned_all_is_written_again() -> None:
    backings = MemoryBacking(), MemoryBacking()
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        async with sessions.open("a") as session, session.turn():
            session.append(Message.user("one"))
    assert (await moved(backings)).copied == 1
    async with connect(MemoryStore(backing=backings[0]), shutdown=QUIET) as sessions:
        await sessions.prune(Retention(keep_turns=0), id="a")
        before = await look(sessions, "a")
    done = await moved(backings)
    assert (done.copied, done.failed) == (1, {})
    async with connect(MemoryStore(backing=backings[1]), shutdown=QUIET) as sessions:
        assert await look(sessions, "a") == before
    assert (await moved(backings)).there == 1


async def test_a_restore_that_was_killed_in_the_middle_of_a_session_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perdure.session.copier.LEAVING", 0.05)
    source, target, new = MemoryStore(), MemoryStore(), MemoryBacking()
    async with connect(source, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "large " + "x" * 3000)
        before = await look(sessions, "a")
    await source.open()
    await target.open()
    assert (await backup(source, target)).failed == {}
    killed = PausingStore(MemoryStore(backing=new))
    await killed.open()
    pause = killed.pause("publish")
    async with anyio.create_task_group() as group:
        group.start_soon(restore_backup, target, killed)
        await pause.reached.wait()
        killed.left = 0
        group.cancel_scope.cancel()
    await killed._store.aclose()
    again = MemoryStore(backing=new)
    await again.open()
    assert [found.draft.purpose for found in await again.drafts("")] == ["migrate"]
    done = await restore_backup(target, again)
    assert (done.written, done.forgotten, done.failed) == (1, [], {})
    async with connect(again, shutdown=QUIET) as sessions:
        assert await look(sessions, "a") == before


@pytest.mark.parametrize("history", ["full", "context"])
@pytest.mark.parametrize("new", ["fork", "other"])
async def test_a_bundle_of_what_begins_with_documents_has_them(
    tmp_path: Path, history: Any, new: str
) -> None:
    source, target = MemoryStore(), MemoryStore()
    async with connect(source, shutdown=QUIET) as sessions:
        await converse(sessions, "a", *map(str, range(40)), "large " + "x" * 3000)
        await sessions.prune(Retention(keep_turns=1), id="a")
        await sessions.fork("a", "fork", history=history)
        before = await look(sessions, "fork")
    await source.open()
    await target.open()
    await write_bundle(source, SessionKey("fork"), tmp_path / "bundle")
    await read_bundle(target, tmp_path / "bundle", key=SessionKey(new))
    async with connect(target, shutdown=QUIET) as sessions:
        assert await look(sessions, new) == before
        async with sessions.open(new) as session:
            session.append(Message.user("on"))
            await session.aclose()
        assert (await sessions.rebuild_working_context(new, dry_run=True)).wrong == ()
        await sessions.fork(new, "fork of it")
        assert (await look(sessions, "fork of it"))["said"] == [*before["said"], "on"]


@pytest.mark.parametrize("kind", ["file", "sqlite", "memory"])
async def test_a_pruned_session_has_the_same_bundle_from_every_store(
    kind: str, tmp_path: Path
) -> None:
    """Also where the store removes no more than whole files or rows of what was pruned."""
    urls = {"file": str(tmp_path / "one"), "sqlite": f"sqlite:///{tmp_path}/one.db"}
    source: Any = store_for(urls[kind]) if kind in urls else MemoryStore()
    imported, moved = MemoryStore(), store_for(tmp_path / "two")
    async with connect(source, shutdown=QUIET) as sessions, sessions.open("a") as session:
        for number in range(20):
            async with session.turn():
                session.append(Message.user(f"question {number}"))
        await session.save()
        await sessions.prune(Retention(keep_turns=3), id="a")
    for store in (source, imported, moved):
        await store.open()
    key = SessionKey("a")
    await write_bundle(source, key, tmp_path / "first")
    written = (tmp_path / "first").read_bytes()
    log = b"".join(line for line in written.splitlines() if line.startswith(b'{"n":'))
    assert b"question 3" not in log
    assert b"question 18" in log
    await read_bundle(imported, tmp_path / "first")
    await read_bundle(imported, tmp_path / "first", key=SessionKey("other"))
    assert (await migrate(source, moved)).failed == {}
    for place, store in (("second", imported), ("third", moved)):
        await write_bundle(store, key, tmp_path / place)
        assert (tmp_path / place).read_bytes() == written
    for store in (source, moved):
        await store.aclose()
    async with connect(imported, shutdown=QUIET) as sessions:
        view = await sessions.load("other")
        assert view is not None
        assert len(await view.history(limit=100)) == 3


@pytest.mark.parametrize("new", ["fork", "other"])
async def test_a_bundle_of_a_fork_of_before_is_plain_and_needs_no_parent(
    tmp_path: Path, new: str
) -> None:
    source, target = MemoryBacking(), MemoryBacking()
    async with connect(MemoryStore(backing=source), shutdown=QUIET) as sessions:
        await converse(sessions, "parent", "one", "large " + "x" * 3000)
    old, here = MemoryStore(backing=source), MemoryStore(backing=target)
    for store in (old, here):
        await store.open()
    await fork_as_before(old, "parent", "fork")
    await say_as_before(old, "fork", "mine")
    await write_bundle(old, SessionKey("fork"), tmp_path / "fork")
    await read_bundle(here, tmp_path / "fork", key=SessionKey(new))
    async with connect(MemoryStore(backing=source), shutdown=QUIET) as sessions:
        before = await look(sessions, "fork")
    async with connect(MemoryStore(backing=target), shutdown=QUIET) as sessions:
        assert await look(sessions, new) == before
        async with sessions.open(new) as session:
            session.append(Message.user("on"))
            await session.aclose()
        assert (await look(sessions, new))["said"] == [*before["said"], "on"]


async def test_an_import_that_was_killed_leaves_nothing_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.session.copier.LEAVING", 0.05)
    source, new = MemoryStore(), MemoryBacking()
    async with connect(source, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "large " + "x" * 3000)
        before = await look(sessions, "a")
    await source.open()
    await write_bundle(source, SessionKey("a"), tmp_path / "bundle")
    killed = PausingStore(MemoryStore(backing=new))
    await killed.open()
    pause = killed.pause("publish")
    async with anyio.create_task_group() as group:
        group.start_soon(read_bundle, killed, tmp_path / "bundle")
        await pause.reached.wait()
        assert await killed.sessions() == []
        killed.left = 0
        group.cancel_scope.cancel()
    await killed._store.aclose()
    again = MemoryStore(backing=new)
    await again.open()
    await read_bundle(again, tmp_path / "bundle")
    async with connect(again, shutdown=QUIET) as sessions:
        assert await look(sessions, "a") == before


@pytest.mark.parametrize("history", ["full", "context"])
async def test_a_backup_of_what_begins_with_documents_has_them_in_its_log(history: Any) -> None:
    source, target, new = MemoryStore(), MemoryStore(), MemoryStore()
    async with connect(source, shutdown=QUIET) as sessions:
        await converse(sessions, "a", "one", "two", "large " + "x" * 3000)
        await sessions.prune(Retention(keep_turns=1), id="a")
        await sessions.fork("a", "fork", history=history)
        before = {id: await look(sessions, id) for id in ("a", "fork")}
    for store in (source, target, new):
        await store.open()
    assert (await backup(source, target)).failed == {}
    for stored in target._backing.sessions.values():  # as of a run that was killed before them
        stored.documents, stored.manifest = {}, None
    assert (await restore_backup(target, new)).failed == {}
    async with connect(new, shutdown=QUIET) as sessions:
        assert {id: await look(sessions, id) for id in before} == before


async def test_a_fork_of_before_is_forgotten_with_what_it_reads() -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await converse(sessions, "parent", "one", "two", owner="ada")
    old = MemoryStore(backing=backing)
    await old.open()
    await fork_as_before(old, "parent", "a fork")
    await say_as_before(old, "a fork", "mine")
    await fork_as_before(old, "a fork", "another")
    await old.aclose()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        with pytest.raises(SessionError, match="is read by a fork"):
            await sessions.forget(id="parent")
        with pytest.raises(SessionError, match="is read by another"):
            await sessions.delete("a fork")
        report = await sessions.forget(owner="ada")
        assert [key.agent for key in report.sessions] == ["a fork", "another", "parent"]
        assert await sessions.list() == []


async def test_a_fork_of_before_is_renamed_forked_and_copied_into_plain_ones() -> None:
    backing = MemoryBacking()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        await converse(sessions, "parent", "one", "two")
    old = MemoryStore(backing=backing)
    await old.open()
    await fork_as_before(old, "parent", "child")
    await say_as_before(old, "child", "mine")
    await old.aclose()
    async with connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        before = await look(sessions, "child")
        await sessions.fork("child", "fork")
        await sessions.copy("child", "copy")
        await sessions.rename("child", "renamed")
        assert await sessions.delete("parent")
        for id in ("fork", "copy", "renamed"):
            assert await look(sessions, id) == before
            async with sessions.open(id) as session:
                session.append(Message.user("on"))
