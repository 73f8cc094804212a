"""Which tests run which functions: recorded once, by a copy of the tree whose functions say so.

Also a pytest plugin (``-p tests.mutants.recording``), told by environment variables what to do:
``MUTANTS_RECORD`` names the folder into which the tests' functions are written, and
``MUTANTS_SELECT`` a file with the ids of the tests that are to run, in that order; those that the
file named by ``MUTANTS_KNOWN`` does not have are newer than the recording, and run behind them.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.operators import Package, functions

# No PERDURE_ in front: what begins so is taken out of the tests' environment.
RECORD = "MUTANTS_RECORD"
SELECT = "MUTANTS_SELECT"
SEEN = "MUTANTS_KNOWN"
NOT = "MUTANTS_UNSOUND"

_SEEN = f'''
"""Notes which functions ran; a process that a test started appends them to a file."""
import builtins, os
_write, _seen, _folder = os.write, set(), os.environ.get("{RECORD}")
_test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
if _folder and _test:
    _file = os.open(f"{{_folder}}/child-{{os.getpid()}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _write(_file, _test.encode() + b"\\n")
    def _note(number):
        if number not in _seen:
            _seen.add(number)
            _write(_file, b"%d\\n" % number)
else:
    _note = _seen.add
builtins.__perdure_ran__ = _note
'''


def instrument(source: Path) -> list[str]:
    """Let each function of a tree's package say that it runs; return their names, by number."""
    names: list[str] = []
    package = Package(source / "perdure")
    modules = {one.path: one.module for places in package.places.values() for one in places}
    (source / "_perdure_ran.py").write_text(_SEEN, encoding="utf-8")
    for path, tree in package.trees.items():
        for name, function in functions(tree):
            call = ast.parse(f"__perdure_ran__({len(names)})").body[0]
            start = 1 if ast.get_docstring(function) is not None else 0
            function.body.insert(start, call)
            names.append(f"{modules[path]}:{name}")
        text = ast.unparse(ast.fix_missing_locations(tree))
        if path == source / "perdure" / "__init__.py":
            first = next(n for n, one in enumerate(tree.body) if isinstance(one, ast.ImportFrom))
            tree.body.insert(first + 1, ast.parse("import _perdure_ran").body[0])
            text = ast.unparse(ast.fix_missing_locations(tree))
        path.write_text(text + "\n", encoding="utf-8")
    return names


def collected(folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """Return what was recorded: for each function its tests, and how long each of them takes."""
    took: dict[str, float] = {}
    ran: dict[str, set[str]] = {}
    for path in folder.iterdir():
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.name.startswith("child-"):
            for number in lines[1:]:
                ran.setdefault(names[int(number)], set()).add(lines[0])
            continue
        for line in lines:
            test, seconds, numbers = json.loads(line)
            took[test] = seconds
            for number in numbers:
                ran.setdefault(names[number], set()).add(test)
    # Under no function's name: one that runs no function would count as newer than the recording.
    ran[""] = set(took)
    return {
        name: {test: took[test] for test in sorted(tests) if test in took}
        for name, tests in sorted(ran.items())
    }


_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails without a mutant tells nothing about one."""
    if report.failed:
        _failed.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write down what ran in a test of this process."""
    folder = os.environ.get(RECORD)
    seen = getattr(sys.modules.get("_perdure_ran"), "_seen", None)
    if not folder or seen is None:
        return (yield)
    seen.clear()
    began = time.perf_counter()
    result = yield
    if item.nodeid in _failed:
        return result
    line = json.dumps([item.nodeid, round(time.perf_counter() - began, 4), sorted(seen)])
    with open(f"{folder}/tests-{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were chosen, file by file in that order, and those that are new."""
    chosen = os.environ.get(SELECT)
    if not chosen:
        return
    ids = Path(chosen).read_text(encoding="utf-8").splitlines()
    known = set(Path(os.environ[SEEN]).read_text(encoding="utf-8").splitlines())
    if unsound := os.environ.get(NOT):
        known.update(Path(unsound).read_text(encoding="utf-8").splitlines())
    files = {test.partition("::")[0]: place for place, test in reversed(list(enumerate(ids)))}
    chosen_ids = set(ids)
    kept = [
        one
        for one in items
        if one.nodeid in chosen_ids or (one.nodeid not in known and "trio" not in one.nodeid)
    ]
    # Within a file they stay in their order: what they share is made for that.
    kept.sort(key=lambda one: files.get(one.nodeid.partition("::")[0], len(ids)))
    config.hook.pytest_deselected(items=[one for one in items if one not in kept])
    items[:] = kept
