"""The two ends of a comparison on one disk: perdure's log, and a plain file that mirrors it."""

from __future__ import annotations

import os
from pathlib import Path

from perdure import SessionKey
from perdure.stores.file.layout import LOG, session_path

__all__ = ["Mirror", "filesystem", "write_through"]


def write_through(fd: int, data: bytes) -> None:
    """Write bytes and make them durable: the limit that nobody can go below."""
    os.write(fd, data)
    os.fdatasync(fd)


class Mirror:
    """A plain copy of a session's log: the same bytes in files of the same lengths.

    ``step`` is called after each turn and gives what perdure has written in it, with the open
    file that is to get it.
    """

    def __init__(self, root: Path, key: SessionKey, copies: Path) -> None:
        self._log = root.joinpath(*session_path(key), LOG)
        self._copies = copies
        self._name = ""
        self._seen = 0
        self._fd = -1

    def step(self) -> tuple[int, bytes]:
        """Return the bytes that are new in the newest file, and the descriptor of its copy."""
        newest = max(self._log.glob("*.jsonl"), key=_place)
        if newest.name != self._name:
            self._begin(newest)
        with newest.open("rb") as file:
            file.seek(self._seen)
            new = file.read()
        self._seen += len(new)
        return self._fd, new

    def catch_up(self) -> None:
        """Copy what is new, unmeasured."""
        fd, new = self.step()
        write_through(fd, new)

    def _begin(self, newest: Path) -> None:
        self.close()
        self._name, self._seen = newest.name, 0
        path = self._copies / f"{self._log.parent.name}-{newest.name}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def close(self) -> None:
        """Close the copy."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _place(path: Path) -> tuple[int, int]:
    epoch, number = path.stem.split("-")
    return int(epoch), int(number)


def filesystem(path: Path) -> str:
    """Return the type of the file system below a path, as far as this system says."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    here, best, kind = str(path.resolve()), "", "unknown"
    for line in mounts.read_text().splitlines():
        _, point, of, *_ = line.split()
        inside = here == point or here.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, of
    return kind
