"""The same kills, stops and races for stores whose work is done on a server.

PostgreSQL has its own: tests/stores/postgres/test_crash.py.
"""

from __future__ import annotations

import sys

import pytest

from tests.crash.test_crash import crash

STORES = ["redis", "s3"]

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone: forks, SIGSTOP and /proc"),
    pytest.mark.parametrize("store", STORES),
]


def test_a_kill_under_load_loses_nothing(store: str) -> None:
    summary = crash("kill", "--cycles", "3", "--store", store)
    assert summary["problems"] == []
    assert summary["kills"] == summary["cycles"] == 3
    assert summary["acknowledged"] > 3


def test_a_holder_that_was_stopped_writes_nothing_behind_the_seal(store: str) -> None:
    summary = crash("pause", "--cycles", "3", "--store", store)
    assert summary["problems"] == []
    assert summary["stopped"] == 3
    assert summary["replaced"] > 0
    assert summary["acknowledged"] > 3


def test_of_those_who_race_for_a_session_one_gets_it(store: str) -> None:
    summary = crash("race", "--rounds", "20", "--store", store)
    assert summary["problems"] == []
    assert summary["epochs"] > 5
    assert summary["beaten"] > 0
