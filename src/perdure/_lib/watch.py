"""Being told that something was put into a folder, without looking again and again.

On Linux the kernel tells, by inotify; elsewhere, or where it has no watch left to give,
there is no watch, and one has to look.
"""

from __future__ import annotations

import os
import sys
from typing import final

import anyio

_MOVED_TO = 0x80
_ONLYDIR = 0x01000000
_MUCH = 65536


@final
class FolderWatch:
    """What becomes readable when an entry is moved into a folder, as `Folder.replace` does."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def wait(self) -> None:
        """Return when there is something new since `drain`, or when the watch was closed.

        One task at a time: a second one gets ``anyio.BusyResourceError``.
        """
        if self._fd >= 0:
            try:
                await anyio.wait_readable(self._fd)
            except anyio.ClosedResourceError:
                return

    def drain(self) -> None:
        """Forget what was told so far: call it before one looks."""
        try:
            while os.read(self._fd, _MUCH):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """End the watch, on the event loop that waits for it. Closing twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            anyio.notify_closing(fd)
            os.close(fd)

    def drop(self) -> None:
        """End the watch where no event loop waits for it, such as in a forked child."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def watch_folder(path: str) -> FolderWatch | None:
    """Watch a folder, None where nobody tells."""
    if sys.platform != "linux":  # pragma: no cover  # one has to look there
        return None
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return None
        if libc.inotify_add_watch(fd, os.fsencode(path), _MOVED_TO | _ONLYDIR) < 0:
            os.close(fd)
            return None
    except (ImportError, OSError, AttributeError):  # no such call in this C library
        return None
    return FolderWatch(fd)
