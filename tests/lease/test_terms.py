"""When a session may be taken: pure decisions."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import ConfigError
from perdure.lease import LeaseOptions
from perdure.records.keys import SessionKey
from perdure.store import Beginning, Draft, LeaseState, Terms

DRAFT = Draft(source=SessionKey("a"), generation=1, up_to=1, purpose="fork")


def holder(**facts: Any) -> LeaseState:
    return LeaseState(**{"epoch": 3, "owner": "other", "beat": 5, **facts})


NEVER, DELETED = None, holder(deleted=True)
ALIVE, UNSEEN, DEAD = holder(alive=True), holder(), holder(alive=False)
RELEASED, OURS = holder(released=True), holder(owner="me", alive=True)
LISTED = holder(listed="theirs")
COPYING, LEFT = holder(deleted=True, draft=DRAFT), holder(deleted=True, draft=DRAFT, released=True)
KILLED = holder(deleted=True, draft=DRAFT, alive=False)

CASES: list[tuple[dict[str, Any], list[LeaseState | None], list[LeaseState | None]]] = [
    ({}, [NEVER, DELETED, DEAD, RELEASED, OURS, LEFT, KILLED], [ALIVE, UNSEEN, COPYING]),
    ({"silent": {"other": 5}}, [ALIVE, UNSEEN, COPYING], [LISTED]),
    ({"silent": {"other": 4, "theirs": 5}}, [LISTED], [ALIVE, UNSEEN]),
    ({"create": False}, [DEAD, RELEASED, OURS], [NEVER, DELETED, LEFT, KILLED, COPYING, ALIVE]),
    ({"new": True}, [NEVER, DELETED, LEFT, KILLED], [DEAD, RELEASED, OURS, ALIVE, COPYING]),
    ({"given": 3}, [NEVER, DEAD, OURS], [RELEASED, LEFT]),
    ({"given": 2}, [RELEASED], []),
    ({"after": 3}, [ALIVE, UNSEEN, DEAD, RELEASED, OURS, DELETED, COPYING], [NEVER]),
    ({"after": 0}, [NEVER], [RELEASED, DELETED]),
    ({"beginning": Beginning(draft=DRAFT)}, [NEVER, DELETED, LEFT], [RELEASED, DEAD, COPYING]),
    ({"beginning": Beginning(draft=DRAFT), "after": 3}, [DELETED, COPYING], [RELEASED, ALIVE]),
]


@pytest.mark.parametrize(("wanted", "yes", "no"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_session_is_taken_on_these_terms_alone(
    wanted: dict[str, Any], yes: list[LeaseState | None], no: list[LeaseState | None]
) -> None:
    terms = Terms(me="me", **wanted)
    assert [terms.allows(each) for each in yes] == [True] * len(yes)
    assert [terms.allows(each) for each in no] == [False] * len(no)


@pytest.mark.parametrize(("heartbeat", "ttl"), [(0, 8), (8, 8), (9, 8), (1, float("inf"))])
def test_terms_that_do_not_fit_are_refused(heartbeat: float, ttl: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        LeaseOptions(heartbeat=heartbeat, ttl=ttl)
