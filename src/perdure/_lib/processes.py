"""Which process this is, told so that others on the machine can see that it has ended.

A process is named by the machine's boot, its namespace of process ids, its id and when it
began: ids are used again, and each container counts its own. Where any of it is unknown,
nothing is claimed.
"""

from __future__ import annotations

import os

from perdure._lib.platform import boot_id

__all__ = ["has_ended", "this_process"]

_BEGAN = 19
"""Where a process's start stands in ``/proc/<pid>/stat``, behind its name."""


def this_process() -> str:
    """Return a name for this process that no other ever has; "" where there is none."""
    boot, space, began = boot_id(), _namespace(), _began(os.getpid())
    return f"{boot} {space} {os.getpid()} {began}" if boot and space and began else ""


def has_ended(process: str) -> bool:
    """Say whether a process has ended for certain; False also where that cannot be told."""
    parts = process.split(" ")
    if len(parts) != 4 or parts[:2] != [boot_id(), _namespace()] or not parts[2].isdigit():
        return False
    began = _began(int(parts[2]))
    return began is not None and began != parts[3]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> str | None:
    """Return when a process began, "" if there is none, None if it cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[_BEGAN].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, IndexError):
        return None
