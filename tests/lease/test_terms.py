"""When a session may be taken: pure decisions."""

from __future__ import annotations

import pytest

from perdure.errors import ConfigError
from perdure.lease.terms import Lease, Watch, may_take, watched
from perdure.store import Holder

OTHER = Holder(epoch=3, owner="other", alive=None, beat=5)


def taken(holder: Holder | None, *, on_held: str = "handover", since: float = 0.0) -> bool:
    watch = None if holder is None else Watch(holder.epoch, holder.beat, since)
    return may_take(holder, watch, me="me", on_held=on_held, ttl=8.0, now=8.0)  # type: ignore[arg-type]


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
    assert taken(holder, on_held="raise")


def test_silent_holder_is_taken_over_after_the_ttl_and_not_before() -> None:
    assert taken(OTHER, since=0.0)
    assert not taken(OTHER, since=0.1)


def test_raise_never_waits_for_an_expiry() -> None:
    assert not taken(OTHER, on_held="raise", since=0.0)


def test_a_heartbeat_starts_the_watch_anew() -> None:
    first = watched(None, OTHER, 1.0)
    assert watched(first, OTHER, 5.0) == first
    beaten = Holder(epoch=3, owner="other", beat=6)
    assert watched(first, beaten, 5.0).since == 5.0


def test_a_new_epoch_starts_the_watch_anew() -> None:
    first = watched(None, OTHER, 1.0)
    assert watched(first, Holder(epoch=4, owner="third", beat=5), 5.0).since == 5.0


@pytest.mark.parametrize(("heartbeat", "ttl"), [(0, 8), (8, 8), (9, 8), (1, float("inf"))])
def test_terms_that_do_not_fit_are_refused(heartbeat: float, ttl: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        Lease(heartbeat=heartbeat, ttl=ttl)
