"""The command that serves says what is missing or wrong before it listens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

MAIN = "import sys; sys.modules[sys.argv.pop(1)] = None; from perdure.cli import main; sys.exit(main())"


def run(folder: Path, missing: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, missing, *arguments],
        cwd=folder,
        env={**os.environ, "PERDURE_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
@pytest.mark.parametrize(
    ("command", "extra"), [(["serve", "x:y"], "serve"), (["inspect", "memory:"], "inspector")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    missing: str, command: list[str], extra: str, tmp_path: Path
) -> None:
    status, said = run(tmp_path, missing, *command)
    assert (status, "Traceback" in said) == (2, False), said
    assert f"{missing}: pip install 'perdure[{extra}]'" in said


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("agents", "give module:name"),
        ("no_such_module:agent", "there is no module 'no_such_module'"),
        ("agents:nothing", "there is no 'nothing' there"),
        ("agents:number", "number is an AgentConfig, or a function"),
    ],
)
def test_what_is_no_agent_is_refused(agent: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("number = 1\n", encoding="utf-8")
    status, error = run(tmp_path, "nothing_is_missing", "serve", agent)
    assert (status, "Traceback" in error) == (2, False), error
    assert said in error


def test_an_age_at_which_sessions_go_is_checked(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("def agent(id): ...\n", encoding="utf-8")
    status, error = run(tmp_path, "nothing", "serve", "agents:agent", "--older-than", "soon")
    assert (status, "Traceback" in error) == (2, False), error
    assert "give days, hours or weeks" in error


def test_other_machines_are_not_let_in_without_tokens(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("def agent(id): ...\n", encoding="utf-8")
    status, error = run(tmp_path, "nothing", "serve", "agents:agent", "--host", "192.0.2.1")
    assert status == 2
    assert "give --tokens FILE" in error


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    file.write_text('[{"token": "ann-token-0123456789"}]', encoding="utf-8")
    return file


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_tokens_that_others_may_write_are_refused(
    command: Command, tokens: Path, mode: int
) -> None:
    tokens.chmod(mode)
    ran = command("serve", "no_such_module:agent", "--tokens", str(tokens))
    assert ran.status == 2
    assert f"chmod 600 {tokens}" in ran.err


def test_tokens_that_others_may_read_are_told_of_unless_they_are_digests(
    command: Command, tokens: Path
) -> None:
    tokens.chmod(0o644)
    ran = command("serve", "no_such_module:agent", "--tokens", str(tokens))
    assert "other users may read the tokens" in ran.err
    tokens.write_text(f'[{{"sha256": "{"5a" * 32}"}}]', encoding="utf-8")
    ran = command("serve", "no_such_module:agent", "--tokens", str(tokens))
    assert "there is no module" in ran.err
    assert "other users" not in ran.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--allow-origin", "*"), "give tokens"),
        (("--allow-host", "*"), "give tokens"),
        (("--host", "0.0.0.0"), "give --tokens FILE"),
        (("--max-connections", "0"), "for --max-connections. Must be > 0"),
        (("--max-connections", "99999999"), "ulimit -n"),
        (("--request-timeout", "0"), "for --request-timeout. Must be > 0"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(
    command: Command, option: tuple[str, str], said: str
) -> None:
    ran = command("serve", "no_such_module:agent", *option)
    assert (ran.status, said in ran.err) == (2, True), ran.err
