"""A kill at any call of a restore or a save leaves the old or the new, and nothing in between."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        sys.platform != "linux", reason="on Linux alone: forks, and hooks on the calls of os"
    ),
]


def test_a_kill_at_any_call_leaves_the_old_or_the_new() -> None:
    """S4-17: the home at the end of a session is the home at the next start, killed or not."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.archive.kills"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["problems"] == {"restores": [], "saves": [], "faults": []}
    assert summary["kills"]["restores"] >= 80
    assert summary["kills"]["saves"] >= 60
    assert summary["kills"]["faults"] >= 80
