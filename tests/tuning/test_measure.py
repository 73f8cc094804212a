"""What a store can take is measured where it is, and nothing is left there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import perdure
from perdure.errors import StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.store import Batch, Outcome, SessionQuery, Status, Store, take_after
from perdure.stores.delegate import DelegatingStore
from perdure.tuning import measure
from perdure.tuning.measure import TENANT


class Counted(DelegatingStore):
    """Counts the calls, and lets the store fail from one on."""

    def __init__(self, inner: Store, *, fails_from: int | None = None) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []
        self._fails_from = fails_from

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        self.sizes.append(len(batches))
        if self._fails_from is not None and len(self.sizes) > self._fails_from:
            return [Outcome(Status.TRANSIENT, StoreUnavailableError("the disk is full"))]
        return await self.inner.append_many(batches)


async def left_in(store: Store) -> list[SessionKey]:
    return [info.key for info in await store.sessions(SessionQuery(tenant=TENANT))]


async def test_batches_are_as_large_as_the_store_takes_them(tmp_path: Path) -> None:
    store = Counted(perdure.store_for(f"sqlite:///{tmp_path / 'k' / 'x.db'}"))
    await store.open()
    try:
        await measure(store, seconds=0.0, levels=(1, 200))
    finally:
        await store.aclose()
    most = store.capabilities.batch_max
    assert set(store.sizes) == {1, most, 200 % most}


async def test_what_a_killed_run_left_is_deleted_first(tmp_path: Path) -> None:
    store = perdure.store_for(tmp_path / "store")
    await store.open()
    grant = await take_after(store, SessionKey("dead-001", tenant=TENANT), after=0)
    await store.release(grant.key, grant.epoch)
    held = await take_after(store, SessionKey("alive-001", tenant=TENANT), after=0)
    await measure(store, seconds=0.0, levels=(1,))
    assert await left_in(store) == [held.key]
    await store.aclose()


async def test_a_store_that_fails_is_told_and_left_as_it_was(tmp_path: Path) -> None:
    store = Counted(perdure.store_for(tmp_path / "store"), fails_from=2)
    await store.open()
    with pytest.raises(StoreUnavailableError, match="could not be measured: the disk is full"):
        await measure(store, seconds=0.0, levels=(1,))
    assert await left_in(store) == []
    await store.aclose()
