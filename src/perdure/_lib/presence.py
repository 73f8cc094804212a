"""A locked file for each process that is here: it tells the dead from the living at once.

The lock ends with the process, however it ends; a forked child lets go of it. Blocking.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import final

from perdure._lib.files import Folder
from perdure._lib.held import HeldFile, is_held, unheld

__all__ = ["Onlooker", "Presence"]

_LOCK = ".lock"
_BELL = ".bell"


@final
class Presence:
    """Be present in a folder under a name, as long as this object is not closed.

    Raises:
        BlockingIOError: Somebody else is present under that name.

    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._name = name
        self._folder = folder
        self._held = HeldFile(folder, _file_of(name))

    def close(self) -> None:
        """Leave. Closing twice is fine."""
        if self._held.remove():
            self._folder.close()

    def is_present(self, name: str) -> bool | None:
        """Say whether somebody of that name is present; None where it cannot be told."""
        return name == self._name or is_held(self._folder, _file_of(name))

    def ring(self, name: str) -> None:
        """Tell somebody who is present that there is something to look at."""
        if self._folder.has(_file_of(name)):
            bell = _bell_of(_file_of(name))
            os.close(self._folder.open(bell, os.O_WRONLY | os.O_CREAT))
            self._folder.touch(bell, time.time())

    def rung(self) -> int:
        """Return a number that changes when somebody rings."""
        found = self._folder.stat(_bell_of(_file_of(self._name)))
        return found.st_mtime_ns if found is not None else 0

    def sweep(self) -> None:
        """Remove the files of those who have gone without leaving."""
        mine = _file_of(self._name)
        names = self._folder.names()
        for file in names:
            if file.endswith(_BELL) and file.removesuffix(_BELL) + _LOCK not in names:
                self._folder.remove(file)
        locks = [file for file in names if file.endswith(_LOCK) and file != mine]
        for _ in unheld(self._folder, locks):
            pass


@final
class Onlooker:
    """A look at who is present in a folder, by somebody who is not; None where there is none."""

    def __init__(self, folder: Folder | None) -> None:
        self._folder = folder

    def close(self) -> None:
        """Close the folder."""
        if self._folder is not None:
            self._folder.close()

    def is_present(self, name: str) -> bool | None:
        """Say whether somebody of that name is present; None where it cannot be told."""
        return None if self._folder is None else is_held(self._folder, _file_of(name))

    def ring(self, name: str) -> None:
        """Do nothing: who only looks has nothing to tell."""

    def rung(self) -> int:
        """Return 0: nobody rings for who is not present."""
        return 0


def _file_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32] + _LOCK


def _bell_of(file: str) -> str:
    return file.removesuffix(_LOCK) + _BELL
