"""The known mutants are still to be found: ``python -m tests.mutants`` is part of a release."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutants.__main__ import equivalent, mutant_of
from tests.mutants.catalog import GROUPS, KNOWN
from tests.mutants.operators import MutantError, Package, apply, operators_of
from tests.source_tree import ROOT


@cache
def package() -> Package:
    return Package(ROOT / "src" / "perdure")


@pytest.mark.deep
def test_each_mutant_is_found_by_its_function_and_changes_it() -> None:
    """Where a function got another name or another shape, tests/mutants/catalog.py follows it."""
    lost = {}
    for name, mutant in KNOWN.items():
        try:
            assert package().mutate(mutant.changes)
        except (MutantError, SyntaxError) as error:
            lost[name] = str(error)
    assert lost == {}


@pytest.mark.deep
def test_what_is_equivalent_is_still_there() -> None:
    for name, why in equivalent().items():
        mutant = KNOWN.get(name) or mutant_of(name, package())
        assert package().mutate(mutant.changes)
        assert len(why) > 10, name


def test_the_tests_of_each_group_are_there() -> None:
    for group in GROUPS.values():
        assert [one for one in group.tests if not (ROOT / "tests" / one).exists()] == []
        if group.packages:
            assert next(package().sites(group.packages))


SOURCE = """
def f(items, most) -> None:
    \"\"\"Do it.\"\"\"
    for n, one in enumerate(items):
        if n >= 10 and one is not None or not most:
            raise ValueError(f"{n + 1} is too many")
        self.count += max(one, 1)
        log.info("counted")
        store.save(one)
"""


def test_each_operator_that_is_drawn_changes_the_function_in_its_own_way() -> None:
    def changed(operator: str) -> str:
        function = ast.parse(SOURCE).body[0]
        assert isinstance(function, ast.FunctionDef)
        apply(function, operator)
        return ast.unparse(ast.fix_missing_locations(function))

    function = ast.parse(SOURCE).body[0]
    assert isinstance(function, ast.FunctionDef)
    operators = operators_of(function)
    texts = {changed(operator) for operator in operators}
    assert len(texts) == len(operators) >= 10
    assert ast.unparse(function) not in texts
    assert "drop call save 1" in operators
    assert "drop call info 1" not in operators
    assert not any(one == "plus constant 2" for one in operators)
    with pytest.raises(MutantError, match="but there are 1"):
        changed("drop call save 2")
