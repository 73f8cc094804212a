"""The code keeps its shape: names, docstrings, and no error that vanishes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.source_tree import (
    CODE,
    ROOT,
    files,
    functions,
    module_name,
    nodes,
    parse,
    place,
    pyproject,
)


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and does nothing with it."""
    names = {ast.unparse(handler.type)} if handler.type else {"BaseException"}
    if isinstance(handler.type, ast.Tuple):
        names = {ast.unparse(element) for element in handler.type.elts}
    return bool(names & {"Exception", "BaseException"}) and all(
        isinstance(node, ast.Pass | ast.Continue)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in handler.body
    )


def pure_modules() -> list[str]:
    """Return the modules that the contract of pure decisions covers, as it names them."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    return next(contract["source_modules"] for contract in contracts if contract["id"] == "pure")


def covered(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def claims_purity(path: Path) -> bool:
    docstring = ast.get_docstring(parse(path)) or ""
    return path.name != "__init__.py" and bool(re.search(r"\bpure\b", docstring, re.IGNORECASE))


def test_no_module_is_named_by_a_gerund() -> None:
    nouns = {"testing", "tuning", "keyring"}
    names = {part for path in files("src") for part in module_name(path).split(".")}
    assert sorted(name for name in names - nouns if name.endswith("ing")) == []


RETIRED = set(
    "accepting attending batcher bell books flight forker gathering grant heirlooms hindsight "
    "holding keeper keeping keepsakes lane leaving lives mine obtain remains ring spoken stay "
    "tending told traced wish".split()
)
"""Words of perdure's own, which the field's have replaced: docs/architecture.md, "The words"."""


def test_no_retired_word_is_a_name() -> None:
    found = [
        f"{module_name(path)}: {name}"
        for path in files("src")
        for name in [
            *module_name(path).split("."),
            *(
                node.name
                for node in nodes(path)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ),
        ]
        if name.strip("_").lower() in RETIRED
    ]
    assert found == []


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in files("src"):
        if "sync" not in path.parts:  # which mirrors the names of the async classes
            for node in nodes(path):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(module_name(path))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_every_module_says_what_it_is() -> None:
    assert [str(path) for path in files(*CODE) if not ast.get_docstring(parse(path))] == []


@pytest.mark.deep
def test_every_test_file_tests_something() -> None:
    empty = [
        str(path.relative_to(ROOT))
        for path in files("tests")
        if path.name.startswith("test_")
        and not any(function.name.startswith("test_") for function in functions(path))
        and not takes_tests_from_elsewhere(path)
    ]
    assert empty == []


def takes_tests_from_elsewhere(path: Path) -> bool:
    """Whether it runs a suite: a subclass, `TestX = suite.TestCase`, or imported tests."""
    return any(
        (isinstance(node, ast.ClassDef) and node.name.startswith("Test") and node.bases)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("Test"))
        or (isinstance(node, ast.ImportFrom) and node.names[0].name.startswith(("*", "test_")))
        for node in parse(path).body
    )


def test_every_todo_has_a_number() -> None:
    word = "TO" + "DO"
    loose = [
        place(path, number)
        for path in files(*CODE, "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if word + ":" in line or re.search(rf"#\s*{word}\b(?!\(#\d+\))", line)
    ]
    assert loose == []


def test_no_error_is_swallowed() -> None:
    swallowed = [
        place(path, node.lineno)
        for path in files(*CODE)
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert swallowed == []


def test_what_calls_itself_pure_is_held_to_it() -> None:
    packages = pure_modules()
    claims = [module_name(path) for path in files("src") if claims_purity(path)]
    assert [module for module in claims if not covered(module, packages)] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("except Exception: pass", True),
        ("except: ...", True),
        ("except (OSError, BaseException): pass", True),
        ("except OSError: pass", False),
        ("except Exception: log()", False),
    ],
)
def test_a_swallowing_handler_is_recognized(source: str, expected: bool) -> None:
    (statement,) = ast.parse(f"try: x()\n{source}").body
    assert isinstance(statement, ast.Try)
    assert swallows(statement.handlers[0]) is expected


def test_what_works_for_a_turn_gives_what_it_says_to_the_turn() -> None:
    """The running turn need not be this task's: `accept` and `turn.append` pass it, a session's own do not."""
    packages = ("adapters", "agent", "asgi", "serve", "sync")
    sessions = {"session", "held"}
    found = [
        f"{path.name}:{call.lineno}"
        for path in files("src")
        if module_name(path).split(".")[1:2] and module_name(path).split(".")[1] in packages
        for call in nodes(path)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"append", "extend"}
        and ast.unparse(call.func.value).split(".")[-1].lstrip("_") in sessions
    ]
    assert found == []
