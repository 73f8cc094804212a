"""A sample of what `test_crash.py` does in full: kills at random, and cuts of power."""

from __future__ import annotations

import sys

import pytest

from tests.crash.test_crash import crash

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="on Linux alone: forks, SIGSTOP and /proc"
)


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_kills_at_random_lose_nothing(store: str) -> None:
    summary = crash("kill", "--cycles", "8", "--store", store)
    assert (summary["lost"], summary["doubled"], summary["problems"]) == (0, 0, [])
    assert summary["acknowledged"] >= summary["kills"] >= 8


def test_a_cut_of_power_leaves_what_was_acknowledged() -> None:
    summary = crash("cuts", "--limit", "60")
    assert summary["problems"] == []
    assert summary["with_promises"] >= 20


def test_a_cut_of_power_leaves_a_copy_whole_or_none() -> None:
    summary = crash("cuts", "--scenario", "draft", "--limit", "60")
    assert summary["problems"] == []
    assert summary["opened"] == 60


def test_forks_of_sessions_that_go_are_whole_or_refused_wherever_it_is_killed() -> None:
    summary = crash("forks", "--forks", "16", "--records", "150", "--seed", "3")
    assert summary["problems"] == []
    assert summary["acknowledged"] >= 4
    assert summary["looks"]
