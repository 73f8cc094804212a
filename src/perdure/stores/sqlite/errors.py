"""Mapping from SQLite's errors to perdure's: what failed, where, and how to fix it."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator

from perdure._lib.files import READ_ONLY_CURE, store_error
from perdure.errors import (
    CorruptRecordError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
    TooLargeError,
)

# SQLite's primary result codes.
_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL = 5, 6, 8, 10, 11, 13
_CANTOPEN, _TOOBIG, _CONSTRAINT, _NOTADB = 14, 18, 19, 26

_CURES = {
    _BUSY: "another process writes to it: perdure retries; if that process hangs or was stopped, "
    "resume it or end it",
    _LOCKED: "another connection writes to it: perdure retries",
    _FULL: "free some room on the disk, and a connected manager tries again",
    _IOERR: "the disk reports an error: check it before anything else",
    _CANTOPEN: "this user may use its folder and files, so the disk or the system refused: check "
    "the disk and the system's log before anything else",
    _READONLY: "mount its file system writable, and make the file, its folder and its -wal and "
    "-shm files writable for this user",
}

_NOT_DURABLE = {None, _BUSY, _LOCKED, _FULL, _CONSTRAINT, _CORRUPT, _NOTADB, _TOOBIG}


CANNOT_SHARE = frozenset({_READONLY, _IOERR, _FULL, _CANTOPEN})
"""The codes for a database whose lock and shared memory files cannot be created."""


class InDoubtError(Exception):
    """A commit failed, and may or may not be durable; the cause is SQLite's error."""


def code_of(error: BaseException | None) -> int | None:
    """Return SQLite's primary result code, None for an error that is not SQLite's own."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def is_not_durable(error: BaseException) -> bool:
    """Return whether a commit that failed with this error wrote nothing durable."""
    return code_of(error) in _NOT_DURABLE


def is_busy(error: BaseException | None) -> bool:
    """Return whether another process has kept the write lock for as long as it may be waited."""
    return code_of(error) == _BUSY


def is_damage(error: BaseException) -> bool:
    """Return whether SQLite found the file, or a text in it, to be damaged."""
    return code_of(error) in {_CORRUPT, _NOTADB} or is_undecodable(error)


def is_undecodable(error: BaseException) -> bool:
    """Return whether a text in the file is damaged, and nothing else."""
    if isinstance(error, UnicodeDecodeError):
        return True
    # The driver's own error, without a code, for text that is not UTF-8.
    return code_of(error) is None and "Could not decode" in str(error)


def perdure_error(error: sqlite3.Error | UnicodeDecodeError, doing: str, path: str) -> PerdureError:
    """Return the error to raise for *error*, met while *doing* something to the database *path*."""
    code = code_of(error)
    if is_damage(error):
        return CorruptRecordError(
            f"cannot {doing} {path}: {error}: the database is damaged, and was left as it is; "
            "restore it from a copy, or save what is readable of each session with `perdure export "
            "ID --salvage --out FILE`, or of the tables with sqlite3's .recover",
            path=path,
        )
    if code == _TOOBIG:
        return TooLargeError(f"cannot {doing} {path}: {error}: store it in parts", path=path)
    if isinstance(error, sqlite3.InterfaceError | sqlite3.DataError):
        return NotStorableError(f"cannot {doing} {path}: {error}", path=path)
    name = getattr(error, "sqlite_errorname", None)
    # For shared memory, SQLite reports a full disk as an I/O error.
    code = _FULL if name == "SQLITE_IOERR_SHMSIZE" else code
    if code == _CANTOPEN:
        try:
            _require_usable(path)
        except OSError as refused:
            return store_error(refused, doing, path)
    cure = _CURES.get(code or 0, "see the cause")
    if doing == "open" and code in {_FULL, _IOERR, _READONLY, _CANTOPEN}:
        cure = f"{cure}; {READ_ONLY_CURE}"
    return StoreUnavailableError(f"cannot {doing} {path}: {error}: {cure}", path=path, code=name)


def _require_usable(path: str) -> None:
    """Raise the system's error for what SQLite could not open, which it does not report.

    The database file itself is not opened: closing it would drop SQLite's locks.
    """
    folder = os.path.dirname(path)
    os.close(os.open(os.devnull, os.O_RDONLY))
    os.listdir(folder)
    beside = [file for file in (f"{path}-wal", f"{path}-shm") if os.path.lexists(file)]
    for file in (folder, path, *beside):
        if not os.access(file, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)


@contextlib.contextmanager
def map_errors(doing: str, path: str) -> Iterator[None]:
    """Raise SQLite's and the system's errors as perdure's, with the original as the cause."""
    try:
        yield
    except OSError as error:
        raise store_error(error, doing, path) from error
    except InDoubtError as error:
        cause = error.__cause__
        assert isinstance(cause, sqlite3.Error)
        raise perdure_error(cause, doing, path) from cause
    except (
        sqlite3.Error,
        UnicodeDecodeError,
    ) as error:  # the latter for a message with a damaged name
        raise perdure_error(error, doing, path) from error
