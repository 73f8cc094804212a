"""A pytest plugin that leaves a process the means of Windows: ``pytest -p tests.platforms.windows``.

No ``fcntl``, no descriptors of folders and so no sync of them, no hooks at a fork, no flags
against links, no advice to the cache; locks by ``msvcrt.locking``, exclusive only; a file that
is open here can be neither removed nor replaced. The locks are real, between processes too: the
stand-in for ``msvcrt`` takes them by the means of this machine.
"""

from __future__ import annotations

import asyncio  # noqa: F401  # what uses fcntl by itself is imported before it goes
import contextlib
import errno
import fcntl as means
import os
import subprocess  # noqa: F401
import sys
import types
from typing import Any

import anyio
import trio  # noqa: F401

DIR_FLAGS = ("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC")


def _locking(fd: int, mode: int, count: int) -> None:
    assert (mode, count) == (2, 1), "only LK_NBLCK of one byte is known here"
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0, "msvcrt locks from where the file stands"
    try:
        means.flock(fd, means.LOCK_EX | means.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, "Permission denied") from error


def _is_open(path: Any) -> bool:
    real = os.path.realpath(os.fspath(path))
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{one}") == real:
                return True
    return False


def _refusing(act: Any, paths: int) -> Any:
    """Return an act of ``os`` that fails as on Windows while a file is in use."""

    def acting(*args: Any, **options: Any) -> Any:
        by_folder = any(value is not None for value in options.values())  # pytest's own tidying
        for path in args[:paths]:
            if not by_folder and isinstance(path, str | os.PathLike) and _is_open(path):
                message = "The process cannot access the file because it is being used"
                raise PermissionError(errno.EACCES, message, os.fspath(path))
        return act(*args, **options)

    return acting


def _leave_what_windows_has() -> None:
    assert "perdure" not in sys.modules
    sys.modules["fcntl"] = sys.modules["resource"] = None  # type: ignore[assignment]
    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK = 2  # type: ignore[attr-defined]
    msvcrt.locking = _locking  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = msvcrt
    kept = {name: getattr(os, name) for name in (*DIR_FLAGS, "register_at_fork")}
    for name in (*DIR_FLAGS, "register_at_fork", "posix_fadvise", "fchmod"):
        delattr(os, name)
    import perdure._lib.files
    import perdure._lib.platform
    import perdure.stores.file

    perdure._lib.files._POSIX = False
    assert perdure._lib.platform.msvcrt is not None
    for name, value in kept.items():  # others of this process need them
        setattr(os, name, value)
    for name, paths in (("unlink", 1), ("remove", 1), ("rmdir", 1), ("replace", 2), ("rename", 2)):
        setattr(os, name, _refusing(getattr(os, name), paths))
    assert anyio


_leave_what_windows_has()
