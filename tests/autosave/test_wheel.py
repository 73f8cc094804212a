"""The wheel: nothing comes late, nothing is lost, and only what has begun comes out."""

from __future__ import annotations

from hypothesis import given, strategies as st

from perdure.autosave.schedule import Wheel
from perdure.autosave.tracked import NEVER

times = st.floats(0, 1000)


@given(at=times)
def test_a_slot_begins_no_later_than_the_times_in_it(at: float) -> None:
    wheel: Wheel[str] = Wheel(0.05)
    wheel.add("a", wheel.slot(at))
    assert wheel.next_at <= at + 1e-9
    assert wheel.next_at > at - 0.05 - 1e-9


@given(ats=st.lists(times, max_size=50, unique=True), now=times, limit=st.integers(1, 5))
def test_exactly_what_has_begun_comes_out_in_order(
    ats: list[float], now: float, limit: int
) -> None:
    wheel: Wheel[float] = Wheel(0.05)
    for at in ats:
        wheel.add(at, wheel.slot(at))
    out: list[float] = []
    while True:
        slot, taken = wheel.pop(now, limit)
        if not taken:
            assert slot == NEVER
            break
        assert len(taken) <= limit
        assert {wheel.slot(at) for at in taken} == {slot}
        out += taken
    begun = [at for at in ats if wheel.slot(at) * 0.05 <= now]
    assert sorted(out) == sorted(begun)
    assert [wheel.slot(at) for at in out] == sorted(wheel.slot(at) for at in out)
    assert wheel.next_at > now
    later = [wheel.slot(at) * 0.05 for at in ats if wheel.slot(at) * 0.05 > now]
    assert wheel.next_at == min(later, default=float("inf"))


def test_add_says_what_comes_first() -> None:
    wheel: Wheel[str] = Wheel(1.0)
    assert wheel.add("late", 9)
    assert not wheel.add("later", 12)
    assert not wheel.add("late too", 9)
    assert wheel.add("early", 3)
    assert wheel.next_at == 3.0


def test_a_slot_can_be_filled_again_while_it_is_emptied() -> None:
    wheel: Wheel[int] = Wheel(1.0)
    for n in range(3):
        wheel.add(n, 2)
    assert wheel.pop(5.0, 2) == (2, [2, 1])
    wheel.add(9, 2)
    assert wheel.pop(5.0, 9) == (2, [9, 0])
    assert wheel.next_at == float("inf")


def test_what_is_taken_out_does_not_come() -> None:
    wheel: Wheel[str] = Wheel(1.0)
    wheel.add("a", 2)
    wheel.add("b", 2)
    wheel.add("c", 4)
    wheel.discard("a", 2)
    wheel.discard("c", 4)
    wheel.discard("d", 4)
    wheel.discard("d", NEVER)
    assert wheel.pop(9.0, 5) == (2, ["b"])
    assert wheel.pop(9.0, 5) == (4, [])
    assert wheel.pop(9.0, 5) == (NEVER, [])
