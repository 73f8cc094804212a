"""Each requirement is quoted by a test that would fail without it."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.source_tree import ROOT, files, functions

ID = re.compile(r"\bS[0-4]-[QG]?\d+[bc]?\b")
TABLES = sorted((ROOT / "tests").glob("requirements_s*.txt"))


def required() -> list[str]:
    return [line.split()[0] for line in lines()]


def lines() -> list[str]:
    return [line for table in TABLES for line in table.read_text(encoding="utf-8").splitlines()]


@cache
def quoted() -> frozenset[str]:
    """Return the ids in the docstrings of tests."""
    return frozenset(
        found
        for path in files("tests")
        if ID.search(path.read_text(encoding="utf-8"))
        for function in functions(path)
        if function.name.startswith("test_")
        for found in ID.findall(ast.get_docstring(function) or "")
    )


def test_every_requirement_is_quoted_by_a_test() -> None:
    assert [one for one in required() if one not in quoted()] == []


def test_no_test_quotes_what_is_not_required() -> None:
    assert quoted() - set(required()) == set()


def test_the_tables_have_each_requirement_once_and_say_what_it_is() -> None:
    assert len(TABLES) == 5
    assert len(set(required())) == len(lines())
    assert [
        line for line in lines() if not re.fullmatch(r"S[0-4]-[QG]?\d+[bc]? +\S.{8,}", line)
    ] == []
