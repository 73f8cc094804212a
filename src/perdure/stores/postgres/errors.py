"""The driver's errors in perdure's words: what, where, and how to mend it.

PostgreSQL names each error by five characters, whose first two are its class; that, and
whether the connection still stands, is all that is decided on. An error that the server
itself reports took its transaction back. A connection that broke leaves open what
became of a commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.errors import NotStorableError, PerdureError, StoreUnavailableError
from perdure.store import Outcome, Status

if TYPE_CHECKING:
    import psycopg


_VALUES = frozenset({"22", "54"})
"""Classes of errors that are the values' own fault."""
_ENDING = "57P"
"""The server is going down, or comes up, or ended this connection: perhaps after a commit."""

_CURES = {
    "08": "see that the server runs and can be reached; saving goes on by itself",
    "23": "the tables were changed by somebody else: restore them from a copy",
    "25": "the server takes no writes now, as a standby does: connect to the primary "
    "(target_session_attrs=read-write)",
    "28": "look at user, password and pg_hba.conf",
    "3D": "create the database first",
    "3F": "the schema was removed while it was in use: open the store again",
    "40": "it gave way to other transactions again and again: look at pg_stat_activity",
    "42": "the schema was changed by somebody else: open the store again",
    "42501": "grant this user USAGE and CREATE on the schema, and its tables",
    "53": "the server has no more of a resource; saving goes on by itself",
    "53100": "the server's disk is full: free some room; saving goes on by itself",
    "53300": "the server has too many connections: lower ?connections=, or raise max_connections",
    "55P03": "another transaction holds a lock for too long: look at pg_stat_activity",
    "57014": "it took too long: look at the server's load, and at pg_stat_activity",
    "57P": "the server is going down or coming up; saving goes on by itself",
    "58": "the server's disk reports an error: look at it before anything else",
    "XX": "the server reports damage: look at its log before anything else",
}
_WORDS = (
    ("authentication", "28"),
    ("password", "28"),
    ("too many", "53300"),
    ("does not exist", "3D"),
    ("starting up", "57P"),
    ("shutting down", "57P"),
)
"""Before there is a connection, libpq has no codes but only words."""


def trouble(error: psycopg.Error, doing: str, where: str) -> PerdureError:
    """Return what to raise for *error*, met while *doing* something to the store *where*."""
    code = error.sqlstate or _guessed(str(error))
    said = " ".join((error.diag.message_primary or str(error) or type(error).__name__).split())
    if code[:2] in _VALUES:
        message = f"{where} cannot {doing} this: {said}"
        return NotStorableError(message, sqlstate=code)
    cure = _CURES.get(code) or _CURES.get(code[:3]) or _CURES.get(code[:2]) or _CURES["08"]
    return StoreUnavailableError(f"cannot {doing} {where}: {said}: {cure}", sqlstate=code)


def _guessed(text: str) -> str:
    return next((code for word, code in _WORDS if word in text), "08")


def is_broken(error: psycopg.Error, connection: psycopg.Connection[object]) -> bool:
    """Say whether the connection was lost, so that nobody knows what was committed."""
    code = error.sqlstate
    return connection.broken or connection.closed or code is None or code.startswith(_ENDING)


def gave_way(error: psycopg.Error) -> bool:
    """Say whether the server ended a transaction for the sake of another, as in a deadlock."""
    return (error.sqlstate or "").startswith("40")


def outcome_of(mapped: PerdureError, *, broken: bool) -> Outcome:
    """Return what an error means for every batch of the statement that met it."""
    if broken:
        return Outcome(Status.IN_DOUBT, mapped)
    if isinstance(mapped, NotStorableError):
        return Outcome(Status.PERMANENT, mapped)
    return Outcome(Status.TRANSIENT, mapped)
