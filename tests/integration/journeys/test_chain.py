"""Every store's sessions into the next one, through kills, until they are back: nothing changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.journeys.chain import HOPS, chain

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform == "win32", reason="the servers have no wheels for Windows"),
    pytest.mark.timeout(400),
]


async def test_sessions_that_went_through_all_stores_are_the_same(tmp_path: Path) -> None:
    seen = await chain(tmp_path, sessions=13, kills=1)
    assert [hop["to"] for hop in seen["hops"]] == list(HOPS[1:])
    assert [hop["failed"] for hop in seen["hops"]] == [{}] * len(seen["hops"])
    assert sum(hop["killed"] for hop in seen["hops"]) > 0
    assert seen["different"] == []
    assert (seen["posted"], seen["inboxes"]) == (3, {})
    assert seen["listed"] == seen["sessions"] == 13
