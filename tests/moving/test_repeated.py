"""Sessions that are moved more than once, or piecemeal, lose nothing on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Message
from perdure.errors import StoreError, StoreUnavailableError
from perdure.model.keys import SessionKey
from perdure.moving import migrate, read_bundle, write_bundle
from perdure.stores.memory import MemoryBacking, MemoryStore

A, P = SessionKey("a"), SessionKey("p")


class Unfolded(MemoryStore):
    """A store that no fold gets into: as after kills."""

    async def write_documents(self, *_: Any) -> None:
        raise StoreUnavailableError("full")


class Held(MemoryStore):
    """A store in which somebody holds one session."""

    held: SessionKey | None = None

    async def acquire(self, key: SessionKey, *, after: int) -> Any:
        if key == self.held:
            raise StoreError("held")
        return await super().acquire(key, after=after)


async def opened(*stores: MemoryStore) -> None:
    for store in stores:
        await store.open()


async def says(store: MemoryStore, id: str, *texts: str) -> None:
    async with perdure.connect(store) as sessions, sessions.open(id) as session:
        for text in texts:
            session.append(Message.user(text))


async def said(store: MemoryStore, id: str) -> tuple[list[str], list[str]]:
    """Return a session's context and its history."""
    async with perdure.connect(store) as sessions:
        view = await sessions.load(id)
        assert view is not None
        items = await view.history(limit=1000)
        told = [item.value.text for item in items if isinstance(item.value, Message)]
        return [message.text for message in view.context()], told


async def forked(store: MemoryStore) -> None:
    await says(store, "p", "one")
    async with perdure.connect(store) as sessions:
        await sessions.fork("p", "c")
    await says(store, "c", "two")


async def often_opened(store: MemoryStore) -> None:
    await says(store, "a", "first")
    for _ in range(20):
        await says(store, "a")
    await says(store, "a", "second")
    await store.open()


async def test_a_session_that_was_opened_often_comes_in_whole(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    await often_opened(source)
    await write_bundle(source, A, tmp_path / "a")
    await target.open()
    await read_bundle(target, tmp_path / "a")
    assert await said(target, "a") == (["first", "second"], ["first", "second"])


async def test_a_session_that_was_opened_often_is_migrated() -> None:
    source, target = MemoryStore(), MemoryStore()
    await often_opened(source)
    await target.open()
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "a") == (["first", "second"], ["first", "second"])


@pytest.mark.parametrize("folded", [True, False])
async def test_a_fork_does_not_come_before_what_it_goes_on_behind(folded: bool) -> None:
    backing = MemoryBacking()
    await forked(MemoryStore(backing=backing) if folded else Unfolded(backing=backing))
    source, target = Held(backing=backing), MemoryStore()
    await opened(source, target)
    source.held = P
    first = await migrate(source, target)
    assert set(first.failed) == {"p", "c"}
    assert "bring that session first" in first.failed["c"]
    source.held = None
    second = await migrate(source, target)
    assert (second.failed, second.copied) == ({}, 2)
    assert await said(target, "c") == (["one", "two"], ["one", "two"])


async def test_a_bundle_of_a_fork_does_not_come_alone(tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    await forked(source)
    await opened(source, target)
    await write_bundle(source, SessionKey("c"), tmp_path / "c")
    with pytest.raises(StoreError, match="goes on behind record 2 of p"):
        await read_bundle(target, tmp_path / "c")
    assert await target.sessions() == []
    await write_bundle(source, P, tmp_path / "p")
    await read_bundle(target, tmp_path / "p")
    await read_bundle(target, tmp_path / "c")
    assert await said(target, "c") == (["one", "two"], ["one", "two"])


async def test_a_fork_finds_its_parent_that_came_again() -> None:
    source, target = Unfolded(), MemoryStore()
    await forked(source)
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    await says(source, "p", "three")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    assert await said(target, "p") == (["one", "three"], ["one", "three"])
    assert await said(target, "c") == (["one", "two"], ["one", "two"])


async def test_what_was_passed_on_waits_behind_a_session_that_came_again() -> None:
    source, target = Unfolded(), MemoryStore()
    await says(source, "p", "one")
    async with perdure.connect(source) as sessions:
        await sessions.post("p", Message.user("posted"))
    await opened(source, target)
    assert (await migrate(source, target)).posted == 1
    await says(source, "p", "two")
    await opened(source, target)
    assert (await migrate(source, target)).failed == {}
    await says(target, "p")  # opened: it takes what waits
    assert await said(target, "p") == (["one", "two", "posted"], ["one", "two", "posted"])


async def test_a_bundle_holds_all_records_that_its_documents_were_made_of(tmp_path: Path) -> None:
    backing = MemoryBacking()
    await says(MemoryStore(backing=backing), "a", "one")

    class Beside(MemoryStore):
        """A store in which somebody goes on while it is read."""

        async def read_documents(self, key: SessionKey, names: Any = None) -> Any:
            await says(MemoryStore(backing=backing), "a", "more")
            return await super().read_documents(key, names)

    source, target = Beside(backing=backing), MemoryStore()
    await opened(source, target)
    await write_bundle(source, A, tmp_path / "a")
    await read_bundle(target, tmp_path / "a")
    context, history = await said(target, "a")
    assert context == history
