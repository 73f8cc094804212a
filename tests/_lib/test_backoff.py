"""Backoff: exponential up to a cap, with full jitter."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from perdure._lib.backoff import backoff


def test_it_doubles_up_to_the_cap() -> None:
    waits = [backoff(n, base=0.25, cap=3, chance=1.0) for n in range(1, 8)]
    assert waits == [0.25, 0.5, 1.0, 2.0, 3, 3, 3]


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_chance_takes_any_share_of_it(chance: float) -> None:
    assert backoff(3, base=1, cap=100, chance=chance) == 4 * chance


@given(attempt=st.integers(1, 10**6), chance=st.floats(0, 1, exclude_max=True))
def test_it_never_exceeds_the_cap(attempt: int, chance: float) -> None:
    assert 0 <= backoff(attempt, base=0.25, cap=15, chance=chance) <= 15
