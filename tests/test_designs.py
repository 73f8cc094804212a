"""docs/seeds.md: every name of the first designs leads to a name of ours that exists.

`seeds_names.txt` has the designs' names, a section for each. In the page's second column stand
dotted names of the public modules, ``name(parameter=)``, documents and folders, a key of
persistence.yaml with its colon, and in quotes a word of a format.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
from functools import cache
from typing import Any

import pytest

import perdure
from perdure import ConfigError
from perdure._lib.designs import HERE as HERE_BY_NAME
from perdure.agent import Agent, EchoModel, MemoryManager
from tests import hints
from tests.source_tree import ROOT, SRC, parse

PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
NAMES = (ROOT / "tests" / "seeds_names.txt").read_text(encoding="utf-8")
MODULES = (
    "perdure",
    "perdure.agent",
    "perdure.archive",
    "perdure.checkpoints",
    "perdure.formats",
    "perdure.restore",
    "perdure.stores",
    "perdure.types",
)
OBJECTS: dict[str, type] = {
    "session": perdure.Session,
    "sessions": perdure.SessionManager,
    "agent": Agent,
    "memory": MemoryManager,
}
FILE = re.compile(r"[\w<>./]*(?:\.(?:jsonl?|yaml|md)|/)")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def sections(text: str, mark: str) -> dict[str, str]:
    parts = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


THERE = {title: text.split() for title, text in sections(NAMES, "#").items()}
TABLES = {
    title: [
        row.strip("| ").split(" | ")
        for row in re.findall(r"^\|.+\|$", text, re.MULTILINE)
        if not row.startswith(("| there", "|---"))
    ]
    for title, text in sections(PAGE, "##").items()
}
HERE = sorted({name for rows in TABLES.values() for _, here, _ in rows for name in quoted(here)})


def test_the_list_of_the_designs_names_is_whole() -> None:
    assert list(THERE) == list(TABLES)
    assert sum(map(len, THERE.values())) > 300


def test_each_name_of_a_design_is_in_its_table() -> None:
    for design, rows in TABLES.items():
        named = {name for there, _, _ in rows for name in quoted(there)}
        assert set(THERE[design]) - named == set(), f"{design}: say what these are called"
        assert named - set(THERE[design]) == set(), f"{design}: tests/seeds_names.txt lacks these"


def test_each_row_says_what_it_is_here_and_why() -> None:
    for there, here, why in (row for rows in TABLES.values() for row in rows):
        assert quoted(here) or here == "none", there
        assert why.strip(), there


def test_each_name_of_ours_is_there() -> None:
    assert len(HERE) > 150
    assert [name for name in HERE if not is_there(name)] == []


def test_what_is_not_there_is_found_out() -> None:
    wrong = [
        "MemoryManager.no_such_method",
        "Agent.create(no_such_option=)",
        "session.checkpoints.no_such_method",
        "AgentContext.no_such_field",
        "NoSuchClass",
        "no_such_file.json",
        "no_such_folder/<name>.json",
        "no_such_key:",
        '"no_such_word"',
        "PERDURE_NO_SUCH_VARIABLE",
    ]
    assert [name for name in wrong if is_there(name)] == []


def test_a_pointer_leads_where_the_page_does() -> None:
    """Of each name that differs, and that somebody may type, an error says what it is here."""
    rows = [
        (set(quoted(there)), quoted(here)) for table in TABLES.values() for there, here, _ in table
    ]
    for name, here in HERE_BY_NAME.items():
        of_page = [place for there, places in rows if name in there for place in places]
        of_page += [place for there, places in rows if f"{name}.ts" in there for place in places]
        bare = [re.sub(r"^perdure\.([a-z]+\.)?", "", place) for place in here]
        assert set(bare) <= set(of_page), name
        assert all(map(is_there, bare)), name
        for place in here:
            if match := re.match(r"(perdure(?:\.[a-z]+)?)\.(\w+)", place):
                assert hasattr(importlib.import_module(match[1]), match[2]), name


@pytest.mark.parametrize(
    ("line", "here"),
    [
        ("from perdure import SnapshotEngine", "perdure.checkpoints.CheckpointEngine"),
        ("from perdure.agent import BaseAgent", "perdure.agent.Agent,"),
        ("from perdure import AgentFactory", "it is in perdure.agent"),
        ("import perdure; perdure.Kernel", "perdure.Session,"),
        ("Agent.create(model='m', autoSaveIntervalMs=3)", "PersistentSession.autosave_interval"),
        (
            "Agent.create(model='m', persistent_session={'saveOnDestroy': True})",
            "PersistentSession.save_on_close",
        ),
    ],
)
def test_who_types_a_designs_name_is_told_what_it_is_called_here(line: str, here: str) -> None:
    with pytest.raises((ImportError, AttributeError, ConfigError), match=re.escape(here)):
        exec(line, {"Agent": Agent})  # noqa: S102


async def test_objects_point_to_what_a_designs_method_is_called_here() -> None:
    async with perdure.connect("memory:", shutdown=perdure.Shutdown(signals=False)) as sessions:
        async with Agent.create("ada", model=EchoModel(), sessions=sessions) as agent:
            objects: list[tuple[Any, str]] = [
                (agent, "savePersistedSession"),
                (agent.session, "append_message"),
                (sessions, "prune_raw_traces"),
            ]
            for owner, name in objects:
                with pytest.raises(AttributeError, match="here it is .*docs/seeds.md"):
                    getattr(owner, name)
                assert not hasattr(owner, "no_such_name")


def test_a_name_that_is_nowhere_gets_the_usual_error() -> None:
    assert not hasattr(perdure, "SnapshotEngine")
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        perdure.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'perdure'"):
        exec("from perdure import Nothing", {})  # noqa: S102

    class Own(Agent):
        @property
        def broken(self) -> Any:
            raise AttributeError("of its own")

    with pytest.raises(AttributeError, match="of its own"):
        object.__new__(Own).broken  # noqa: B018


def is_there(name: str) -> bool:
    """Say whether a name of the page leads somewhere."""
    if name.startswith('"'):
        return name.strip('"') in words()
    if name.endswith(":"):
        return name[:-1] in yaml_keys()
    if FILE.fullmatch(name):
        return is_a_file(name)
    if name.isupper():
        return name in words() or name in importlib.import_module("perdure.formats").__all__
    try:
        look_up(name)
    except AttributeError:
        return False
    return True


def is_a_file(name: str) -> bool:
    """Say whether a document or a folder has this name: its last step, or what it begins with."""
    fixed, last = name.split("<", maxsplit=1)[0], name.rstrip("/").split("/")[-1]
    if fixed != name:
        return any(word.startswith(fixed) or word == fixed.rstrip("/") for word in words())
    is_ours = not {last, last.rsplit(".", 1)[0]}.isdisjoint(words())
    return is_ours or (ROOT / name).exists()


def look_up(name: str) -> Any:
    """Return what a dotted name leads to, through what properties give."""
    path, _, parameter = name.removesuffix("=)").partition("(")
    first, *steps = path.split(".")
    value: Any = OBJECTS.get(first) or public(first)
    for at, step in enumerate(steps):
        found = getattr(value, step, None) or hints.of_fields(value).get(step)
        if found is None and step not in assigned(value):
            raise AttributeError(name)
        if isinstance(found, property) and at + 1 < len(steps):
            (found, *_) = hints.classes(hints.of_function(found.fget)["return"])
        value = found
    if parameter and parameter not in inspect.signature(value).parameters:
        raise AttributeError(name)
    return value


def assigned(cls: type) -> set[str]:
    """Return the attributes that a class gives itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def public(name: str) -> Any:
    for module in map(importlib.import_module, MODULES):
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"{name} is in none of {MODULES}")


@cache
def words() -> frozenset[str]:
    """Return what stands in quotes in the source, and the names of fields as they are written."""
    found = set()
    for path in (SRC / "perdure").rglob("*.py"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(found)


@cache
def yaml_keys() -> frozenset[str]:
    schema = (SRC / "perdure" / "config" / "persistence.schema.json").read_text("utf-8")
    found: set[str] = set()

    def collect(part: dict[str, Any]) -> dict[str, Any]:
        found.update(part)
        return part

    json.loads(schema, object_hook=collect)
    return frozenset(found)
