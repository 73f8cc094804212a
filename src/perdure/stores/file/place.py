"""The store's own folder: found, made if it may be, and checked before anything trusts it."""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys

from perdure._lib.files import Folder
from perdure._lib.platform import network_file_system
from perdure.errors import ConfigError, StoreUnavailableError

__all__ = ["open_root", "resolve_root"]

_log = logging.getLogger("perdure")

HOME_VARIABLE = "PERDURE_HOME"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[str] = set()


def resolve_root(root: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Return the absolute path of the store, and whether its parents may be made too.

    The argument, else ``PERDURE_HOME``, else the per-user data folder.
    """
    named = root if root is not None else os.environ.get(HOME_VARIABLE) or None
    if named is None:
        from platformdirs import user_data_dir

        return user_data_dir("perdure", appauthor=False), True
    path = os.path.expanduser(os.fspath(named))
    if not path or path.startswith("~"):
        message = (
            f"root={os.fspath(named)!r} names no folder: give a path, or leave it out for the "
            "per-user data folder"
        )
        raise ConfigError(message, root=os.fspath(named))
    return os.path.abspath(path), False


def open_root(path: str, *, parents: bool) -> Folder:
    """Open the store's folder, made if only it is missing.

    Raises:
        ConfigError: It is no folder, or others can write to it.
        StoreUnavailableError: Its parent is missing, or it cannot be made or opened.

    """
    _make(path, parents=parents)
    try:
        folder = Folder.root(path)
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
    with Folder.root(os.path.dirname(path)) as parent_folder:
        parent_folder.sync()


def _require_private(folder: Folder, path: str) -> None:
    found = folder.stat(".") if sys.platform != "win32" else None
    if found is not None and found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        message = (
            f"{path} can be written by others (mode {mode:04o}), who could then change what is "
            f"kept there: chmod go-w {path}"
        )
        raise ConfigError(message, path=path, mode=mode)


def is_local(path: str) -> bool:
    """Say whether a folder lies on this machine's own disk; warn once where it does not."""
    kind = network_file_system(path)
    if kind is not None and path not in _warned:
        _warned.add(path)
        _log.warning(
            "the store lies on a network file system, where locks and syncs may not hold: "
            "keep it on a local disk, or use a server store",
            extra={"path": path, "type": kind},
        )
    return kind is None
