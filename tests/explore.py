"""Look for what the same examples for ever would not show: ``python -m tests.explore --minutes 10``.

The tests are the same on each run: Hypothesis draws the same examples, and trio runs what is
ready in the same order. Here each test file that is drawn gets a seed of its own for both. Ends
by itself; prints each seed, and how to run what has failed again; exits 1 if something has.

``python -m tests.explore --schedules --minutes 10`` looks for orders of public operations instead: of many tasks and two processes,
cancelled, stopped and killed, judged from the log (`tests/schedules`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.source_tree import ROOT, files

ELSEWHERE = re.compile(
    r"tests/(servers|integration|crash|examples|platforms|sigterm|benchmarks|typing|golden)/"
    r"|postgres|redis|s3|test_(imports|shape|docs|api|requirements|mutants|explore)\.py"
)
"""What starts servers or many processes, or has no order and no examples."""
DRAWS = re.compile(r"^(from|import) hypothesis\b", re.MULTILINE)
ASYNC = re.compile(r"^ *async def test_", re.MULTILINE)
NOTHING = {0, 5}
"""Statuses of pytest: all passed, and no test was there."""


def drawable() -> list[tuple[str, bool]]:
    """Return the test files worth a seed, and whether each has examples that are drawn."""
    found = []
    for path in files("tests"):
        name = path.relative_to(ROOT).as_posix()
        if not path.name.startswith("test_") or ELSEWHERE.search(name):
            continue
        text = path.read_text(encoding="utf-8")
        if DRAWS.search(text) or ASYNC.search(text):
            found.append((name, bool(DRAWS.search(text))))
    return found


def command(name: str, seed: int, *, has_examples: bool) -> list[str]:
    """Return how to run a file with a seed."""
    tests = [] if has_examples else ["-k", "trio"]  # asyncio has but one order
    seeds = ["--hypothesis-profile=explore", f"--hypothesis-seed={seed}", f"--trio-seed={seed}"]
    return ["python", "-m", "pytest", "-q", "-m", "", "--tb=short", *seeds, *tests, name]


def run(words: list[str], seconds: float) -> tuple[int, str] | None:
    """Run it; return its status and what it said, None if the time was over before it ended."""
    with subprocess.Popen(
        [sys.executable, *words[1:]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def explore(minutes: float, seed: int, among: list[tuple[str, bool]]) -> list[str]:
    """Run files with new seeds until the time is over; return how to run the failed ones again."""
    end = time.monotonic() + 60 * minutes
    dice = random.Random(seed)
    failed: list[str] = []
    while time.monotonic() < end:
        name, has_examples = dice.choice(among)
        words = command(name, dice.randrange(2**32), has_examples=has_examples)
        done = run(words, end - time.monotonic())
        if done is None:
            break
        status, said = done
        again = shlex.join(words)
        print(f"{'ok' if status in NOTHING else 'FAILED':6} {again}", flush=True)
        if status not in NOTHING:
            print(said)
            failed.append(again)
    return failed


def schedules(options: argparse.Namespace, seed: int) -> int:
    """Explore schedules for as long as the command line says."""
    from tests.schedules.search import failed, search

    print(f"seed {seed}, on {options.store}")
    summary = search(
        options.minutes,
        seed,
        store=options.store,
        episodes=options.episodes,
        themes=options.theme,
        allow=options.allow,
        every=options.every,
        shrink=options.shrink,
        repeat=options.repeat,
    )
    return 1 if failed(summary, options.allow) else 0


def main(arguments: list[str] | None = None) -> int:
    """Explore for as long as the command line says."""
    parser = argparse.ArgumentParser("python -m tests.explore", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="when to end")
    parser.add_argument("--seed", type=int, help="which files and seeds to draw; new if left out")
    parser.add_argument("--schedules", action="store_true", help="random public operations instead")
    parser.add_argument(
        "--store",
        default="file",
        help="of schedules: file, sqlite, memory, encrypted, postgres, valkey, s3, or a URL",
    )
    parser.add_argument("--theme", action="append", default=[], help="of schedules: only these")
    parser.add_argument("--episodes", type=int, help="of schedules: how many at most")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="LABEL",
        help="of schedules: the status ignores these failures",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="of schedules: how often each is run, in another order each time",
    )
    parser.add_argument(
        "--shrink", action="store_true", help="of schedules: leave out what a failure does not need"
    )
    parser.add_argument(
        "--every", action="store_true", help="of schedules: tell each failure, not one of each kind"
    )
    parser.add_argument("files", nargs="*", type=Path, help="draw among these test files only")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes has to be more than 0")
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.schedules:
        return schedules(options, seed)
    wanted = {path.as_posix() for path in options.files}
    among = [one for one in drawable() if not wanted or one[0] in wanted]
    if not among:
        parser.error("none of these files draws examples, or runs on trio")
    print(f"seed {seed}: {len(among)} test files; the same order again with --seed {seed}")
    failed = explore(options.minutes, seed, among)
    if failed:
        print("\nrun again what has failed:", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
