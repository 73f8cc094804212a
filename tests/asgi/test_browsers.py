"""Pages of other sites send nothing to a server, and read nothing of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from perdure.asgi import BrowserGuard


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


def client(**options: Any) -> httpx.AsyncClient:
    guard = Middleware(BrowserGuard, **{"hosts": ["agents.example", "::1"], **options})
    app = Starlette(
        routes=[Route("/", hello, methods=["GET", "POST", "DELETE"])], middleware=[guard]
    )
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://agents.example:8000")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
async def test_a_name_that_is_not_known_is_refused(method: str) -> None:
    async with client() as http:
        for host in (
            *("evil.example", "agents.example.evil", "", "agents.example:", "agents.example:80x"),
            *("agents.example@evil.example", "[::1]evil", "::1", "[::1", "agents.example:1:1"),
            *("agents.example/x", "agents.example:8000, evil.example", "agents.example:123456"),
        ):
            answer = await http.request(method, "/", headers={"host": host})
            assert (answer.status_code, answer.json()["title"]) == (421, "Wrong host"), host
        both = [("host", "agents.example"), ("host", "evil.example")]
        assert (await http.request(method, "/", headers=both)).status_code == 421
        for host in ("agents.example", "AGENTS.example:1", "[::1]", "[::1]:8000"):
            answer = await http.request(method, "/", headers={"host": host})
            assert answer.status_code == (405 if method == "OPTIONS" else 200), host


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
async def test_another_site_is_refused_unless_it_is_named(method: str) -> None:
    own = "http://agents.example:8000"
    named = "https://app.example"
    passes = 405 if method == "OPTIONS" else 200
    async with client(origins=[named + "/"]) as http:
        for origin in ("https://evil.example", "null", "http://agents.example", "", f"{own}0"):
            answer = await http.request(method, "/", headers={"origin": origin})
            assert (answer.status_code, answer.json()["title"]) == (403, "Another site"), origin
        for origin in (own, named):
            headers = {"origin": origin}
            assert (await http.request(method, "/", headers=headers)).status_code == passes
        several = [("origin", own), ("origin", "https://evil.example")]
        assert (await http.request(method, "/", headers=several)).status_code == 403
        cross = {"origin": named, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
        assert (await http.request(method, "/", headers=cross)).status_code == passes


async def test_another_site_may_link_here_but_not_load_or_send_anything() -> None:
    async with client() as http:
        for site in ("cross-site", "same-site"):
            for method, mode, status in (
                ("GET", "navigate", 200),
                ("GET", "no-cors", 403),
                ("POST", "navigate", 403),
                ("POST", "no-cors", 403),
            ):
                headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
                assert (await http.request(method, "/", headers=headers)).status_code == status
        for site in ("same-origin", "none"):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": "cors"}
            assert (await http.post("/", headers=headers)).status_code == 200
