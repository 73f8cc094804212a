"""When a session may be taken: pure decisions."""

from __future__ import annotations

import pytest

from perdure.errors import ConfigError
from perdure.lease import LeaseOptions, may_take
from perdure.store import LeaseState


@pytest.mark.parametrize(
    "holder",
    [
        None,
        LeaseState(epoch=3, owner="other", released=True),
        LeaseState(epoch=3, owner="other", alive=False),
        LeaseState(epoch=3, owner="other", deleted=True),
        LeaseState(epoch=3, owner="me", alive=True),
    ],
)
def test_what_nobody_else_holds_is_free(holder: LeaseState | None) -> None:
    assert may_take(holder, me="me", silent=False)


@pytest.mark.parametrize("alive", [None, True])
def test_a_holder_is_taken_over_when_it_is_silent_and_not_before(alive: bool | None) -> None:
    holder = LeaseState(epoch=3, owner="other", alive=alive, beat=5)
    assert may_take(holder, me="me", silent=True)
    assert not may_take(holder, me="me", silent=False)


@pytest.mark.parametrize(("heartbeat", "ttl"), [(0, 8), (8, 8), (9, 8), (1, float("inf"))])
def test_terms_that_do_not_fit_are_refused(heartbeat: float, ttl: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        LeaseOptions(heartbeat=heartbeat, ttl=ttl)
