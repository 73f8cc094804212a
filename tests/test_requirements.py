"""Each requirement is quoted by a test that would fail without it."""

from __future__ import annotations

import ast
import re

from tests.source_tree import ROOT, files, functions

ID = re.compile(r"\bS2-\d+b?\b")
TABLE = ROOT / "tests" / "requirements_s2.txt"


def required() -> list[str]:
    return [line.split()[0] for line in TABLE.read_text(encoding="utf-8").splitlines() if line]


def quoted() -> set[str]:
    """Return the ids in the docstrings of tests."""
    return {
        found
        for path in files("tests")
        for function in functions(path)
        if function.name.startswith("test_")
        for found in ID.findall(ast.get_docstring(function) or "")
    }


def test_every_requirement_is_quoted_by_a_test() -> None:
    assert [one for one in required() if one not in quoted()] == []


def test_no_test_quotes_what_is_not_required() -> None:
    assert quoted() - set(required()) == set()


def test_the_table_has_each_requirement_once_and_says_what_it_is() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(set(required())) == len(lines)
    assert [line for line in lines if not re.fullmatch(r"S2-\d+b? +\S.{8,}", line)] == []
