"""``perdure import SDK URL`` in a process of its own that is killed, at call after call to the disk.

    python -m tests.adapters.import_kills SDK URL STORE AT

kills itself at its AT-th change of the disk; 0 is never.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.crash.hooks import Tripwire

ROOT = Path(__file__).parents[2]


def killed_imports(sdk: str, url: Path, store: Path, *, step: int) -> int:
    """Import again and again, each time up to a later call, until it ends; return the kills."""
    kills = 0
    while True:
        command = [sys.executable, "-m", "tests.adapters.import_kills", sdk, url, store]
        ran = subprocess.run(
            [*map(str, command), str((kills + 1) * step)],
            cwd=ROOT,
            capture_output=True,
            timeout=250,
        )
        if ran.returncode != -signal.SIGKILL:
            assert (ran.returncode, ran.stderr) == (0, b"")
            return kills
        kills += 1


def main(sdk: str, url: str, store: str, at: str) -> int:
    from perdure.cli import main

    Tripwire(int(at), "kill").install()
    return main(["import", sdk, url, "--store", store])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
