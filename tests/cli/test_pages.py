"""The pages about the command line and the errors say what the code says."""

from __future__ import annotations

import inspect
import io
import re
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from perdure import errors
from perdure.cli.app import COMMANDS, app
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
CLI = (ROOT / "docs" / "cli.md").read_text()
ERRORS = (ROOT / "docs" / "errors.md").read_text()
README = (ROOT / "README.md").read_text()
NAMES = [command.__name__ for command in COMMANDS]


def section(page: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found[1]


@cache
def options(name: str) -> dict[str, str]:
    """Return a command's options, and what its help says of each."""
    console = Console(width=300, file=io.StringIO(), color_system=None)
    app.help_print([name], console=console)
    shown = console.file.getvalue()
    rows = re.findall(r"│ \*?\s*(--[a-z-]+)(?: [A-Z|.]+)?  +(.*?) *│", shown)
    return {option: text.partition(" [default")[0].strip() for option, text in rows}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_documented(name: str) -> None:
    below = section(CLI, f"perdure {name}")
    common = CLI.split("## perdure demo")[0]
    missing = [option for option in options(name) if f"`{option}`" not in below + common]
    assert missing == []


def test_no_page_speaks_of_a_command_or_an_option_that_is_not_there() -> None:
    pages = [README, *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    spoken = {
        name for page in pages for name in re.findall(r"(?:`|bin/)perdure ([a-z][a-z-]*)", page)
    }
    assert {"demo", "ls"} <= spoken <= set(NAMES)
    documented = set(re.findall(r"^\| `(--[a-z-]+)`", CLI, re.MULTILINE))
    there = {option for name in NAMES for option in options(name)} | {"--help"}
    assert documented == there


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_is_short_and_says_everything(name: str, command: Command) -> None:
    summary = (inspect.getdoc(app[name].default_command) or "").splitlines()[0]
    assert len(summary) <= 88
    assert summary.endswith(".")
    for option, text in options(name).items():
        assert text, f"{name} {option} has no help"
        assert text.endswith("."), f"{name} {option}: {text}"
    shown = command(name, "--help")
    assert shown.status == 0
    assert " ".join(summary.split()) in " ".join(shown.out.split())
    assert len(shown.out.splitlines()) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_every_command_answers_as_json(name: str) -> None:
    assert "--json" in options(name)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_documented_with_its_text(name: str) -> None:
    below = section(ERRORS, name)
    text = inspect.cleandoc(getattr(errors, name).__doc__ or "").splitlines()[0]
    assert f"> {text}\n" in below
    cure = below.split(text)[1].strip()
    assert len(cure) > 10, f"{name} has no cure"


def test_no_error_is_documented_that_is_not_there() -> None:
    assert set(re.findall(r"^#+ (\w+Error)$", ERRORS, re.MULTILINE)) == set(errors.__all__)


def test_the_eight_lines_of_the_readme_are_the_example() -> None:
    example = (ROOT / "examples" / "eight_lines.py").read_text()
    code = example.split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in README
    body = code.split("async def main() -> None:\n")[1].split("\n\n")[0]
    assert len(body.splitlines()) <= 8
