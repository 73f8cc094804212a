"""Leases: one holder at a time, epochs that only grow, and ways to hand a session on."""
# ruff: noqa: D102

from __future__ import annotations

import anyio
import pytest

from perdure.errors import LeaseHeldError
from perdure.model.keys import SessionKey
from perdure.store import Grant, Status, Store
from perdure.testing.conformance._kit import (
    KEY,
    OpenStore,
    Suite,
    append,
    append_ok,
    group,
    read,
    take,
)


class LeaseConformance(Suite):
    """The store decides the race and gives the epoch; it never asks a clock."""

    async def test_a_session_that_nobody_ever_had_has_no_holder(self, store: Store) -> None:
        assert await store.holder(KEY) is None

    async def test_the_holder_is_known_to_everybody(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        await take(store)
        mine, theirs = await store.holder(KEY), await other.holder(KEY)
        assert mine is not None
        assert theirs is not None
        assert (mine.epoch, mine.owner) == (theirs.epoch, theirs.owner)
        assert not theirs.released
        assert not theirs.deleted
        assert theirs.alive is not False

    async def test_an_epoch_is_given_once(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        await take(store)
        for late in (store, other):
            with pytest.raises(LeaseHeldError):
                await late.acquire(KEY, after=0)
        assert (await other.acquire(KEY, after=1)).epoch == 2
        with pytest.raises(LeaseHeldError):
            await store.acquire(KEY, after=1)

    async def test_an_epoch_that_is_not_there_cannot_be_followed(self, store: Store) -> None:
        with pytest.raises(LeaseHeldError):
            await store.acquire(KEY, after=5)
        assert (await take(store)).epoch == 1
        with pytest.raises(LeaseHeldError):
            await store.acquire(KEY, after=5)

    @pytest.mark.parametrize("rounds", [6])
    async def test_a_race_has_exactly_one_winner(self, open_store: OpenStore, rounds: int) -> None:
        racers = [await open_store(f"racer-{n}") for n in range(4)]
        for round_ in range(rounds):
            won: list[tuple[Store, Grant]] = []
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

    async def test_a_release_is_seen(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        grant = await take(store)
        await append_ok(store, grant, 2, *group("a"))
        await store.release(KEY, grant.epoch)
        holder = await other.holder(KEY)
        assert holder is not None
        assert holder.released
        assert holder.epoch == grant.epoch
        taken = await other.acquire(KEY, after=holder.epoch)
        assert (taken.epoch, taken.head) == (2, 3)
        holder = await store.holder(KEY)
        assert holder is not None
        assert not holder.released

    async def test_releasing_an_old_epoch_has_no_effect(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        old = await take(store)
        new = await take(other)
        await store.release(KEY, old.epoch)
        await store.release(SessionKey("never was"), 1)
        holder = await store.holder(KEY)
        assert holder is not None
        assert (holder.epoch, holder.released) == (new.epoch, False)
        await append_ok(other, new, new.head + 1, *group("a"))

    async def test_a_heartbeat_moves_the_beat_of_all_its_sessions(
        self, open_store: OpenStore
    ) -> None:
        store, other = await open_store("one"), await open_store("other")
        keys = [KEY, SessionKey("second")]
        for key in keys:
            await take(store, key)
        before = [await other.holder(key) for key in keys]
        assert await store.heartbeat() == []
        after = [await other.holder(key) for key in keys]
        for old, new in zip(before, after, strict=True):
            assert old is not None
            assert new is not None
            assert new.beat > old.beat

    async def test_a_handover_is_asked_for_at_the_holder(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        keys = [KEY, SessionKey("CON", "a/b", "Tenant ..")]
        for key in keys:
            await take(store, key)
        for key in [*keys, KEY]:
            holder = await other.holder(key)
            assert holder is not None
            await other.request_handover(key, holder)
        assert await other.heartbeat() == []
        assert sorted(await store.heartbeat()) == sorted(keys)
        assert await store.heartbeat() == []

    async def test_a_closed_owner_does_not_look_alive(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        await take(store)
        await store.aclose()
        holder = await other.holder(KEY)
        assert holder is not None
        assert holder.alive is not True
        assert not holder.released
        assert (await other.acquire(KEY, after=holder.epoch)).epoch == 2

    async def test_sessions_are_held_one_by_one(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        mine = await take(store, SessionKey("agent", "mine"))
        theirs = await take(other, SessionKey("agent", "theirs"))
        await append_ok(store, mine, 2, *group("a"))
        await append_ok(other, theirs, 2, *group("b"))


async def _race(racer: Store, after: int, won: list[tuple[Store, Grant]]) -> None:
    try:
        grant = await racer.acquire(KEY, after=after)
    except LeaseHeldError:
        return
    won.append((racer, grant))
