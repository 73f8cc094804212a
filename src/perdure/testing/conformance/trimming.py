"""Trimming: the oldest records go when their holder says so, and nothing else changes."""
# ruff: noqa: D102

from __future__ import annotations

import pytest

from perdure.errors import LeaseLostError
from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.store import Status, Store
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    Suite,
    append,
    append_ok,
    entries,
    group,
    read,
    take,
)


class TrimConformance(Suite):
    """More may be kept than was asked for, never less; what is kept has no gap."""

    async def test_what_is_kept_is_whole(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        before = await several_epochs(store)
        for below in (1, 2, 7, 8, len(before) // 2, len(before)):
            assert await store.trim(KEY, 6, below) >= 0
            for witness in (store, other):
                left = await read(witness)
                assert left == before[-len(left) :]
                assert left[0].seq <= below
                assert await witness.head(KEY) == len(before)
                assert await read(witness, reverse=True) == left[::-1]
                assert await read(witness, after=left[-1].seq - 1) == left[-1:]
                assert await read(witness, before=below) == [r for r in left if r.seq < below]

    async def test_the_log_goes_on_behind_a_trim(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        head = len(await several_epochs(store))
        await store.trim(KEY, 6, head)
        await append_ok(store, await take(store), head + 2, *group("after", "it"))
        grant = await take(other)
        assert (grant.head, grant.created) == (head + 4, False)
        assert await other.trim(KEY, grant.epoch, head + 2) >= 0
        await append_ok(other, grant, head + 5, *group("further"))
        assert tuple(entries(await read(other)))[-3:] == group("after", "it") + group("further")

    async def test_a_resend_behind_a_trim_is_known(self, store: Store) -> None:
        grant = await take(store)
        await append_ok(store, grant, 2, *group("old"))
        await append_ok(store, grant, 3, *group("new"))
        await store.trim(KEY, grant.epoch, 3)
        await append_ok(store, grant, 3, *group("new"))
        outcome = await append(store, grant, 3, *group("another"))
        assert outcome.status is Status.PERMANENT
        assert tuple(entries(await read(store)))[-1:] == group("new")

    async def test_trimming_beyond_the_head_keeps_the_head(self, open_store: OpenStore) -> None:
        store = await open_store("one")
        grant = await take(store)
        await append_ok(store, grant, 2, *group("a", "b"))
        await store.trim(KEY, grant.epoch, 99)
        assert await store.head(KEY) == 3
        await append_ok(store, grant, 4, *group("c"))
        other = await open_store("other")
        assert await other.head(KEY) == 4
        assert tuple(entries(await read(other)))[-1:] == group("c")
        assert (await take(other)).head == 5

    async def test_only_the_holder_trims(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        old = await take(store)
        await append_ok(store, old, 2, *group("kept"))
        await take(other)
        with pytest.raises(LeaseLostError):
            await store.trim(KEY, old.epoch, 3)
        with pytest.raises(LeaseLostError):
            await store.trim(SessionKey("never was"), 1, 3)
        assert tuple(entries(await read(other))) == group("kept")

    async def test_a_trimmed_session_is_deleted_and_begins_anew(self, store: Store) -> None:
        head = len(await several_epochs(store))
        await store.trim(KEY, 6, head)
        await store.delete(KEY, 6)
        assert await read(store) == []
        grant = await take(store)
        assert (grant.head, grant.created) == (1, True)
        await append_ok(store, grant, 2, *group("new life"))
        assert tuple(entries(await read(store))) == group("new life")


async def several_epochs(store: Store) -> list[Record]:
    """Write a log under six epochs, the last of them ours; return it."""
    for _ in range(6):
        grant = await take(store)
        head = await append_ok(store, grant, grant.head + 1, *group("a", "b"))
        await append_ok(store, grant, head + 1, *group("c"))
    return await read(store)
