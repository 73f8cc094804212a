"""The file store by the means of other platforms: its own tests, run again in a process of theirs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="it takes from Linux what others lack"
    ),
]

WINDOWS = [
    "tests/conformance/test_file.py",
    "tests/stores/file/test_leases.py",
    "tests/stores/file/test_documents.py",
    "tests/stores/file/test_blobs.py",
]
BARE = ["tests/conformance/test_file.py", "tests/stores/file/test_leases.py"]
NEED_LOCKS = (
    "test_a_killed_process_is_known_to_be_dead_at_once",
    "test_a_forked_child_does_not_keep_its_parent_alive",
    "test_an_owner_s_id_is_its_own",
    "test_the_files_of_dead_owners_are_swept_and_no_others",
    "test_a_clock_that_jumps_changes_nothing",
    "test_an_acquire_that_fails_half_way_keeps_nobody_out",
    "test_who_knows_no_boot_of_its_own_goes_by_the_lock",
)
"""What only a lock can tell; without one a dead owner is known by its heartbeat."""
FORKS = ("test_a_forked_child_does_not_keep_its_parent_alive",)
OPEN_DRAFTS = (
    "test_posts_outlive_a_draft",
    "test_dead_letters_are_the_draft_s",
    "test_an_overtaken_holder_publishes_nothing",
    "test_an_overtaken_holder_writes_nothing",
    "test_either_it_is_published_or_taken_over",
)
"""A draft whose log is open cannot be removed on Windows: an open of its id fails until then."""


def run_with(plugin: str, paths: list[str], without: tuple[str, ...]) -> int:
    """Run tests with a plugin, on one event loop; return how many passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider"]
    unless = " and ".join(f"not {one}" for one in ("trio", *without))
    done = subprocess.run(
        [*command, "-k", unless, *paths],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


def test_the_file_store_works_by_the_means_of_windows() -> None:
    assert run_with("tests.platforms.windows", WINDOWS, (*FORKS, *OPEN_DRAFTS)) > 100


def test_the_file_store_works_without_any_locks() -> None:
    assert run_with("tests.platforms.bare", BARE, NEED_LOCKS) > 80
