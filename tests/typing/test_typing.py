"""The types that people see: right code passes the checker, wrong code does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import perdure
from tests.source_tree import ROOT

HERE = Path(__file__).parent

Findings = set[tuple[int, str]]


def mypy(path: Path, cache: Path) -> Findings:
    """Check one file as strictly as perdure itself; return lines and codes of its errors."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(cache)]
    command += ["--hide-error-context", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    pattern = re.compile(rf"{re.escape(path.name)}:(\d+): error: .*\[([a-z-]+)\]$")
    found = (pattern.search(line) for line in run.stdout.splitlines())
    return {(int(match[1]), match[2]) for match in found if match}


def marked(path: Path) -> Findings:
    return {
        (number, code.strip())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "# error: " in line
        for code in line.partition("# error: ")[2].split(",")
    }


def test_right_code_passes_and_wrong_code_does_not(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert mypy(HERE / "api.py", cache) == set()
    assert mypy(HERE / "wrong.py", cache) == marked(HERE / "wrong.py")
    assert mypy(every_name(tmp_path), cache) == set()


def every_name(folder: Path) -> Path:
    """Write a module that imports each name of the top level, which resolves them lazily."""
    names = getattr(perdure, "__all__", ())
    path = folder / "every_name.py"
    lines = [f"from perdure import {name} as public_{name}\n" for name in names]
    path.write_text("".join(lines), encoding="utf-8")
    return path
