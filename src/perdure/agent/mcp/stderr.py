"""The last lines that a process has written to its standard error."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final, TextIO, final

__all__ = ["LastLines"]

_KEPT: Final = 20
_LONGEST: Final = 500


@final
class LastLines:
    """Read a pipe to its end in a thread, and keep the last lines of it.

    The thread ends when the last process that has the pipe open ends.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        reading, writing = os.pipe()
        self.pipe: TextIO = os.fdopen(writing, "w")
        """For the process to write to; close it once the process has it."""
        self._thread = threading.Thread(
            target=self._read, args=(reading,), name="perdure stderr", daemon=True
        )
        self._thread.start()

    @property
    def text(self) -> str:
        """What was written last, in a few lines; waits a moment for what is on its way."""
        self._thread.join(0.2)
        return "\n".join(self._lines)

    def _read(self, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as pipe:
            while line := pipe.readline(_LONGEST):  # one that does not end is read in pieces
                if line.strip():
                    self._lines.append(line.rstrip())
