"""Cancellation: a cancelled call has its complete effect, or none."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from perdure.errors import LeaseHeldError
from perdure.store import Document, HeldLease, Store
from perdure.testing.conformance._kit import (
    KEY,
    Suite,
    append_ok,
    entries,
    group,
    manifest_of,
    name_of,
    read,
    take,
)

_STEPS = pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 40])


class CancellationConformance(Suite):
    """Each call is cancelled after a number of scheduler steps, then the store is used on."""

    @_STEPS
    async def test_a_cancelled_append_is_whole_or_nothing(self, store: Store, steps: int) -> None:
        grant = await take(store)
        await append_ok(store, grant, 2, *group("before"))
        sent = group("a", "b", "c")
        await cancelled_after(steps, lambda: append_ok(store, grant, 3, *sent))
        assert len(await read(store)) in (2, 5)
        # The sender cannot know: it sends again, and that is safe.
        await append_ok(store, grant, 3, *sent)
        await append_ok(store, grant, 6, *group("after"))
        assert tuple(entries(await read(store))) == group("before") + sent + group("after")

    @_STEPS
    async def test_a_cancelled_acquire_leaves_a_session_to_acquire(
        self, store: Store, steps: int
    ) -> None:
        first = await take(store)
        await append_ok(store, first, 2, *group("before"))
        await cancelled_after(steps, lambda: take(store))
        grant = await take_in_the_end(store)
        assert grant.epoch in (2, 3)
        await append_ok(store, grant, grant.head + 1, *group("after"))
        records = await read(store)
        assert tuple(entries(records)) == group("before") + group("after")
        assert [record.seq for record in records] == list(range(1, len(records) + 1))

    @_STEPS
    async def test_a_cancelled_fold_leaves_the_old_or_the_new(
        self, store: Store, steps: int
    ) -> None:
        grant = await take(store)
        old = {"session.json": b"old", "memory.json": b"old"}
        await store.write_documents(KEY, old, manifest_of(grant, 1, old))
        head = await append_ok(store, grant, 2, *group("a"))
        new = {"session.json": b"new", "memory.json": b"new"}
        manifest = manifest_of(grant, head, new)
        await cancelled_after(steps, lambda: store.write_documents(KEY, new, manifest))
        got = await store.read_documents(KEY)
        for document in got.found.values():
            assert document in (Document(b"old", 1), Document(b"new", head))
        assert not got.damaged
        await store.write_documents(KEY, new, manifest)
        got = await store.read_documents(KEY)
        assert got.found == {name: Document(b"new", head) for name in new}

    @_STEPS
    async def test_a_cancelled_put_is_whole_or_nothing(self, store: Store, steps: int) -> None:
        blobs = {name_of(data): data for data in (b"a" * 9999, b"b")}
        await cancelled_after(steps, lambda: store.put_blobs("", blobs))
        for name, data in blobs.items():
            assert await store.get_blob("", name) in (None, data)
        await store.put_blobs("", blobs)
        for name, data in blobs.items():
            assert await store.get_blob("", name) == data

    @_STEPS
    async def test_a_cancelled_read_leaves_nothing_behind(self, store: Store, steps: int) -> None:
        grant = await take(store)
        await append_ok(store, grant, 2, *[entry for n in range(400) for entry in group(str(n))])
        await cancelled_after(steps, lambda: read(store))
        assert len(await read(store)) == 401


async def cancelled_after(steps: int, call: Callable[[], Awaitable[object]]) -> None:
    """Run a call, and cancel it after some steps of the scheduler if it still runs then."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await call()

        tasks.start_soon(run)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def take_in_the_end(store: Store) -> HeldLease:
    """Acquire a session whose abandoned acquire may win against ours, once."""
    try:
        return await take(store)
    except LeaseHeldError:
        return await take(store)
