"""Folders for the roots that are crashed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = "/dev/shm"


@contextmanager
def scratch(*, on_disk: bool = False) -> Iterator[Path]:
    """Make a folder, in memory where there is a file system for it, and remove it afterwards.

    A process that is killed or stopped leaves the same behind in memory as on a disk, and a
    cut of power is not made but modeled; only that each sync costs time is missing there.
    """
    memory = not on_disk and os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(
        prefix="perdure-crash-", dir=MEMORY if memory else None, ignore_cleanup_errors=True
    ) as top:
        yield Path(top)
