"""All sessions of a store come over as they are, also after a kill in the middle."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    PerdureError,
    StoreError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.store import Held, Taken, Terms, take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from perdure.transfer import migrate, read_bundle, write_bundle
from tests.transfer.sessions import fill


async def bundles(store: Any, keys: list[SessionKey], folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    found = {}
    for n, key in enumerate(keys):
        path = folder / f"{n}.jsonl"
        await write_bundle(store, key, path)
        found[str(key)] = path.read_bytes()
    return found


async def contents(store: Any, key: SessionKey) -> Any:
    async with perdure.connect(store) as sessions:
        view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
        assert view is not None
        history = await view.history(limit=1000)
        return [(item.seq, item.kind, item.value) for item in history], view.context()


async def test_every_session_is_the_same_afterwards(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    keys = await fill(first)
    backing = MemoryBacking()
    source, middle, target = (
        perdure.store_for(first),
        MemoryStore(backing=backing),
        perdure.store_for(second),
    )
    for store in (source, middle, target):
        await store.open()
    seen: list[int] = []
    done = await migrate(source, middle, progress=lambda one: seen.append(one.done))
    assert done.failed == {}
    assert (done.sessions, done.copied, done.there) == (len(keys), len(keys), 0)
    assert done.posted == 1
    assert sorted(seen) == list(range(1, len(keys) + 1))
    done = await migrate(middle, target)
    assert (done.failed, done.copied) == ({}, len(keys))
    before = await bundles(source, keys, tmp_path / "before")
    assert await bundles(target, keys, tmp_path / "after") == before
    for store in (source, middle, target):
        await store.aclose()
    for key in keys:
        assert await contents(first, key) == await contents(second, key)
    async with perdure.connect(second) as sessions, sessions.open("agent-0") as session:
        async with session.turn():
            assert "posted" in str(session.context())


async def test_a_second_run_copies_nothing(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    keys = await fill(source)
    await source.open()
    await target.open()
    await migrate(source, target)
    again = await migrate(source, target)
    assert (again.copied, again.there, again.failed) == (0, len(keys), {})


@pytest.mark.parametrize("nth", range(2, 60, 3))
async def test_it_goes_on_where_it_was_killed(nth: int, tmp_path: Path) -> None:
    source, backing = MemoryStore(), MemoryBacking()
    keys = await fill(source, many=3)
    await source.open()
    inner = MemoryStore(backing=backing)
    broken = FaultyStore(inner, nth=nth, how="crash")
    with pytest.raises(BaseExceptionGroup):
        await broken.open()
        await migrate(source, broken)
    await inner.aclose()  # its owner is dead
    target = MemoryStore(backing=backing)
    await target.open()
    done = await migrate(source, target, on_held="steal", wait=30)
    assert done.failed == {}
    assert done.copied + done.continued + done.there == len(keys)
    before = await bundles(source, keys, tmp_path / "before")
    assert await bundles(target, keys, tmp_path / "after") == before


async def test_another_session_of_the_same_name_is_left_alone() -> None:
    source, target = MemoryStore(), MemoryStore()
    for store, text in ((source, "one"), (target, "other")):
        async with perdure.connect(store) as sessions, sessions.open("same") as session:
            session.append(Message.user(text))
    await source.open()
    await target.open()
    done = await migrate(source, target)
    assert "another session same" in done.failed["same"]
    async with perdure.connect(target) as sessions:
        view = await sessions.load("same")
        assert view is not None
        assert [message.content for message in view.context()] == ["other"]


async def test_a_bundle_comes_in_under_another_name(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    await fill(source)
    await source.open()
    await target.open()
    path = tmp_path / "one.jsonl"
    await write_bundle(source, SessionKey("agent-1"), path)
    landed = await read_bundle(target, path, key=SessionKey("renamed"))
    assert landed.key == SessionKey("renamed")
    old = await contents(source, SessionKey("agent-1"))
    assert await contents(target, SessionKey("renamed")) == old
    async with perdure.connect(target) as sessions, sessions.open("renamed") as session:
        assert await session.memory.get("big") == "v" * 20_000
        assert await session.state.get("app") == {"n": 1}


async def test_a_bundle_does_not_replace_what_is_there(tmp_path: Path) -> None:
    store = MemoryStore()
    await fill(store)
    await store.open()
    path = tmp_path / "one.jsonl"
    await write_bundle(store, SessionKey("agent-1"), path)
    with pytest.raises(ConfigError, match="has a session agent-1"):
        await read_bundle(store, path)
    with pytest.raises(ConfigError, match="there already"):
        await write_bundle(store, SessionKey("agent-1"), path)


@pytest.mark.parametrize("damage", ["cut", "flip", "swap", "more", "newer", "empty"])
async def test_a_damaged_bundle_lands_nothing(damage: str, tmp_path: Path) -> None:
    store, target = MemoryStore(), MemoryStore()
    await fill(store)
    await store.open()
    await target.open()
    path = tmp_path / "one.jsonl"
    await write_bundle(store, SessionKey("agent-1"), path)
    lines = path.read_bytes().splitlines(keepends=True)
    match damage:
        case "cut":
            lines = lines[:-1]
        case "flip":
            lines[4] = lines[4].replace(b"question", b"guestion")
        case "swap":
            lines[3], lines[4] = lines[4], lines[3]
        case "more":
            lines.append(lines[4])
        case "newer":
            lines[0] = lines[0].replace(b'"perdure_bundle":1', b'"perdure_bundle":3')
        case "empty":
            lines = []
    path.write_bytes(b"".join(lines))
    error = UnsupportedVersionError if damage == "newer" else CorruptRecordError
    with pytest.raises(error, match=r"one\.jsonl"):
        await read_bundle(target, path)
    assert await target.sessions() == []


async def test_a_store_that_loses_what_it_was_given_is_noticed() -> None:
    source = MemoryStore()
    await fill(source)
    await source.open()

    class Forgetful(MemoryStore):
        async def read_log(self, key: SessionKey, **where: Any) -> Any:
            async with contextlib.aclosing(super().read_log(key, **where)) as log:
                async for chunk in log:
                    yield type(chunk)(chunk.records[:5])
                    break

    target = Forgetful()
    await target.open()
    done = await migrate(source, target)
    assert "is not the same" in done.failed["agent-2"]
    with pytest.raises(StoreError):
        raise StoreError(done.failed["agent-2"])


async def test_what_a_killed_run_had_on_its_way_is_cleared_when_it_arrives() -> None:
    source, backing = MemoryStore(), MemoryBacking()
    async with perdure.connect(source) as sessions, sessions.open("late") as session:
        session.append(Message.user("Hello"))
    arrived: list[int] = []

    class Overtaken(MemoryStore):
        """Its first acquire finds that a dead run's came in after all."""

        async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
            if not arrived:
                dead = MemoryStore(backing=backing)
                await dead.open()
                arrived.append((await take_after(dead, key, after=0)).epoch)
                await dead.aclose()
            return await super().acquire(key, terms)

    await source.open()
    target = Overtaken(backing=backing)
    await target.open()
    done = await migrate(source, target)
    assert (done.failed, done.copied) == ({}, 1)
    assert arrived == [1]


async def test_a_holder_that_began_in_the_source_began_in_the_copy(tmp_path: Path) -> None:
    """Else the retry of a cut turn takes back what its next holder appended."""
    key, backing = SessionKey("ada"), MemoryBacking()
    source, copy = MemoryStore(backing=backing), MemoryBacking()
    await source.open()
    with contextlib.suppress(PerdureError):
        async with perdure.connect(MemoryStore(backing=backing)) as sessions:
            async with sessions.open("ada") as session, session.turn("t"):
                session.append(Message.user("cut"))
                await session.save()
                held = await source.holder(key)
                assert held is not None
                await source.release(key, (await take_after(source, key, after=held.epoch)).epoch)
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("of the next holder"))
    target = MemoryStore(backing=copy)
    await target.open()
    await write_bundle(source, key, tmp_path / "ada.jsonl")
    await read_bundle(target, tmp_path / "ada.jsonl")
    said = []
    for place in (backing, copy):
        async with perdure.connect(MemoryStore(backing=place)) as sessions:
            async with sessions.open("ada") as session:
                async with session.turn("t"):
                    session.append(Message.user("again"))
                said.append([message.content for message in session.context()])
    assert said[0] == said[1]
    assert "of the next holder" in said[1]
