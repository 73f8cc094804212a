"""The breaker: closed, open with probes, slow start."""

from __future__ import annotations

import pytest

from perdure.autosave.core import Breaker


def breaker(chance: float = 0.0) -> Breaker:
    return Breaker(failures=3, base=4.0, reset=4.0, full=10, chance=lambda: chance)


def opened(chance: float = 0.0) -> Breaker:
    one = breaker(chance)
    assert [one.failed(10.0) for _ in range(3)] == [False, False, True]
    return one


def test_it_opens_after_failures_in_a_row() -> None:
    one = opened()
    assert one.state == "open"
    assert one.allowance(10.0, 0) == 0


def test_a_success_between_begins_the_count_anew() -> None:
    one = breaker()
    one.failed(0)
    one.failed(0)
    one.succeeded(waiting=True)
    one.failed(0)
    one.failed(0)
    assert one.state == "closed"


@pytest.mark.parametrize(("chance", "at"), [(0.0, 12.0), (1.0, 14.0)])
def test_a_probe_goes_between_half_and_all_of_the_reset(chance: float, at: float) -> None:
    one = opened(chance)
    assert one.probe_at == at
    assert one.allowance(at - 0.01, 0) == 0
    assert one.allowance(at, 0) == 1
    assert one.allowance(at, 1) == 0


def test_a_failed_probe_waits_for_the_next() -> None:
    one = opened()
    assert not one.failed(12.0)
    assert one.probe_at == 14.0


def test_probes_come_soon_at_first() -> None:
    one = Breaker(failures=1, base=0.25, reset=5.0, full=10, chance=lambda: 1.0)
    now, pauses = 0.0, []
    for _ in range(7):
        one.failed(now)
        pauses.append(one.probe_at - now)
        now = one.probe_at
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    one.succeeded(waiting=True)
    one.failed(now)
    assert one.probe_at == now + 0.25


def test_recovery_starts_slowly() -> None:
    one = opened()
    widths = []
    while one.state != "closed":
        one.succeeded(waiting=True)
        widths.append(one.allowance(13.0, 0))
    assert widths == [2, 4, 8, 10]


def test_recovery_is_over_when_nothing_waits() -> None:
    one = opened()
    one.succeeded(waiting=False)
    assert one.state == "closed"


def test_in_recovery_one_failure_opens_it_again() -> None:
    one = opened()
    one.succeeded(waiting=True)
    assert not one.failed(20.0)
    assert one.state == "open"


def test_a_narrow_store_needs_no_slow_start() -> None:
    one = Breaker(failures=1, base=1, reset=1, full=1, chance=lambda: 0.0)
    one.failed(0)
    one.succeeded(waiting=True)
    assert one.state == "closed"


def test_a_process_that_ends_probes_every_second() -> None:
    one = opened(0.5)
    one.hurry(10.0)
    assert one.probe_at == 10.5
    one.failed(10.5)
    assert one.probe_at == 10.5 + 0.75
