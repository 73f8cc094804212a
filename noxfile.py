"""The tasks of this repository; `nox -s check` is what a change must pass besides its tests.

``check``, ``fix`` and ``api`` use the environment that nox itself runs in (``pip install -e
'.[check]'``), so that nothing is installed twice. ``tests`` makes environments of its own.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["check"]

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PYTHON = sys.executable
INSTALLED = {**os.environ, "PERDURE_TEST_INSTALLED": "1"}
SDKS = [
    "langgraph",
    "openai-agents",
    "google-adk",
    "pydantic-ai",
    "agent-framework",
    "claude-agent-sdk",
]
"""The extras of the adapters."""
UPSTREAM = [
    *("dirty-equals", "inline-snapshot", "pip", "psycopg-pool", "pycryptodome", "pytest-mock"),
    *("pytest-retry", "redis", "syrupy"),
]
"""Packages that the SDKs' own tests need besides."""
CHECKS = [
    [PYTHON, "-m", "ruff", "format", "--check", "."],
    [PYTHON, "-m", "ruff", "check", "."],
    [PYTHON, "-m", "mypy"],
    # Its cache goes by each file's own time, and misses a module that has appeared since.
    [str(Path(PYTHON).with_name("lint-imports")), "--no-cache"],
    [PYTHON, "-m", "tests.public_api"],
]


@nox.session(venv_backend="none")
def check(session: nox.Session) -> None:
    """Judge format, lint, types, layers and the public API; change nothing."""
    failed = [" ".join(step) for step in CHECKS if not passes(session, step)]
    if failed:
        session.error("failed: " + "; ".join(failed))


def passes(session: nox.Session, step: list[str]) -> bool:
    """Run one step of the check, so that a failure does not hide the next one's."""
    try:
        session.run(*step, external=True)
    except nox.command.CommandFailed:
        return False
    return True


@nox.session(venv_backend="none")
def fix(session: nox.Session) -> None:
    """Format, and mend what ruff can mend."""
    paths = session.posargs or ["."]
    session.run(PYTHON, "-m", "ruff", "check", "--fix-only", *paths, external=True)
    session.run(PYTHON, "-m", "ruff", "format", *paths, external=True)


@nox.session(venv_backend="none")
def api(session: nox.Session) -> None:
    """Accept the public API as it is now; the difference belongs in the review."""
    session.run(PYTHON, "-m", "tests.public_api", "--update", external=True)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests against the built wheel, on each Python that is there."""
    session.install(".[test]")
    session.run("pytest", *session.posargs, env=INSTALLED)


@nox.session(venv_backend="none")
def deep(session: nox.Session) -> None:
    """Run the tests that take long, which the README's command leaves out."""
    session.run(PYTHON, "-m", "pytest", "-q", "-m", "deep", *session.posargs, external=True)


@nox.session(python=PYTHONS[0])
def adapters(session: nox.Session) -> None:
    """Hold the adapters to what their SDKs ask of them, on several stores, and to kills."""
    session.install(".[test-adapters]")
    tests = ["tests/adapters", "tests/asgi/test_litestar.py"]
    session.run("pytest", *(session.posargs or ["-q", "-m", "", *tests]), env=INSTALLED)
    for sdk in SDKS:
        session.run("python", "-m", "tests.adapters.kills", sdk, "--kills", "30")


@nox.session(python=PYTHONS[0])
def lowest_adapters(session: nox.Session) -> None:
    """Run the adapters' tests with the lowest versions of the SDKs that pyproject.toml allows."""
    session.install(".[test-adapters]", *lowest_versions(*SDKS, "pydantic-ai-harness"))
    given = session.posargs or ["-q", "tests/adapters"]
    session.run("pytest", *given, env=INSTALLED)


@nox.session(python=PYTHONS[0])
def upstream(session: nox.Session) -> None:
    """Run the SDKs' own tests over their own stores and over perdure's, and compare."""
    session.install(".[test-adapters]", *UPSTREAM)
    session.run("python", "-m", "tests.upstream", *session.posargs, env=INSTALLED)


@nox.session(python=PYTHONS[0])
@nox.parametrize("extra", SDKS)
def extras(session: nox.Session, extra: str) -> None:
    """Run the program of an SDK's page, and its diff, where nothing but its extra is installed."""
    session.install(f".[{extra}]")
    session.run("python", "tests/adapters/quick_starts.py", extra)


@nox.session(python=PYTHONS[0])
def browser(session: nox.Session) -> None:
    """Walk pages in chromium, hostile ones too; PERDURE_SCREENSHOTS=docs/images takes pictures."""
    session.install(".[test-browser]")
    tests = [
        f"tests/{what}/test_browser.py" for what in ("examples", "inspector", "serve", "tuning")
    ]
    session.run("pytest", "-q", "-m", "", *tests, *session.posargs)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run tests with the lowest versions that pyproject.toml allows; by default the security's."""
    floors = Path(session.create_tmp()) / "floors.txt"
    floors.write_text("".join(f"{floor}\n" for floor in lowest_versions()), encoding="utf-8")
    session.install("-c", str(floors), ".[test]")
    session.run(
        "pytest",
        *(session.posargs or ["-q", "tests/test_security.py", "tests/stores/wrapped"]),
        env=INSTALLED,
    )


def lowest_versions(*names: str) -> list[str]:
    """Return what each requirement of the project, or of some extras, allows at least, pinned."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    given = [] if names else [*project["dependencies"]]
    given += [one for name in names or extras for one in extras[name]]
    bounds = (re.match(r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)", one) for one in given)
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound is not None})


@nox.session(python=PYTHONS[0])
def sbom(session: nox.Session) -> None:
    """Write what an installation with all extras brings along: dist/perdure-VERSION.cdx.json."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    tools = {"test", "test-adapters", "test-sdks", "test-browser", "docs", "check", "bench"}
    extras = [name for name in project["optional-dependencies"] if name not in tools]
    session.install(f".[{','.join(extras)}]")
    written = Path("dist") / f"perdure-{project['version']}.cdx.json"
    written.parent.mkdir(exist_ok=True)
    made = [PYTHON, "-m", "cyclonedx_py", "environment", session.virtualenv.location]
    options = ["--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible"]
    session.run(*made, *options, "--of", "JSON", "-o", str(written), external=True)
    session.log(f"written to {written}")


@nox.session(python=PYTHONS[0])
def docs(session: nox.Session) -> None:
    """Build the site of the documents into site/; a warning fails it."""
    session.install("-e", ".[docs]")
    session.run("python", "-m", "tests.site")


@nox.session(venv_backend="none")
def package(session: nox.Session) -> None:
    """Build wheel and sdist twice, compare them, install them without extras, run examples."""
    session.run(PYTHON, "-m", "tests.package", external=True)


@nox.session(python=PYTHONS[0])
def bare(session: nox.Session) -> None:
    """See that the library imports with its core dependencies alone."""
    session.install(".")
    session.run("python", "-c", "from perdure import *")
