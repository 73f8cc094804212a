"""Folders that only their user may write to."""

from __future__ import annotations

import errno
import os
import stat
import sys

from perdure._lib.files import Folder
from perdure.errors import ConfigError, StoreUnavailableError

__all__ = ["open_private"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_private(path: str, *, parents: bool = False, make: bool = True) -> Folder:
    """Open a folder of perdure's own, made if only it is missing and ``make`` says so.

    Raises:
        ConfigError: It is no folder, or others can write to it.
        StoreUnavailableError: Its parent is missing, or it cannot be made or opened.

    """
    if make:
        _make(path, parents=parents)
    try:
        folder = Folder.root(path)
    except FileNotFoundError as error:
        message = f"there is no store at {path}: see that the path is right, and the disk mounted"
        raise StoreUnavailableError(message, path=path, errno=errno.ENOENT) from error
    except NotADirectoryError as error:
        message = f"{path} is a file, not a folder: move it away, or choose another folder"
        raise ConfigError(message, path=path) from error
    try:
        _require_private(folder, path)
    except BaseException:
        folder.close()
        raise
    return folder


def _make(path: str, *, parents: bool) -> None:
    try:
        if parents:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # a umask may have taken our own rights
    except FileExistsError:
        return
    except FileNotFoundError as error:
        parent = os.path.dirname(path)
        message = (
            f"{path} cannot be made, since {parent} is not there: make it (mkdir -p), mount the "
            "volume that it belongs to, or choose another folder"
        )
        raise StoreUnavailableError(message, path=path, errno=errno.ENOENT) from error
    except NotADirectoryError as error:
        message = f"{path} lies below a file: choose another folder"
        raise ConfigError(message, path=path) from error
    with Folder.root(os.path.dirname(path)) as above:
        above.sync()


def _require_private(folder: Folder, path: str) -> None:
    found = folder.stat(".") if sys.platform != "win32" else None
    if found is not None and found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        message = (
            f"{path} can be written by others (mode {mode:04o}), who could then change what is "
            f"kept there: chmod go-w {path}"
        )
        raise ConfigError(message, path=path, mode=mode)
