"""Backups on the command line: made, verified, and restored after the store was lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message
from perdure.errors import ConfigError
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
    assert "eve: was forgotten since the backup, and stays forgotten" in left.out
    assert command("backup", str(store), target, "--json").json["forgotten"] == 1
    shutil.rmtree(store)
    ran = command("restore-backup", target, str(store), "--json")
    assert (ran.status, ran.json["written"], ran.json["failed"]) == (0, 3, {})
    checked = command("check", "--store", str(store), "--json").json
    assert (checked["checked"], checked["problems"]) == (3, 0)
    shown = command("show", "ada", "--store", str(store)).out
    assert "It is 5." in shown
    assert "copy of" not in shown


def test_a_session_that_was_only_posted_to_is_counted(
    command: Command, store: Path, tmp_path: Path
) -> None:
    async def post() -> None:
        async with perdure.connect(store) as sessions:
            await sessions.post("new", Message.user("posted"))

    anyio.run(post)
    target = str(tmp_path / "backup")
    assert command("backup", str(store), target).out.startswith("5 of 5 sessions written to ")
    again = command("backup", str(store), target, "--verify", "--json").json
    assert (again["sessions"], again["there"], again["verified"]["sessions"]) == (5, 5, 5)


def test_what_cannot_be_backed_up_is_refused(
    command: Command, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = command("backup", str(tmp_path / "none"), str(tmp_path / "backup"))
    assert (ran.status, "there is no store at" in ran.err) == (1, True)
    assert not (tmp_path / "backup").exists()
    ran = command("restore-backup", str(store), str(tmp_path / "new"))
    assert (ran.status, "is no backup" in ran.err) == (2, True)


def test_what_is_forgotten_goes_from_a_backup_at_once(
    command: Command, store: Path, tmp_path: Path
) -> None:
    target, other = str(tmp_path / "backup"), str(tmp_path / "other")
    for place in (target, other):
        assert command("backup", str(store), place).status == 0
    eve = ("forget", "eve", "--tenant", "acme", "--store", str(store))
    wrong = command(*eve, "--backup", str(store))
    assert (wrong.status, "is no backup" in wrong.err) == (2, True)
    assert command("show", "eve", "--tenant", "acme", "--store", str(store)).status == 0
    assert command(*eve, "--backup", target, "--dry-run").status == 0
    ran = command(*eve, "--backup", target)
    assert (ran.status, ran.err) == (0, "")
    assert "1 session removed from the backup in" in ran.out
    late = command(*eve, "--backup", other, "--json").json  # forgotten before: goes all the same
    assert [len(keys) for keys in late["backups"].values()] == [1]
    shutil.rmtree(store)  # before another backup runs
    for place in (target, other):
        assert command("restore-backup", place, str(store)).status == 0
        listed = command("ls", "--tenant", "acme", "--store", str(store), "--json").json
        assert "eve" not in str(listed)
        assert command("check", "--store", str(store)).status == 0


@pytest.mark.parametrize("scheme", ["file", "sqlite", "encrypted"])
def test_a_backup_is_no_store_to_use(
    scheme: str, command: Command, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    target = {
        "file": (tmp_path / "backup").as_uri(),
        "sqlite": f"sqlite:///{tmp_path / 'backup.db'}",
        "encrypted": f"encrypted+{(tmp_path / 'backup').as_uri()}",
    }[scheme]
    assert command("backup", str(store), target).status == 0
    out = str(tmp_path / "out")
    bundle = str(tmp_path / "bundle")
    command("export", "ada", "--layout", "bundle", "--out", bundle, "--store", str(store))
    for tokens in (
        ("ls", "--store", target),
        ("show", "ada", "--store", target),
        ("check", "--store", target),
        ("export", "ada", "--store", target),
        ("export", "ada", "--layout", "bundle", "--out", out, "--store", target),
        ("export", "ada", "--salvage", "--out", out, "--store", target),
        ("import", bundle, "--store", target),
        ("forget", "ada", "--store", target),
        ("migrate", target, str(tmp_path / "new")),
        ("migrate", str(store), target),
        ("backup", target, f"encrypted+{(tmp_path / 'again').as_uri()}"),
        ("restore-backup", target, target),
    ):
        ran = command(*tokens)
        assert (tokens, ran.status) == (tokens, 2)
        assert "is a backup, whose sessions cannot be used as they are: `perdure" in ran.err

    async def use(**how: bool) -> None:
        async with perdure.connect(target, shutdown=perdure.Shutdown(signals=False), **how):
            pass

    for how in ({}, {"read_only": True}):
        with pytest.raises(ConfigError, match="restore-backup BACKUP STORE"):
            anyio.run(lambda how=how: use(**how))
    ran = command("restore-backup", target, str(tmp_path / "new"))  # what the message says
    assert ran.status == 0
    assert "It is 5." in command("show", "ada", "--store", str(tmp_path / "new")).out
