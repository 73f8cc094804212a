"""Sessions that continue each other, as in a store that somebody made: told, and removed."""

from __future__ import annotations

import anyio
import pytest

import perdure
from perdure import Message, Retention, Shutdown
from perdure.errors import CorruptRecordError, SessionError
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import ForkNote, Origin
from perdure.records.records import BASE, FORK, MESSAGE, Entry
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance._kit import append_ok, take
from perdure.transfer import backup, migrate, verify_backup

QUIET = Shutdown(signals=False)
SAID = Entry(MESSAGE, b'{"role":"user","content":"x"}', end=True)


@pytest.fixture(params=[1, 2, 3], ids=["itself", "each other", "three"])
async def circle(request: pytest.FixtureRequest) -> tuple[MemoryStore, list[str]]:
    """A store with ada's sound session, and some that follow each other."""
    store = MemoryStore()
    await store.open()
    async with perdure.connect(store, shutdown=QUIET) as sessions:
        async with sessions.open("sound", owner="ada") as session:
            session.append(Message.user("hi"))
    await store.open()
    ids = ["x", "y", "z"][: request.param]
    for place, id in enumerate(ids):
        grant = await take(store, SessionKey(id))
        above = SessionKey(ids[place - 1])
        notes = [Entry(FORK, encode(ForkNote(SessionKey(other))), end=True) for other in ids]
        base = Entry(BASE, encode(Origin(at=2, parent=above, epoch=grant.epoch)), end=True)
        await append_ok(store, grant, 2, base, *notes, SAID)
        await store.release(grant.key, grant.epoch)
    return store, ids


async def test_a_circle_is_told_by_whoever_follows_it(
    circle: tuple[MemoryStore, list[str]],
) -> None:
    store, ids = circle
    with anyio.fail_after(20):
        async with perdure.connect(store, shutdown=QUIET) as sessions:
            for id in ids:
                for act in (
                    sessions.load(id),
                    sessions.rename(id, "other"),
                    sessions.copy(id, "other"),
                ):
                    with pytest.raises(CorruptRecordError, match="perdure forget"):
                        await act
                with pytest.raises(SessionError, match="perdure migrate"):
                    async with sessions.open(id):
                        pass
            pruned = await sessions.prune(Retention(keep_turns=1))
            assert set(pruned.damaged) == {SessionKey(id) for id in ids}


async def test_a_circle_is_left_out_of_copies_and_named(
    circle: tuple[MemoryStore, list[str]],
) -> None:
    store, ids = circle
    kept, moved = MemoryStore(), MemoryStore()
    for one in (kept, moved):
        await one.open()
    with anyio.fail_after(20):
        copied = await backup(store, kept)
        assert set(copied.failed) == {str(SessionKey(id)) for id in ids}
        done = await migrate(store, moved)
        assert set(done.failed) == {str(SessionKey(id)) for id in ids}
        assert not (await verify_backup(kept)).problems
    assert await moved.head(SessionKey("sound"))


@pytest.mark.parametrize("how", ["forget", "delete"])
async def test_a_circle_is_removed_and_holds_up_nobody_else(
    circle: tuple[MemoryStore, list[str]], how: str
) -> None:
    store, ids = circle
    with anyio.fail_after(20):
        async with perdure.connect(store, shutdown=QUIET) as sessions:
            assert (await sessions.forget(owner="ada")).sessions == (SessionKey("sound"),)
            for id in ids:
                await getattr(sessions, how)(id)
            assert [info.key for info in await sessions.list()] == []
            async with sessions.open(ids[0]) as session:  # the id is free
                session.append(Message.user("anew"))
            assert len(await sessions.list()) == 1


async def test_a_fork_of_a_fork_is_no_circle() -> None:
    store = MemoryStore()
    async with perdure.connect(store, shutdown=QUIET) as sessions:
        for parent, id in ((None, "a"), ("a", "b"), ("b", "c"), ("c", "d")):
            if parent is not None:
                await sessions.fork(parent, id)
            async with sessions.open(id) as session:
                session.append(Message.user(id))
        await sessions.fork("d", "early", at=3)
        view = await sessions.load("d")
        assert view is not None
        said = [item.value.content for item in await view.history()]
        assert said == ["a", "b", "c", "d"]
        await sessions.delete("a")
        view = await sessions.load("d")
        assert view is not None
        assert len(await view.history()) == 4
