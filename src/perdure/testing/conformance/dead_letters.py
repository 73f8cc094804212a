"""Dead letters: what could not be delivered is kept, whole, until somebody drops it."""
# ruff: noqa: D102

from __future__ import annotations

import pytest

from perdure.errors import LeaseLostError
from perdure.records.keys import SessionKey
from perdure.records.posts import UNREADABLE
from perdure.store import DeadLetter, PendingItem, Store
from perdure.testing.conformance._kit import KEY, OpenStore, Suite, take
from perdure.testing.conformance.inbox import OTHER, posted, waiting


def letter(item: PendingItem, at: float = 7.5) -> DeadLetter:
    """Make a dead letter of an item."""
    return DeadLetter(item, "über das Limit", 5, at)


async def dead(store: Store, key: SessionKey = KEY) -> list[str]:
    """Return the op ids of the dead letters."""
    return [letter.item.op_id for letter in await store.dead_letters(key)]


class DeadLetterConformance(Suite):
    """What is set aside leaves the inbox, and stays until it is dropped."""

    async def test_the_store_says_that_it_keeps_dead_letters(self, store: Store) -> None:
        """One that does not leaves this part of the suite out."""
        assert store.capabilities.dead_letters is True

    async def test_a_rejected_item_leaves_the_inbox_and_is_kept_whole(
        self, open_store: OpenStore
    ) -> None:
        store, other = await open_store("one"), await open_store("other")
        odd = PendingItem("x/../y\n", "app:rating", '{"a":"Grüße \\u0000 😀"}'.encode(), 2.0)
        await other.post(KEY, [*posted("a"), odd, *posted("b")])
        grant = await take(store)
        assert await store.dead_letters(KEY) == []
        await store.reject(KEY, grant.epoch, [letter(odd)])
        assert await waiting(store, grant.epoch) == ["a", "b"]
        assert await other.dead_letters(KEY) == [letter(odd)]
        assert await other.dead_letters(OTHER) == []
        await store.reject(KEY, grant.epoch, [])
        assert await store.dead_letters(KEY) == [letter(odd)]

    async def test_bytes_of_any_kind_are_kept_exactly(self, store: Store) -> None:
        """An unreadable item is no JSON, and may have no op id of its own."""
        grant = await take(store)
        raw = PendingItem(f"{UNREADABLE}00ff", "", bytes(range(256)), 0.0, "it is torn")
        await store.reject(KEY, grant.epoch, [letter(raw)])
        assert await store.dead_letters(KEY) == [letter(raw)]
        assert await store.drop_dead_letters(KEY, [raw.op_id]) == 1
        assert await store.dead_letters(KEY) == []

    async def test_they_come_in_the_order_of_their_times(self, store: Store) -> None:
        grant = await take(store)
        a, b, c = posted("a", "b", "c")
        await store.reject(KEY, grant.epoch, [letter(c, 3.0), letter(a, 1.0)])
        await store.reject(KEY, grant.epoch, [letter(b, 2.0)])
        assert await dead(store) == ["a", "b", "c"]

    async def test_one_of_the_same_op_id_is_replaced(self, store: Store) -> None:
        grant = await take(store)
        (item,) = posted("a")
        await store.reject(KEY, grant.epoch, [letter(item, 1.0)])
        again = DeadLetter(item, "another reason", 6, 2.0)
        await store.reject(KEY, grant.epoch, [again])
        assert await store.dead_letters(KEY) == [again]

    async def test_its_op_id_may_be_posted_again(self, store: Store) -> None:
        grant = await take(store)
        await store.post(KEY, posted("a"))
        await store.reject(KEY, grant.epoch, [letter(dead_letter) for dead_letter in posted("a")])
        assert await store.post(KEY, posted("a")) == 1
        assert await waiting(store, grant.epoch) == ["a"]
        assert await dead(store) == ["a"]

    async def test_dropped_ones_are_gone_and_the_others_stay(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        grant = await take(store)
        await store.reject(
            KEY, grant.epoch, [letter(dead_letter) for dead_letter in posted("a", "b", "c")]
        )
        assert await other.drop_dead_letters(KEY, ["b", "never was"]) == 1
        assert await other.drop_dead_letters(KEY, ["b"]) == 0
        assert await other.drop_dead_letters(KEY, []) == 0
        assert await other.drop_dead_letters(OTHER, ["a"]) == 0
        assert sorted(await dead(store)) == ["a", "c"]

    async def test_only_the_newest_holder_rejects(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        old = await take(store)
        await store.post(KEY, posted("a"))
        new = await take(other)
        with pytest.raises(LeaseLostError):
            await store.reject(KEY, old.epoch, [letter(dead_letter) for dead_letter in posted("a")])
        assert await waiting(other, new.epoch) == ["a"]
        assert await dead(other) == []

    async def test_they_outlast_whoever_set_them_aside(self, open_store: OpenStore) -> None:
        store = await open_store("one")
        grant = await take(store)
        await store.reject(KEY, grant.epoch, [letter(dead_letter) for dead_letter in posted("a")])
        await store.release(KEY, grant.epoch)
        await store.aclose()
        other = await open_store("other")
        await take(other)
        assert await dead(other) == ["a"]

    async def test_sessions_that_have_them_are_listed(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        assert await store.waiting(dead_letters=True) == []
        for key in (KEY, OTHER):
            grant = await take(store, key)
            await store.post(key, posted("a", "waits"))
            await store.reject(
                key, grant.epoch, [letter(dead_letter) for dead_letter in posted("a")]
            )
        assert await other.waiting(dead_letters=True) == sorted([KEY, OTHER])
        assert await other.waiting() == sorted([KEY, OTHER])
        grant = await take(store, KEY)
        await store.settle(KEY, grant.epoch, ["waits"])
        assert await other.waiting(dead_letters=True) == sorted([KEY, OTHER])
        assert await other.waiting() == [OTHER]
        await other.drop_dead_letters(KEY, ["a"])
        assert await other.waiting(dead_letters=True) == [OTHER]

    async def test_they_end_with_their_session(self, open_store: OpenStore) -> None:
        store, other = await open_store("one"), await open_store("other")
        for key in (KEY, OTHER):
            grant = await take(store, key)
            await store.reject(
                key, grant.epoch, [letter(dead_letter) for dead_letter in posted("a")]
            )
        grant = await take(store)
        await store.delete(KEY, grant.epoch)
        assert await other.dead_letters(KEY) == []
        assert await other.waiting(dead_letters=True) == [OTHER]
        again = await take(other)  # its next life has none
        assert await other.dead_letters(KEY) == []
        await other.reject(KEY, again.epoch, [letter(dead_letter) for dead_letter in posted("b")])
        assert await dead(other) == ["b"]
