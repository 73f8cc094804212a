"""Which of two settings counts (S2-13, S2-14)."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Autosave, ConfigError
from perdure.agent import PersistentSession
from perdure.agent.context import autosave_of, persistence_of

FIVE = PersistentSession(autosave_interval=5.0)


@pytest.mark.parametrize(
    ("given", "configured", "counts"),
    [
        (None, None, None),
        (True, None, True),
        (None, FIVE, FIVE),
        (True, FIVE, FIVE),
        (FIVE, True, FIVE),
        (FIVE, FIVE, FIVE),
        (False, False, False),
    ],
)
def test_an_object_counts_before_the_shorthand(given: Any, configured: Any, counts: Any) -> None:
    assert persistence_of(given, configured) == counts


@pytest.mark.parametrize(
    ("given", "configured"), [(FIVE, PersistentSession()), (True, False), (False, FIVE)]
)
def test_two_that_differ_are_refused(given: Any, configured: Any) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        persistence_of(given, configured)


def test_the_interval_is_the_longest_delay_and_0_is_no_timer() -> None:
    assert autosave_of(PersistentSession()) == Autosave(max_delay=30.0)
    assert autosave_of(PersistentSession(autosave_interval=1.0)) == Autosave(max_delay=1.0)
    assert autosave_of(PersistentSession(autosave_interval=0)) is None


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_an_interval_that_does_not_fit_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="autosave_interval"):
        PersistentSession(autosave_interval=bad)
