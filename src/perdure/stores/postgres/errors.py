"""Mapping from the driver's errors to perdure's: what failed, where, and how to fix it.

PostgreSQL identifies each error by five characters, whose first two are its class. Only that, and
whether the connection is still open, decides. An error that the server itself reports has rolled
its transaction back. After a lost connection, a commit may or may not be durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.errors import NotStorableError, PerdureError, StoreUnavailableError
from perdure.store import Outcome, Status

if TYPE_CHECKING:
    import psycopg


_VALUES = frozenset({"22", "54"})
"""Classes of errors that the values themselves cause."""
_ENDING = "57P"
"""The server is shutting down, starting up, or ended this connection: perhaps after a commit."""

_CURES = {
    "08": "make sure that the server runs and can be reached; a connected manager tries again",
    "23": "another program changed the tables: restore them from a copy",
    "25": "the server takes no writes now, as a standby does: connect to the primary "
    "(target_session_attrs=read-write)",
    "28": "check user, password and pg_hba.conf",
    "3D": "create the database first",
    "3F": "the schema was removed while it was in use: open the store again",
    "40": "it was rolled back for other transactions several times: look at pg_stat_activity",
    "42": "another program changed the schema: open the store again",
    "42501": "grant this user USAGE and CREATE on the schema, and its tables",
    "53": "the server has run out of a resource; a connected manager tries again",
    "53100": "the server's disk is full: free some room; a connected manager tries again",
    "53300": "the server has too many connections: lower ?connections=, or raise max_connections",
    "55P03": "another transaction holds a lock for too long: look at pg_stat_activity",
    "57014": "it took too long: check the server's load, and pg_stat_activity",
    "57P": "the server is shutting down or starting up; a connected manager tries again",
    "58": "the server's disk reports an error: check it before anything else",
    "XX": "the server reports damage: check its log before anything else",
}
_WORDS = (
    ("authentication", "28"),
    ("password", "28"),
    ("too many", "53300"),
    ("does not exist", "3D"),
    ("starting up", "57P"),
    ("shutting down", "57P"),
)
"""Before there is a connection, libpq has no codes, only messages."""


def perdure_error(
    error: psycopg.Error, doing: str, location: str, hide: Callable[[str], str]
) -> PerdureError:
    """Return the error to raise for *error*, met while *doing* something to the store.

    Secrets are hidden in the driver's text alone: a password may be a word of ours, too.
    """
    code = error.sqlstate or next((code for word, code in _WORDS if word in str(error)), "08")
    given = error.diag.message_primary or str(error) or type(error).__name__
    text = hide(" ".join(given.split()))
    if code[:2] in _VALUES:
        return NotStorableError(f"{location} cannot {doing} this: {text}", sqlstate=code)
    cure = _CURES.get(code) or _CURES.get(code[:3]) or _CURES.get(code[:2]) or _CURES["08"]
    return StoreUnavailableError(f"cannot {doing} {location}: {text}: {cure}", sqlstate=code)


def is_broken(error: psycopg.Error, connection: psycopg.Connection[object]) -> bool:
    """Return whether the connection was lost, so that a commit may or may not be durable."""
    code = error.sqlstate
    return connection.broken or connection.closed or code is None or code.startswith(_ENDING)


def is_rollback(error: psycopg.Error) -> bool:
    """Return whether the server rolled back in favor of another transaction, as in a deadlock."""
    return (error.sqlstate or "").startswith("40")


def outcome_of(error: PerdureError, *, is_lost: bool) -> Outcome:
    """Return the outcome of an error for every batch of the statement that met it."""
    if is_lost:
        return Outcome(Status.IN_DOUBT, error)
    if isinstance(error, NotStorableError):
        return Outcome(Status.PERMANENT, error)
    return Outcome(Status.TRANSIENT, error)
