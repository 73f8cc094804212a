"""The types that people see: right code passes the checkers, wrong code does not."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perdure
from tests.source_tree import ROOT, missing_sdks

HERE = Path(__file__).parent
RIGHT = sorted(HERE.glob("api*.py"))
WRONG = HERE / "wrong.py"

Findings = set[tuple[int, str]]


def mypy(paths: list[Path], cache: Path) -> Findings:
    """Check files as strictly as perdure itself; return lines and codes of its errors."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(cache)]
    command += ["--hide-error-context", *map(str, paths)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    pattern = re.compile(r"^[^:]+:(\d+): error: .*\[([a-z-]+)\]$")
    found = (pattern.search(line) for line in run.stdout.splitlines())
    return {(int(match[1]), match[2]) for match in found if match}


def pyright(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
    # It looks for the environment by the first Python on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return json.loads(run.stdout)


def errors(report: dict[str, Any]) -> dict[int, str]:
    """Return the messages of pyright's errors by line."""
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    }


def marked(path: Path) -> Findings:
    return {
        (number, code.strip())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "# error: " in line
        for code in line.partition("# error: ")[2].split(",")
    }


def every_name(folder: Path) -> Path:
    """Write a module that imports each name of the top level, which resolves them lazily."""
    names = getattr(perdure, "__all__", ())
    path = folder / "every_name.py"
    lines = [f"from perdure import {name} as public_{name}\n" for name in names]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def used_from(module: str) -> set[str]:
    """Return the names of a module that the files of right code import and then use."""
    used: set[str] = set()
    for path in RIGHT:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        loaded = {node.id for node in nodes if isinstance(node, ast.Name)}
        loaded |= {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == module:
                used |= {alias.name for alias in node.names} & loaded
        used |= {name.removeprefix(f"{module}.") for name in loaded if name.startswith(module)}
    return used


@pytest.mark.deep
def test_mypy_accepts_right_code_and_refuses_wrong_code(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert mypy([*RIGHT, every_name(tmp_path)], cache) == set()
    assert mypy([WRONG], cache) == marked(WRONG)


@pytest.mark.deep
def test_pyright_accepts_right_code_and_refuses_wrong_code(tmp_path: Path) -> None:
    right = pyright(*map(str, [*RIGHT, every_name(tmp_path)]))
    assert errors(right) == {}
    assert right["summary"]["filesAnalyzed"] == len(RIGHT) + 1
    wrong = errors(pyright(str(WRONG)))
    assert set(wrong) == {line for line, _ in marked(WRONG)}


@pytest.mark.deep
@pytest.mark.skipif(
    bool({*missing_sdks()} - {"claude_agent_sdk"}),
    reason="the adapters' types are those of their SDKs",
)
def test_every_type_that_others_can_see_is_written_down() -> None:
    report = pyright("--verifytypes", "perdure", "--ignoreexternal")["typeCompleteness"]
    incomplete = {
        symbol["name"]: [one["message"] for one in symbol["diagnostics"]]
        for symbol in report["symbols"]
        if not symbol["isTypeKnown"] or symbol.get("isTypeAmbiguous")
    }
    assert incomplete == {}
    assert report["completenessScore"] == 1
    assert report["exportedSymbolCounts"]["withKnownType"] > 1000


PROGRAM = re.compile(r"```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TYPOS = [
    ("README", "session.context()[-1].text", "session.context()[-1].txet"),
    ("1-a-session", "session.context()[-1].text", "session.info.turnz"),
    ("3-a-crash", "before.id", "before.idd"),
    ("4-a-server", "Shutdown(deadline=10)", "Shutdown(dedline=10)"),
    ("4-a-server", "Message.assistant(answer)", "Message.asistant(answer)"),
    ("4-a-server", "await session.save()", "print((await session.save()).verson)"),
    ("4-a-server", "if turn.replayed", "if turn.replaid"),
]
"""What a person may mistype in a program of the README or the tutorial."""


def programs() -> dict[str, str]:
    """Return the programs that a person copies first, by their page."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("[1-4]-*.md"))]
    return {page.stem: PROGRAM.findall(page.read_text(encoding="utf-8"))[0] for page in pages}


def written(folder: Path) -> dict[Path, int]:
    """Write each program, and one for each typo, with the line that is wrong in it; 0 for none."""
    lines: dict[Path, int] = {}
    right = [(page, code, code) for page, code in programs().items()]
    wrong = [(page, code, programs()[page].replace(code, typo, 1)) for page, code, typo in TYPOS]
    for number, (page, code, text) in enumerate(right + wrong):
        path = folder / f"program_{number}_{page.replace('-', '_')}.py"
        path.write_text(f"# pyright: strict\n{text}", encoding="utf-8")
        before, there, _ = programs()[page].partition(code)
        assert there, f"{page} has no {code!r}: plant the typo elsewhere"
        lines[path] = 0 if text == code else before.count("\n") + 2
    return lines


@pytest.mark.deep
def test_mypy_accepts_the_first_programs_and_finds_typos_in_them(tmp_path: Path) -> None:
    for path, line in written(tmp_path).items():
        found = mypy([path], tmp_path / "cache")
        assert {where for where, _ in found} == ({line} if line else set()), path.name


@pytest.mark.deep
def test_pyright_accepts_the_first_programs_and_finds_typos_in_them(tmp_path: Path) -> None:
    lines = written(tmp_path)
    report = pyright(*map(str, lines))
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in report["generalDiagnostics"]
    }
    assert found == {(path.name, line) for path, line in lines.items() if line}


@pytest.mark.parametrize("module", ["perdure", "perdure.agent", "perdure.sync", "perdure.testing"])
def test_every_public_name_is_used_in_code_that_is_checked(module: str) -> None:
    public = set(importlib.import_module(module).__all__)
    assert public - used_from(module) == set(), "show in tests/typing/api*.py how these are used"
