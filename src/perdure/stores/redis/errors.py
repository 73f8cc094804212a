"""Mapping of the server's and the driver's errors to perdure's errors."""

from __future__ import annotations

from perdure.errors import CorruptRecordError, PerdureError, StoreUnavailableError
from perdure.store import Outcome, Status

_NOT_NOW = {
    "LOADING": "it is still loading its data: wait",
    "READONLY": "it is a replica: name the primary in the URL",
    "OOM": "its memory is full: raise maxmemory, or remove what is not needed",
    "MISCONF": "it cannot write to its disk: see its log, and free space",
    "NOPERM": "the user may not do this: grant it with ACL SETUSER (docs/stores.md lists what)",
    "NOAUTH": "it requires a password: write it into the URL",
    "WRONGPASS": "it refused the user or the password: correct the URL",
    "MASTERDOWN": "it is a replica without its primary: name the primary in the URL",
    "NOREPLICAS": "it lacks the replicas that it has to write to: start them",
    "CLUSTERDOWN": "its cluster is down: see cluster info",
    "MOVED": "it is one node of a cluster that keeps this session on another: name a single server",
    "ASK": "it is one node of a cluster that moves this session: name a single server",
    "TRYAGAIN": "its cluster moves this session: wait",
    "BUSY": "it is busy with a long script: wait",
    "NOTBUSY": "it is busy with a long script: wait",
    "maxmemory": "its memory is full: raise maxmemory, or remove what is not needed",
}
"""Errors of a server that executed nothing, by the first word of the reply."""
_BY_CLASS = {
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "AuthorizationError": "NOPERM",
    "AuthenticationRequiredError": "NOAUTH",
    "AuthenticationFailureError": "WRONGPASS",
    "ClusterDownError": "CLUSTERDOWN",
    "MovedError": "MOVED",
    "AskError": "ASK",
    "TryAgainError": "TRYAGAIN",
}
"""The driver's classes for some of them, which drop the first word."""


def unreachable(location: str, error: BaseException | None, *, sent: bool) -> StoreUnavailableError:
    """Return the error for a server that did not answer."""
    cause = f" ({type(error).__name__}: {error})" if error is not None else ""
    message = f"the server at {location} cannot be reached{cause}: check that it is running"
    if sent:
        message = (
            f"the server at {location} did not answer{cause}: what was sent may or may not have "
            "been executed, and may be sent again"
        )
    failure = StoreUnavailableError(message, location=location, sent=sent)
    failure.__cause__ = error
    return failure


def in_doubt(location: str) -> StoreUnavailableError:
    """Return the error for a write that the server executed but did not sync in time."""
    return StoreUnavailableError(
        f"the server at {location} has not synced a write to its disk in time: it will be sent "
        "again; check the server's disk, or do not wait for it with ?wait=no",
        location=location,
        sent=True,
    )


def error_meaning(location: str, error: BaseException) -> PerdureError:
    """Return the perdure error for an error reply."""
    word = _BY_CLASS.get(type(error).__name__) or str(error).partition(" ")[0]
    if word in _NOT_NOW:
        message = f"the server at {location} refuses: {_NOT_NOW[word]}"
        failure: PerdureError = StoreUnavailableError(message, location=location, sent=False)
    elif type(error).__name__ == "WrongTypeError" or "WRONGTYPE" in str(error):
        message = (
            f"the server at {location} has foreign data under one of perdure's keys: move it, "
            "or choose another ?prefix=…"
        )
        failure = CorruptRecordError(message, location=location)
    else:
        return unreachable(location, error, sent=True)
    failure.__cause__ = error
    return failure


def outcome_of(error: PerdureError) -> Outcome:
    """Return the outcome of a batch whose sending raised an error."""
    if not isinstance(error, StoreUnavailableError):
        return Outcome(Status.PERMANENT, error)
    return Outcome(Status.IN_DOUBT if error.facts.get("sent") else Status.TRANSIENT, error)
