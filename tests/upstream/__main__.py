"""Run the SDKs' own tests, over their own stores and over perdure's, and print what passes.

    python -m tests.upstream [langgraph openai-agents …]

The tests are in the source distributions of the versions that are installed. They are downloaded
into a temporary folder, and nothing of them is kept. What fails over perdure alone must be in
`tests.upstream.differences`; what is not runs once more, since some tests wait for milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.upstream.differences import DIFFERENCES

HERE = Path(__file__).parent


class Suite(NamedTuple):
    """Tests of one SDK."""

    tests: tuple[str, ...]
    """Files and folders of its source distribution."""
    ours: tuple[str, ...] = ("ours",)
    options: tuple[str, ...] = ("-p", "no:asyncio")


SUITES = {
    "langgraph": Suite(("tests",), ("ours-sdk-serde", "ours")),
    "langgraph-checkpoint-sqlite": Suite(("tests",), options=("-o", "addopts=")),
    "openai-agents": Suite(
        (
            "tests/memory/test_compaction_model_visibility.py",
            "tests/memory/test_openai_responses_compaction_session.py",
            "tests/memory/test_session.py",
            "tests/memory/test_session_context_wrapper.py",
            "tests/memory/test_session_limit.py",
            "tests/extensions/memory/test_async_sqlite_session.py",
            "tests/extensions/memory/test_encrypt_session.py",
            "tests/test_agent_runner.py",
            "tests/test_soft_cancel.py",
            "tests/test_tool_batch_failure_history.py",
        ),
        options=("-o", "addopts="),
    ),
    "pydantic-ai-harness": Suite(
        ("tests/step_persistence", "--ignore=tests/step_persistence/test_mongo.py"),
        options=("-p", "no:asyncio", "-o", "addopts=", "-o", "filterwarnings=default"),
    ),
}


def unpacked(sdk: str, folder: Path) -> Path:
    """Return the folder with the source distribution of the version that is installed."""
    name = f"{sdk}=={version(sdk)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-binary", sdk, name, "--dest", folder], check=True)
    (archive,) = folder.glob(f"{sdk.replace('-', '_')}-{version(sdk)}.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def outcomes(sdk: str, whose: str, source: Path, tests: Sequence[str] = ()) -> dict[str, str]:
    """Return the outcome of each of an SDK's tests, or of some of them."""
    suite, report = SUITES[sdk], source / f"{whose}.json"
    about = {
        "PERDURE_UPSTREAM": whose,
        "PERDURE_UPSTREAM_SDK": sdk,
        "PERDURE_UPSTREAM_REPORT": str(report),
        "PYTHONPATH": str(HERE),
        "NO_DOCKER": "true",  # LangGraph's word for a machine without servers
        "OPENAI_API_KEY": "none",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "perdure_upstream"]
    command += ["-p", "no:cacheprovider", "--timeout=60", "-n", "2", *suite.options]
    command += tests or suite.tests
    with (source / f"{whose}.log").open("w", encoding="utf-8") as log:
        subprocess.run(
            command, cwd=source, env={**os.environ, **about}, stdout=log, stderr=log, check=False
        )
    if not report.exists():
        sys.exit((source / f"{whose}.log").read_text(encoding="utf-8")[-4000:])
    found: dict[str, str] = json.loads(report.read_text(encoding="utf-8"))
    return found


def reason_of(sdk: str, whose: str, test: str) -> str | None:
    """Return why a test may fail over perdure; None if it may not."""
    known = {**DIFFERENCES.get(sdk, {}), **DIFFERENCES.get(f"{sdk} {whose}", {})}
    return next((why for pattern, why in known.items() if fnmatch(test, pattern)), None)


def row(sdk: str, whose: str, found: dict[str, str], rest: str = "") -> str:
    """Return a line of the table."""
    counts = [sum(each == what for each in found.values()) for what in ("passed", "failed")]
    return f"{sdk:28} {version(sdk):9} {whose:15} {counts[0]:6} {counts[1]:6} {rest}"


def run(sdk: str, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return lines of the table, the differences that are known, and the failures that are not."""
    source = unpacked(sdk, folder)
    theirs = outcomes(sdk, "theirs", source)
    lines, known, unknown = [row(sdk, "theirs", theirs)], list[str](), list[str]()
    passed = [test for test, outcome in theirs.items() if outcome == "passed"]
    for whose in SUITES[sdk].ours:
        ours = outcomes(sdk, whose, source)
        for is_last in (False, True):
            failed = [test for test in passed if ours.get(test) != "passed"]
            reasons = {test: reason_of(sdk, whose, test) for test in failed}
            again = [test for test, why in reasons.items() if why is None]
            if again and not is_last:
                ours |= outcomes(sdk, whose, source, again)
        named = [f"{sdk} {whose}: {test}: {why}" for test, why in reasons.items() if why]
        new = [f"{sdk} {whose}: {test}" for test, why in reasons.items() if why is None]
        lines.append(row(sdk, whose, ours, f"{len(named):6} {len(new):6}"))
        known += named
        unknown += new
    return lines, known, unknown


def main(sdks: list[str]) -> int:
    """Run the suites, and return how the program ends."""
    lines = [f"{'SDK':28} {'version':9} {'over':15} {'passed':>6} {'failed':>6}  known    new"]
    known, unknown = list[str](), list[str]()
    for sdk in sdks or SUITES:
        with TemporaryDirectory(prefix="perdure-upstream-") as folder:
            part, named, new = run(sdk, Path(folder))
        lines += part
        known += named
        unknown += new
        print(*part, sep="\n", flush=True)
    print("", *lines, sep="\n")
    print("\nDifferences that are documented:", *(known or ["none"]), sep="\n  ")
    print("\nFailures that are not:", *(unknown or ["none"]), sep="\n  ")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
