"""``python -m tests.sigterm --cycles 50 --runner trio``: prints a JSON summary, exits by it."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.runners import LOOPS
from tests.sigterm.cycles import run_cycles

RUNNERS = sorted(LOOPS.keys() - {"notebook"})
"""A notebook's kernel owns SIGTERM."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sigterm", description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--runner", choices=RUNNERS, default="asyncio")
    parser.add_argument("--sessions", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-sigterm-") as folder:
        summary = run_cycles(
            Path(folder), given.runner, cycles=given.cycles, sessions=given.sessions
        )
    print(json.dumps(summary, indent=2))
    return 0 if summary["ok"] and summary["in_time"] else 1


if __name__ == "__main__":
    sys.exit(main())
