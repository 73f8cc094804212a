"""What the server's and the driver's errors mean, in perdure's own words."""

from __future__ import annotations

from perdure.errors import CorruptRecordError, PerdureError, StoreUnavailableError
from perdure.store import Outcome, Status

_NOT_NOW = {
    "LOADING": "it is still loading its data: wait",
    "READONLY": "it is a replica: name the primary in the URL",
    "OOM": "its memory is full: raise maxmemory, or remove what is not needed",
    "MISCONF": "it cannot write its disk: see its log, and make room",
    "NOPERM": "the user may not do this: grant it with ACL SETUSER (docs/stores.md says what)",
    "NOAUTH": "it asks for a password: write it into the URL",
    "WRONGPASS": "it refused the user or the password: correct the URL",
    "MASTERDOWN": "it is a replica without its primary: name the primary in the URL",
    "NOREPLICAS": "it misses the replicas that it is to write to: start them",
    "CLUSTERDOWN": "its cluster is down: see cluster info",
    "MOVED": "it is one node of a cluster that keeps this session elsewhere: name a single server",
    "ASK": "it is one node of a cluster that moves this session: name a single server",
    "TRYAGAIN": "its cluster moves this session: wait",
    "BUSY": "it is busy with a long script: wait",
    "NOTBUSY": "it is busy with a long script: wait",
    "maxmemory": "its memory is full: raise maxmemory, or remove what is not needed",
}
"""What a server says that has done nothing, by the first word of its answer."""
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
"""The driver's classes for some of them, which take the first word away."""


def unreachable(location: str, error: BaseException | None, *, sent: bool) -> StoreUnavailableError:
    """Return the error for a server that did not answer."""
    why = f" ({type(error).__name__}: {error})" if error is not None else ""
    message = f"the server at {location} cannot be reached{why}: see that it runs and is reachable"
    if sent:
        message = (
            f"the server at {location} did not answer{why}: what was sent may or may not have "
            "been done, and may be sent again"
        )
    failure = StoreUnavailableError(message, location=location, sent=sent)
    failure.__cause__ = error
    return failure


def in_doubt(location: str) -> StoreUnavailableError:
    """Return the error for a write that the server took, and did not sync in time."""
    message = (
        f"the server at {location} has not synced a write to its disk in time: it will be sent "
        "again; see the server's disk, or do not wait for it with ?wait=no"
    )
    return StoreUnavailableError(message, location=location, sent=True)


def meaning_of(location: str, error: BaseException) -> PerdureError:
    """Return what an error that stands in an answer's place means."""
    word = _BY_CLASS.get(type(error).__name__) or str(error).partition(" ")[0]
    if word in _NOT_NOW:
        message = f"the server at {location} refuses: {_NOT_NOW[word]}"
        failure: PerdureError = StoreUnavailableError(message, location=location, sent=False)
    elif type(error).__name__ == "WrongTypeError" or "WRONGTYPE" in str(error):
        message = (
            f"the server at {location} has something else where perdure keeps its own: move it, "
            "or choose another ?prefix=…"
        )
        failure = CorruptRecordError(message, location=location)
    else:
        return unreachable(location, error, sent=True)
    failure.__cause__ = error
    return failure


def outcome_of(error: PerdureError) -> Outcome:
    """Return what an error means for a batch that was, or was not, sent."""
    if not isinstance(error, StoreUnavailableError):
        return Outcome(Status.PERMANENT, error)
    return Outcome(Status.IN_DOUBT if error.facts.get("sent") else Status.TRANSIENT, error)
