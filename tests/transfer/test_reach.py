"""What a session reaches: each blob is looked at, by every command, on every kind of store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message, SessionKey
from perdure.cli.check import audit, collect, garbage
from perdure.errors import CorruptRecordError
from perdure.records.chunks import name_of
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from perdure.transfer import backup, migrate, restore_backup, verify_backup, write_bundle
from perdure.transfer.bundle_files import reach
from tests.judges.damages import Names, names_of
from tests.judges.writers import fill

pytestmark = [pytest.mark.anyio, pytest.mark.deep]

BY = {
    "value": ("ada", "memory key"),
    "only_value": ("pruned", "memory key"),
    "result": ("ada", "the tool result of record"),
    "image": ("ada", "the image/png of "),
    "root": ("ada", "the state of checkpoint 2 ('large')"),
    "node": ("ada", "the state of checkpoint 2 ('large')"),
    "leaf": ("ada", "the state of checkpoint 2 ('large')"),
    "page": ("ada", "archive "),
    "file": ("ada", "archive "),
    "folded": ("pruned", "what the session was at record"),
    "document": ("pruned", "working_context_snapshot.json of record"),
}
"""Who reaches each blob, and through what."""

ADA = SessionKey("ada")


At = Callable[[str], Store]
"""Makes a store of a name, of one kind, in one folder."""


@pytest.fixture(params=["file", "encrypted", "compressed"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> At:
    def make(name: str) -> Store:
        store = FileStore(tmp_path / name)
        if request.param == "encrypted":
            return EncryptedStore(store, "5a" * 32)
        return CompressedStore(store) if request.param == "compressed" else store

    return make


@asynccontextmanager
async def opened(at: At, *names: str) -> Any:
    async with AsyncExitStack() as stack:
        stores = [at(name) for name in names]
        for store in stores:
            await store.open()
            stack.push_async_callback(store.aclose)
        yield stores


async def sound(at: At) -> Names:
    await fill(at("store"))
    return await names_of(at("store"))


async def test_each_blob_is_reached_and_a_lost_one_is_named_with_what_needs_it(at: At) -> None:
    names = await sound(at)
    async with opened(at, "store") as (store,):
        for field, (id, by) in BY.items():
            name = getattr(names, field)
            whose = SessionKey(id).blobs
            data = await store.get_blob(whose, name)
            await store.remove_blobs(whose, [name])
            problems = (await audit(store, SessionKey(id))).problems
            assert any(name in one.detail for one in problems), field
            if field not in {"folded", "document"}:  # else reading fails first
                [problem] = problems
                assert by in problem.detail, field
                assert problem.cure
                found = [blob async for blob in (await reach(store, SessionKey(id))).blobs()]
                [lost] = [blob for blob in found if blob.why]
                assert (lost.name, lost.is_lost) == (name, field != "value")
                assert by in lost.problem(SessionKey(id))
            await store.put_blobs(whose, {name: data})
            assert not (await audit(store, SessionKey(id))).problems, field


async def test_nothing_that_is_reached_is_collected(at: At) -> None:
    names = await sound(at)
    async with opened(at, "store") as (store,):
        keys = [SessionKey(id) for id in ("ada", "pruned", "copied", "plain")]
        there = set(await store.blob_names(""))
        audits = [await audit(store, key) for key in keys]
        counted, reached = await garbage(store, "", there, audits)
        assert counted.unreachable < len(there) - len(BY)
        for _ in range(2):
            await collect(store, counted, reached, 0.0)
        for field, name in names._asdict().items():
            assert await store.get_blob(SessionKey(BY[field][0]).blobs, name) is not None
        assert not [one for key in keys for one in (await audit(store, key)).problems]


async def test_a_lost_blob_that_may_name_others_keeps_them_from_being_collected(at: At) -> None:
    names = await sound(at)
    async with opened(at, "store") as (store,):
        for field, is_known in (("leaf", True), ("node", False)):
            await store.remove_blobs(ADA.blobs, [getattr(names, field)])
            there = set(await store.blob_names(""))
            counted, _ = await garbage(store, "", there, [await audit(store, SessionKey("ada"))])
            assert (counted.unknown is None) == is_known, field


async def test_a_copy_of_a_session_that_lost_a_blob_says_so_each_time_and_is_mended_by_it(
    at: At, tmp_path: Path
) -> None:
    names = await sound(at)
    async with opened(at, "store", "copy", "backup") as (store, other, saved):
        data = await store.get_blob(ADA.blobs, names.node)
        await store.remove_blobs(ADA.blobs, [names.node])
        for _ in range(2):
            for failed in (
                (await migrate(store, other)).failed,
                (await backup(store, saved)).failed,
            ):
                assert list(failed) == ["ada"]
                assert names.node in failed["ada"]
                assert BY["node"][1] in failed["ada"]
            assert BY["root"][1] in (await verify_backup(saved)).problems["ada"]
        with pytest.raises(CorruptRecordError, match="--salvage"):
            await write_bundle(store, SessionKey("ada"), tmp_path / "ada.jsonl")
        assert not (tmp_path / "ada.jsonl").exists()
        async with perdure.connect(at("copy"), read_only=True) as sessions:  # all else is there
            view = await sessions.load("ada")
            assert view is not None
            assert len(view.context()) == 13
        await store.put_blobs(ADA.blobs, {names.node: data})
        assert (await migrate(store, other)).failed == {}
        assert (await backup(store, saved)).failed == {}
        assert (await verify_backup(saved)).problems == {}
        assert not (await audit(other, SessionKey("ada"))).problems


async def test_a_restore_says_each_time_what_its_backup_lacks_and_brings_the_rest(at: At) -> None:
    names = await sound(at)
    async with opened(at, "store", "backup", "new") as (store, saved, restored):
        assert (await backup(store, saved)).failed == {}
        await saved.remove_blobs("", [names.leaf])
        for _ in range(2):
            failed = (await restore_backup(saved, restored)).failed
            assert list(failed) == ["ada"]
            assert names.leaf in failed["ada"]
    async with perdure.connect(at("new")) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert len(view.context()) == 13


async def test_a_memory_value_that_only_the_log_has_is_put_back(at: At) -> None:
    names = await sound(at)
    async with opened(at, "store", "copy", "backup") as (store, other, saved):
        await store.remove_blobs(ADA.blobs, [names.value])
        assert (await migrate(store, other)).failed == {}
        assert (await backup(store, saved)).failed == {}
        assert (await verify_backup(saved)).problems == {}
        for one in (other, saved):
            assert await one.get_blob(ADA.blobs, names.value) is not None
        [problem] = (await audit(store, SessionKey("ada"))).problems
        assert problem.repairable
    async with perdure.connect(at("store")) as sessions:
        await sessions.rebuild_working_context("ada")
    async with opened(at, "store") as (store,):
        assert not (await audit(store, SessionKey("ada"))).problems


async def test_what_only_looks_like_the_name_of_a_blob_is_missed_by_nobody(at: At) -> None:
    name = name_of(b"nobody's")
    reference = {"sha256": name, "bytes": 8, "media_type": "text/plain"}
    async with perdure.connect(at("store")) as sessions, sessions.open("ada") as session:
        session.append(Message.user(name))
        session.memory.set("hash", [name] * 100)
        session.state.set("app", {"blob": reference})
        await session.checkpoints.create("of them", state={"blobs": [reference] * 100})
    async with opened(at, "store", "copy", "backup") as (store, other, saved):
        assert not (await audit(store, SessionKey("ada"))).problems
        assert (await migrate(store, other)).failed == {}
        assert (await backup(store, saved)).failed == {}
        assert (await verify_backup(saved)).problems == {}


async def test_a_backup_without_the_states_of_pruned_checkpoints_is_sound(at: At) -> None:
    async with opened(at, "backup") as (saved,):
        for step in range(3):
            async with perdure.connect(at("store")) as sessions:
                async with sessions.open("bob") as session:
                    session.append(Message.user("hello"))
                async with sessions.open("ada") as session:
                    session.append(Message.user("hello"))
                    for number in range(3):
                        pad = f"{step}{number}" * 2000
                        await session.checkpoints.create("given", state={"pad": pad})
                    if step:
                        await session.checkpoints.prune(keep=1)
                        await sessions.delete("bob")
            async with opened(at, "store") as (store,):
                assert (await backup(store, saved)).failed == {}
                assert (await verify_backup(saved)).problems == {}


async def test_a_fork_keeps_the_states_of_checkpoints_that_its_parent_has_let_go(at: At) -> None:
    async with perdure.connect(at("store")) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("hello"))
            await session.checkpoints.create("given", state={"pad": "x" * 9000})
        await sessions.fork("ada", "fork")
        async with sessions.open("ada") as session:
            await session.checkpoints.prune(keep=0)
    async with opened(at, "store", "copy", "backup", "new") as (store, other, saved, restored):
        assert (await migrate(store, other)).failed == {}
        assert (await backup(store, saved)).failed == {}
        assert (await restore_backup(saved, restored)).failed == {}
    for name in ("copy", "new"):
        async with perdure.connect(at(name)) as sessions:
            fork = await sessions.load("fork")
            assert fork is not None
            state = await fork.checkpoints.restore(1)
            assert state is not None
            assert state.state == {"pad": "x" * 9000}
