from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

pytestmark = pytest.mark.deep


@pytest.fixture
def say(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chat by lines of standard input."""

    def chat(*lines: str, json: bool = False):
        typed = tmp_path / "typed"
        typed.write_text("".join(f"{line}\n" for line in lines))
        flags = ["--json"] if json else []
        with typed.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return command("chat", "--store", str(tmp_path / "store"), *flags)

    return chat


def test_a_conversation_goes_on_after_a_restart(say) -> None:
    ran = say("My name is Ada")
    assert ran.status == 0, ran.err
    assert "chat is new" in ran.out
    assert "You said 'My name is Ada'. I will remember it." in ran.out
    ran = say("What did I say?")
    assert "chat continues after turn 1" in ran.out
    assert "before that, 'My name is Ada'. I know 2 things you said." in ran.out


def test_the_agent_calls_a_tool(say) -> None:
    out = say("count one two three").out
    assert "[count_words]" in out
    assert "Those were 3 words." in out


def test_as_json_each_turn_is_a_line(say) -> None:
    first, second = map(json.loads, say("Hello", "", "Again", json=True).out.splitlines())
    assert first["turn"] == "turn_0001"
    assert first["version"] < second["version"]
    assert second["answer"].startswith("You said 'Again'; before that, 'Hello'.")


def test_quit_leaves_and_what_follows_is_not_said(say) -> None:
    assert len(say("Hello", "/quit", "Never said", json=True).out.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_it_waits_for_a_line(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure.cli", "chat", "--json"]
    command += ["--store", str(tmp_path / "store")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as chat:
        chat.stdin.write("Hello\n")
        chat.stdin.flush()
        assert "Hello" in chat.stdout.readline()
        chat.send_signal(number)
        chat.wait()  # standard input stays open all the time
        assert chat.returncode == (130 if number == signal.SIGINT else -number)
        assert chat.stderr.read() == ""


def test_an_answered_turn_outlives_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure.cli", "chat", "--json", "--id", "ada"]
    command += ["--store", str(tmp_path / "store")]

    def start() -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**os.environ}, **pipes)

    with start() as first:
        first.stdin.write("Remember the harbor\n")
        first.stdin.flush()
        assert "the harbor" in json.loads(first.stdout.readline())["answer"]
        first.send_signal(signal.SIGKILL)
    with start() as second:
        out, _ = second.communicate("What was it?\n")
    assert "before that, 'Remember the harbor'" in json.loads(out)["answer"]
    assert second.returncode == 0
