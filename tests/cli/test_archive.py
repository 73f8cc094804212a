"""``perdure archive``: save, list and restore."""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

import pytest

from tests.archive import hostile
from tests.archive.trees import look, make
from tests.cli.conftest import Command


@pytest.fixture
def home(store: Path) -> Path:
    """The home of ada, with files in it."""
    files = {"data/a.txt": "1", ".config/x": "1", ".bashrc": "poison"}
    return make(store / "agents/ada/files", files)


def test_files_are_saved_listed_and_restored(command: Command, store: Path, home: Path) -> None:
    """S4-8, S4-17: on demand, from the command line."""
    at = ("--store", str(store))
    assert command("archive", "list", "ada", *at).out.split() == (
        "archive label saved files bytes paths".split()
    )
    saved = command("archive", "save", "ada", "--path", ".config/", "--label", "draft", *at)
    assert saved.status == 0
    assert "skipped: .bashrc: hidden" in saved.out
    assert "saved: 2 files, 2 B, 1 B of them stored now" in saved.out
    again = command("archive", "save", "ada", "--path", ".config/", *at, "--json").json
    assert (again["new"], again["stored_bytes"]) == (False, 0)
    before = look(home)
    make(home, {"data/a.txt": "2", "data/b.txt": "2"})
    done = command("archive", "restore", "ada", "--archive", "draft", *at)
    assert "data replaced" in done.out
    assert "the replaced files are in" in done.out
    assert look(home) == before
    assert "nothing was changed" in command("archive", "restore", "ada", *at).out
    listed = command("archive", "list", "ada", *at, "--json").json
    assert [(one["label"], one["files"]) for one in listed["archives"]] == [("draft", 2)]
    assert command("check", *at).status == 0


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone a name is any bytes")
def test_names_of_any_bytes_are_shown(command: Command, store: Path, home: Path) -> None:
    at = ("--store", str(store))
    odd = Path(os.fsdecode(os.fsencode(home) + b"/.\xff"))
    odd.write_text("x")
    assert r"skipped: .\udcff: hidden" in command("archive", "save", "ada", *at).out
    saved = command("archive", "save", "ada", *at, "--json").json
    assert r".\udcff" in [one["path"] for one in saved["skipped"]]
    odd.rename(odd.with_name(odd.name[1:]))
    assert r"\udcff" in command("archive", "restore", "ada", *at, "--json").json["replaced"]


def test_an_archive_goes_out_as_a_file_and_comes_in(
    command: Command, store: Path, home: Path, tmp_path: Path
) -> None:
    at, out = ("--store", str(store)), tmp_path / "out.tar.gz"
    ran = command("archive", "save", "ada", "--to", str(out), *at, "--json")
    assert ran.json["file_bytes"] == out.stat().st_size
    with tarfile.open(out) as tar:  # other tools read it
        assert tar.getnames() == [".perdure/archive.jsonl", "data", "data/a.txt"]
    new = ("--home", str(tmp_path / "new"))
    assert command("archive", "restore", "bob", "--from", str(out), *new, *at).status == 0
    assert look(tmp_path / "new") == {"data": None, "data/a.txt": b"1"}
    refused = command("archive", "save", "ada", "--to", str(out), *at)
    assert (refused.status, "is there already" in refused.err) == (2, True)


def test_the_paths_of_a_persistence_yaml_count(
    command: Command, store: Path, home: Path, tmp_path: Path
) -> None:
    """S4-8: persist_paths beyond the default snapshot; alone with --only."""
    file = tmp_path / "persistence.yaml"
    file.write_text("version: 1\npersist_paths: [.config/]\n")
    ran = command(
        *("archive", "save", "ada", "--config", str(file), "--only"),
        *("--store", str(store), "--json"),
    )
    assert (ran.json["archive"]["paths"], ran.json["archive"]["files"]) == ([".config"], 1)


def test_a_hostile_file_is_refused_in_one_line(
    command: Command, store: Path, home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "evil.tar"
    path.write_bytes(hostile.of(hostile.file("../evil")))
    before = look(home)
    ran = command("archive", "restore", "ada", "--from", str(path), "--store", str(store))
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (1, "", 1)
    assert "'../evil' is refused: it leaves the folder; nothing was changed" in ran.err
    assert look(home) == before


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (("list", "ada", "--to", "x.tar"), "--to goes with archive save"),
        (("save", "ada", "--archive", "x"), "--archive goes with archive restore"),
        (("restore", "ada", "--from", "x", "--archive", "y"), "not both"),
        (("restore", "ada"), "has no archive"),
        (("save", "ada", "--path", "../x"), "persist_paths"),
        (("save", "ada", "--home", "nowhere"), "--home nowhere: there is no such folder"),
        (("save", "ada", "--to", "x.zip"), "none of the names"),
        (("explode", "ada"), "see perdure archive --help"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(
    command: Command, store: Path, home: Path, tokens: tuple[str, ...], said: str
) -> None:
    ran = command("archive", *tokens, "--store", str(store))
    assert (ran.status, said in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("action", ["list", "save", "restore"])
def test_a_session_that_is_not_there_is_not_made(
    command: Command, store: Path, action: str
) -> None:
    ran = command("archive", action, "nobody", "--store", str(store))
    assert (ran.status, "there is no session nobody" in ran.err) == (1, True)
