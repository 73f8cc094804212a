"""Sessions in an ASGI application: one manager for the app, requests, streams and probes.

`AppSessions` is plain ASGI, for Starlette, FastAPI and Litestar. Its responses are Starlette's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.asgi.app import AppSessions as AppSessions
    from perdure.asgi.browsers import BrowserGuard as BrowserGuard
    from perdure.asgi.feed import (
        Channel as Channel,
        Cursor as Cursor,
        Feed as Feed,
        FeedEvent as FeedEvent,
        FeedPlace as FeedPlace,
    )
    from perdure.asgi.responses import (
        FeedResponse as FeedResponse,
        Problem as Problem,
        problem_of as problem_of,
    )
    from perdure.asgi.runs import Run as Run, RunOutcome as RunOutcome

_HOME_OF = {
    "AppSessions": "perdure.asgi.app",
    "BrowserGuard": "perdure.asgi.browsers",
    "Channel": "perdure.asgi.feed",
    "Cursor": "perdure.asgi.feed",
    "Feed": "perdure.asgi.feed",
    "FeedEvent": "perdure.asgi.feed",
    "FeedPlace": "perdure.asgi.feed",
    "FeedResponse": "perdure.asgi.responses",
    "Problem": "perdure.asgi.responses",
    "Run": "perdure.asgi.runs",
    "RunOutcome": "perdure.asgi.runs",
    "problem_of": "perdure.asgi.responses",
}

__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
