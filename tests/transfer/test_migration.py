"""One table decides what becomes of a session in the target of a migration."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.transfer.migration import Act, Found, decide
from perdure.transfer.second_look import Moment

FOLDED = Manifest(key=SessionKey("a"), epoch=0, as_of_seq=4)
NONE = Moment(0, False, 0, None)
GONE = Moment(3, True, 0, None)
OURS = Moment(2, False, 9, FOLDED)
THEIRS = Moment(1, False, 5, FOLDED)


@pytest.mark.parametrize(
    ("ours", "theirs", "facts", "act"),
    [
        # The target has no session, or deleted it.
        (OURS, NONE, {}, Act.WRITE),
        (OURS, GONE, {}, Act.WRITE),
        (NONE, NONE, {"has_content": False}, Act.NOTHING),
        (GONE, NONE, {"has_content": False}, Act.NOTHING),
        # The target has a session that the source has not, or not any more.
        (GONE, THEIRS, {"has_content": False, "differs": 2, "is_superseded": True}, Act.REMOVE),
        (GONE, THEIRS, {"has_content": False, "is_superseded": True}, Act.REMOVE),
        (GONE, THEIRS, {"has_content": False, "differs": 2}, Act.REFUSE),
        (GONE, THEIRS, {"has_content": False}, Act.REFUSE),
        (NONE, THEIRS, {"has_content": False, "differs": 2}, Act.REFUSE),
        (OURS, THEIRS, {"differs": 2}, Act.REFUSE),
        (OURS, THEIRS, {"differs": 2, "is_outdated": True}, Act.REFUSE),
        (OURS, THEIRS, {"differs": 2, "is_superseded": True}, Act.REPLACE),
        (OURS, THEIRS, {"has_content": False, "differs": 2, "is_superseded": True}, Act.REMOVE),
        # The target has the beginning: its lease takes number 6.
        (OURS, THEIRS, {"next": 7}, Act.CONTINUE),
        (OURS, THEIRS, {"next": 6}, Act.REPLACE),
        (OURS, THEIRS, {"next": 7, "is_outdated": True}, Act.REPLACE),
        # The target has all records.
        (OURS, THEIRS, {}, Act.KEEP),
        (OURS, THEIRS, {"is_damaged": True}, Act.CONTINUE),
        (OURS, Moment(1, False, 5, None), {}, Act.CONTINUE),
        (OURS, THEIRS, {"is_outdated": True}, Act.REPLACE),
        (Moment(1, False, 1, None), Moment(1, False, 1, None), {"has_content": False}, Act.NOTHING),
    ],
)
def test_the_target_is_written_only_where_it_has_what_this_source_had(
    ours: Moment, theirs: Moment, facts: dict[str, Any], act: Act
) -> None:
    assert decide(Found(ours=ours, theirs=theirs, **{"has_content": True, **facts})) is act
