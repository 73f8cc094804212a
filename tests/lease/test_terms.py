"""When a session may be taken: pure decisions."""

from __future__ import annotations

import pytest

from perdure.errors import ConfigError
from perdure.lease import Lease, may_take
from perdure.store import Holder


@pytest.mark.parametrize(
    "holder",
    [
        None,
        Holder(epoch=3, owner="other", released=True),
        Holder(epoch=3, owner="other", alive=False),
        Holder(epoch=3, owner="other", deleted=True),
        Holder(epoch=3, owner="me", alive=True),
    ],
)
def test_what_nobody_else_holds_is_free(holder: Holder | None) -> None:
    assert may_take(holder, me="me", silent=False)


@pytest.mark.parametrize("alive", [None, True])
def test_a_holder_is_taken_over_when_it_is_silent_and_not_before(alive: bool | None) -> None:
    holder = Holder(epoch=3, owner="other", alive=alive, beat=5)
    assert may_take(holder, me="me", silent=True)
    assert not may_take(holder, me="me", silent=False)


@pytest.mark.parametrize(("heartbeat", "ttl"), [(0, 8), (8, 8), (9, 8), (1, float("inf"))])
def test_terms_that_do_not_fit_are_refused(heartbeat: float, ttl: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        Lease(heartbeat=heartbeat, ttl=ttl)
