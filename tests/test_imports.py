"""Importing costs little: nothing slow or optional comes in before it is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.source_tree import files, importable, imports, modules, place, pyproject

LOOPS = frozenset({"asyncio", "trio"})
HEAVY = frozenset(
    "aiofiles anthropic cyclopts httpx hypothesis mcp openai platformdirs psutil pydantic pytest "
    "rich sqlite3 ssl starlette uvicorn yaml".split()
)
SURFACES = {
    # Subclasses of an SDK's own class, which only their first use imports.
    **dict.fromkeys(
        ("perdure.adapters.claude_agent", "perdure.adapters.claude_agent_import"),
        frozenset({"asyncio", "httpx", "mcp", "pydantic", "rich", "ssl", "starlette", "uvicorn"}),
    ),
    **dict.fromkeys(
        (
            "perdure.adapters.google_adk",
            "perdure.adapters.google_adk_events",
            "perdure.adapters.google_adk_import",
            "perdure.adapters.google_adk_shared",
        ),
        frozenset({"asyncio", "httpx", "pydantic", "rich", "ssl"}),
    ),
    **dict.fromkeys(
        (
            "perdure.adapters.langgraph",
            "perdure.adapters.langgraph_import",
            "perdure.adapters.langgraph_store",
            "perdure.adapters.thread_types",
            "perdure.adapters.thread_values",
            "perdure.adapters.threads",
        ),
        frozenset({"asyncio", "httpx", "pydantic", "rich", "ssl", "trio", "uvicorn"}),
    ),
    **dict.fromkeys(
        (
            "perdure.adapters.agent_framework",
            "perdure.adapters.agent_framework_checkpoints",
        ),
        frozenset({"asyncio", "pydantic", "ssl"}),
    ),
    "perdure.adapters.pydantic_ai": frozenset(
        {"asyncio", "httpx", "pydantic", "rich", "ssl", "trio"}
    ),
    "perdure.adapters.pydantic_ai_steps": frozenset(
        {"asyncio", "httpx", "pydantic", "rich", "sqlite3", "ssl", "trio"}
    ),
    "perdure.stores.sqlite": frozenset({"sqlite3"}),
    "perdure.asgi": frozenset({"starlette", "asyncio", "ssl"}),
    "perdure.serve": frozenset({"starlette", "uvicorn", "asyncio", "ssl"}),
    "perdure.cli": frozenset({"cyclopts", "rich", "asyncio", "ssl"}),
    "perdure.inspector": frozenset({"starlette", "asyncio", "ssl"}),
    "perdure.testing": frozenset({"pytest", "asyncio", "ssl"}),
}
"""What a package, or what is in one, may bring in besides the core's dependencies."""

DISTRIBUTIONS = {
    "agent_framework": "agent_framework_core",
    "google": "google_adk",
    "markdown_it": "markdown_it_py",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic_ai_slim",
    "sqlalchemy": "google_adk",
    "opentelemetry": "opentelemetry_api",
    "pydantic_ai": "pydantic_ai_slim",
    "yaml": "pyyaml",
}
"""Import names that differ from the names that pip knows."""


EACH_ALONE = """
import importlib, json, os, sys, traceback
import anyio, msgspec  # what every module may bring in, and most do
theirs = {"ssl"} & set(sys.modules)  # anyio below 4.14 brings it
for module in sys.argv[1:]:
    out, into = os.pipe()
    if not os.fork():
        os.close(out)
        try:
            importlib.import_module(module)
            said = sorted(set(sys.modules) - theirs)
        except BaseException:
            said = traceback.format_exc()
        with open(into, "w") as pipe:
            json.dump(said, pipe)
        os._exit(0)
    os.close(into)
    with open(out) as pipe:
        print(pipe.read())
    os.wait()
"""


def loaded_by(*modules: str) -> dict[str, set[str]]:
    """Import each module in a process of its own, and return what came in with it."""
    run = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", EACH_ALONE, *modules],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = dict(zip(modules, map(json.loads, run.stdout.splitlines()), strict=True))
    assert [text for text in said.values() if isinstance(text, str)] == []
    return {module: set(loaded) for module, loaded in said.items()}


def packages() -> list[str]:
    """Return the packages right below perdure, and the modules there."""
    return sorted({".".join(module.split(".")[:2]) for module in modules()} - {"perdure"})


def allowed(module: str) -> frozenset[str]:
    package, inside = (".".join(module.split(".")[:parts]) for parts in (2, 3))
    return SURFACES.get(package, SURFACES.get(inside, frozenset()))


def third_party() -> dict[str, str]:
    """Return each foreign top-level name that perdure imports, with one place that does."""
    return {
        name.split(".")[0]: place(path, line)
        for path in files("src")
        for name, line in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names | {"perdure", "__future__"}
    }


def declared(*groups: list[str]) -> set[str]:
    return {
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("-", "_")
        for group in groups
        for requirement in group
    }


def test_import_perdure_brings_in_no_loop_and_nothing_slow() -> None:
    assert loaded_by("perdure")["perdure"] & (LOOPS | HEAVY) == set()


@pytest.mark.deep
@pytest.mark.parametrize("package", packages())
def test_every_module_imports_alone_and_light(package: str) -> None:
    inside = [
        one for one in importable(modules()) if one == package or one.startswith(f"{package}.")
    ]
    heavy = {
        module: loaded & ((LOOPS | HEAVY) - allowed(module))
        for module, loaded in loaded_by(*inside).items()
    }
    assert {module: names for module, names in heavy.items() if names} == {}


@pytest.mark.deep
def test_whatever_is_imported_is_declared() -> None:
    project = pyproject()["project"]
    known = declared(project["dependencies"], *project["optional-dependencies"].values())
    missing = {
        name: where
        for name, where in third_party().items()
        if DISTRIBUTIONS.get(name, name) not in known
    }
    assert missing == {}


def test_every_core_dependency_is_used() -> None:
    used = {DISTRIBUTIONS.get(name, name) for name in third_party()}
    assert declared(pyproject()["project"]["dependencies"]) - used == set()


def test_a_name_that_is_in_another_package_is_named_with_it() -> None:
    for name, home in (("PerdureSession", "perdure.adapters"), ("Agent", "perdure.agent")):
        with pytest.raises(ImportError, match=f"it is in {home}"):
            exec(f"from perdure import {name}")
