"""The two ends of a comparison on one disk: perdure's log, and a plain file that mirrors it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from perdure import SessionKey
from perdure.stores.file.layout import LOG, session_path

__all__ = ["Mirror", "Piece", "filesystem", "write_through"]


def write_through(fd: int, data: bytes) -> None:
    """Write bytes and make them durable: the limit that nobody can go below."""
    os.write(fd, data)
    os.fdatasync(fd)


class Piece(NamedTuple):
    """Bytes that one turn has written."""

    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        """Return them."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


class Mirror:
    """A plain copy of a session's log: the same bytes in files of the same lengths."""

    def __init__(self, root: Path, key: SessionKey, copies: Path) -> None:
        self._log = root.joinpath(*session_path(key), LOG)
        self._copies = copies
        self._newest = max(self._log.glob("*.jsonl"), key=_place)
        self._seen = 0
        self._copied = Path()
        self._fd = -1

    def mark(self) -> Piece:
        """Note what is new in the newest file; cheap enough between two turns."""
        size = self._newest.stat().st_size
        if size == self._seen:  # the log has gone on in another file
            self._newest = max(self._log.glob("*.jsonl"), key=_place)
            self._seen, size = 0, self._newest.stat().st_size
        piece = Piece(self._newest, self._seen, size)
        self._seen = size
        return piece

    def copy_of(self, piece: Piece) -> int:
        """Return the open file that is to get a piece, and holds everything before it."""
        if piece.path != self._copied:
            self.close()
            path = self._copies / f"{self._log.parent.name}-{piece.path.name}"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._copied = piece.path
        return self._fd

    def catch_up(self) -> None:
        """Copy what is new, unmeasured."""
        piece = self.mark()
        write_through(self.copy_of(piece), piece.read())

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
