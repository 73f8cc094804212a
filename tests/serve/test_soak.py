"""What a soak calls a problem; the soak itself, for some seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.soak import Sample, problems
from tests.source_tree import ROOT


def sample(cycle: int, **changed: int) -> Sample:
    values = {"memory": 80_000_000, "descriptors": 20, "threads": 10, "tasks": 9, "disk": 10**8}
    return Sample(at=cycle, **{**values, **changed})


def test_what_varies_is_no_problem_and_what_grows_is_one() -> None:
    flat = [sample(cycle, descriptors=20 + cycle % 3) for cycle in range(30)]
    assert problems(flat) == []
    warm = [sample(cycle, memory=60_000_000 + 4_000_000 * min(cycle, 9)) for cycle in range(30)]
    assert problems(warm) == []
    leaks = [
        sample(cycle, memory=80_000_000 + 2_000_000 * cycle, tasks=cycle) for cycle in range(30)
    ]
    assert [problem.split()[0] for problem in problems(leaks)] == ["memory", "tasks"]


@pytest.mark.deep
@pytest.mark.parametrize("store", ["valkey", "sqlite"])
def test_a_server_survives_outages_of_its_store(store: str) -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.1", "--cycle", "6"]
    done = subprocess.run([*command, "--store", store], cwd=ROOT, capture_output=True, text=True)
    summary = json.loads(done.stdout)
    assert summary["exit_status"] == 0, done.stderr
    assert summary["turns"] > 0
    # So few cycles are all warm-up: what grows in them is none.
    assert [found for found in summary["problems"] if " grows " not in found] == []
