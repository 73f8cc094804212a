"""Backups on the command line: made, verified, and restored after the store was lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command


def test_a_lost_store_comes_back(command: Command, store: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "backup")
    ran = command("backup", str(store), target, "--verify")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("4 of 4 sessions written to ")
    assert ran.out.endswith(", no problems\n")
    again = command("backup", str(store), target, "--verify", "--json").json
    assert (again["written"], again["there"], again["verified"]["problems"]) == (0, 4, {})
    command("forget", "eve", "--tenant", "acme", "--store", str(store))
    left = command("restore-backup", target, str(store))
    assert "eve: was forgotten since the backup, and stays so" in left.out
    assert command("backup", str(store), target, "--json").json["forgotten"] == 1
    shutil.rmtree(store)
    ran = command("restore-backup", target, str(store), "--json")
    assert (ran.status, ran.json["written"], ran.json["failed"]) == (0, 3, {})
    checked = command("check", "--store", str(store), "--json").json
    assert (checked["checked"], checked["problems"]) == (3, 0)
    assert "It is 5." in command("show", "ada", "--store", str(store)).out


def test_what_cannot_be_backed_up_is_refused(
    command: Command, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = command("backup", str(tmp_path / "none"), str(tmp_path / "backup"))
    assert (ran.status, "there is no store at" in ran.err) == (1, True)
    assert not (tmp_path / "backup").exists()
    ran = command("restore-backup", str(store), str(tmp_path / "new"))
    assert (ran.status, "is no backup" in ran.err) == (2, True)
