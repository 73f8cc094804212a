"""The model of a disk forgets what was not synced, and nothing else."""

from __future__ import annotations

import pytest

from tests.crash.disk import FOLDER, Disk

pytestmark = pytest.mark.deep


def trees(*events: list) -> set[tuple[tuple[str, bytes], ...]]:
    disk = Disk()
    for event in events:
        assert disk.replay(list(event))
    return {tree.files for tree in disk.cuts()}


NAMED = [["entries", "", {"a": 1}], ["sync folder", ""]]
SYNCED = [["write", 1, 0, "old"], ["sync file", 1]]


def test_without_a_sync_of_the_folder_the_name_may_be_missing() -> None:
    found = trees(["entries", "", {"a": 1}], *SYNCED)
    assert found == {(), (("a", b"old"),)}


def test_without_a_sync_of_the_file_any_prefix_may_be_there_and_zeros_behind_it() -> None:
    found = trees(*NAMED, *SYNCED, ["write", 1, 3, "new!"])
    contents = {data for ((_, data),) in found}
    assert contents == {b"old", b"oldne", b"oldnew!", b"old\0\0\0\0", b"oldne\0\0"}


def test_what_was_synced_stays() -> None:
    assert trees(*NAMED, *SYNCED) == {(("a", b"old"),)}


def test_a_rename_is_both_names_or_none() -> None:
    found = trees(*NAMED, *SYNCED, ["entries", "", {"b": 1, "a": None}])
    assert found == {(("a", b"old"),), (("b", b"old"),)}


def test_changes_of_a_folder_are_not_ordered() -> None:
    found = trees(*NAMED, ["entries", "", {"b": 1}], ["entries", "", {"a": None}])
    names = {tuple(path for path, _ in files) for files in found}
    assert names == {("a",), ("a", "b"), ("b",), ()}


def test_a_file_in_a_folder_that_vanished_is_gone() -> None:
    found = trees(
        ["entries", "", {"f": FOLDER}], ["entries", "f", {"a": 1}], ["sync folder", "f"], *SYNCED
    )
    assert found == {(), (("f/a", b"old"),)}


def test_what_is_no_change_of_the_disk_is_left_to_others() -> None:
    assert not Disk().replay(["ok", "agent", 1, 1])
