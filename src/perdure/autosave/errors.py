"""Why a session takes no more, or cannot say that it is durable: the errors, in words.

Decisions only: each function returns the error, its caller raises it.
"""

from __future__ import annotations

from perdure._lib import task_scope
from perdure.autosave.tracked import State, Tracked
from perdure.errors import (
    AcknowledgedRecordsLostError,
    LeaseLostError,
    SessionClosedError,
    SessionError,
    SessionQuarantinedError,
    StoreUnavailableError,
    TooLargeError,
)


def ended(
    t: Tracked,
) -> AcknowledgedRecordsLostError | LeaseLostError | SessionClosedError | SessionQuarantinedError:
    """Return the error of a session that has ended, or is sealed."""
    if t.end is State.LOST:
        return _gone(t) if t.missing else _lost(t)
    if t.end is State.QUARANTINED:
        return _quarantined(t)
    return _closed(t)


def _lost(t: Tracked) -> LeaseLostError:
    message = (
        f"session {t.key}: another process has taken it over, epoch {t.epoch} can write no more; "
        f"{_unsaved(t)}. fork_unsaved(new_id) keeps them, discard_unsaved() drops them; open the "
        "session again to go on"
    )
    error = LeaseLostError(message, key=t.key, epoch=t.epoch, version=t.version, durable=t.durable)
    error.__cause__ = t.last_error
    return error


def _gone(t: Tracked) -> AcknowledgedRecordsLostError:
    error = AcknowledgedRecordsLostError(
        f"{t.last_error}; {_unsaved(t)}", key=t.key, durable=t.durable, missing=t.missing
    )
    error.__cause__ = t.last_error
    return error


def _quarantined(t: Tracked) -> SessionQuarantinedError:
    message = (
        f"session {t.key}: the store refuses record {t.durable + 1} for good ({t.last_error}); "
        f"{_unsaved(t)}. Use retry(), fork_unsaved(new_id) or discard_unsaved()"
    )
    error = SessionQuarantinedError(message, key=t.key, seq=t.durable + 1, version=t.version)
    error.__cause__ = t.last_error
    return error


def _closed(t: Tracked) -> SessionClosedError:
    message = f"session {t.key} is closed, {_unsaved(t)}: open it again"
    return SessionClosedError(message, key=t.key, version=t.version, durable=t.durable)


def _unsaved(t: Tracked) -> str:
    return f"{t.version - t.durable} of its records are only in memory"


def require_outside(t: Tracked | None, what: str) -> None:
    """Refuse what would wait for the very hook that it is asked in; None for any session's.

    Raises:
        SessionError: This task is in a ``before_save`` hook or a contributor of the session, or
            was started there.

    """
    if task_scope.is_within_any(Tracked) if t is None else task_scope.is_within(t):
        name = "a session" if t is None else f"session {t.key}"
        message = (
            f"{name} is about to be saved, and waits for this before_save hook or contributor: "
            f"it cannot wait for the session {what}. Append and return: what is appended here is "
            "saved at once, with the rest"
        )
        raise SessionError(message, key=None if t is None else str(t.key))


def overloaded(
    t: Tracked, *, dirty_bytes: int, oldest_age: float, cause: Exception | None = None
) -> StoreUnavailableError:
    """Return the error of an append while too much is unsaved."""
    message = (
        f"session {t.key}: the store does not keep up; {dirty_bytes} bytes are unsaved over all "
        f"sessions, the oldest for {oldest_age:.1f} s. Nothing accepted is dropped: try again "
        "when the store works, or raise dirty_hard and max_unsaved_age"
    )
    error = StoreUnavailableError(
        message, key=t.key, dirty_bytes=dirty_bytes, oldest_age=oldest_age
    )
    error.__cause__ = cause
    return error


def too_large(t: Tracked, *, size: int, limit: int) -> TooLargeError:
    """Return the error of a record beyond the store's limit."""
    message = (
        f"session {t.key}: a record of {size} bytes, the store takes at most {limit}: "
        "put large content into a blob or a file"
    )
    return TooLargeError(message, key=t.key, size=size, limit=limit)
