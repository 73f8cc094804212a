"""The guard in front of the inspector: who may ask, and which headers every answer has.

A request needs the cookie that the link with the token sets, or the token as a bearer. Before
that, `BrowserRules` refuses what comes by another name, or from another site.

A browser sends a cookie to every port of its host, so to other users' servers too.
So this one is for a path that no one else knows, and all pages that it opens are below that.
"""

from __future__ import annotations

import hashlib
import hmac
import html
from collections.abc import Collection
from typing import Final, final
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from perdure.asgi.browsers import BrowserRules
from perdure.asgi.responses import Problem, check_url

TOKEN: Final = "token"  # noqa: S105  # the name of the link's parameter
FORM_TOKEN: Final = "perdure.form_token"  # noqa: S105  # the name of an entry of the scope
"""The entry with the token that a request's forms must bring along, and no other site can know."""
OPEN_PATHS: Final = "/static/"
"""The path that needs no token: scripts and styles, which say nothing about sessions."""

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
DEFAULTS: Final = {"cache-control": "no-store", "referrer-policy": "no-referrer"}
"""Headers that an answer may have otherwise."""

_LANDING: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="0;url={url}">
<link rel="icon" href="{base}/static/icon.svg"><title>perdure</title></head>
<body><p><a href="{url}">Continue to the inspector</a></p></body></html>
"""


@final
class Guard:
    """Answer for an application that only who knows the token may see.

    Args:
        app: What it guards.
        token: What a link or a bearer has to show.
        hosts: Names, without a port, that it is served under.

    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._rules = BrowserRules(hosts=hosts)
        self._cookie = f"perdure_inspector_{self._derived('name')[:8]}"
        self._path = f"/{self._derived('path')[:32]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                for name, value in DEFAULTS.items():
                    headers.setdefault(name, value)
            await send(message)

        base = scope.get("root_path", "")
        if f"{scope['path']}/".startswith(f"{base}{self._path}/"):
            scope = {**scope, "root_path": base + self._path}
        request = Request(scope)
        refusal = self._foreign(request) or self._unknown(request, base)
        answer: ASGIApp = self._app if refusal is None else refusal
        scope[FORM_TOKEN] = self._derived("form")
        await answer(scope, receive, send_guarded)

    def _derived(self, purpose: str) -> str:
        # The same in every worker of a server, and no way back to the token.
        return hmac.digest(self._token, purpose.encode(), hashlib.sha256).hex()

    def _foreign(self, request: Request) -> Response | None:
        """Refuse what comes by another name, or from another site."""
        try:
            self._rules.check(request.scope)
            check_url(request.scope)
        except Problem as problem:
            return _refusal(problem.status, str(problem))
        return None

    def _unknown(self, request: Request, base: str) -> Response | None:
        """Refuse who has no token; greet who comes with the link."""
        own = request.scope.get("root_path", "")
        page = request.scope["path"].removeprefix(own)
        if page.startswith(OPEN_PATHS):
            return None
        given = request.query_params.get(TOKEN)
        if given is not None and request.method in {"GET", "HEAD"} and self._is_token(given):
            return self._greeting(request, base, page)
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        cookie = request.cookies.get(self._cookie, "") if own != base else ""
        if hmac.compare_digest(cookie.encode(), self._derived("cookie").encode()):
            return None
        return _refusal(401, "open the link with the token, as `perdure inspect` prints it")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)

    def _greeting(self, request: Request, base: str, page: str) -> Response:
        # Not a redirect: after a link on another site, a browser sends no strict cookie with it.
        rest = [pair for pair in parse_qsl(request.url.query) if pair[0] != TOKEN]
        path = f"{quote(base + self._path)}/{quote(page.lstrip('/'))}"
        url = html.escape(f"{path}?{urlencode(rest)}" if rest else path)
        response = HTMLResponse(_LANDING.format(url=url, base=html.escape(quote(base))))
        response.set_cookie(
            self._cookie,
            self._derived("cookie"),
            path=base + self._path,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response


def _refusal(status: int, why: str) -> Response:
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return PlainTextResponse(f"{why}\n", status, headers=headers)
