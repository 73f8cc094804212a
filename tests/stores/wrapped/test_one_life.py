"""An encrypted session that is deleted, or begins again, amid a read: gone or new, and never damaged."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any

import anyio.lowlevel
import pytest

from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH
from perdure.store import Documents, Held, LogChunk, Status, Store, Taken, Terms
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryStore
from perdure.stores.wrapped import EncryptedStore
from perdure.testing.conformance._kit import (
    KEY,
    append,
    append_ok,
    group,
    manifest_of,
    read,
    take,
    texts_of,
)

MASTER = "5a" * 32


class Overtaken(DelegatingStore):
    """Something happens to the session once it was read, before anything else is."""

    def __init__(self, inner: Store, happens: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._happens: Callable[[], Awaitable[None]] | None = happens

    async def _happened(self) -> None:
        happens, self._happens = self._happens, None
        if happens is not None:
            await happens()

    async def read_documents(self, key: Any, names: Collection[str] | None = None) -> Documents:
        have = await self.inner.read_documents(key, names)
        await self._happened()
        return have

    async def read_log(self, *args: Any, **options: Any) -> AsyncGenerator[LogChunk, None]:
        async with aclosing(self.inner.read_log(*args, **options)) as log:
            async for chunk in log:
                await self._happened()
                yield chunk

    def __getattr__(self, name: str) -> Any:
        if name == "read_for_restore":  # what is read in one step cannot be overtaken
            raise AttributeError(name)
        return super().__getattr__(name)


async def begin(store: Store, text: str) -> None:
    grant = await take(store)
    head = await append_ok(store, grant, grant.head + 1, *group(text))
    documents = {"state/a.json": text.encode()}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))


async def delete(store: Store) -> None:
    grant = await take(store)
    await store.delete(KEY, grant.epoch)


@pytest.fixture
async def inner() -> MemoryStore:
    store = MemoryStore()
    await begin(EncryptedStore(store, MASTER), "first")
    return store


async def test_what_is_deleted_while_it_is_read_is_gone(inner: MemoryStore) -> None:
    gone = Overtaken(inner, lambda: delete(EncryptedStore(inner, MASTER)))
    assert await read(EncryptedStore(gone, MASTER)) == []
    again = MemoryStore()
    await begin(EncryptedStore(again, MASTER), "first")
    gone = Overtaken(again, lambda: delete(EncryptedStore(again, MASTER)))
    have = await EncryptedStore(gone, MASTER).read_documents(KEY)
    assert (have.manifest, have.found, have.damaged) == (None, {}, ())


async def test_what_begins_again_while_it_is_read_is_the_new_one(inner: MemoryStore) -> None:
    async def renew() -> None:
        await delete(EncryptedStore(inner, MASTER))
        await begin(EncryptedStore(inner, MASTER), "second")

    assert texts_of(await read(EncryptedStore(Overtaken(inner, renew), MASTER))) == ["second"]
    have = await EncryptedStore(Overtaken(inner, renew), MASTER).read_documents(KEY)
    assert have.found["state/a.json"].data == b"second"
    assert not have.damaged


async def test_a_session_that_is_taken_over_before_it_has_its_key_is_held_by_others() -> None:
    inner = MemoryStore()

    class Raced(DelegatingStore):
        async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
            taken = await self.inner.acquire(key, terms)
            if key == KEY:  # the tenant has its key by then
                await begin(EncryptedStore(inner, MASTER), "theirs")
            return taken

    store = EncryptedStore(Raced(inner), MASTER)
    held = await store.acquire(KEY, Terms(me=store.owner))
    assert isinstance(held, Held)
    assert held.holder is not None
    assert held.holder.epoch == 2
    assert texts_of(await read(store)) == ["theirs"]


async def test_whoever_is_cancelled_as_others_take_the_session_over_is_cancelled() -> None:
    inner, scope = MemoryStore(), anyio.CancelScope()

    class Raced(DelegatingStore):
        async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
            taken = await self.inner.acquire(key, terms)
            if key == KEY:
                await begin(EncryptedStore(inner, MASTER), "theirs")
                scope.cancel()
            return taken

        async def write_documents(self, *args: Any) -> None:
            await anyio.lowlevel.checkpoint()
            await self.inner.write_documents(*args)

    store = EncryptedStore(Raced(inner), MASTER)
    with scope:
        await store.acquire(KEY, Terms(me=store.owner))
    assert scope.cancelled_caught
    assert texts_of(await read(EncryptedStore(inner, MASTER))) == ["theirs"]


async def outlived(inner: MemoryStore) -> tuple[EncryptedStore, EncryptedStore]:
    """Return a store that has read the first life, and one that has ended it."""
    twin, other = EncryptedStore(inner, MASTER), EncryptedStore(inner, MASTER)
    assert texts_of(await read(twin)) == ["first"]
    await delete(other)
    return twin, other


async def test_a_reader_of_the_life_before_finds_the_new_one_whose_last_record_is_an_epoch(
    inner: MemoryStore,
) -> None:
    twin, other = await outlived(inner)
    grant = await take(other)
    await append_ok(other, grant, grant.head + 1, *group("second", "third"))
    await take(other)
    newest = await read(twin, reverse=True, limit=1)
    assert [record.kind for record in newest] == [EPOCH]
    assert texts_of(await read(twin)) == ["second", "third"]


async def test_a_reader_of_the_life_before_finds_the_documents_of_the_new_one(
    inner: MemoryStore,
) -> None:
    twin, other = await outlived(inner)
    await begin(other, "second")
    have = await twin.read_documents(KEY, ["state/a.json"])
    assert {name: one.data for name, one in have.found.items()} == {"state/a.json": b"second"}
    assert not have.damaged


@pytest.mark.parametrize("later", ["deleted", "new", "lost"])
async def test_a_holder_of_the_life_before_is_told_that_it_has_lost_the_session(
    inner: MemoryStore, later: str
) -> None:
    place = DelegatingStore(inner)
    late, other = EncryptedStore(place, MASTER), EncryptedStore(place, MASTER)
    grant = await take(late)
    if later == "lost":  # the store was restarted without its data
        place.inner = MemoryStore()
    else:
        await delete(other)
    if later == "new":
        await begin(other, "second")
    outcome = await append(late, grant, grant.head + 1, *group("late"))
    assert outcome.status is Status.CONFLICT
    assert texts_of(await read(EncryptedStore(place, MASTER))) == ["second"] * (later == "new")
