"""The repository's own source files, as the tests about the code's shape see them."""

from __future__ import annotations

import ast
import gc
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
CODE = ("src", "benchmarks", "examples")
"""The folders whose files keep the sizes; tests may be longer."""


LARGE_SDKS = {
    "claude_agent_sdk": (
        "claude-agent-sdk",
        ("claude_agent", "claude_agent_import"),
        ("PerdureSessionStore",),
    ),
    "google.adk": (
        "google-adk",
        ("google_adk", "google_adk_events", "google_adk_import", "google_adk_shared"),
        ("PerdureSessionService",),
    ),
    "langgraph": (
        "langgraph",
        (
            "langgraph",
            "langgraph_import",
            "langgraph_store",
            "thread_types",
            "thread_values",
            "threads",
        ),
        ("PerdureSaver", "PerdureStore"),
    ),
    "pydantic_ai_harness": (
        "pydantic-ai-harness",
        ("pydantic_ai_steps",),
        ("PerdureStepStore",),
    ),
}
"""Packages that not every environment has: their distributions, the adapters' modules, and their
public names."""


@cache
def missing_sdks() -> list[str]:
    """Return the large packages that are not installed."""
    installed = {found.metadata["Name"] for found in distributions()}
    return [sdk for sdk, (name, _, _) in LARGE_SDKS.items() if name not in installed]


@cache
def missing_names() -> set[str]:
    """Return the public names of adapters whose SDK is not installed."""
    return {name for sdk in missing_sdks() for name in LARGE_SDKS[sdk][2]}


def importable(modules: list[str]) -> list[str]:
    """Leave out the modules of adapters whose SDK is not installed."""
    missing = {f"perdure.adapters.{one}" for sdk in missing_sdks() for one in LARGE_SDKS[sdk][1]}
    return [module for module in modules if module not in missing]


def files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(found)


def modules() -> list[str]:
    """Return the dotted names of all modules and packages of perdure."""
    return sorted(module_name(path) for path in files("src"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file once for all tests, and keep it from the collector, which would walk it again."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        gc.freeze()
        if is_collecting:
            gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return what the tests look at of a file: definitions, imports, calls and handlers."""
    return tuple(node for node in ast.walk(parse(path)) if isinstance(node, LOOKED_AT))


LOOKED_AT = (
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Import,
    ast.ImportFrom,
    ast.Call,
    ast.ExceptHandler,
)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each module that a file imports, anywhere in it, and the line."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
