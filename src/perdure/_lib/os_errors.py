"""The operating system's errors in perdure's words: what, where, and how to mend it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from perdure._lib.files import LinkFoundError
from perdure.errors import ConfigError, PerdureError, StoreUnavailableError

__all__ = ["FULL", "READ_ONLY_CURE", "store_error", "store_errors"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room: what was written stays, and the rest may follow later."""

READ_ONLY_CURE = "to read what is there as it is, connect with read_only=True"

_CURES = {
    errno.ENOSPC: "free some room on the disk; saving goes on by itself",
    errno.EDQUOT: "the quota is used up: free some room; saving goes on by itself",
    errno.EFBIG: "a limit on the size of files was met: raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only: mount it writable, or choose another place",
    errno.EACCES: "make the folder belong to this user (chown, chmod u+rwx), or choose another",
    errno.EPERM: "make the folder belong to this user (chown, chmod u+rwx), or choose another",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine: raise its limit",
    errno.EIO: "the disk reports an error: look at it before anything else",
    errno.ENOTDIR: "a file stands where a folder should be: move it away",
    errno.ENOENT: "a folder was removed while it was in use: open the session again",
}
_AT_OPEN = {
    errno.ENOSPC: "free some room on the disk",
    errno.EDQUOT: "the quota is used up: free some room",
}
_READABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
"""What keeps a store from being opened to write, and may well let it be read."""


def store_error(error: OSError, doing: str, where: str) -> PerdureError:
    """Return what to raise for *error*, met while *doing* something to *where*."""
    path = error.filename if isinstance(error.filename, str) else where
    if isinstance(error, LinkFoundError):
        message = (
            f"cannot {doing} {where}: {path} is a symbolic link, which could lead anywhere; put "
            "a real folder there, or make the store's own folder the link"
        )
        return ConfigError(message, path=path)
    code = error.errno or 0
    cure = _CURES.get(code, "look at the cause")
    if doing == "open":
        cure = _AT_OPEN.get(code, cure)
        if code in _READABLE:
            cure = f"{cure}; {READ_ONLY_CURE}"
    at = "" if path.startswith(where) and len(path) <= len(where) else f" at {path}"
    message = f"cannot {doing} {where}: {error.strerror or error}{at}: {cure}"
    return StoreUnavailableError(message, path=path, errno=error.errno)


@contextlib.contextmanager
def store_errors(doing: str, where: str) -> Iterator[None]:
    """Raise the operating system's errors as perdure's, with themselves as the cause."""
    try:
        yield
    except OSError as error:
        raise store_error(error, doing, where) from error
