"""What a home's own folder has no more use for: set aside by its name, and removed.

A tree here may be anything that an agent has made: deeper than any stack, with folders that nobody
may write. What cannot be removed is no reason to refuse a save or a restore: it stays, with a
warning, for the next one to try again. All of it blocks.
"""

from __future__ import annotations

import logging
import os
import stat
from typing import Final

from perdure._lib.files import Folder
from perdure._lib.ids import random_id

__all__ = ["LEFT", "remove_left", "set_aside", "set_mode"]

log: logging.Logger = logging.getLogger("perdure")

LEFT: Final = "restore-"
"""How the names of what may be removed begin, unless a journal says otherwise."""


def set_aside(control: Folder, name: str) -> None:
    """Give what is to go, if it is there, a name that says so."""
    if control.stat(name) is not None:
        control.rename(name, f"{LEFT}{random_id()}")


def remove_left(control: Folder) -> None:
    """Remove whatever was set aside, or left by a kill; no link is followed."""
    for name in control.names():
        if name.startswith(LEFT):
            try:
                _remove_tree(control, name)
            except OSError as error:
                facts = {"path": f"{control.path}/{name}", "error": str(error)}
                log.warning("replaced files not removed", extra=facts)


def _remove_tree(control: Folder, name: str) -> None:
    """Remove a tree, whose folders come up beside it one by one: its depth needs no stack."""
    left = [name]
    while left:
        one = left.pop()
        if not _is_folder(control, one):
            control.remove(one)
            continue
        set_mode(control, one, 0o700)
        with control.enter(one) as folder:
            for inner in folder.names():
                if _is_folder(folder, inner):
                    set_mode(folder, inner, 0o700)  # it says where it lies: a move writes it
                    left.append(f"{LEFT}{random_id()}")
                    folder.rename(inner, left[-1], to=control)
                else:
                    folder.remove(inner)
        control.remove_folder(one)


def _is_folder(folder: Folder, name: str) -> bool:
    found = folder.stat(name)
    return found is not None and stat.S_ISDIR(found.st_mode)


def set_mode(parent: Folder, name: str, mode: int) -> None:
    """Set a folder's rights, where folders have any."""
    if os.name == "posix":  # elsewhere they cannot be opened, either
        fd = parent.open(name, getattr(os, "O_DIRECTORY", 0))
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
