from __future__ import annotations

import pytest

from perdure.errors import ConfigError, NotStorableError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Status, Taken, take_after
from perdure.stores.memory import MemoryStore
from perdure.testing.faulty import Faults, SwitchedStore

KEY = SessionKey("agent")


@pytest.fixture
async def store():
    store = SwitchedStore(MemoryStore())
    await store.open()
    yield store
    await store.aclose()


@pytest.fixture
async def grant(store):
    return await take_after(store, KEY, after=0)


def batch(grant: Taken) -> Batch:
    return Batch(KEY, grant.epoch, grant.head + 1, (Entry(MESSAGE, b"{}", end=True),))


async def test_a_store_that_is_down_answers_nothing_and_keeps_everything(store, grant):
    store.down()
    (outcome,) = await store.append_many([batch(grant)])
    assert outcome.status is Status.TRANSIENT
    for call in (store.head(KEY), store.holder(KEY), store.sessions(), store.open()):
        with pytest.raises(StoreUnavailableError):
            await call
    with pytest.raises(StoreUnavailableError):
        await anext(store.read_log(KEY))
    store.up()
    assert not store.is_down
    assert await store.head(KEY) == grant.head


async def test_a_store_that_is_down_can_be_closed(store, grant):
    store.down()
    await store.aclose()
    store.up()
    holder = await store.holder(KEY)
    assert holder is not None
    assert not holder.alive


async def test_fail_next_fails_so_many_calls_of_one_method(store, grant):
    store.fail_next("head", times=2)
    assert await store.holder(KEY) is not None
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await store.head(KEY)
    assert await store.head(KEY) == grant.head


async def test_fail_next_without_a_method_fails_the_next_call_of_any(store, grant):
    store.fail_next(None, how="permanent")
    with pytest.raises(NotStorableError):
        await store.sessions()
    assert await store.head(KEY) == grant.head


async def test_a_failure_may_have_had_its_effect(store, grant):
    store.fail_next(how="in_doubt_applied")
    (outcome,) = await store.append_many([batch(grant)])
    assert outcome.status is Status.IN_DOUBT
    assert await store.head(KEY) == grant.head + 1


async def test_planned_failures_come_in_their_order(store, grant):
    store.fail_next(how="permanent")
    store.fail_next(how="in_doubt_lost")
    found = [(await store.append_many([batch(grant)]))[0].status for _ in range(3)]
    assert found == [Status.PERMANENT, Status.IN_DOUBT, Status.OK]


async def test_up_forgets_the_failures_that_were_to_come(store, grant):
    store.fail_next("head", times=5)
    store.up()
    assert await store.head(KEY) == grant.head


async def test_stores_that_share_their_faults_go_down_together():
    faults = Faults()
    one, other = (SwitchedStore(MemoryStore(), faults=faults) for _ in range(2))
    one.down()
    assert other.is_down
    with pytest.raises(StoreUnavailableError):
        await other.open()


@pytest.mark.parametrize("method", ["append", "__init__", "capabilities"])
def test_a_method_that_no_store_has_is_refused(method):
    with pytest.raises(ConfigError, match="no such method"):
        SwitchedStore(MemoryStore()).fail_next(method)


@pytest.mark.parametrize("how", ["crash", "crash_applied"])
def test_a_crash_is_no_failure_of_a_store(how):
    with pytest.raises(ConfigError, match="reopen"):
        SwitchedStore(MemoryStore()).fail_next(how=how)


def test_a_plan_for_no_calls_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        SwitchedStore(MemoryStore()).fail_next(times=0)


def test_it_looks_like_the_store_inside():
    inner = MemoryStore(owner="me")
    store = SwitchedStore(inner)
    assert (store.owner, store.location) == ("me", inner.location)
    assert store.capabilities == inner.capabilities
