"""SQLite's errors in perdure's words: what, where, and how to mend it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from perdure._lib.files import READ_ONLY_CURE, store_error
from perdure.errors import (
    CorruptRecordError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
    TooLargeError,
)

if TYPE_CHECKING:
    import sqlite3


# SQLite's primary result codes.
_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL = 5, 6, 8, 10, 11, 13
_CANTOPEN, _TOOBIG, _CONSTRAINT, _NOTADB = 14, 18, 19, 26

_CURES = {
    _BUSY: "another process writes to it: it is tried again; if that one hangs or "
    "was stopped, let it go on or end it",
    _LOCKED: "another connection writes to it: it is tried again",
    _FULL: "free some room on the disk, and saving goes on by itself",
    _IOERR: "the disk reports an error: look at it before anything else",
    _READONLY: "mount its file system writable, and make the file, its folder and its -wal and "
    "-shm files writable for this user",
}

_LEFT_NOTHING = {None, _BUSY, _LOCKED, _FULL, _CONSTRAINT, _CORRUPT, _NOTADB, _TOOBIG}


CANNOT_SHARE = frozenset({_READONLY, _IOERR, _FULL, _CANTOPEN})
"""What comes of a database whose files for locks and shared memory cannot be made."""


class InDoubtError(Exception):
    """A commit failed in a way that does not tell whether it lasts; the cause is SQLite's error."""


def driver_error() -> type[sqlite3.Error]:
    """Return what all errors of the driver are; it is imported only when it is used."""
    import sqlite3

    return sqlite3.Error


def integrity_error() -> type[sqlite3.Error]:
    """Return what the driver raises where a rule of the schema, or of a trigger, is broken."""
    import sqlite3

    return sqlite3.IntegrityError


def code_of(error: BaseException) -> int | None:
    """Return SQLite's primary result code, None for an error that is not SQLite's own."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def left_nothing(error: BaseException) -> bool:
    """Say whether a commit that failed with this has written nothing that could last."""
    return code_of(error) in _LEFT_NOTHING


def is_damage(error: BaseException) -> bool:
    """Say whether SQLite found the file, or a text in it, to be damaged."""
    if code_of(error) in {_CORRUPT, _NOTADB} or isinstance(error, UnicodeDecodeError):
        return True
    # The driver's own error, without a code, for text that is no UTF-8.
    return code_of(error) is None and "Could not decode" in str(error)


def trouble(error: sqlite3.Error | UnicodeDecodeError, doing: str, where: str) -> PerdureError:
    """Return what to raise for *error*, met while *doing* something to the database *where*."""
    import sqlite3

    code = code_of(error)
    if is_damage(error):
        message = (
            f"cannot {doing} {where}: {error}: the database is damaged, and was left as it is; "
            "restore it from a copy, or bring out what is left of each session by `perdure export "
            "ID --salvage --out FILE`, or of the tables by sqlite3's .recover"
        )
        return CorruptRecordError(message, path=where)
    if code == _TOOBIG:
        return TooLargeError(f"cannot {doing} {where}: {error}: store it in parts", path=where)
    if isinstance(error, sqlite3.InterfaceError | sqlite3.DataError):
        return NotStorableError(f"cannot {doing} {where}: {error}", path=where)
    name = getattr(error, "sqlite_errorname", None)
    # Of shared memory, what is too little room is an I/O error.
    code = _FULL if name == "SQLITE_IOERR_SHMSIZE" else code
    cure = _cure_of_open(where) if code == _CANTOPEN else _CURES.get(code or 0, "look at the cause")
    if doing == "open" and code in {_FULL, _IOERR, _READONLY, _CANTOPEN}:
        cure = f"{cure}; {READ_ONLY_CURE}"
    message = f"cannot {doing} {where}: {error}: {cure}"
    return StoreUnavailableError(message, path=where, code=name)


def _cure_of_open(path: str) -> str:
    """Find out why SQLite could not open a file of a database, which it does not say.

    The database itself is only asked about: opening and closing it would drop SQLite's locks.
    """
    folder = os.path.dirname(path)
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return "too many files are open: raise the limit (ulimit -n)"
    try:
        os.listdir(folder)
        there = [one for one in (path, f"{path}-wal", f"{path}-shm") if os.path.lexists(one)]
    except PermissionError:
        there = []
    except OSError as error:
        return f"the disk reports an error ({error.strerror}): look at it before anything else"
    wanted = os.R_OK | os.W_OK
    if path not in there or not all(os.access(one, wanted) for one in (folder, *there)):
        return (
            "make the folder and the database's files belong to this user (chown, chmod u+rwx), or "
            "choose another place"
        )
    return (
        "this user may use its folder and files, so the disk or the system has refused: look at "
        "the disk and the system's log before anything else"
    )


@contextlib.contextmanager
def troubles(doing: str, where: str) -> Iterator[None]:
    """Raise SQLite's errors as perdure's, with themselves as the cause."""
    import sqlite3

    try:
        yield
    except OSError as error:
        raise store_error(error, doing, where) from error
    except InDoubtError as error:
        cause = error.__cause__
        assert isinstance(cause, sqlite3.Error)
        raise trouble(cause, doing, where) from cause
    except (sqlite3.Error, UnicodeDecodeError) as error:  # also of a message with a damaged name
        raise trouble(error, doing, where) from error
