from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Shell:
    """Runs examples on a store of its own, as a user would."""

    def __init__(self, home: Path) -> None:
        self.env = {**os.environ, "PERDURE_HOME": str(home)}

    def run(self, name: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def test_the_eight_lines_remember_the_run_before(shell: Shell) -> None:
    assert shell.run("eight_lines.py") == ["Hello! I remember 0 earlier messages."]
    assert shell.run("eight_lines.py") == ["Hello! I remember 2 earlier messages."]


def test_the_script_assistant_knows_what_was_said_in_another_process(shell: Shell) -> None:
    shell.run("script_assistant.py", "My name is Ada")
    (answer,) = shell.run("script_assistant.py", "What did I say?")
    assert "'My name is Ada'" in answer


def test_the_trio_example_goes_on_where_it_stopped(shell: Shell) -> None:
    assert "cedar: 3 turns, durable up to record 13" in shell.run("on_trio.py")
    assert any(line.startswith("cedar: 6 turns") for line in shell.run("on_trio.py"))


def test_a_session_moves_from_one_worker_to_another_and_loses_nothing(shell: Shell) -> None:
    first, asked, second, done, last = shell.run("several_workers.py")
    assert first == "first has it after turn 0"
    assert asked == "first was asked for it, and let go"
    turn = int(second.removeprefix("second has it after turn "))
    assert turn >= 1
    assert done == f"second is done after turn {turn + 5}"
    assert last == f"{turn + 5} turns, the last: Answer {turn + 5}, by second"


def test_every_example_is_run_here() -> None:
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    missing = [
        path.name
        for path in (ROOT / "examples").glob("*.py")
        if path.name not in tested and f"{path.stem}:app" not in tested
    ]
    assert missing == []
