"""Processes on one PostgreSQL server that are killed, stopped, and race for a session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.deep


def crash(*arguments: str) -> dict[str, Any]:
    """Run a command of the crash tests in a process of its own, which forks."""
    command = [sys.executable, "-m", "tests.crash", *arguments, "--store", "postgres"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_of_eight_who_race_for_an_epoch_one_gets_it() -> None:
    summary = crash("race", "--rounds", "20", "--racers", "8")
    assert summary["problems"] == []
    assert summary["racers"] == 8
    assert summary["epochs"] >= 20
    assert summary["beaten"] > 0


def test_a_kill_under_load_loses_nothing() -> None:
    summary = crash("kill", "--cycles", "5")
    assert summary["problems"] == []
    assert (summary["kills"], summary["lost"]) == (5, 0)
    assert summary["acknowledged"] > 0


def test_a_holder_that_was_stopped_writes_nothing_behind_its_successor() -> None:
    summary = crash("pause", "--cycles", "4")
    assert summary["problems"] == []
    assert summary["stopped"] == 4
    assert summary["replaced"] > 0  # one that is stopped amid a transaction blocks its successor


def test_readers_see_whole_prefixes() -> None:
    summary = crash("readers", "--seconds", "2")
    assert summary["problems"] == []
    assert all(summary["views"])
