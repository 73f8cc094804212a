"""Leases: one holder at a time, epochs that only grow, handover and takeover."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, cast

import anyio
import msgspec
import pytest

from perdure.errors import LeaseHeldError, LeaseLostError, NotStorableError
from perdure.lease import LeaseOptions, OnHeld, OwnerWatch, acquire_lease
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Record
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
    Suite,
    append,
    append_ok,
    group,
    manifest_of,
    read,
    take,
)


class LeaseConformance(Suite):
    """The store decides the race and gives the epoch; it never asks a clock."""

    async def test_a_session_that_nobody_ever_had_has_no_holder(self, store: Store) -> None:
        assert await store.holder(KEY) is None

    async def test_the_holder_is_known_to_everybody(self, store: Store, other: Store) -> None:
        await take(store)
        own_state, theirs = await store.holder(KEY), await other.holder(KEY)
        assert own_state is not None
        assert theirs is not None
        assert (own_state.epoch, own_state.owner) == (theirs.epoch, theirs.owner)
        assert not theirs.released
        assert not theirs.deleted
        assert theirs.alive is not False

    async def test_an_epoch_is_given_once(self, store: Store, other: Store) -> None:
        await take(store)
        for late in (store, other):
            with pytest.raises(LeaseHeldError):
                await take_after(late, KEY, after=0)
        assert (await take_after(other, KEY, after=1)).epoch == 2
        with pytest.raises(LeaseHeldError):
            await take_after(store, KEY, after=1)

    @pytest.mark.parametrize("life", ["never", "held", "released", "deleted", "draft", "left"])
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
            await _left(store, key, life, draft)
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
        grant = await take(store)
        names = frozenset({"a.json", "b.json"})
        await self._same(store, grant, frozenset())
        for place, documents in enumerate([{"a.json": b"1"}, {"a.json": b"2", "b.json": b"{}"}]):
            end = await append_ok(store, grant, grant.head + 1, *group("folded", "too"))
            await store.write_documents(KEY, documents, manifest_of(grant, end, documents))
            if place:
                await append_ok(store, grant, end + 1, *group("after"))
                with suppress(NotStorableError):  # where there is no inbox
                    await other.enqueue(KEY, [PendingItem("op", "post", b"hello", 1.0)])
            await store.release(KEY, grant.epoch)
            for wanted in (frozenset[str](), names, None, frozenset({"a.json"})):
                answer = await store.acquire(KEY, Terms(me=store.owner, names=wanted))
                assert isinstance(answer, Taken)
                await self._same(store, answer, wanted)
                grant = answer

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

    async def test_an_epoch_that_is_not_there_cannot_be_followed(self, store: Store) -> None:
        with pytest.raises(LeaseHeldError):
            await take_after(store, KEY, after=5)
        assert (await take(store)).epoch == 1
        with pytest.raises(LeaseHeldError):
            await take_after(store, KEY, after=5)

    @pytest.mark.parametrize("rounds", [6])
    async def test_a_race_has_exactly_one_winner(self, open_store: OpenStore, rounds: int) -> None:
        racers = [await open_store(f"racer-{n}") for n in range(4)]
        for round_ in range(rounds):
            won: list[tuple[Store, Taken]] = []
            async with anyio.create_task_group() as tasks:
                for racer in racers:
                    tasks.start_soon(_race, racer, round_, won)
            ((winner, grant),) = won
            assert grant.epoch == round_ + 1
            await append_ok(winner, grant, grant.head + 1, *group(f"round {round_}"))
        assert len(await read(racers[0])) == 2 * rounds

    async def test_an_owner_may_take_its_own_session_again(self, store: Store) -> None:
        first = await take(store)
        second = await take(store)
        assert (second.epoch, second.head, second.created) == (2, 2, False)
        assert (await append(store, first, 3, *group("old"))).status is Status.CONFLICT
        await append_ok(store, second, 3, *group("new"))

    async def test_a_release_is_seen(self, store: Store, other: Store) -> None:
        grant = await take(store)
        await append_ok(store, grant, 2, *group("a"))
        await store.release(KEY, grant.epoch)
        holder = await other.holder(KEY)
        assert holder is not None
        assert holder.released
        assert holder.epoch == grant.epoch
        lease = await take_after(other, KEY, after=holder.epoch)
        assert (lease.epoch, lease.head) == (2, 3)
        holder = await store.holder(KEY)
        assert holder is not None
        assert not holder.released

    async def test_releasing_an_old_epoch_has_no_effect(self, store: Store, other: Store) -> None:
        old = await take(store)
        new = await take(other)
        await store.release(KEY, old.epoch)
        await store.release(SessionKey("never was"), 1)
        holder = await store.holder(KEY)
        assert holder is not None
        assert (holder.epoch, holder.released) == (new.epoch, False)
        await append_ok(other, new, new.head + 1, *group("a"))

    async def test_a_heartbeat_moves_the_beat_of_all_its_sessions(
        self, store: Store, other: Store
    ) -> None:
        keys = [KEY, SessionKey("second")]
        for key in keys:
            await take(store, key)
        before = [await other.holder(key) for key in keys]
        assert _wanted(await store.heartbeat()) == HeartbeatRequests()
        after = [await other.holder(key) for key in keys]
        for old, new in zip(before, after, strict=True):
            assert old is not None
            assert new is not None
            assert 0 != new.beat != old.beat

    async def test_a_heartbeat_tells_of_those_of_others(self, store: Store, other: Store) -> None:
        await take(store)
        requests: list[Mapping[str, int]] = []
        for _ in range(9):  # a store that looks at others by a request of its own does not always
            holder = await other.holder(KEY)
            beats = (await other.heartbeat()).beats
            assert holder is not None
            if beats is not None:
                requests.append(beats)
                assert beats[holder.listed or holder.owner] == holder.beat
                await store.heartbeat()
        assert len({*map(str, requests)}) == len(requests)  # each time another counter

    async def test_an_owner_that_begins_anew_has_a_new_beat(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        owner = store.owner
        await take(store)
        before = await other.holder(KEY)
        await store.aclose()
        again = await open_store(owner)
        await take_after(again, KEY, after=1)
        after = await other.holder(KEY)
        assert before is not None
        assert after is not None
        # Its owner id was given, and its death is unknown: only the counter shows it.
        if before.owner == after.owner and after.alive is not False:
            assert 0 != after.beat != before.beat

    async def test_a_handover_is_asked_for_at_the_holder(self, store: Store, other: Store) -> None:
        keys = [KEY, SessionKey("CON", "a/b", "Tenant ..")]
        for key in keys:
            await take(store, key)
        for key in [*keys, KEY]:
            holder = await other.holder(key)
            assert holder is not None
            await other.request_handover(key, holder)
        assert _wanted(await other.heartbeat()) == HeartbeatRequests()
        assert sorted((await store.heartbeat()).handovers) == sorted(keys)
        assert _wanted(await store.heartbeat()) == HeartbeatRequests()

    async def test_a_closed_owner_does_not_look_alive(self, store: Store, other: Store) -> None:
        await take(store)
        await store.aclose()
        holder = await other.holder(KEY)
        assert holder is not None
        assert holder.alive is not True
        assert not holder.released
        assert (await take_after(other, KEY, after=holder.epoch)).epoch == 2

    async def test_sessions_are_held_one_by_one(self, store: Store, other: Store) -> None:
        own_lease = await take(store, SessionKey("agent", "mine"))
        theirs = await take(other, SessionKey("agent", "theirs"))
        await append_ok(store, own_lease, 2, *group("a"))
        await append_ok(other, theirs, 2, *group("b"))

    # what an engine makes of it

    async def test_a_holder_is_asked_and_hands_over(self, store: Store, other: Store) -> None:
        grant = await take(store)
        head = await append_ok(store, grant, 2, *group("a"))
        lease: list[Taken] = []

        async def want() -> None:
            lease.append(await _acquire_lease(other, "handover"))

        with anyio.fail_after(LONG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(want)
                while KEY not in (await store.heartbeat()).handovers:
                    await store.wait_for_notification(0.05)
                assert not lease
                head = await append_ok(store, grant, head + 1, *group("b"))
                await store.release(KEY, grant.epoch)
        assert (lease[0].epoch, lease[0].head) == (grant.epoch + 1, head + 1)
        outcome = await append(store, grant, head + 1, *group("too late"))
        assert outcome.status is Status.CONFLICT
        assert isinstance(outcome.error, LeaseLostError)
        assert "open" in str(outcome.error)  # the cure
        assert texts(await read(other)) == ["a", "b"]

    async def test_a_session_that_is_held_is_refused(self, store: Store, other: Store) -> None:
        grant = await take(store)
        with pytest.raises(LeaseHeldError, match="on_held"):
            await _acquire_lease(other, "raise")
        await append_ok(store, grant, 2, *group("a"))
        await store.release(KEY, grant.epoch)
        assert (await _acquire_lease(other, "raise")).epoch == grant.epoch + 1

    async def test_a_holder_that_beats_is_not_robbed(self, store: Store, other: Store) -> None:
        grant = await take(store)
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
        await append_ok(store, grant, 2, *group("a"))

    async def test_a_holder_that_hangs_is_replaced_and_told(
        self, store: Store, other: Store
    ) -> None:
        grant = await take(store)
        head = await append_ok(store, grant, 2, *group("a"))
        stolen = await _acquire_lease(other, "steal", ttl=0.3)  # without heartbeats
        assert stolen.epoch == grant.epoch + 1
        outcome = await append(store, grant, head + 1, *group("late"))
        assert outcome.status is Status.CONFLICT
        assert isinstance(outcome.error, LeaseLostError)
        await append_ok(other, stolen, stolen.head + 1, *group("b"))
        assert texts(await read(store)) == ["a", "b"]

    async def test_two_who_want_it_all_the_time_take_turns(self, open_store: OpenStore) -> None:
        stores = [await open_store("one"), await open_store("other")]
        rounds, done = 5, 0

        async def work(name: str, store: Store) -> None:
            nonlocal done
            given = 0
            for place in range(rounds):
                grant = await _acquire_lease(store, "handover", given=given)
                await append_ok(store, grant, grant.head + 1, *group(f"{name}{place}"))
                done += 1
                while KEY not in (await store.heartbeat()).handovers and done < 2 * rounds - 1:
                    await store.wait_for_notification(0.05)
                await store.release(KEY, grant.epoch)
                given = grant.epoch

        with anyio.fail_after(LONG):
            async with anyio.create_task_group() as tasks:
                for name, store in zip("ab", stores, strict=True):
                    tasks.start_soon(work, name, store)
        found = texts(await read(stores[0]))
        for name in "ab":  # each its own, once, in order
            mine = [text for text in found if text[0] == name]
            assert mine == [f"{name}{place}" for place in range(rounds)]
        assert sum(a[0] != b[0] for a, b in pairwise(found)) >= 2 * rounds - 3


LONG = 60.0


def texts(records: list[Record]) -> list[str]:
    """Return what was appended."""
    return [
        msgspec.json.decode(record.payload)["text"] for record in records if record.kind != EPOCH
    ]


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


async def _race(racer: Store, after: int, won: list[tuple[Store, Taken]]) -> None:
    try:
        grant = await take_after(racer, KEY, after=after)
    except LeaseHeldError:
        return
    won.append((racer, grant))


async def _left(store: Store, key: SessionKey, life: str, draft: Draft) -> None:
    """Leave a session as somebody may find it."""
    if life == "never":
        return
    grant = await take_after(
        store, key, after=0, draft=draft if life in {"draft", "left"} else None
    )
    if life in {"released", "left"}:
        await store.release(key, grant.epoch)
    elif life == "deleted":
        await store.delete(key, grant.epoch)
