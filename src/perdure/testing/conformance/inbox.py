"""The inbox: any process posts, once for each op id; only the holder receives; posts are atomic."""

from __future__ import annotations

import secrets
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from perdure.errors import InboxFullError
from perdure.records.keys import SessionKey
from perdure.records.posts import UNREADABLE
from perdure.records.records import MESSAGE
from perdure.store import (
    DeadLetter,
    InboxLimit,
    PendingItem,
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
    held,
    hold,
    lost,
    take,
    together,
)

# ruff: noqa: D102


OTHER = SessionKey("CON", "a/b", "Tenant ..")
MANY = 25
MEETINGS = 8
"""Number of times that two calls are begun at once, in the hope of different orders."""
AT_MOST = 30.0
"""Seconds that a call is given which is to come back early."""


def posted(*op_ids: str) -> list[PendingItem]:
    """Make items to post."""
    return [
        PendingItem(op_id, MESSAGE, b'{"text":"%s"}' % op_id.encode(), float(place))
        for place, op_id in enumerate(op_ids)
    ]


async def waiting(store: Store, epoch: int, key: SessionKey = KEY) -> list[str]:
    """Take what waits, and return its op ids."""
    return [item.op_id for item in await store.receive(key, epoch)]


async def received(writer: SessionWriter) -> list[str]:
    """Take what waits for a session that is held, and return its op ids."""
    return await waiting(writer.store, writer.epoch, writer.key)


async def full(store: Store, items: list[PendingItem], limit: InboxLimit, why: str = ".") -> None:
    """Post what must go over the limit."""
    with pytest.raises(InboxFullError, match=why):
        await store.enqueue(KEY, items, limit=limit)


class InboxConformance(Suite):
    """Posts are kept in order until the holder has settled them."""

    async def test_what_is_posted_comes_to_the_holder_as_it_was(
        self, store: Store, other: Store
    ) -> None:
        items = [
            PendingItem("op-1", MESSAGE, '{"text":"Grüße \\u0000 \\" 😀"}'.encode(), 1.5),
            PendingItem("x/../y\n", "app:rating", b'{"stars":5,"deep":[[[]],{}]}', 2.0),
        ]
        assert await other.enqueue(KEY, items) == 2
        grant = await take(store)
        assert await store.receive(KEY, grant.epoch) == items

    async def test_what_came_since_a_session_was_taken_is_received(
        self, store: Store, other: Store
    ) -> None:
        """An acquire may read the inbox, too; a move of a session asks for what waits later."""
        grant = await take(store)
        await other.enqueue(KEY, posted("before"))
        for names in (frozenset[str](), None):
            await store.release(KEY, grant.epoch)
            taken = await store.acquire(KEY, Terms(me=store.owner, names=names))
            assert isinstance(taken, Taken)
            await other.enqueue(KEY, posted(f"after {taken.epoch}"))
            items = await waiting(store, taken.epoch)
            assert (items[0], items[-1]) == ("before", f"after {taken.epoch}")
            grant = taken

    async def test_items_come_in_the_order_of_their_posts(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        for place in range(MANY):
            poster = other if place % 2 else store
            assert await poster.enqueue(KEY, posted(f"{place}a", f"{place}b")) == 2
        wanted = [f"{place}{part}" for place in range(MANY) for part in "ab"]
        assert await received(writer) == wanted
        seven = await store.receive(KEY, writer.epoch, limit=7)
        assert [item.op_id for item in seven] == wanted[:7]

    async def test_an_op_id_that_waits_is_not_posted_again(
        self, store: Store, other: Store
    ) -> None:
        grant = await take(store)
        first = posted("a", "b")
        again = [PendingItem("b", MESSAGE, b'{"text":"other"}', 9.0), *posted("c", "a", "c")]
        for poster, items, new in [(store, first, 2), (other, again, 1), (other, again, 0)]:
            assert await poster.enqueue(KEY, items) == new
        assert await other.enqueue(KEY, []) == 0
        items = await store.receive(KEY, grant.epoch)
        assert [item.op_id for item in items] == ["a", "b", "c"]
        assert items[:2] == first
        assert await store.enqueue(OTHER, posted("a")) == 1  # another session's ids are others

    async def test_of_many_who_post_one_id_one_does(self, open_store: OpenStore) -> None:
        stores = [await open_store(f"poster {place}") for place in range(4)]
        new: list[int] = []

        async def post(store: Store) -> None:
            new.append(await store.enqueue(KEY, posted("same")))

        await together(*[partial(post, store) for store in stores * 2])
        assert sorted(new) == [0] * 7 + [1]
        assert await received(await hold(stores[0])) == ["same"]

    async def test_posts_that_meet_are_all_kept(self, open_store: OpenStore) -> None:
        stores = [await open_store(f"poster {place}") for place in range(4)]
        writer = await hold(stores[0])

        async def post(place: int) -> None:
            for number in range(5):
                assert await stores[place].enqueue(KEY, posted(f"{place}-{number}")) == 1

        await together(*[partial(post, place) for place in range(4)])
        items = await received(writer)
        assert len(items) == 20
        for place in range(4):  # each one's own order
            own_items = [op_id for op_id in items if op_id.startswith(f"{place}-")]
            assert own_items == [f"{place}-{number}" for number in range(5)]

    async def test_what_is_settled_is_gone_and_the_rest_stays(self, store: Store) -> None:
        writer = await hold(store)
        await store.enqueue(KEY, posted("a", "b", "c"))
        await store.enqueue(KEY, posted("d"))
        for settled, rest in [(["b", "never was"], ["a", "c", "d"]), (["a", "c", "d"], [])]:
            await store.ack(KEY, writer.epoch, settled)
            assert await received(writer) == rest
        await store.ack(KEY, writer.epoch, ["a"])
        assert await store.enqueue(KEY, posted("a")) == 1  # the holder knows that it was taken
        assert await received(writer) == ["a"]

    async def test_a_large_post_is_taken_in_parts(self, store: Store) -> None:
        names = [f"op {place}" for place in range(MANY)]
        assert await store.enqueue(KEY, posted(*names)) == MANY
        assert await store.enqueue(KEY, posted(*names)) == 0
        grant = await take(store)
        items: list[str] = []
        while part := await store.receive(KEY, grant.epoch, limit=10):
            assert len(part) <= 10
            items += [item.op_id for item in part]
            await store.ack(KEY, grant.epoch, [item.op_id for item in part])
        assert items == names

    async def test_no_more_items_wait_than_the_limit_says(self, store: Store) -> None:
        writer = await hold(store)
        limit = InboxLimit(3, 1_000_000)
        await full(store, posted(*"abcd"), limit, "limit is 3 items")
        assert await store.enqueue(KEY, posted("a", "b"), limit=limit) == 2
        await full(store, posted("b", "c", "d"), limit, r"2 items and .* wait")
        assert await received(writer) == ["a", "b"]  # all of a post, or none
        assert await store.enqueue(KEY, posted("b", "c"), limit=limit) == 1
        assert await store.enqueue(KEY, posted(*"abc"), limit=limit) == 0  # a retry goes well
        await full(store, posted("d"), limit)
        assert await store.enqueue(OTHER, posted("d"), limit=limit) == 1
        await store.ack(KEY, writer.epoch, ["a"])
        assert await store.enqueue(KEY, posted("d"), limit=limit) == 1
        assert await store.enqueue(KEY, posted("e")) == 1  # without a limit
        assert await received(writer) == ["b", "c", "d", "e"]

    async def test_no_more_bytes_wait_than_the_limit_says(self, store: Store) -> None:
        limit = InboxLimit(1_000, 100_000)
        *large, largest = [
            PendingItem(op_id, MESSAGE, b'"%s"' % secrets.token_hex(size).encode(), 1.0)
            for op_id, size in (("a", 10_000), ("b", 10_000), ("c", 100_000))
        ]
        await full(store, [largest], limit)
        assert await store.enqueue(KEY, large[:1], limit=limit) == 1
        await full(store, [largest], limit, "limit is 1000 items and 100000 bytes")
        assert await store.enqueue(KEY, large, limit=limit) == 1
        assert await store.sessions_with_pending_items() == [KEY]
        grant = await take(store)
        assert await store.receive(KEY, grant.epoch) == large

    async def test_only_the_newest_holder_takes_and_settles(
        self, store: Store, other: Store
    ) -> None:
        old = await take(store)
        await store.enqueue(KEY, posted("a"))
        new = await hold(other)
        await lost(store.receive(KEY, old.epoch))
        await lost(store.ack(KEY, old.epoch, ["a"]))
        assert await received(new) == ["a"]

    async def test_what_waits_can_be_read_before_anybody_has_opened_the_session(
        self, store: Store, other: Store
    ) -> None:
        assert await other.receive(KEY, 0) == []
        items = posted("a", "b")
        await store.enqueue(KEY, items)
        assert await other.receive(KEY, 0) == items
        writer = await hold(store)
        await lost(other.receive(KEY, 0))
        await writer.delete()
        removed = await held(other)
        assert await other.receive(KEY, removed.epoch) == []
        await store.enqueue(KEY, items)
        assert await other.receive(KEY, removed.epoch) == items

    async def test_posts_outlast_whoever_posted_and_whoever_held(
        self, store: Store, other: Store, open_store: OpenStore
    ) -> None:
        writer = await hold(store)
        await other.enqueue(KEY, posted("a"))
        await writer.release()
        await other.enqueue(KEY, posted("b"))
        await store.aclose()
        await other.aclose()
        assert await received(await hold(await open_store("third"))) == ["a", "b"]

    async def test_what_is_posted_after_a_deletion_is_the_next_lifes(
        self, store: Store, other: Store
    ) -> None:
        """Also of what comes while that begins."""
        for turn in range(MEETINGS):
            await store.delete(KEY, (await take(store)).epoch)
            holder = await store.holder(KEY)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.enqueue, KEY, posted(f"{turn}"))
                if turn % 2:
                    await anyio.lowlevel.checkpoint()
                grant = await take_after(store, KEY, after=0 if holder is None else holder.epoch)
            assert await waiting(store, grant.epoch) == [f"{turn}"]

    async def test_a_session_that_is_only_posted_to_does_not_exist(self, store: Store) -> None:
        await store.enqueue(KEY, posted("a"))
        await store.enqueue(OTHER, posted("a"))
        assert await store.holder(KEY) is None
        assert await store.head(KEY) == 0
        assert await store.sessions() == []
        writer = await hold(store, "first")
        assert (writer.epoch, writer.head, writer.grant.created) == (1, 2, True)
        assert await received(writer) == ["a"]

    async def test_what_waits_is_listed_whether_its_session_exists_or_not(
        self, store: Store, other: Store
    ) -> None:
        """A post to a session that was never opened is not overlooked."""
        long = SessionKey("x" * 200, "y" * 200, "z" * 200)
        keys = [KEY, SessionKey(KEY.agent, "second"), OTHER, long]
        assert await store.sessions_with_pending_items() == []
        for key in keys:
            await other.enqueue(key, posted("a"))
        assert await store.sessions_with_pending_items() == sorted(keys)
        for key in keys[1:]:
            grant = await take(store, key)
            await store.ack(key, grant.epoch, ["a"])
        assert await store.sessions_with_pending_items() == [KEY]
        writer = await hold(store)
        assert await store.sessions_with_pending_items() == [KEY]
        await writer.delete()
        assert await store.sessions_with_pending_items() == []
        await store.enqueue(KEY, posted("b"))
        assert await store.sessions_with_pending_items() == [KEY]

    async def test_an_inbox_ends_with_its_session(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        await store.enqueue(KEY, posted("a"))
        await store.enqueue(OTHER, posted("kept"))
        await writer.delete()
        await other.enqueue(KEY, posted("b"))  # for the next life
        assert await received(await hold(other)) == ["b"]
        assert await received(await hold(other, key=OTHER)) == ["kept"]

    async def test_posts_outlive_a_deletion_that_keeps_them(
        self, store: Store, other: Store
    ) -> None:
        """Posts are to an id: a move of a session leaves what comes meanwhile."""
        grant = await take(store)
        await other.enqueue(KEY, posted("a", "b"))
        await store.ack(KEY, grant.epoch, ["a"])
        await store.delete(KEY, grant.epoch, keep_posts=True)
        for witness in (store, other):
            assert await witness.head(KEY) == 0
            assert await witness.sessions() == []
            assert await witness.sessions_with_pending_items() == [KEY]
        assert await other.enqueue(KEY, posted("b", "c")) == 1
        await store.scrub()
        new = await hold(other)
        assert (new.head, new.grant.created) == (1, True)
        assert await received(new) == ["b", "c"]
        await lost(store.delete(KEY, grant.epoch, keep_posts=True))
        await other.ack(KEY, new.epoch, ["b"])
        await new.delete()
        assert await store.sessions_with_pending_items() == []
        await store.enqueue(KEY, posted("d"))
        await store.scrub()
        assert await received(await hold(store)) == ["d"]

    # who hears of it

    async def test_the_holder_hears_of_a_post(self, store: Store, other: Store) -> None:
        for key in (KEY, OTHER):
            await take(store, key)
            await other.enqueue(key, posted("a"))
        requests = await store.heartbeat()
        assert sorted(requests.mail) == sorted([KEY, OTHER])
        assert requests.handovers == ()
        assert (await other.heartbeat()).mail == ()
        assert (await store.heartbeat()).mail == ()

    async def test_a_post_under_way_at_a_takeover_is_heard_of_or_taken(
        self, store: Store, other: Store
    ) -> None:
        await take(store)
        items: list[str] = []

        async def take_over() -> None:
            items.extend(await received(await hold(store)))

        await together(partial(other.enqueue, KEY, posted("a")), take_over)
        assert items == ["a"] or KEY in (await store.heartbeat()).mail

    async def test_news_come_early_or_not_at_all(self, store: Store, other: Store) -> None:
        """A notified store wakes up; every other one sleeps until its timeout."""
        await take(store)
        await store.wait_for_notification(0.01)
        assert (await store.heartbeat()).mail == ()
        await other.enqueue(KEY, posted("a"))
        with anyio.fail_after(AT_MOST):
            await store.wait_for_notification(0.5)
        assert KEY in (await store.heartbeat()).mail

    async def test_news_wake_whoever_waits(self, store: Store, other: Store) -> None:
        await take(store)
        heard: list[SessionKey] = []

        async def listen() -> None:
            while not heard:
                await store.wait_for_notification(0.2)
                heard.extend((await store.heartbeat()).handovers)

        async def ask() -> None:
            await other.request_handover(KEY, await held(other))

        with anyio.fail_after(AT_MOST):
            await together(listen, ask)
        assert heard == [KEY]

    async def test_a_cancelled_post_is_whole_or_not_there(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        for place in range(6):
            names = [f"{place}-{part}" for part in "abc"]
            with anyio.move_on_after(0.001 * place):
                await other.enqueue(KEY, posted(*names))
            await other.enqueue(KEY, posted(f"{place} then"))  # after it, if it continues
            items = await received(writer)
            assert [name for name in names if name in items] in ([], names)
            await store.ack(KEY, writer.epoch, items)


# Dead letters: an undeliverable post is kept, complete, until it is dropped


def letter(item: PendingItem, at: float = 7.5) -> DeadLetter:
    """Make a dead letter of an item."""
    return DeadLetter(item, "über das Limit", 5, at)


async def reject(writer: SessionWriter, *op_ids: str) -> None:
    """Set items aside, as the session's holder."""
    letters = [letter(item) for item in posted(*op_ids)]
    await writer.store.ack(writer.key, writer.epoch, dead=letters)


async def dead(store: Store, key: SessionKey = KEY) -> list[str]:
    """Return the op ids of the dead letters."""
    return [letter.item.op_id for letter in await store.dead_letters(key)]


class DeadLetterConformance(Suite):
    """Dead letters leave the inbox, and stay until they are dropped."""

    async def test_a_rejected_item_leaves_the_inbox_and_is_kept_whole(
        self, store: Store, other: Store
    ) -> None:
        odd = PendingItem("x/../y\n", "app:rating", '{"a":"Grüße \\u0000 😀"}'.encode(), 2.0)
        await other.enqueue(KEY, [*posted("a"), odd, *posted("b")])
        writer = await hold(store)
        assert await store.dead_letters(KEY) == []
        await store.ack(KEY, writer.epoch, dead=[letter(odd)])
        assert await received(writer) == ["a", "b"]
        assert await other.dead_letters(KEY) == [letter(odd)]
        assert await other.dead_letters(OTHER) == []
        await store.ack(KEY, writer.epoch, dead=[])
        assert await store.dead_letters(KEY) == [letter(odd)]

    async def test_bytes_of_any_kind_are_kept_exactly(self, store: Store) -> None:
        """An unreadable item is no JSON, and may have no op id of its own."""
        grant = await take(store)
        raw = PendingItem(f"{UNREADABLE}00ff", "", bytes(range(256)), 0.0, "it is torn")
        await store.ack(KEY, grant.epoch, dead=[letter(raw)])
        assert await store.dead_letters(KEY) == [letter(raw)]
        await store.ack(KEY, None, [raw.op_id])
        assert await store.dead_letters(KEY) == []

    async def test_they_come_in_the_order_of_their_times(self, store: Store) -> None:
        grant = await take(store)
        a, b, c = posted("a", "b", "c")
        await store.ack(KEY, grant.epoch, dead=[letter(c, 3.0), letter(a, 1.0)])
        await store.ack(KEY, grant.epoch, dead=[letter(b, 2.0)])
        assert await dead(store) == ["a", "b", "c"]

    async def test_one_of_the_same_op_id_is_replaced(self, store: Store) -> None:
        writer = await hold(store)
        await reject(writer, "a")
        again = DeadLetter(posted("a")[0], "another reason", 6, 8.5)
        await store.ack(KEY, writer.epoch, dead=[again])
        assert await store.dead_letters(KEY) == [again]

    async def test_its_op_id_may_be_posted_again(self, store: Store) -> None:
        writer = await hold(store)
        await store.enqueue(KEY, posted("a"))
        await reject(writer, "a")
        for epoch in (writer.epoch, None):
            assert await store.enqueue(KEY, posted("a")) == 1
            assert await received(writer) == ["a"]
            assert await dead(store) == ["a"]
            await store.ack(KEY, epoch, ["a"])
        assert await received(writer) == ["a"]
        assert await dead(store) == []

    async def test_some_are_received_while_others_are_set_aside(self, store: Store) -> None:
        writer = await hold(store)
        items = posted("a", "b", "c", "d")
        await store.enqueue(KEY, items[:3])
        await store.enqueue(KEY, items[3:])
        await store.ack(KEY, writer.epoch, ["a", "never was"], dead=[letter(items[1])])
        assert await received(writer) == ["c", "d"]
        assert await dead(store) == ["b"]

    async def test_dropped_ones_are_gone_and_the_others_stay(
        self, store: Store, other: Store
    ) -> None:
        await reject(await hold(store), "a", "b", "c")
        for key, dropped in [(KEY, ["b", "never was"]), (KEY, ["b"]), (KEY, []), (OTHER, ["a"])]:
            await other.ack(key, None, dropped)
            assert sorted(await dead(store)) == ["a", "c"]

    async def test_only_the_newest_holder_rejects(self, store: Store, other: Store) -> None:
        old = await hold(store)
        await store.enqueue(KEY, posted("a"))
        new = await hold(other)
        await lost(reject(old, "a"))
        assert await received(new) == ["a"]
        assert await dead(other) == []

    async def test_they_outlast_whoever_set_them_aside(
        self, store: Store, open_store: OpenStore
    ) -> None:
        writer = await hold(store)
        await reject(writer, "a")
        await writer.release()
        await store.aclose()
        other = await open_store("other")
        await take(other)
        assert await dead(other) == ["a"]

    async def test_sessions_that_have_them_are_listed(self, store: Store, other: Store) -> None:
        assert await store.sessions_with_pending_items(dead_letters=True) == []
        both = sorted([KEY, OTHER])
        for key in both:
            writer = await hold(store, key=key)
            await store.enqueue(key, posted("a", "waits"))
            await reject(writer, "a")
        assert await other.sessions_with_pending_items(dead_letters=True) == both
        assert await other.sessions_with_pending_items() == both
        await store.ack(KEY, (await held(store)).epoch, ["waits"])
        assert await other.sessions_with_pending_items(dead_letters=True) == both
        assert await other.sessions_with_pending_items() == [OTHER]
        await other.ack(KEY, None, ["a"])
        assert await other.sessions_with_pending_items(dead_letters=True) == [OTHER]

    async def test_they_end_with_their_session(self, store: Store, other: Store) -> None:
        writer = await hold(store)
        await reject(writer, "a")
        await reject(await hold(store, key=OTHER), "a")
        await writer.delete()
        assert await other.dead_letters(KEY) == []
        assert await other.sessions_with_pending_items(dead_letters=True) == [OTHER]
        again = await hold(other)  # its next life has none
        assert await other.dead_letters(KEY) == []
        await reject(again, "b")
        assert await dead(other) == ["b"]
