"""Leases: one holder at a time, epochs that only grow, handover and takeover."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, cast

import anyio
import msgspec
import pytest

from perdure.errors import LeaseHeldError, LeaseLostError, NotStorableError
from perdure.lease import LeaseOptions, OnHeld, OwnerWatch, acquire_lease
from perdure.records.keys import SessionKey
from perdure.store import (
    Beginning,
    Draft,
    HeartbeatRequests,
    PendingItem,
    Status,
    Store,
    Taken,
    Terms,
    take_after,
)
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    SessionWriter,
    Suite,
    append,
    group,
    held,
    hold,
    read,
    take,
    texts_of,
    together,
)


class LeaseConformance(Suite):
    """The store decides the race and gives the epoch; it never asks a clock."""

    async def test_a_session_that_nobody_ever_had_has_no_holder(self, store: Store) -> None:
        assert await store.holder(KEY) is None

    async def test_the_holder_is_known_to_everybody(self, store: Store, other: Store) -> None:
        await take(store)
        own, theirs = await held(store), await held(other)
        assert (own.epoch, own.owner) == (theirs.epoch, theirs.owner)
        assert not theirs.released
        assert not theirs.deleted
        assert theirs.alive is not False

    @pytest.mark.parametrize(
        "life",
        ["never", "held", "released", "deleted", "draft", "left", "own", "own draft"],
    )
    async def test_the_terms_decide_who_may_take_a_session(
        self, open_store: OpenStore, life: str
    ) -> None:
        """The store's own decision, where it has one, is that of ``Terms.allows``."""
        store, other = await open_store("one"), await open_store("other")
        draft = Draft(source=SessionKey("source"), generation=1, up_to=1, purpose="fork")
        copies = Beginning(draft=draft)
        wanted: list[dict[str, Any]] = [
            {},
            {"create": False},
            {"new": True},
            {"given": 1},
            {"given": 2},
            {"after": 1},
            {"after": 0},
            {"after": 9},
            {"silent": "known"},
            {"silent": "moved"},
            {"beginning": copies},
            {"beginning": copies, "after": 1},
        ]
        for place, each in enumerate(wanted):
            key = SessionKey(f"{life}-{place}")
            await _left(other if "own" in life else store, key, life, draft)
            holder = await other.holder(key)
            moved = {"known": 0, "moved": 1}.get(each.pop("silent", ""))
            if moved is not None and holder is not None:
                each["silent"] = {holder.listed or holder.owner: holder.beat + moved}
            terms = Terms(me=other.owner, **each)
            answer = await other.acquire(key, terms)
            assert isinstance(answer, Taken) == terms.allows(holder), (each, holder)
            if isinstance(answer, Taken):
                assert answer.epoch == 1 + (0 if holder is None else holder.epoch)
            else:
                assert answer.holder == holder
                assert await other.holder(key) == holder

    async def test_what_is_read_with_a_lease_is_what_is_there(
        self, store: Store, other: Store
    ) -> None:
        writer, both = await hold(store), frozenset({"a.json", "b.json"})
        await self._same(store, writer.grant, frozenset())
        for place, documents in enumerate([{"a.json": b"1"}, {"a.json": b"2", "b.json": b"{}"}]):
            await writer.add("folded", "too")
            await writer.fold(documents)
            if place:
                await writer.add("after")
                with suppress(NotStorableError):  # where there is no inbox
                    await other.enqueue(KEY, [PendingItem("op", "post", b"hello", 1.0)])
            await writer.release()
            for names in (frozenset[str](), both, None, frozenset({"a.json"})):
                answer = await store.acquire(KEY, Terms(me=store.owner, names=names))
                assert isinstance(answer, Taken)
                await self._same(store, answer, names)
                writer = SessionWriter(store, answer)

    async def _same(self, store: Store, taken: Taken, names: frozenset[str] | None) -> None:
        assert taken.head == await store.head(KEY)
        if (found := taken.found) is None:
            return
        assert found.documents == await store.read_documents(KEY, names)
        if found.records is not None:
            assert list(found.records) == await read(store, after=found.after)
            assert found.after <= (found.documents.log_after or 0)
        waiting = await store.receive(KEY, taken.epoch)
        assert found.may_have_items or not waiting

    async def test_a_race_has_exactly_one_winner(self, open_store: OpenStore) -> None:
        racers = [await open_store(f"racer-{n}") for n in range(4)]
        won: list[SessionWriter] = []

        async def race(racer: Store, after: int) -> None:
            with suppress(LeaseHeldError):
                won.append(SessionWriter(racer, await take_after(racer, KEY, after=after)))

        for round_ in range(6):
            await together(*[partial(race, racer, round_) for racer in racers])
            assert [writer.epoch for writer in won] == list(range(1, round_ + 2))
            await won[-1].add(f"round {round_}")
        assert len(await read(racers[0])) == 12

    async def test_an_owner_may_take_its_own_session_again(self, store: Store) -> None:
        first, second = await hold(store), await hold(store)
        assert (second.epoch, second.head, second.grant.created) == (2, 2, False)
        assert await first.send(3, "old") is Status.CONFLICT
        await second.add("new")

    async def test_a_release_is_seen(self, store: Store, other: Store) -> None:
        writer = await hold(store, "a")
        await writer.release()
        holder = await held(other)
        assert (holder.epoch, holder.released) == (writer.epoch, True)
        lease = await take_after(other, KEY, after=holder.epoch)
        assert (lease.epoch, lease.head) == (2, 3)
        assert not (await held(store)).released

    async def test_releasing_an_old_epoch_has_no_effect(self, store: Store, other: Store) -> None:
        old, new = await hold(store), await hold(other)
        await old.release()
        await store.release(SessionKey("never was"), 1)
        holder = await held(store)
        assert (holder.epoch, holder.released) == (new.epoch, False)
        await new.add("a")

    async def test_a_heartbeat_moves_the_beat_of_all_its_sessions(
        self, store: Store, other: Store
    ) -> None:
        keys = [KEY, SessionKey("second")]
        for key in keys:
            await take(store, key)
        before = [(await held(other, key)).beat for key in keys]
        assert _wanted(await store.heartbeat()) == HeartbeatRequests()
        for key, beat in zip(keys, before, strict=True):
            assert 0 != (await held(other, key)).beat != beat

    async def test_a_heartbeat_tells_of_those_of_others(self, store: Store, other: Store) -> None:
        await take(store)
        requests: list[Mapping[str, int]] = []
        for _ in range(9):  # a store that looks at others by a request of its own does not always
            holder = await held(other)
            beats = (await other.heartbeat()).beats
            if beats is not None:
                requests.append(beats)
                assert beats[holder.listed or holder.owner] == holder.beat
                await store.heartbeat()
        assert len({*map(str, requests)}) == len(requests)  # each time another counter

    async def test_an_owner_that_begins_anew_has_a_new_beat(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        await take(store)
        before = await held(other)
        await store.aclose()
        again = await open_store(store.owner)
        await take_after(again, KEY, after=1)
        after = await held(other)
        # Its owner id was given, and its death is unknown: only the counter shows it.
        if before.owner == after.owner and after.alive is not False:
            assert 0 != after.beat != before.beat

    async def test_a_handover_is_asked_for_at_the_holder(self, store: Store, other: Store) -> None:
        keys = [KEY, SessionKey("CON", "a/b", "Tenant ..")]
        for key in keys:
            await take(store, key)
        for key in [*keys, KEY]:
            await other.request_handover(key, await held(other, key))
        assert _wanted(await other.heartbeat()) == HeartbeatRequests()
        assert sorted((await store.heartbeat()).handovers) == sorted(keys)
        assert _wanted(await store.heartbeat()) == HeartbeatRequests()

    async def test_a_closed_owner_does_not_look_alive(self, store: Store, other: Store) -> None:
        await take(store)
        await store.aclose()
        holder = await held(other)
        assert holder.alive is not True
        assert not holder.released
        assert (await take_after(other, KEY, after=holder.epoch)).epoch == 2

    async def test_sessions_are_held_one_by_one(self, store: Store, other: Store) -> None:
        own = await hold(store, key=SessionKey("agent", "mine"))
        theirs = await hold(other, key=SessionKey("agent", "theirs"))
        await own.add("a")
        await theirs.add("b")

    # what an engine makes of it

    async def test_a_holder_is_asked_and_hands_over(self, store: Store, other: Store) -> None:
        writer = await hold(store, "a")
        lease: list[Taken] = []

        async def want() -> None:
            lease.append(await _acquire_lease(other, "handover"))

        async def give() -> None:
            while KEY not in (await store.heartbeat()).handovers:
                await store.wait_for_notification(0.05)
            assert not lease
            await writer.add("b")
            await writer.release()

        with anyio.fail_after(LONG):
            await together(want, give)
        assert (lease[0].epoch, lease[0].head) == (writer.epoch + 1, writer.head + 1)
        outcome = await append(store, writer.grant, writer.head + 1, *group("too late"))
        assert outcome.status is Status.CONFLICT
        assert isinstance(outcome.error, LeaseLostError)
        assert "open" in str(outcome.error)  # the cure
        assert texts_of(await read(other)) == ["a", "b"]

    async def test_a_session_that_is_held_is_refused(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        with pytest.raises(LeaseHeldError, match="on_held"):
            await _acquire_lease(other, "raise")
        await writer.add("a")
        await writer.release()
        assert (await _acquire_lease(other, "raise")).epoch == writer.epoch + 1

    async def test_a_holder_that_beats_is_not_robbed(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await store.heartbeat()
                beats += 1
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            with pytest.raises(LeaseHeldError):  # its time is the holder's beats: both may be slow
                await _acquire_lease(other, "steal", ttl=20, wait=25, clock=lambda: float(beats))
            tasks.cancel_scope.cancel()
        await writer.add("a")

    async def test_a_holder_that_hangs_is_replaced_and_told(
        self, store: Store, other: Store
    ) -> None:
        writer = await hold(store, "a")
        stolen = SessionWriter(
            other, await _acquire_lease(other, "steal", ttl=0.3)
        )  # without heartbeats
        assert stolen.epoch == writer.epoch + 1
        outcome = await append(store, writer.grant, writer.head + 1, *group("late"))
        assert outcome.status is Status.CONFLICT
        assert isinstance(outcome.error, LeaseLostError)
        await stolen.add("b")
        assert texts_of(await read(store)) == ["a", "b"]

    async def test_two_who_want_it_all_the_time_take_turns(self, open_store: OpenStore) -> None:
        stores = [await open_store("one"), await open_store("other")]
        rounds, done = 5, 0

        async def work(name: str, store: Store) -> None:
            nonlocal done
            given = 0
            for place in range(rounds):
                writer = SessionWriter(store, await _acquire_lease(store, "handover", given=given))
                await writer.add(f"{name}{place}")
                done += 1
                while KEY not in (await store.heartbeat()).handovers and done < 2 * rounds - 1:
                    await store.wait_for_notification(0.05)
                await writer.release()
                given = writer.epoch

        with anyio.fail_after(LONG):
            await together(partial(work, "a", stores[0]), partial(work, "b", stores[1]))
        texts = texts_of(await read(stores[0]))
        for name in "ab":  # each its own, once, in order
            mine = [text for text in texts if text[0] == name]
            assert mine == [f"{name}{place}" for place in range(rounds)]
        assert sum(a[0] != b[0] for a, b in pairwise(texts)) >= 2 * rounds - 3


LONG = 60.0


async def _acquire_lease(
    store: Store,
    on_held: OnHeld,
    *,
    ttl: float = LONG,
    wait: float = LONG,
    given: int = 0,
    clock: Callable[[], float] = anyio.current_time,
) -> Taken:
    watch = OwnerWatch(LeaseOptions(heartbeat=0.9 * ttl, ttl=ttl), clock)
    return await acquire_lease(
        cast("Store", _Attentive(store, watch)),
        KEY,
        Terms(me=store.owner, given=given),
        watch=watch,
        on_held=on_held,
        wait=wait,
    )


class _Attentive:
    """A store whose taker never misses a heartbeat of its own."""

    def __init__(self, store: Store, watch: OwnerWatch) -> None:
        self._store = store
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        self._watch.renewed()
        return getattr(self._store, name)


def _wanted(requests: HeartbeatRequests) -> HeartbeatRequests:
    """Return what is asked of an owner alone."""
    return msgspec.structs.replace(requests, beats=None)


async def _left(store: Store, key: SessionKey, life: str, draft: Draft) -> None:
    """Leave a session as another process may find it."""
    if life == "never":
        return
    grant = await take_after(
        store, key, after=0, draft=draft if "draft" in life or life == "left" else None
    )
    if life in {"released", "left"}:
        await store.release(key, grant.epoch)
    elif life == "deleted":
        await store.delete(key, grant.epoch)
