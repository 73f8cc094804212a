"""A store is migrated while a program writes to it: after a last run both are equal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.journeys.catch_up import RUNS, catch_up

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the servers have no wheels for Windows"),
    pytest.mark.timeout(600),
]


@pytest.mark.deep
async def test_a_store_is_migrated_while_it_is_written(tmp_path: Path) -> None:
    """The chain over all stores is a command: python -m tests.integration.journeys.catch_up."""
    await migrated(tmp_path, ("file", "postgres"))


async def migrated(folder: Path, hops: Sequence[str]) -> None:
    found = await catch_up(folder, hops=hops)
    assert [seen["to"] for seen in found] == list(hops[1:])
    assert [seen["different"] for seen in found] == [[]] * len(found)
    for seen in found:
        assert len(seen["runs"]) == RUNS
        for why in [why for run in seen["runs"] for why in run["failed"].values()]:
            assert why.endswith("try again")  # deleted, opened or pruned just then
        assert (seen["last"]["failed"], seen["last"]["open"]) == ({}, 0)
        again = seen["again"]
        assert again["there"] == again["sessions"]
        assert (again["copied"], again["continued"], again["deleted"]) == (0, 0, 0)
