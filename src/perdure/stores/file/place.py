"""The store's own folder: found, made if it may be, and checked before anything trusts it."""

from __future__ import annotations

import logging
import os

from perdure._lib.platform import network_file_system
from perdure._lib.private_folder import open_private as open_root
from perdure.errors import ConfigError

__all__ = ["is_local", "open_root", "resolve_root"]

_log = logging.getLogger("perdure")

HOME_VARIABLE = "PERDURE_HOME"

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
