"""The examples without async, and in a notebook: they run, and remember."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.source_tree import ROOT


def run(name: str, *args: str, home: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *args],
        env={**os.environ, "PERDURE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_the_blocking_script_remembers(tmp_path: Path) -> None:
    first = run("blocking_script.py", "My name is Ada", home=tmp_path)
    assert sorted(first.splitlines()) == [
        "amber: Nice to meet you. I will remember that.",
        "basalt: Nice to meet you. I will remember that.",
    ]
    second = run("blocking_script.py", "What did I say?", home=tmp_path)
    assert second.count("Before that you said: 'My name is Ada'") == 2


def test_the_notebook_shows_its_sessions_and_outlives_its_kernel(tmp_path: Path) -> None:
    said = run("notebook.py", home=tmp_path)
    assert "<Session notebook open version=1 durable=1>" in said
    assert said.count("characters of HTML") == 4
    assert "'Hello! How can I help?'" in said
    assert "Health(status='ok'" in said
    assert said.count("ShutdownReport(") == 2
    assert "['Hello', 'Hello! How can I help?']" in said
