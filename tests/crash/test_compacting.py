"""An agent's turn that compacts, killed at every step (``python -m tests.crash compaction``)."""

from __future__ import annotations

import sys

import pytest

from tests.crash.test_crash import crash

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone: forks"),
]


def test_a_kill_at_any_step_of_a_compaction_leaves_the_memory_of_a_run_without_it() -> None:
    """S1-14, S1-15, S1-17: items and context are one group, so it has happened, or it has not.

    Every fifth step; the command alone takes them all.
    """
    summary = crash("compaction", "--every", "5")
    assert summary["problems"] == []
    assert summary["acknowledged"] == summary["kills"] >= 15
    assert summary["cuts"] >= 2
    assert summary["items"] >= 5
