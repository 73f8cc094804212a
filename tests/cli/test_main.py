from __future__ import annotations

import json
import os
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
        ["--store", "x", "ls"],
        ["ls", "a", "b", "c"],
        ["ls", "--limit", "-1"],
        ["show", "ada", "--target", "openai"],
        ["show", "ada", "--restore-plan", "--log"],
        ["prune"],
        ["check", "--grace", "-1"],
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


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["sho", "ada"], 'Unknown command "sho". Did you mean "show"?; see perdure --help'),
        (["--store", "x", "ls"], "options come after the command: perdure COMMAND --store"),
        (["ls", "a", "b", "c"], "'b c' is more than the command takes; see perdure ls --help"),
        (["prune"], "say what to prune: give --keep-turns, --keep-days or --older-than"),
        (["ls", "--store", "ftp://x"], "use a path, or one of file:, memory:, sqlite:, redis:"),
    ],
    ids=["misspelled", "option first", "too many", "no retention", "unknown store"],
)
def test_a_call_that_does_not_fit_says_what_would(
    tokens: list[str], said: str, command: Command
) -> None:
    assert said in command(*tokens).err


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["rollback", "ada", "99"], "`perdure checkpoints ada` list the existing ones"),
        (["replay", "ada", "--report", "no/a.html"], "make it first"),
        (["import", "notes.txt"], "; name what `perdure export` wrote"),
        (["ls", "--owner", "nobody"], "no fitting sessions in "),
        (["ls", "--by-id", "--after", "zz"], "no more sessions in "),
        (["ls", "--scopes"], "no scopes in "),
        (["doctor", "--grace", "-1"], 'Invalid value "-1.0" for --grace. Must be >= 0'),
        (["inspect", "--host", "no host"], "choose another --host or --port"),
    ],
)
def test_an_error_says_how_to_mend_it(
    tokens: list[str],
    said: str,
    command: Command,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("buy herring")
    ran = command(*tokens, "--store", str(store))
    assert said in ran.err + ran.out
    assert (ran.status == 0) == (tokens[0] == "ls")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["config", "check"], "name another file, or none if nothing is declared"),
        (["serve", "perdure.agent:EchoModel", "--tokens", "none"], "name a file of tokens"),
        (["migrate", "{store}", "{store}"], "is the source, too: name another TARGET"),
    ],
)
def test_a_command_without_a_store_says_how_to_mend_it(
    tokens: list[str],
    said: str,
    command: Command,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = command(*(token.format(store=store) for token in tokens))
    assert ran.status == 2
    assert said in ran.err


def test_a_folder_that_is_missing_is_named_without_a_traceback(
    command: Command, store: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "no" / "folder"
    ran = command("export", "ada", "--out", str(missing / "ada.json"), "--store", str(store))
    assert ran == (
        2,
        "",
        f"perdure: {missing / 'ada.json'}: there is no folder {missing}: make it first\n",
    )
    ran = command("replay", "ada", "--report", str(missing / "ada.json"), "--store", str(store))
    assert ran.status != 0
    assert str(missing) in ran.err
    assert "--debug" not in ran.err


def test_a_file_that_is_no_export_is_named(command: Command, store: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy herring")
    ran = command("import", str(tmp_path / "notes.txt"), "--store", str(store))
    assert ran.status == 1
    assert ran.err.startswith(f"perdure: {tmp_path / 'notes.txt'} is no export that can be read")


SEVERAL = """
import sys
from perdure.cli import main
for tokens in (["chat"], ["show", "chat"], ["show", "chat", "--json"], ["export", "chat"]):
    assert main([*tokens, "--store", sys.argv[1]]) == 0
    print("=" * 9, flush=True)
"""


def test_a_terminal_that_knows_few_letters_shows_the_others_escaped(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SEVERAL, str(tmp_path / "store")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        input="h\xe9llo \u2192\n".encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    said, shown, shown_json, exported, _ = run.stdout.split(b"=" * 9)
    assert b"You said 'h\\xe9llo \\u2192'" in said
    assert b"h\\xe9llo" in shown
    assert json.loads(shown_json)["context"][1]["content"] == "h\xe9llo \u2192"
    assert "h\xe9llo \u2192" in json.dumps(json.loads(exported), ensure_ascii=False)


def test_a_failure_is_one_line_and_status_1(command: Command, store: Path) -> None:
    ran = command("show", "nobody", "--store", str(store))
    assert ran.status == 1
    cure = "`perdure ls` lists what is there"
    assert ran.err == f"perdure: there is no session nobody in {store}: {cure}\n"


@pytest.mark.parametrize(
    ("tokens", "status", "kind"),
    [
        (["show", "nobody"], 1, "SessionNotFoundError"),
        (["show", "ada", "--target", "openai"], 2, "ConfigError"),
        (["ls", "--store", "ftp://x"], 2, "ConfigError"),
    ],
)
def test_a_failure_is_json_too_where_json_is_asked_for(
    tokens: list[str], status: int, kind: str, command: Command, store: Path
) -> None:
    place = [] if "--store" in tokens else ["--store", str(store)]
    ran = command(*tokens, *place, "--json")
    error = ran.json["error"]
    assert (ran.status, error["status"], error["type"]) == (status, status, kind)
    assert ran.err == f"perdure: {error['message']}\n"


def test_the_package_is_the_command_too(store: Path) -> None:
    command = [sys.executable, "-m", "perdure", "ls", "--by-id", "--store", str(store), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["sessions"][0]["agent"] == "ada"
    code = "import runpy, sys; sys.modules['cyclopts'] = None; runpy.run_module('perdure', run_name='__main__')"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert bare.returncode == 2
    assert bare.stderr == "perdure: cyclopts is not installed: pip install 'perdure[cli]'\n"


def test_a_shell_completes_the_commands(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    ran = command("--install-completion", "--shell", "bash")
    assert ran.status == 0, ran.err
    scripts = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("checkpoints" in path.read_text() for path in scripts)


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
    monkeypatch.setattr("perdure.cli.sessions.print_table", None)
    ran = command("ls", "--by-id", "--store", str(store))
    assert ran.status == 1
    assert ran.err.count("\n") == 1
    assert "run it again with --debug" in ran.err


def test_streams_that_are_closed_are_no_failure(store: Path) -> None:
    at = f"{sys.executable} -m perdure.cli chat --store {store} <&- >&-"
    run = subprocess.run(at, shell=True, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_reader_that_has_read_enough_causes_no_noise(store: Path) -> None:
    run = subprocess.run(
        f"{sys.executable} -m perdure.cli show ada --log --store {store} | true",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    ("tokens", "status"), [(["ls"], 1), (["show", "nobody"], 1), (["show", "ada", "--no"], 2)]
)
def test_an_output_that_takes_nothing_is_one_line(
    tokens: list[str], status: int, options: list[str], unbuffered: str, store: Path
) -> None:
    at = [sys.executable, "-m", "perdure.cli", *tokens, "--store", str(store), *options]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(at, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert (run.returncode, run.stderr.count("\n")) == (status, 1), run.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("tokens", ["show ada --log", "export ada"])
def test_an_output_that_takes_only_a_part_is_a_failure(
    tokens: str, unbuffered: str, store: Path, tmp_path: Path
) -> None:
    at = f"{sys.executable} -m perdure.cli {tokens} --store {store} > {tmp_path / 'out'}"
    run = subprocess.run(
        f"ulimit -f 1; {at}",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert (tmp_path / "out").stat().st_size <= 1024
    assert (run.returncode, run.stderr.count("\n")) == (1, 1), run.stderr
