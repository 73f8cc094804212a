"""Responses: streams of server-sent events, and errors as problems in JSON (RFC 9457).

A client continues a stream by ``Last-Event-ID``. A problem has its status, and says when to try
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import unquote_to_bytes

import anyio
import msgspec

from perdure import errors
from perdure._lib.lazy import import_extra
from perdure.asgi.feed import KEEP_ALIVE, Cursor, FeedEvent

log: logging.Logger = logging.getLogger("perdure.asgi")

MEDIA_TYPE = "application/problem+json"

_AGAIN: Final = "a request with the same Idempotency-Key continues it"

_STATUS: tuple[tuple[type[errors.PerdureError], int, str, int | None, str | None], ...] = (
    # The first that fits: subclasses come before their bases. The last column is what is sent
    # where the error's own words are for the operator: hosts, processes, paths, users.
    (errors.LeaseHeldError, 503, "Held by another process", 1, "it was not handed over in time"),
    (errors.LeaseLostError, 503, "Taken over by another process", 0, _AGAIN),
    (errors.SessionClosedError, 503, "Stopping", 1, f"what came of the turn is kept; {_AGAIN}"),
    (errors.SessionAlreadyActiveError, 409, "In use", 1, "another agent runs on the session"),
    (errors.SessionQuarantinedError, 409, "Quarantined", None, "its store refuses to save it"),
    (errors.SessionNotFoundError, 404, "Not found", None, None),
    (errors.CheckpointNotFoundError, 404, "Not found", None, None),
    (errors.HistoryPrunedError, 410, "Pruned", None, None),
    (errors.InboxFullError, 429, "Too much waits", 1, "try again later"),
    (errors.StoreUnavailableError, 503, "Store unavailable", 1, "try again later"),
    (errors.TooLargeError, 413, "Too large", None, None),
    (errors.NotStorableError, 422, "Not storable", None, None),
    (errors.TurnReusedError, 422, "Used for another request", None, None),
    (errors.InvalidArgumentError, 400, "Invalid", None, None),
    (errors.ContextOverflowError, 422, "Too long for the model", None, "send less"),
    (errors.ModelUnavailableError, 503, "Model unavailable", 1, "try again later"),
    (errors.ModelError, 502, "Model failed", None, ""),
)


@final
class Problem(Exception):  # noqa: N818  # the standard's word
    """An error as a client gets it.

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
    """Return what a client gets of an error.

    Only an error about the request itself is sent in its own words; others name what is inside:
    hosts, processes, paths, users. What is not perdure's own is a 500 without any.
    Another owner's session is one that is not there.
    """
    error = _cause(error)
    if isinstance(error, Problem):
        return error
    if isinstance(error, errors.OwnerMismatchError):
        return Problem(404, "Not found", code=errors.SessionNotFoundError.__name__)
    code = type(error).__name__ if isinstance(error, errors.PerdureError) else None
    for kind, status, title, retry_after, told in _STATUS:
        if isinstance(error, kind):
            detail = str(error) if told is None else told
            return Problem(status, title, detail, retry_after=retry_after, code=code)
    return Problem(500, "Internal error", code=code)


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def answered(error: BaseException) -> Problem:
    """Return what a client gets of an error that no one else sees.

    What the client does not get is logged, once: of a 500 with its traceback.
    """
    problem, cause = problem_of(error), _cause(error)
    if cause is problem or is_logged(error) or problem.detail == str(cause):
        return problem
    if problem.status == 500:
        log.error("a request failed", exc_info=error)
    elif problem.status != 404:  # another owner's session, which is no trouble
        # Nor are sessions that move between processes.
        is_trouble = not isinstance(cause, errors.LeaseError | errors.SessionClosedError)
        level = logging.WARNING if is_trouble else logging.INFO
        log.log(level, "a request was answered with %d: %s", problem.status, cause)
    setattr(error, _LOGGED, True)
    return problem


def is_logged(error: BaseException) -> bool:
    """Return whether `answered` has logged an error."""
    return hasattr(error, _LOGGED)


_LOGGED: Final = "_perdure_logged"

Scope = MutableMapping[str, Any]
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
        leave: Called when the stream has ended, from either side.

    """

    def __init__(self, begin: Begin, leave: Callable[[], object] | None = None) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._begin = begin
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            if scope["method"] == "HEAD":  # what a stream sends has no end
                await send(start)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            try:
                events = await self._begin(place_of(scope))
            except Exception as error:
                if not (isinstance(error, errors.PerdureError | Problem) or is_logged(error)):
                    raise
                await problem_response(answered(error))(scope, receive, send)
                return
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
        group.start_soon(watch, name="perdure:watch client")
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


def check_url(scope: Scope) -> None:
    """Refuse a URL that is no UTF-8: all that it names would be one name for all of these.

    Raises:
        Problem: It is none.

    """
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
        unquote_to_bytes(scope["query_string"].replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise Problem(400, "Invalid", "the URL is not UTF-8") from None


def json_response(value: Any, status: int = 200) -> Response:
    """Return a response with a value as JSON, which no cache keeps."""
    body = msgspec.json.encode(value, enc_hook=str)
    headers = {"cache-control": "no-store"}
    return Response(body, status, headers=headers, media_type="application/json")


def problem_response(problem: Problem) -> Response:
    """Return the response that describes a problem to a client."""
    return Response(problem.body, problem.status, headers=problem.headers)
