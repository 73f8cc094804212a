"""Which files stay open: those of the sessions that were written to last."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import Protocol, final

__all__ = ["OpenFiles", "Owning"]


class Owning(Protocol):
    """Somebody with files that may be closed, and are opened again when needed."""

    lock: threading.Lock
    """Held by whoever uses the files."""

    def close_files(self) -> None:
        """Close them. The caller has the lock."""


@final
class OpenFiles:
    """Keep the files of the sessions that were written to last open, and no others.

    Thread-safe. A writer that is busy is left alone: it comes up again when it is done.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closed = False
        self._writers: OrderedDict[Owning, None] = OrderedDict()
        self._lock = threading.Lock()

    def used(self, writer: Owning) -> None:
        """Note that a writer, whose lock the caller has, may have files open."""
        if self._closed:
            writer.close_files()
            return
        with self._lock:
            writers = self._writers
            writers[writer] = None
            writers.move_to_end(writer)
            spare = len(writers) - self._limit
            oldest = list(itertools.islice(writers, spare)) if spare > 0 else ()
        for other in oldest:
            self.close(other)

    def close(self, writer: Owning) -> bool:
        """Close a writer's files unless it is busy; say whether they are closed."""
        if not writer.lock.acquire(blocking=False):
            return False
        try:
            writer.close_files()
            with self._lock:
                self._writers.pop(writer, None)
        finally:
            writer.lock.release()
        return True

    def close_all(self) -> None:
        """Close every file; a writer that is busy closes its own when it is done."""
        self._closed = True
        for writer in list(self._writers):
            self.close(writer)
