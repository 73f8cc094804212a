"""``perdure chat`` with a real client: what it shows, what it says when something is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.servers.models import KEY, Server, running

pytestmark = pytest.mark.deep

SCRIPT = Path(__file__).parents[1] / "servers" / "mcp_tools.py"


@pytest.fixture(scope="module")
def models() -> Iterator[Server]:
    with running() as server:
        yield server


def started(models: Server, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perdure.cli", "chat", "--store", str(tmp_path / "store")]
    command += ["--model", "openai:m", "--base-url", models.openai_url, *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, "OPENAI_API_KEY": KEY},
    )


def test_it_streams_calls_tools_and_says_why_there_is_no_answer(
    models: Server, tmp_path: Path
) -> None:
    with started(models, tmp_path, "--mcp", f"{sys.executable} {SCRIPT} {tmp_path}") as chat:
        out, err = chat.communicate("Hello\ntime in Asia/Tokyo\ncut this long sentence\nAgain\n")
    assert chat.returncode == 0, err
    assert "You said: Hello\n" in out
    assert '[get_current_time] {"timezone":"Asia/Tokyo"}' in out
    assert "[get_current_time] failed: there is no tool" in out
    assert "(no answer: the answer of m at http://127.0.0.1" in out
    assert out.rstrip().endswith("You said: Again")
    tools = {tool["function"]["name"] for tool in models.seen()["requests"][-1]["tools"]}
    assert "files_read" in tools


SILENT = """
import sys
from perdure.cli import chat, main
chat.SILENCE = 0
sys.exit(main())
"""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_chat_without_any_answer_has_failed_and_tells_that_it_waits(
    options: list[str], models: Server, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SILENT, "chat", "--store", str(tmp_path), *options]
    command += ["--model", "openai:m", "--base-url", "http://127.0.0.1:9"]
    env = {**os.environ, "OPENAI_API_KEY": KEY}
    ran = subprocess.run(command, input="Hello\n", env=env, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "no answer" in ran.stdout or '"error":' in ran.stdout
    assert "waiting for the model; Ctrl-C gives up" in ran.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_one_interrupt_ends_the_turn_and_the_next_one_leaves(
    models: Server, tmp_path: Path
) -> None:
    with started(models, tmp_path) as chat:
        chat.stdin.write("hang amid this sentence\n")
        chat.stdin.flush()
        said = ""
        while "You said" not in said:
            said += chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        while "(interrupted; what came is kept" not in said:
            said += chat.stdout.read(1)
        chat.stdin.write("Hello\n")
        chat.stdin.flush()
        while "You said: Hello\n" not in said:
            said += chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        assert chat.wait() == 130
        assert chat.stderr.read() == ""
    assert models.seen()["broken"] == []


def test_a_missing_key_is_named_and_none_is_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    ran = command("chat", "--model", "openai:m")
    assert ran.status == 2
    assert "OPENAI_API_KEY" in ran.err
    ran = command("chat", "--model", "m")
    assert "openai:NAME" in ran.err
    ran = command("chat", "--base-url", "http://localhost:1")
    assert "--model openai:NAME" in ran.err


def test_a_server_of_tools_that_does_not_start_is_an_error(
    command: Command, models: Server, tmp_path: Path
) -> None:
    options = ["--model", "openai:m", "--base-url", models.openai_url]
    ran = command("chat", *options, "--mcp", "no-such-program", "--store", str(tmp_path))
    assert ran.status == 1
    assert "there is no program 'no-such-program'" in ran.err
