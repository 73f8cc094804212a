from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure.cli.app import COMMANDS
from tests.cli.conftest import Command

WITHOUT = "import sys; sys.modules[{name!r}] = None; from perdure.cli import main; sys.exit(main())"


def test_the_version_is_printed(command: Command) -> None:
    assert command("--version") == (0, f"{perdure.__version__}\n", "")


def test_no_command_shows_what_there_is(command: Command) -> None:
    ran = command()
    assert ran.status == 0
    assert all(one.__name__ in ran.out for one in COMMANDS)


@pytest.mark.parametrize("name", ["cyclopts", "rich"])
def test_without_the_extra_it_says_what_to_install(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(name=name)], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stderr == f"perdure: {name} is not installed: pip install 'perdure[cli]'\n"


def test_another_module_that_is_missing_is_not_taken_for_the_extra() -> None:
    code = WITHOUT.format(name="msgspec")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "perdure[cli]" not in run.stderr
    assert "msgspec" in run.stderr


@pytest.mark.parametrize(
    "tokens",
    [
        ["nonsense"],
        ["show"],
        ["show", "ada", "--nonsense"],
        ["ls", "--limit", "many"],
        ["demo", "--agents", "0"],
        ["ls", "--store", "ftp://x"],
        ["show", "bad\nid"],
    ],
)
def test_a_call_that_does_not_fit_is_one_line_and_status_2(
    tokens: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    ran = command(*tokens)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("perdure: ")
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line_and_status_1(command: Command, store: Path) -> None:
    ran = command("show", "nobody", "--store", str(store))
    assert ran.status == 1
    cure = "`perdure ls` lists what is there"
    assert ran.err == f"perdure: there is no session nobody in {store}: {cure}\n"


def test_debug_lets_the_error_through(command: Command, store: Path) -> None:
    with pytest.raises(perdure.SessionNotFoundError):
        command("show", "nobody", "--store", str(store), "--debug")


@pytest.mark.parametrize("name", ["ls", "check"])
def test_looking_at_a_store_that_is_not_there_does_not_make_it(
    name: str, command: Command, tmp_path: Path
) -> None:
    ran = command(name, "--store", str(tmp_path / "nowhere"))
    assert ran.status == 1
    assert "there is no store at" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_error_is_one_line_too(
    command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.cli.sessions._list", None)
    ran = command("ls", "--store", str(store))
    assert ran.status == 1
    assert ran.err.count("\n") == 1
    assert "run it again with --debug" in ran.err


def test_a_reader_that_has_read_enough_causes_no_noise(store: Path) -> None:
    run = subprocess.run(
        f"{sys.executable} -m perdure.cli show ada --log --store {store} | true",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
