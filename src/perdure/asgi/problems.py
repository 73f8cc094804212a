"""Errors as problems in JSON (RFC 9457): the status of each, and when to try again."""

from __future__ import annotations

from typing import Any, final

import msgspec

from perdure.errors import (
    CheckpointNotFoundError,
    ContextOverflowError,
    HistoryPrunedError,
    InboxFullError,
    InvalidArgumentError,
    LeaseHeldError,
    LeaseLostError,
    ModelError,
    ModelUnavailableError,
    NotStorableError,
    PerdureError,
    SessionAlreadyActiveError,
    SessionClosedError,
    SessionNotFoundError,
    SessionQuarantinedError,
    StoreUnavailableError,
    TooLargeError,
)

MEDIA_TYPE = "application/problem+json"

_STATUS: tuple[tuple[type[PerdureError], int, str, int | None], ...] = (
    # The first that fits: subclasses come before their bases.
    (LeaseHeldError, 503, "Held by another process", 1),
    (LeaseLostError, 503, "Taken over by another process", 0),
    (SessionClosedError, 503, "Stopping", 1),
    (SessionAlreadyActiveError, 409, "In use", 1),
    (SessionQuarantinedError, 409, "Quarantined", None),
    (SessionNotFoundError, 404, "Not found", None),
    (CheckpointNotFoundError, 404, "Not found", None),
    (HistoryPrunedError, 410, "Pruned", None),
    (InboxFullError, 429, "Too much waits", 1),
    (StoreUnavailableError, 503, "Store unavailable", 1),
    (TooLargeError, 413, "Too large", None),
    (NotStorableError, 422, "Not storable", None),
    (InvalidArgumentError, 400, "Invalid", None),
    (ContextOverflowError, 422, "Too long for the model", None),
    (ModelUnavailableError, 503, "Model unavailable", 1),
    (ModelError, 502, "Model failed", None),
)


@final
class Problem(Exception):  # noqa: N818  # the standard's word
    """An error as a client is told of it.

    Args:
        status: The HTTP status.
        title: What kind of problem it is, in short.
        detail: What has happened, and what helps. None: nothing more is said.
        retry_after: Seconds after which the same request may succeed; None if it will not.
        code: The name of the error, for programs.
        headers: More headers of the answer.

    """

    def __init__(
        self,
        status: int,
        title: str,
        detail: str | None = None,
        *,
        retry_after: int | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail or title)
        self.status: int = status
        self.title: str = title
        self.detail: str | None = detail
        self.retry_after: int | None = retry_after
        self.code: str | None = code
        self._headers = headers or {}

    @property
    def body(self) -> bytes:
        """The problem as JSON."""
        fields: dict[str, Any] = {
            "type": "about:blank",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        return msgspec.json.encode({name: value for name, value in fields.items() if value})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, in lower case."""
        again = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {"content-type": MEDIA_TYPE, **again, **self._headers}


def problem_of(error: BaseException) -> Problem:
    """Return what a client is told of an error.

    What is not perdure's own, and what concerns the operator alone, is a 500 without details.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, Problem):
        return error
    for kind, status, title, retry_after in _STATUS:
        if isinstance(error, kind):
            detail = None if status == 502 else str(error)
            code = type(error).__name__
            return Problem(status, title, detail, retry_after=retry_after, code=code)
    return Problem(500, "Internal error", code=type(error).__name__)
