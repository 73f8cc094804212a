"""The file store through kills, stops and cuts of power: nothing acknowledged is ever lost.

Each test runs one of the commands of ``python -m tests.crash`` with a small count, in a
process of its own: it forks its children, which a process with threads had better not do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, SIGSTOP and /proc"),
    pytest.mark.timeout(240),
]


def crash(*arguments: str) -> dict[str, Any]:
    """Run the command, and return its summary."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.crash", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("scenario", "least"), [("append", 20), ("acquire", 20), ("fold", 30), ("release", 30)]
)
def test_a_kill_at_any_call_loses_nothing(scenario: str, least: int) -> None:
    summary = crash("steps", "--scenario", scenario)
    assert summary["problems"] == []
    assert summary["kills"] >= least
    assert summary["acknowledged"] >= summary["kills"]


def test_a_kill_under_load_loses_nothing() -> None:
    summary = crash("kill", "--cycles", "12")
    assert summary["problems"] == []
    assert summary["kills"] == summary["cycles"] == 12
    assert summary["acknowledged"] >= 5 * summary["cycles"]


def test_a_holder_that_was_stopped_writes_nothing_behind_the_seal() -> None:
    summary = crash("stop", "--cycles", "20")
    assert summary["problems"] == []
    assert summary["stopped"] >= 20
    assert summary["replaced"] > 0
    assert summary["acknowledged"] > 0


def test_readers_beside_a_folding_writer_see_whole_prefixes() -> None:
    summary = crash("readers", "--seconds", "2")
    assert summary["problems"] == []
    assert all(views > 1 for views in summary["views"])
    assert summary["acknowledged"] > 0


@pytest.mark.parametrize("scenario", ["acquire", "fold", "release"])
def test_a_cut_of_power_after_any_call_loses_nothing(scenario: str) -> None:
    summary = crash("cuts", "--scenario", scenario, "--limit", "60")
    assert summary["problems"] == []
    assert summary["opened"] == 60
    assert summary["with_promises"] > 20


def test_the_judge_sees_a_store_without_a_fence() -> None:
    summary = crash("stop", "--cycles", "10", "--unfenced")
    assert any("lost an acknowledged group" in text for text in summary["problems"])


@pytest.mark.parametrize("lie", ["fsync", "fdatasync"])
def test_the_judge_sees_a_missing_sync(lie: str) -> None:
    summary = crash("cuts", "--scenario", "append", "--limit", "40", "--lie", lie)
    assert any("lost an acknowledged group" in text for text in summary["problems"])
