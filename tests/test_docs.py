"""The documents are true: commands, links, examples, and what they say of the code."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import errors
from tests.source_tree import (
    ROOT,
    SRC,
    files,
    importable,
    missing_names,
    missing_sdks,
    modules,
    pyproject,
)

GIVEN = ROOT / "tests" / "docs_given"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
EXAMPLE = re.compile(
    r"(?:<!-- given: (?P<given>\w+) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
BRITISH = re.compile(
    r"\b\w*(?:behaviour|colour|favour|honour|neighbour|labour|serialis|recognis|normalis|initialis"
    r"|synchronis|organis|optimis|summaris|analys(?:e[sd]?\b|ing)|licence|catalogue|centre)\w*",
    re.IGNORECASE,
)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def command(name: str) -> list[str]:
    """Return the lines of the README's command behind this marker."""
    found = re.findall(
        rf"^<!-- command: {name} -->\n```sh\n(.*?)^```$",
        text(ROOT / "README.md"),
        re.MULTILINE | re.DOTALL,
    )
    assert len(found) == 1, f"README.md has {len(found)} commands {name!r}, and needs one"
    return found[0].splitlines()


def is_runnable(code: str) -> bool:
    """Whether the SDKs that a snippet imports are here: not all are in every environment."""
    absent = [f"from {sdk}" for sdk in missing_sdks()] + sorted(missing_names())
    return not any(name in code for name in absent)


def without_code(markdown: str) -> str:
    return re.sub(r"```.*?^```$|`[^`\n]*`", "", markdown, flags=re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    """Return the fragments that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def examples() -> list[tuple[str, str | None, str]]:
    """Return each snippet: its name, the module that gives it what it needs, its code."""
    return [
        (f"{relative(page)}-{number}", match["given"], match["code"])
        for page in PAGES
        for number, match in enumerate(EXAMPLE.finditer(text(page)), 1)
    ]


@pytest.mark.parametrize("name", ["demo", "test"])
def test_a_command_of_the_readme_is_one_line(name: str) -> None:
    (line,) = command(name)
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    script = text(ROOT / ".ci" / "run")
    extract = script[script.index("command_of_readme() {") : script.index("step() {")]
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{extract}\ncommand_of_readme test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == command("test")
    before, _ = script.split("# The check reads")  # behind it, the adapters that it leaves out
    assert "pytest" not in before


def test_every_link_inside_the_repository_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text(page))):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, fragment = target.partition("#")
            goal = page.parent / name if name else page
            if not goal.exists() or (fragment and fragment not in anchors(text(goal))):
                broken.append(f"{relative(page)}: {target}")
    assert broken == []


def test_no_snippet_is_left_out() -> None:
    count = sum(len(re.findall(r"^```python$", text(page), re.MULTILINE)) for page in PAGES)
    assert len(examples()) == count
    assert [relative(page) for page in PAGES if "<!-- not run" in text(page)] == []
    given = {path.stem for path in GIVEN.glob("*.py")} - {"run"}
    assert {name for _, name, _ in examples() if name} == given


@pytest.mark.deep
def test_the_examples_of_the_documents_run(tmp_path: Path) -> None:
    failed = {}
    for name, given, code in examples():
        if not is_runnable(code):
            continue
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        snippet = folder / "snippet.py"
        snippet.write_text(code, encoding="utf-8")
        command = [str(GIVEN / "run.py"), str(GIVEN / f"{given}.py"), str(snippet)]
        run = subprocess.run(
            [sys.executable, "-W", "error", *(command if given else ["-c", code])],
            cwd=folder,
            env={
                **{key: value for key, value in os.environ.items() if key[:6] != "PYTEST"},
                "PERDURE_HOME": str(folder / "home"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            failed[name] = run.stdout + run.stderr
    assert failed == {}


@pytest.mark.deep
def test_the_examples_in_docstrings_are_true() -> None:
    failed = [
        module
        for module in importable(modules())
        if doctest.testmod(importlib.import_module(module)).failed
    ]
    assert failed == []


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn = re.findall(r"^ {4}[│ ]*[├└]?─*\s*(\w+Error)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(errors.__all__)
    assert drawn == list(depth_first(errors.PerdureError))


def depth_first(cls: type) -> list[str]:
    children = [
        name for child in cls.__subclasses__() if of_the_tree(child) for name in depth_first(child)
    ]
    return [cls.__name__, *children]


def of_the_tree(cls: type) -> bool:
    return cls.__module__ == "perdure.errors"


def test_the_architecture_names_every_package_and_no_other() -> None:
    tree = re.search(
        r"```\nsrc/perdure/\n(.*?)^```$",
        text(ROOT / "docs/architecture.md"),
        re.MULTILINE | re.DOTALL,
    )
    assert tree is not None
    named = set(re.findall(r"^  (\w+(?:/|\.py))", tree[1], re.MULTILINE))
    there = {path.name for path in (SRC / "perdure").glob("*.py")}
    there |= {f"{path.parent.name}/" for path in (SRC / "perdure").glob("*/__init__.py")}
    assert there - named == set(), "docs/architecture.md does not say what these are for"
    assert named - there == set(), "docs/architecture.md speaks of what is not there"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_layers_of_a_page_are_those_that_are_enforced(page: str) -> None:
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    enforced = [set(re.findall(r"\w+", layer)) for layer in layers]
    drawn = re.search(
        r"(?:^    .*(?:cli \||__main__).*\n)(?:    .*\n)*", text(ROOT / page), re.MULTILINE
    )
    assert drawn is not None
    rows = re.split(r"→|\n(?!\s*→)", drawn[0].replace("(the port)", "").strip())
    assert [set(re.findall(r"\w+", row)) for row in rows] == enforced


def test_what_a_package_s_docstring_names_is_there() -> None:
    missing = {}
    for path in sorted((SRC / "perdure").rglob("__init__.py")):
        first, *_ = (ast.get_docstring(ast.parse(text(path))) or "").partition("\n\n    ")
        named = set(re.findall(r"(?<!`)`([a-z_]+)`(?!`)", first))
        around = [path.parent, SRC / "perdure"]
        places = {one.stem for folder in around for one in folder.iterdir()}
        gone = named - places - names_in(path)
        if gone:
            missing[str(path.relative_to(SRC))] = gone
    assert missing == {}


def names_in(path: Path) -> set[str]:
    """Return what a package exports, and itself."""
    return {"perdure", *re.findall(r"\b[a-z_]+\b", text(path).partition("__future__")[2])}


def test_every_path_that_a_page_names_is_there() -> None:
    path = re.compile(r"`((?:perdure|src|tests|docs|examples|benchmarks|\.ci)/[\w./-]*)`")
    missing = [
        f"{relative(page)}: {name}"
        for page in PAGES
        for name in path.findall(text(page))
        if not any((base / name).exists() for base in (ROOT, SRC))
    ]
    assert missing == []


def test_every_decision_is_listed_and_says_why() -> None:
    index = text(ROOT / "docs" / "decisions" / "README.md")
    assert DECISIONS
    for page in DECISIONS:
        assert f"]({page.name})" in index, f"{page.name} is not in the index"
        assert re.match(r"# \S", text(page))
        assert "## Why" in text(page), f"{page.name} does not say why"


def test_every_core_dependency_has_its_reason() -> None:
    page = text(ROOT / "docs" / "decisions" / "0001-dependencies.md")
    for requirement in pyproject()["project"]["dependencies"]:
        name = re.split(r"[<>=~\[]", requirement)[0]
        assert f"`{name}`" in page


def test_the_changelog_knows_this_version() -> None:
    version = pyproject()["project"]["version"]
    assert re.search(
        rf"^## \[{re.escape(version)}\] - (?:unreleased|\d{{4}}-\d\d-\d\d)$",
        text(ROOT / "CHANGELOG.md"),
        re.MULTILINE,
    )


def test_the_spelling_is_american() -> None:
    found = {
        f"{relative(path)}: {word}"
        for path in [*PAGES, *files("src", "examples", "benchmarks")]
        for word in BRITISH.findall(text(path))
    }
    assert found == set()
