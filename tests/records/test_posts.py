"""What a holder still has to take, decided from values."""

from __future__ import annotations

from hypothesis import given, strategies as st

from perdure.records.posts import key_of, new_posts, op_ids
from perdure.store import PendingItem

KEYS = st.text(min_size=1, max_size=8)


def item(op_id: str) -> PendingItem:
    return PendingItem(op_id, "message", b"{}", 0.0)


@given(KEYS, st.integers(1, 5))
def test_an_op_id_tells_its_key(key: str, count: int) -> None:
    assert {key_of(op_id) for op_id in op_ids(key, count)} == {key}


@given(KEYS, KEYS, st.integers(1, 12), st.integers(1, 12))
def test_two_keys_have_no_op_id_in_common(one: str, other: str, some: int, more: int) -> None:
    common = set(op_ids(one, some)) & set(op_ids(other, more))
    assert bool(common) == (one == other)


def test_an_op_id_of_somebody_elses_making_is_its_own_key() -> None:
    assert key_of("bare") == "bare"
    assert key_of("/0") == "/0"


@given(st.lists(st.tuples(KEYS, st.integers(1, 3)), max_size=8, unique_by=lambda one: one[0]))
def test_what_is_taken_is_passed_over_and_the_rest_keeps_its_order(
    posts: list[tuple[str, int]],
) -> None:
    items = [item(op_id) for key, count in posts for op_id in op_ids(key, count)]
    assert [[one.op_id for one in post] for post in new_posts(items, ())] == [
        list(op_ids(key, count)) for key, count in posts
    ]
    taken = {one.op_id for one in items[::2]}
    left = [one for post in new_posts(items, taken) for one in post]
    assert left == items[1::2]
    assert list(new_posts(items, {one.op_id for one in items})) == []
