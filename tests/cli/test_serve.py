"""The command that serves says what is missing or wrong before it listens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_other_machines_are_not_let_in_without_tokens(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("def agent(id): ...\n", encoding="utf-8")
    status, error = run(tmp_path, "nothing", "serve", "agents:agent", "--host", "192.0.2.1")
    assert status == 2
    assert "give --tokens FILE" in error
