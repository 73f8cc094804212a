"""Responses: streams of server-sent events, and errors as problems in JSON (RFC 9457).

A client continues a stream by ``Last-Event-ID``. A problem has its status, and says when to try
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, final

import anyio
import msgspec

from perdure import errors
from perdure._lib.lazy import import_extra
from perdure.asgi.feed import KEEP_ALIVE, Cursor, FeedEvent

log: logging.Logger = logging.getLogger("perdure.asgi")

MEDIA_TYPE = "application/problem+json"

_STATUS: tuple[tuple[type[errors.PerdureError], int, str, int | None], ...] = (
    # The first that fits: subclasses come before their bases.
    (errors.LeaseHeldError, 503, "Held by another process", 1),
    (errors.LeaseLostError, 503, "Taken over by another process", 0),
    (errors.SessionClosedError, 503, "Stopping", 1),
    (errors.SessionAlreadyActiveError, 409, "In use", 1),
    (errors.SessionQuarantinedError, 409, "Quarantined", None),
    (errors.SessionNotFoundError, 404, "Not found", None),
    (errors.CheckpointNotFoundError, 404, "Not found", None),
    (errors.HistoryPrunedError, 410, "Pruned", None),
    (errors.InboxFullError, 429, "Too much waits", 1),
    (errors.StoreUnavailableError, 503, "Store unavailable", 1),
    (errors.TooLargeError, 413, "Too large", None),
    (errors.NotStorableError, 422, "Not storable", None),
    (errors.TurnReusedError, 422, "Used for another request", None),
    (errors.InvalidArgumentError, 400, "Invalid", None),
    (errors.ContextOverflowError, 422, "Too long for the model", None),
    (errors.ModelUnavailableError, 503, "Model unavailable", 1),
    (errors.ModelError, 502, "Model failed", None),
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
    Another owner's session is one that is not there.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, Problem):
        return error
    if isinstance(error, errors.OwnerMismatchError):
        return Problem(404, "Not found", code=errors.SessionNotFoundError.__name__)
    for kind, status, title, retry_after in _STATUS:
        if isinstance(error, kind):
            detail = None if status == 502 else str(error)
            code = type(error).__name__
            return Problem(status, title, detail, retry_after=retry_after, code=code)
    return Problem(500, "Internal error", code=type(error).__name__)


def answered(error: BaseException) -> Problem:
    """Return what a client is told of an error that nobody else sees: a 500 is logged, once."""
    problem = problem_of(error)
    if problem.status == 500 and error is not problem and not is_logged(error):
        setattr(error, _LOGGED, True)
        log.error("a request failed", exc_info=error)
    return problem


def is_logged(error: BaseException) -> bool:
    """Whether `answered` has logged an error."""
    return hasattr(error, _LOGGED)


_LOGGED: Final = "_perdure_logged"

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
ASGIApp = Callable[[Any, Receive, Send], Awaitable[None]]

Events = AsyncGenerator[FeedEvent | None, None]
Begin = Callable[[Cursor | None], Awaitable[Events]]
"""Called with the client's place, and returns what follows it; what it raises is the answer."""

RETRY: Final = b"retry: 500\n\n"
"""Milliseconds after which a client connects again."""

if TYPE_CHECKING:
    from starlette.responses import Response
else:
    Response = import_extra(
        "starlette.responses", used_by="perdure.asgi", name="Starlette", extra="asgi"
    ).Response


@final
class FeedResponse(Response):
    """Stream events to a client; a client that goes away ends the stream and nothing else.

    Args:
        begin: Called with the client's place, and returns what follows it.
        leave: Called when the stream has ended, whoever ended it.

    """

    def __init__(self, begin: Begin, leave: Callable[[], object] | None = None) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._begin = begin
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            try:
                events = await self._begin(place_of(scope))
            except Exception as error:
                if not (isinstance(error, errors.PerdureError | Problem) or is_logged(error)):
                    raise
                await send_problem(send, answered(error))
                return
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async with aclosing(events):
                await _stream(events, receive, send)
        finally:
            if self._leave is not None:
                self._leave()


async def _stream(events: Events, receive: Receive, send: Send) -> None:
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            await _send_events(events, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client has gone away
        group.cancel_scope.cancel()


async def _send_events(events: Events, send: Send) -> None:
    async def body(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    await body(RETRY)
    sent_at = time.monotonic()
    try:
        async for event in events:
            if event is not None:
                await body(as_text(event))
            elif time.monotonic() - sent_at >= KEEP_ALIVE:
                await body(b": still here\n\n")
            else:
                continue
            sent_at = time.monotonic()
    except errors.PerdureError as error:
        await body(as_text(failure(error)))


def failure(error: BaseException) -> FeedEvent:
    """Return the event that says why a stream ends early."""
    return FeedEvent("error", None, msgspec.json.decode(answered(error).body))


def as_text(event: FeedEvent) -> bytes:
    """Return an event as it is sent."""
    place = b"" if event.id is None else b"id: %s\n" % str(event.id).encode()
    data = msgspec.json.encode(event.data, enc_hook=str)
    return b"%sevent: %s\ndata: %s\n\n" % (place, event.name.encode(), data)


def place_of(scope: Scope) -> Cursor | None:
    """Return the place that a request's Last-Event-ID names.

    Raises:
        Problem: It names none.

    """
    for name, value in scope["headers"]:
        if name == b"last-event-id" and value:
            cursor = Cursor.parse(value.decode("latin-1"))
            if cursor is None:
                raise Problem(400, "Invalid", "Last-Event-ID is no id of an event of ours")
            return cursor
    return None


async def send_problem(send: Send, problem: Problem) -> None:
    """Answer with a problem."""
    body = problem.body
    headers = {**problem.headers, "content-length": str(len(body))}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
