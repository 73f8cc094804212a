"""Taking a lease from somebody who holds it: asking, waiting, and who comes first."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from perdure import lease as module
from perdure.errors import LeaseHeldError, SessionError, StoreUnavailableError
from perdure.lease import LeaseOptions, OnHeld, OwnerWatch, acquire_lease
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Beginning, Draft, Held, LeaseState, Taken, Terms
from perdure.stores.memory import MemoryBacking, MemoryStore

pytestmark = pytest.mark.anyio

KEY = SessionKey("agent")
LONG = 60.0


@pytest.fixture
def backing() -> MemoryBacking:
    return MemoryBacking()


async def store_of(backing: MemoryBacking, owner: str) -> MemoryStore:
    store = MemoryStore(backing=backing, owner=owner)
    await store.open()
    return store


async def get(
    store: MemoryStore,
    on_held: OnHeld = "handover",
    *,
    ttl: float = LONG,
    wait: float = LONG,
    given: int = 0,
    clock: Callable[[], float] = anyio.current_time,
) -> Taken:
    watch = OwnerWatch(LeaseOptions(heartbeat=0.9 * ttl, ttl=ttl), clock)

    inner = store.acquire

    async def acquire(key: SessionKey, terms: Terms) -> Held | Taken:
        watch.renewed()  # as the taker's manager does
        return await inner(key, terms)

    store.acquire = acquire  # type: ignore[method-assign]
    terms = Terms(me=store.owner, given=given)
    return await acquire_lease(store, KEY, terms, watch=watch, on_held=on_held, wait=wait)


async def test_a_holder_that_is_asked_hands_over(backing: MemoryBacking) -> None:
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    grant = await get(one)
    taken: list[Taken] = []

    async def ask() -> None:
        taken.append(await get(two))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not (asked := await one.heartbeat()).handovers:
                await one.wait_for_notification(5)
            assert asked.handovers == (KEY,)
            assert not taken
            await one.release(KEY, grant.epoch)
    assert taken[0].epoch == grant.epoch + 1


async def test_a_letter_that_was_lost_is_written_again(
    backing: MemoryBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN", 0.05)
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    grant = await get(one)
    heard: list[SessionKey] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get, two)
            while len(heard) < 2:  # the first is heard, and forgotten
                heard += (await one.heartbeat()).handovers
                await one.wait_for_notification(0.02)
            await one.release(KEY, grant.epoch)
    assert heard == [KEY, KEY]
    holder = await two.holder(KEY)
    assert holder is not None
    assert (holder.owner, holder.epoch) == (two.owner, grant.epoch + 1)


async def test_raise_gives_up_at_once_and_asks_nobody(backing: MemoryBacking) -> None:
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    await get(one)
    with pytest.raises(LeaseHeldError, match=r"owner one .*on_held=\"handover\""):
        await get(two, "raise")
    assert (await one.heartbeat()).handovers == ()


async def test_steal_waits_for_the_expiry_and_asks_nobody(backing: MemoryBacking) -> None:
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    grant = await get(one)
    taken = await get(two, "steal", ttl=0.2)
    assert taken.epoch == grant.epoch + 1
    assert (await one.heartbeat()).handovers == ()


@pytest.mark.parametrize("on_held", ["handover", "steal"])
async def test_a_holder_that_beats_and_keeps_it_is_not_robbed(
    backing: MemoryBacking, on_held: OnHeld
) -> None:
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    await get(one)
    beats = 0
    async with anyio.create_task_group() as tasks:

        async def beat() -> None:
            nonlocal beats
            while True:
                await one.heartbeat()
                beats += 1
                await anyio.sleep(0.002)

        tasks.start_soon(beat)
        with pytest.raises(LeaseHeldError, match=r"load\(\)"):  # its time is the holder's beats
            await get(two, on_held, ttl=20, wait=50, clock=lambda: float(beats))
        tasks.cancel_scope.cancel()


async def test_who_was_asked_lets_the_one_who_asked_go_first(
    backing: MemoryBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COURTESY", LONG)
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    grant = await get(one)
    await one.release(KEY, grant.epoch)
    back: list[Taken] = []

    async def want_back() -> None:
        back.append(await get(one, given=grant.epoch))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(want_back)
            await anyio.sleep(0.1)  # time enough to snatch it
            assert not back
            theirs = await get(two)
            await two.release(KEY, theirs.epoch)
    assert (theirs.epoch, back[0].epoch) == (grant.epoch + 1, grant.epoch + 2)


async def test_courtesy_ends_when_nobody_comes(
    backing: MemoryBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COURTESY", 0.05)
    one = await store_of(backing, "one")
    grant = await get(one)
    await one.release(KEY, grant.epoch)
    assert (await get(one, given=grant.epoch)).epoch == grant.epoch + 1


async def test_of_many_who_wait_each_has_its_turn(backing: MemoryBacking) -> None:
    """Nobody starves: each of the workers gets the session each of its times."""
    done: list[str] = []
    names = [f"worker {place}" for place in range(4)]
    at_work = set(names)

    async def work(name: str) -> None:
        store = await store_of(backing, name)
        given = 0
        for _ in range(10):
            grant = await get(store, given=given)
            done.append(name)
            while not (await store.heartbeat()).handovers and len(at_work) > 1:
                await store.wait_for_notification(0.05)
            await store.release(KEY, grant.epoch)
            given = grant.epoch
        at_work.discard(name)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(work, name)
    assert sorted(done) == sorted(names * 10)
    switches = sum(a != b for a, b in zip(done, done[1:], strict=False))
    assert switches >= 30  # it goes round; nobody keeps it while others wait


async def test_who_is_always_too_late_gives_up_in_time(
    backing: MemoryBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that says both "nobody has it" and "somebody was faster" is not asked for ever."""
    monkeypatch.setattr(module, "AGAIN", 0.0)
    store = await store_of(backing, "one")
    tries: list[int] = []

    async def too_late(_: SessionKey, terms: Terms) -> Held:
        holder = LeaseState(epoch=7, owner="other", released=True)
        assert terms.allows(holder)
        tries.append(holder.epoch)
        return Held(holder)

    monkeypatch.setattr(store, "acquire", too_late)
    begun = anyio.current_time()
    with anyio.fail_after(60), pytest.raises(LeaseHeldError, match="held by owner other"):
        await get(store, wait=20, clock=lambda: float(len(tries)))  # a second each
    assert len(tries) == 20
    assert anyio.current_time() - begun > 0.5  # with a pause between two tries


@pytest.mark.parametrize("is_released", [False, True])
async def test_a_copy_waits_for_no_session_in_its_place(
    backing: MemoryBacking, is_released: bool
) -> None:
    one, two = await store_of(backing, "one"), await store_of(backing, "two")
    grant = await get(one)
    if is_released:
        await one.release(KEY, grant.epoch)
    draft = Draft(source=SessionKey("source"), generation=1, up_to=1, purpose="fork")
    terms = Terms(me="two", beginning=Beginning(draft=draft))
    watch = OwnerWatch(LeaseOptions(), anyio.current_time)
    with pytest.raises(LeaseHeldError, match="choose another id, or delete it first"):
        await acquire_lease(two, KEY, terms, watch=watch, on_held="steal", wait=0)
    assert (await one.heartbeat()).handovers == ()


async def test_a_new_session_whose_answer_was_lost_is_taken_again(backing: MemoryBacking) -> None:
    store = await store_of(backing, "one")
    inner, lost = store.acquire, list[Taken]()

    async def acquire(key: SessionKey, terms: Terms) -> Held | Taken:
        answer = await inner(key, terms)
        if isinstance(answer, Taken) and not lost:
            lost.append(answer)
            raise StoreUnavailableError("the answer was lost")
        return answer

    store.acquire = acquire  # type: ignore[method-assign]
    watch = OwnerWatch(LeaseOptions(), anyio.current_time)
    terms = Terms(me="one", new=True)
    taken = await acquire_lease(store, KEY, terms, watch=watch, on_held="raise", wait=0)
    assert (lost[0].epoch, taken.epoch) == (1, 2)
    with pytest.raises(SessionError, match="exists"):
        await acquire_lease(store, KEY, terms, watch=watch, on_held="raise", wait=0)


async def test_a_store_that_fails_once_makes_no_new_session_of_an_old_one(
    backing: MemoryBacking,
) -> None:
    store = await store_of(backing, "one")
    grant = await get(store)
    entry = Entry(MESSAGE, b'{"role":"user"}', end=True)
    await store.append_many([Batch(KEY, grant.epoch, grant.head + 1, (entry,))])
    await store.release(KEY, grant.epoch)
    inner, failed = store.acquire, list[Terms]()

    async def acquire(key: SessionKey, terms: Terms) -> Held | Taken:
        if not failed:
            failed.append(terms)
            raise StoreUnavailableError("not now")
        return await inner(key, terms)

    store.acquire = acquire  # type: ignore[method-assign]
    watch = OwnerWatch(LeaseOptions(), anyio.current_time)
    terms = Terms(me="one", new=True)
    with pytest.raises(SessionError, match="exists"):
        await acquire_lease(store, KEY, terms, watch=watch, on_held="raise", wait=0)
    holder = await store.holder(KEY)
    assert holder is not None
    assert holder.released
