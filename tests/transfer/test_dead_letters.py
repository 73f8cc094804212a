"""Dead letters come along: in migrations, backups, bundles, and out of damaged sessions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message, SessionKey, Shutdown
from perdure.errors import CorruptRecordError, NotStorableError
from perdure.store import DeadLetter, PendingItem
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from perdure.transfer import backup, migrate, read_bundle, restore_backup, salvage, write_bundle
from tests.servers import postgres, s3, valkey
from tests.transfer.test_waiting import opened, say, set_aside

pytestmark = pytest.mark.anyio

A, B, C = SessionKey("a"), SessionKey("b", tenant="acme"), SessionKey("a", "second")
QUIET = Shutdown(signals=False)
NEAR = ["memory", "file", "sqlite", "encrypted"]
FAR = [pytest.param(kind, marks=pytest.mark.deep) for kind in ("postgres", "redis", "s3")]


def made(kind: str, folder: Path) -> Any:
    """Return a store of a kind, not open."""
    match kind:
        case "memory":
            return MemoryStore()
        case "file":
            return perdure.store_for(folder / "files")
        case "sqlite":
            return perdure.store_for(f"sqlite:///{folder / 'a.db'}")
        case "encrypted":
            return perdure.store_for(f"encrypted+{(folder / 'sealed').as_uri()}")
        case "postgres":
            return perdure.store_for(f"{postgres.shared().url}?schema={postgres.schema_of(folder)}")
        case "redis":
            return perdure.store_for(f"{valkey.shared().url}?prefix={folder.name}")
        case _:
            return s3.store_on(s3.shared(), folder)


@contextlib.asynccontextmanager
async def at(kind: str, folder: Path) -> AsyncGenerator[Any, None]:
    store = made(kind, folder)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)


async def filled() -> tuple[MemoryStore, dict[SessionKey, list[DeadLetter]]]:
    source = MemoryStore()
    await opened(source)
    await say(source, A, "Hello")
    await say(source, B, "Hello")
    letters = {
        A: [await set_aside(source, A, f"large/{n}") for n in range(2)],
        B: [await set_aside(source, B, "large/0")],
        C: [await set_aside(source, C, "alone/0")],  # nothing was ever said there
    }
    return source, letters


async def lying(store: Any) -> dict[SessionKey, list[DeadLetter]]:
    keys = await store.sessions_with_pending_items(dead_letters=True)
    return {
        key: sorted(await store.dead_letters(key), key=lambda one: one.item.op_id) for key in keys
    }


@pytest.mark.parametrize("kind", [*NEAR, *FAR])
async def test_they_come_into_each_store_and_out_of_it(kind: str, tmp_path: Path) -> None:
    source, letters = await filled()
    last = MemoryStore()
    await opened(last)
    async with at(kind, tmp_path) as store:
        for here, there in ((source, store), (store, last)):
            done = await migrate(here, there)
            assert (done.failed, done.copied, done.dead_letters) == ({}, 2, 4)
            assert await lying(there) == letters
            again = await migrate(here, there)
            assert (again.failed, again.dead_letters, again.there) == ({}, 0, 2)
        await write_bundle(store, A, tmp_path / "theirs")
    await write_bundle(source, A, str(tmp_path / "ours"))
    assert (tmp_path / "theirs").read_bytes() == (tmp_path / "ours").read_bytes()


async def test_each_run_follows_what_becomes_of_them() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    await say(source, A, "Hello")
    assert (await migrate(source, target)).failed == {}
    first = await set_aside(source, A, "first/0")
    second = await set_aside(source, A, "second/0")
    done = await migrate(source, target)
    assert (done.failed, done.dead_letters) == ({}, 2)
    await source.ack(A, None, ["first/0"])
    assert (await migrate(source, target)).failed == {}
    assert await lying(target) == {A: [second]}
    async with perdure.connect(MemoryStore(backing=source._backing), shutdown=QUIET) as sessions:
        await sessions.retry_dead_letters("a")
    done = await migrate(source, target)
    assert (done.failed, done.posted, await lying(target)) == ({}, 1, {})
    assert await target.sessions_with_pending_items() == [A]
    assert first != second


async def test_they_stay_with_a_session_that_is_written_anew() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    async with perdure.connect(MemoryStore(backing=source._backing), shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        for number in range(3):  # under one lease all the while
            session.append(Message.user(str(number)))
            await session.save()
            letter = DeadLetter(
                PendingItem("large/0", "message", b"{}", 1.0), "no", 5, float(number)
            )
            holder = await source.holder(A)
            assert holder is not None
            await source.ack(A, holder.epoch, dead=[letter])
            assert (await migrate(source, target)).failed == {}
            assert await lying(target) == {A: [letter]}
    await opened(source)


async def test_those_of_the_targets_own_are_not_dropped() -> None:
    source, target = MemoryStore(), MemoryStore()
    await opened(source, target)
    await say(source, A, "Hello")
    await migrate(source, target)
    own = await set_aside(target, A, "own/0")
    await set_aside(source, A, "large/0")
    assert (await migrate(source, target)).failed == {}
    await source.ack(A, None, ["large/0"])
    assert (await migrate(source, target)).failed == {}
    assert await lying(target) == {A: [own]}


@pytest.mark.parametrize("nth", range(2, 40, 3))
async def test_a_run_that_was_killed_loses_and_doubles_none(nth: int) -> None:
    source, letters = await filled()
    backing = MemoryBacking()
    inner = MemoryStore(backing=backing)
    broken = FaultyStore(inner, nth=nth, how="crash")
    with contextlib.suppress(BaseExceptionGroup):
        await broken.open()
        await migrate(source, broken)
    await inner.aclose()  # its owner is dead
    target = MemoryStore(backing=backing)
    await target.open()
    assert (await migrate(source, target, on_held="steal", wait=30)).failed == {}
    assert await lying(target) == letters


async def test_a_store_that_keeps_none_says_which_stay_behind(tmp_path: Path) -> None:
    source, _ = await filled()

    class Without(MemoryStore):
        """As a storage of whole states has no inbox."""

        async def ack(self, *args: Any, dead: Any = ()) -> None:
            if dead:
                raise NotStorableError("it keeps no dead letters")
            await super().ack(*args)

    target = Without()
    await opened(target)
    done = await migrate(source, target)
    assert set(done.failed) == {str(key) for key in (A, B, C)}
    assert "keeps no dead letters, and 2 of a stay in the source" in done.failed["a"]
    assert await target.head(A) > 0
    await write_bundle(source, A, tmp_path / "a")
    with pytest.raises(NotStorableError, match="keeps no dead letters"):
        await read_bundle(target, tmp_path / "a", key=SessionKey("other"))
    assert await target.drafts("") == []
    assert await target.head(SessionKey("other")) == 0


async def test_a_damaged_one_is_told_and_the_others_come(tmp_path: Path) -> None:
    source, letters = await filled()
    bad = DeadLetter(PendingItem("bad/0", "", b"?", 0.0, "it does not fit"), "unknown", 0, 9.0)
    source._backing.sessions[A].dead_letters["bad/0"] = bad
    target, kept = MemoryStore(), MemoryStore()
    await opened(target, kept)
    done = await migrate(source, target)
    assert "1 of its dead letters are damaged: `perdure inbox a`" in done.failed["a"]
    saved = await backup(source, kept)
    assert "1 of the posts and dead letters of a are damaged" in saved.failed["a"]
    new = MemoryStore()
    await opened(new)
    await restore_backup(kept, new)
    assert await lying(target) == await lying(new) == letters
    with pytest.raises(CorruptRecordError, match="a dead letter of a is damaged"):
        await write_bundle(source, A, tmp_path / "a")
    left = await salvage(source, A, str(tmp_path / "a"))
    assert (left.dead_letters, left.lost_dead_letters, left.is_whole) == (2, 1, False)
    await read_bundle(new, str(tmp_path / "a"), key=SessionKey("left"))
    assert len(await new.dead_letters(SessionKey("left"))) == 2


async def test_a_bundle_has_them_and_another_is_as_it_was(tmp_path: Path) -> None:
    source, letters = await filled()
    target = MemoryStore()
    await opened(target)
    await write_bundle(source, A, tmp_path / "with")
    await read_bundle(target, tmp_path / "with")
    assert await lying(target) == {A: letters[A]}
    assert (tmp_path / "with").read_bytes().startswith(b'{"perdure_bundle":2,')
    await source.ack(A, None, [one.item.op_id for one in letters[A]])
    await write_bundle(source, A, tmp_path / "without")
    assert (tmp_path / "without").read_bytes().startswith(b'{"perdure_bundle":1,')


@pytest.mark.parametrize("kind", ["file", "encrypted"])
async def test_a_backup_has_them(kind: str, tmp_path: Path) -> None:
    source, letters = await filled()
    new = MemoryStore()
    await opened(new)
    async with at(kind, tmp_path) as kept:
        assert (await backup(source, kept)).failed == {}
        if kind == "encrypted":
            for path in (tmp_path / "sealed").rglob("*.jsonl"):
                assert b"large/0" not in path.read_bytes()
        assert (await backup(source, kept)).written == 0
        assert (await restore_backup(kept, new)).dead_letters == 4
        assert await lying(new) == letters
        await source.ack(A, None, ["large/0"])
        assert (await backup(source, kept)).written == 1
        again = MemoryStore()
        await opened(again)
        assert (await restore_backup(kept, again)).dead_letters == 3


async def test_what_waits_for_sessions_that_nobody_has_opened_is_backed_up(tmp_path: Path) -> None:
    source, new = MemoryStore(), MemoryStore()
    await opened(source, new)
    item = PendingItem("op/0", "message", b'{"role":"user","content":"x"}', 1.0)
    await source.enqueue(A, [item])
    async with at("file", tmp_path) as kept:
        done = await backup(source, kept)
        assert (done.failed, done.written) == ({}, 1)
        assert (await restore_backup(kept, new)).posted == 1
    assert await new.receive(A, 0) == [item]
