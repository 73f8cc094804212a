"""The guard against other sites: what a web page may make a browser send to a server.

A server on this machine, or with a cookie, is reached by every page that its user opens. So a
request has to name a host that the server is known by, with every method, which keeps out names
that an attacker points at this machine; and what another site's page sends is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, final

from perdure.asgi.responses import ASGIApp, Problem, Receive, Scope, Send, problem_response
from perdure.records.keys import require_list

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
ANY: Final = "*"

_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/?#@\\\s]+))(?::[0-9]{1,5})?")


@final
class BrowserRules:
    """Rules for the requests of browsers.

    Args:
        hosts: Names, without a port, that the server is reached by; "*" for any.
        origins: Other sites whose pages may send requests, such as ``https://app.example.com``;
            "*" for any.
        links: Whether any site may link to a page here.

    """

    def __init__(
        self, *, hosts: Collection[str], origins: Collection[str] = (), links: bool = True
    ) -> None:
        require_list("hosts", hosts)
        require_list("origins", origins)
        self._hosts = {host.lower().strip("[]") for host in hosts}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._links = links

    def check(self, scope: Scope) -> None:
        """Refuse a request that comes by another name, or from another site.

        Raises:
            Problem: It does.

        """
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or not self._is_known(hosts[0]):
            raise Problem(421, "Wrong host", "this is not served under that name")
        origins = _values(scope, b"origin")
        if origins and self._origins & {ANY, *origins}:
            return
        is_own = [origin.partition("://")[2] for origin in origins] in ([], hosts)
        if not is_own or not self._is_near(scope):
            raise Problem(403, "Another site", "requests of other sites' pages are refused")

    def _is_known(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        return match is not None and not self._hosts.isdisjoint({ANY, match[1] or match[2]})

    def _is_near(self, scope: Scope) -> bool:
        if {*_values(scope, b"sec-fetch-site")} <= {"same-origin", "none"}:
            return True
        mode = _values(scope, b"sec-fetch-mode") or ["navigate"]
        return self._links and scope["method"] in {"GET", "HEAD"} and mode == ["navigate"]


@final
class BrowserGuard:
    """ASGI middleware: refuse what another site's page makes a browser send.

        app.add_middleware(BrowserGuard, hosts=["agents.example.com"])

    Args:
        app: What it guards.
        hosts: Names, without a port, that browsers reach it by; "*" for any.
        origins: Other sites whose pages may send requests, such as ``https://app.example.com``.
            They need the framework's CORS middleware, too.

    """

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str] = ()
    ) -> None:
        self._app = app
        self._rules = BrowserRules(hosts=hosts, origins=origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] in {"http", "websocket"}:
            try:
                self._rules.check({"method": "GET", **scope})
            except Problem as problem:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                else:
                    await problem_response(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return what a request's headers of a name say, in lower case."""
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]
