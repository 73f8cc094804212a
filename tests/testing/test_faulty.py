"""The faulty store fails where it is told to, how it is told to, and nowhere else."""

from __future__ import annotations

import anyio
import pytest

from perdure.errors import LeaseLostError, NotStorableError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Outcome, Status, take_after
from perdure.stores.memory import MemoryStore
from perdure.testing.faulty import Crash, FaultyStore, How

KEY = SessionKey("agent")


async def append(store: FaultyStore, first: int) -> Outcome:
    (outcome,) = await store.append_many([Batch(KEY, 1, first, (Entry(MESSAGE, b"1"),))])
    return outcome


async def read(store: FaultyStore) -> int:
    return sum([len(chunk.records) async for chunk in store.read_log(KEY)])


async def opened(**fault: object) -> FaultyStore:
    store = FaultyStore(MemoryStore(), **fault)
    await take_after(store, KEY, after=0)
    return store


@pytest.mark.parametrize(
    ("how", "status", "error", "head"),
    [
        ("transient", Status.TRANSIENT, StoreUnavailableError, 1),
        ("in_doubt_lost", Status.IN_DOUBT, StoreUnavailableError, 1),
        ("in_doubt_applied", Status.IN_DOUBT, StoreUnavailableError, 2),
        ("permanent", Status.PERMANENT, NotStorableError, 1),
        ("conflict", Status.CONFLICT, LeaseLostError, 1),
    ],
)
async def test_an_append_answers_with_the_status(
    how: How, status: Status, error: type[Exception], head: int
) -> None:
    store = await opened(fail_on="append_many", how=how)
    outcome = await append(store, 2)
    assert outcome.status is status
    assert isinstance(outcome.error, error)
    assert await store.head(KEY) == head
    assert (await append(store, 2)).status is Status.OK
    assert await store.head(KEY) == 2


@pytest.mark.parametrize(
    ("how", "error", "epoch"),
    [
        ("transient", StoreUnavailableError, 1),
        ("in_doubt_applied", StoreUnavailableError, 2),
        ("permanent", NotStorableError, 1),
        ("conflict", LeaseLostError, 1),
        ("crash", Crash, 1),
        ("crash_applied", Crash, 2),
    ],
)
async def test_another_method_raises(how: How, error: type[BaseException], epoch: int) -> None:
    store = await opened(fail_on="acquire", nth=2, how=how)
    with pytest.raises(error):
        await take_after(store, KEY, after=1)
    holder = await store.holder(KEY)
    assert holder is not None
    assert holder.epoch == epoch


async def test_only_the_nth_calls_fail() -> None:
    store = await opened(fail_on="append_many", nth=2, times=2)
    statuses = [(await append(store, 2)).status for _ in range(5)]
    ok, bad = Status.OK, Status.TRANSIENT
    assert statuses == [ok, bad, bad, ok, ok]
    assert store.injected == 2
    assert store.calls == {"acquire": 1, "append_many": 5}


async def test_it_fails_until_it_is_mended() -> None:
    store = await opened(fail_on="append_many", times=None)
    assert {(await append(store, 2)).status for _ in range(4)} == {Status.TRANSIENT}
    store.mend()
    assert (await append(store, 2)).status is Status.OK


async def test_without_a_method_the_kth_call_of_any_fails() -> None:
    async def run(nth: int) -> FaultyStore:
        store = FaultyStore(MemoryStore(), nth=nth, how="crash")
        try:
            await take_after(store, KEY, after=0)
            await append(store, 2)
            await store.head(KEY)
            await read(store)
        except Crash:
            pass
        return store

    totals = [
        (store.injected, store.calls.total()) for store in [await run(n) for n in range(1, 6)]
    ]
    assert totals == [(1, 1), (1, 2), (1, 3), (1, 4), (0, 4)]


async def test_a_read_fails_before_the_first_chunk_or_behind_the_last() -> None:
    store = await opened(fail_on="read_log", how="transient")
    chunks = store.read_log(KEY)
    with pytest.raises(StoreUnavailableError):
        await anext(chunks)
    assert await read(store) == 1
    store = await opened(fail_on="read_log", how="in_doubt_applied")
    chunks = store.read_log(KEY)
    assert len((await anext(chunks)).records) == 1
    with pytest.raises(StoreUnavailableError):
        await anext(chunks)


async def test_a_call_that_hangs_can_be_cancelled() -> None:
    store = await opened(fail_on="append_many", how="hang")
    with anyio.move_on_after(0) as scope:
        await append(store, 2)
    assert scope.cancelled_caught
    assert await store.head(KEY) == 1


async def test_faults_compose() -> None:
    inner = FaultyStore(MemoryStore(), fail_on="append_many", nth=1)
    store = FaultyStore(inner, fail_on="append_many", nth=2, how="conflict")
    await take_after(store, KEY, after=0)
    statuses = [(await append(store, 2)).status for _ in range(3)]
    assert statuses == [Status.TRANSIENT, Status.CONFLICT, Status.OK]


def test_a_misspelled_method_is_refused() -> None:
    with pytest.raises(ValueError, match="append_all"):
        FaultyStore(MemoryStore(), fail_on="append_all")
