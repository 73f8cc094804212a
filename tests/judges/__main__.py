"""Do the commands that judge a store tell the truth?

    python -m tests.judges --runs 200                # beside live writers: no false problem
    python -m tests.judges --runs 50 --store sqlite  # file, sqlite, encrypted, postgres, redis
    python -m tests.judges --damages                 # planted damage: each command that looks finds it

Each run starts a random command beside a process that writes, prunes, forks, copies, renames and
forgets sessions. A problem that it reports is false if it is gone once the writer has stopped.
Prints JSON or a table; exits with 1 on a false problem, one that stays, or damage that went unseen.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.crash.scratch import scratch
from tests.judges import damages
from tests.judges.commands import Ran, place_of, random_command, run
from tests.judges.writers import write_all

PER_STORE = 10
"""Runs in each store, beside one writer."""


def judged(kind: str, runs: int, seed: int) -> dict[str, object]:
    """Run commands beside writers; return how often each ran, and which problems were reported."""
    dice = random.Random(seed)
    ran: collections.Counter[str] = collections.Counter()
    false: list[str] = []
    real: list[str] = []
    for at in range(0, runs, PER_STORE):
        with scratch() as top:
            url = place_of(kind, top / "store")
            writer = start(url, dice.getrandbits(32))
            try:
                for number in range(min(PER_STORE, runs - at)):
                    words = random_command(kind, url, top, number, dice)
                    said = run(words)
                    ran[words[0]] += 1
                    print(f"{at + number + 1}: {said.line}", file=sys.stderr)
                    if said.is_problem:
                        false.append(said.text)
            finally:
                stop(writer)
            problems = [said.text for said in at_rest(kind, url, top) if said.is_problem]
            real += problems
            if problems:  # then what was reported before may be true
                real += false
                false = []
                break
    return {"ran": ran, "false": false, "real": real}


def start(url: str, seed: int) -> subprocess.Popen[str]:
    """Start a process that writes, and wait until it does."""
    words = [sys.executable, "-m", "tests.judges", "--write", url, "--seed", str(seed)]
    writer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline().startswith("writing"), "the writer did not start"
    return writer


def stop(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGTERM)
    try:
        writer.wait(60)
    except subprocess.TimeoutExpired:
        writer.kill()
        writer.wait()
    finally:
        assert writer.stdout is not None
        writer.stdout.close()


def at_rest(kind: str, url: str, top: Path) -> list[Ran]:
    """Judge a store that nobody writes any more."""
    backup, copy = place_of(kind, top / "backup"), place_of(kind, top / "copy")
    return [
        run(["check", "--store", url]),
        run(["backup", url, backup, "--verify"]),
        run(["migrate", url, copy]),
        run(["check", "--store", copy]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--store", default="file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--damages", action="store_true")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        asyncio.run(write_all(options.write, options.seed))
        return 0
    if options.damages:
        return damages.show(options.store)
    found = judged(options.store, options.runs, options.seed)
    print(json.dumps(found, indent=2))
    return 1 if found["false"] or found["real"] else 0


if __name__ == "__main__":
    sys.exit(main())
