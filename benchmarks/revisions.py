"""A process of one revision of perdure over one store, for benchmarks that compare revisions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, cast

__all__ = ["Worker"]


class Worker:
    """A process that runs a program of a checkout, and does what it is asked for.

    Args:
        checkout: Whose ``src`` it imports.
        program: Reads a line of JSON for each request, and answers with one: seconds of CPU.
        url: The store, the program's argument.

    """

    def __init__(self, checkout: Path, program: str, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        )

    def ask(self, *words: Any) -> float:
        """Return the seconds of CPU that it took.

        Raises:
            SystemExit: The process ended instead.

        """
        asked, answers = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        asked.write(json.dumps(words) + "\n")
        asked.flush()
        answer = answers.readline()
        if not answer:
            raise SystemExit(f"{words} failed")
        return float(json.loads(answer))

    def close(self) -> None:
        """Let it end."""
        with self._process:
            cast("IO[str]", self._process.stdin).close()
