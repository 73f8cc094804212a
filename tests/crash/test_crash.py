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
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone: forks, SIGSTOP and /proc"),
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
    ("scenario", "least"),
    [("acquire", 40), ("fold", 60), ("release", 60), ("roll", 80), ("delete", 80), ("draft", 100)],
)
def test_a_kill_at_any_call_loses_nothing(scenario: str, least: int) -> None:
    summary = crash("steps", "--scenario", scenario)
    assert summary["problems"] == []
    assert summary["kills"] >= least
    assert summary["torn"] >= 5
    assert summary["acknowledged"] >= summary["kills"]


@pytest.mark.parametrize(("scenario", "every"), [("roll", 17), ("delete", 19)])
def test_a_call_that_fails_is_told_and_loses_nothing(scenario: str, every: int) -> None:
    """An error of the disk, once or for good, a full one; and then a cut of power."""
    summary = crash("faults", "--scenario", scenario, "--every", str(every))
    assert summary["problems"] == []
    assert summary["faults"] >= 15
    assert summary["told"] >= 8
    assert summary["acknowledged"] >= 30


def test_a_rollback_is_wholly_there_or_not_at_all() -> None:
    """S3-7, S3-11: killed at any call, a rollback is one group of the log."""
    summary = crash("rollback", "--every", "4")
    assert summary["problems"] == []
    assert summary["kills"] >= 8
    assert summary["wholly_there"] >= 2
    assert summary["not_at_all"] >= 2


def test_a_kill_amid_setting_a_damaged_log_aside_loses_no_evidence() -> None:
    """S2-21: nor what the new log has acknowledged."""
    summary = crash("aside", "--every", "3")
    assert summary["problems"] == []
    assert summary["kills"] >= 30


@pytest.mark.parametrize("how", [["--bare"], ["--store", "encrypted"]], ids=["bare", "encrypted"])
def test_a_kill_under_load_loses_nothing(how: list[str]) -> None:
    """Sessions on files and on SQLite are in `test_samples.py`."""
    summary = crash("kill", "--cycles", "6", *how)
    assert summary["problems"] == []
    assert summary["kills"] == summary["cycles"] == 6
    assert summary["acknowledged"] >= 5 * summary["cycles"]


@pytest.mark.parametrize(
    ("store", "forks", "records"),
    [("file", 40, 400), ("sqlite", 20, 200), ("postgres", 20, 200), ("redis", 20, 400)],
)
def test_forks_of_sessions_that_go_are_whole_or_refused(
    store: str, forks: int, records: int
) -> None:
    """The copier is the same; Redis answers it so fast that a kill needs a longer one."""
    count = ("--forks", str(forks), "--records", str(records))
    summary = crash("forks", *count, "--store", store)
    assert summary["problems"] == []
    assert summary["acknowledged"] >= forks // 4
    assert summary["killed"] >= forks // 10
    assert sum(summary["stopped"].values()) >= forks // 20


def test_the_judge_sees_a_fork_that_is_published_before_it_is_whole() -> None:
    summary = crash("forks", "--forks", "40", "--records", "400", "--hasty")
    assert len(summary["problems"]) >= 3


def test_a_sqlite_holder_that_was_stopped_writes_nothing_behind_the_seal() -> None:
    summary = crash("pause", "--cycles", "8", "--store", "sqlite")
    assert summary["problems"] == []
    assert summary["stopped"] == 8
    assert summary["replaced"] > 0
    assert summary["acknowledged"] > 8


def test_of_those_who_race_for_a_sqlite_session_one_gets_it() -> None:
    summary = crash("race", "--rounds", "20", "--store", "sqlite")
    assert summary["problems"] == []
    assert summary["epochs"] >= 20
    assert summary["beaten"] > 0


def test_a_holder_that_was_stopped_at_any_call_writes_nothing_behind_the_seal() -> None:
    summary = crash("stop")
    assert summary["problems"] == []
    assert summary["stopped"] >= 80
    assert summary["replaced"] > 40
    assert summary["acknowledged"] > 0


def test_holders_that_were_stopped_one_after_the_other_keep_the_seal() -> None:
    summary = crash("stop", "--cycles", "8")
    assert summary["problems"] == []
    assert summary["stopped"] >= 8
    assert summary["replaced"] > 0


def test_of_those_who_race_for_an_epoch_one_gets_it() -> None:
    summary = crash("race", "--rounds", "20")
    assert summary["problems"] == []
    assert summary["epochs"] > 1
    assert summary["beaten"] > 0


def test_a_kill_of_who_posts_or_takes_neither_loses_nor_doubles() -> None:
    summary = crash("mail", "--every", "5")
    assert summary["problems"] == []
    assert summary["kills"] >= 20
    assert summary["acknowledged"] >= summary["kills"]


@pytest.mark.parametrize(("variant", "every"), [("sound", 8), ("damaged", 6)])
def test_a_kill_within_a_restore_changes_nothing(variant: str, every: int) -> None:
    """S0-2, C8: whatever the restore was at, the next one gives the same state."""
    summary = crash("restore", "--variant", variant, "--every", str(every))
    assert summary["problems"] == []
    assert summary["kills"] >= 7
    assert summary["messages"] >= 6


def test_a_kill_amid_tools_with_effects_doubles_nothing_and_loses_no_message() -> None:
    """S1-G1, 2.1: an admitted message is answered once, its mail is sent once, or asked about."""
    summary = crash("effects", "--cycles", "24")
    assert summary["problems"] == []
    assert summary["kills"] == 24
    assert summary["resumed"] >= 18
    assert summary["unknown"] > 0


def test_a_kill_of_who_asks_leaves_a_turn_that_goes_on_or_nothing() -> None:
    """S1-G1, 2.1: on trio; a message that is answered at once stands in the log once."""
    summary = crash("effects", "--asks", "--cycles", "8", "--backend", "trio")
    assert summary["problems"] == []
    assert (summary["kills"], summary["resumed"] > 0) == (8, True)


def test_readers_beside_a_folding_writer_see_whole_prefixes() -> None:
    summary = crash("readers", "--seconds", "1.5")
    assert summary["problems"] == []
    assert all(views > 1 for views in summary["views"])
    assert summary["acknowledged"] > 0


@pytest.mark.parametrize("scenario", ["acquire", "unsynced", "fold", "release", "roll", "delete"])
def test_a_cut_of_power_after_any_call_loses_nothing(scenario: str) -> None:
    # Of a fold's states two may tell that a sync is missing.
    limit = 1000 if scenario == "fold" else 200
    summary = crash("cuts", "--scenario", scenario, "--limit", str(limit))
    assert summary["problems"] == []
    assert summary["opened"] == min(limit, summary["states"])
    assert summary["with_promises"] > 40


def test_the_judge_sees_a_store_without_a_fence() -> None:
    summary = crash("stop", "--cycles", "6", "--unfenced")
    assert any("lost an acknowledged group" in text for text in summary["problems"])


@pytest.mark.parametrize("lie", ["fsync", "fdatasync"])
def test_the_judge_sees_a_missing_sync(lie: str) -> None:
    summary = crash("cuts", "--scenario", "append", "--limit", "25", "--lie", lie)
    assert any("lost an acknowledged group" in text for text in summary["problems"])


def test_damage_is_noticed_and_never_read_as_truth() -> None:
    summary = crash("flip", "--cycles", "100")
    assert summary["problems"] == []
    assert summary["cycles"] == 100
    assert summary["noticed"] > 75  # The rest met bytes that tell nothing: a heartbeat, a time.


def test_damage_to_a_database_ends_no_read_but_by_data_or_an_error_that_says_so() -> None:
    summary = crash("flip", "--cycles", "150", "--store", "sqlite", "--seed", "1")
    assert summary["problems"] == []
    assert summary["cycles"] == 150
    assert summary["noticed"] > 25  # Most pages are another session's, or hold what has no sum.


@pytest.mark.parametrize("scenario", ["acquire", "fold"])
def test_a_call_around_the_database_that_fails_is_told(scenario: str) -> None:
    """Its folder, and its owners: what SQLite itself calls is not within reach here."""
    summary = crash("faults", "--scenario", scenario, "--store", "sqlite")
    assert summary["problems"] == []
    assert summary["faults"] >= 3
    assert summary["told"] >= 3
