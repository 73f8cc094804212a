"""Nobody sees a session without the token, and no other site can make a browser show one."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncGenerator

import httpx
import pytest

import perdure.inspector
from perdure.errors import InvalidArgumentError
from tests.inspector.conftest import TOKEN, client, connected, home_of

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]


@pytest.fixture
async def stranger() -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client that has not seen the link."""
    async with connected() as sessions, client(sessions) as http:
        del http.headers["authorization"]
        yield http


async def test_nothing_is_shown_without_the_token(stranger: httpx.AsyncClient) -> None:
    for path in ("/", "/session?agent=ada", "/inbox", "/part?agent=ada", "/none"):
        for method in METHODS:
            assert (await stranger.request(method, path)).status_code == 401
        wrong = await stranger.get(path, headers={"authorization": "Bearer " + TOKEN[:-1]})
        assert wrong.status_code == 401
        wrong = await stranger.get(path, params={"token": "é" + TOKEN})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers


async def test_the_link_sets_a_strict_cookie_and_leads_to_the_page(
    stranger: httpx.AsyncClient,
) -> None:
    landing = await stranger.get("/inbox", params={"a": '"><b>', "token": TOKEN})
    assert landing.status_code == 200
    cookie = landing.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert TOKEN not in cookie
    (url,) = re.findall(r'content="0;url=([^"]*)"', landing.text)
    assert url.endswith("/inbox?a=%22%3E%3Cb%3E")
    assert TOKEN not in landing.text
    assert (await stranger.get(url)).status_code == 200


async def test_the_cookie_is_not_sent_to_another_server_of_this_host(
    stranger: httpx.AsyncClient,
) -> None:
    """A cookie goes to every port, so only a path that others do not know keeps it here."""
    home = home_of(await stranger.get("/", params={"token": TOKEN}))
    assert "cookie" in stranger.build_request("GET", home).headers
    for url in ("/", "/inbox", "http://localhost:9999/", "http://localhost:9999/session?agent=ada"):
        assert "cookie" not in stranger.build_request("GET", url).headers
    assert len(home.strip("/")) == 32
    (cookie,) = stranger.cookies.jar
    sent = {"cookie": f"{cookie.name}={cookie.value}"}
    assert (await stranger.get("/session?agent=ada", headers=sent)).status_code == 401


async def test_a_url_that_is_no_text_is_refused(inspector: httpx.AsyncClient) -> None:
    for url in ("/session?agent=%FF", "/%C3%28", "/?prefix=%ED%A0%80"):
        assert (await inspector.get(url)).status_code == 400, url
    assert (await inspector.get("/session?agent=%C3%A9")).status_code == 404


async def test_behind_tls_the_cookie_is_secure(stranger: httpx.AsyncClient) -> None:
    landing = await stranger.get("https://localhost/", params={"token": TOKEN})
    assert "Secure" in landing.headers["set-cookie"]


@pytest.mark.parametrize("path", ["//evil.com/x", "/\\evil.com"])
async def test_the_link_leads_nowhere_else(stranger: httpx.AsyncClient, path: str) -> None:
    url = httpx.URL("http://localhost:8000").copy_with(raw_path=f"{path}?token={TOKEN}".encode())
    landing = await stranger.get(url)
    assert "url=//" not in landing.text
    assert "\\" not in landing.text


async def test_a_foreign_host_is_refused_on_every_method(inspector: httpx.AsyncClient) -> None:
    for host in (
        *("evil.com", "localhost.evil.com", "evil.com:8000", "", "[::2]:1", "localhost:"),
        *("localhost:80:80", "localhost:x", "localhost@evil.com", "[::1]evil.com", "[::1", "::1"),
    ):
        for method in METHODS:
            answer = await inspector.request(method, "/", headers={"host": host})
            assert answer.status_code == 421
            assert "ada" not in answer.text


async def test_a_foreign_origin_is_refused_on_every_method(inspector: httpx.AsyncClient) -> None:
    for origin in ("http://evil.com", "null", "http://localhost:9000", "http://localhost", ""):
        for method in METHODS:
            answer = await inspector.request(method, "/", headers={"origin": origin})
            assert answer.status_code == 403
            assert "ada" not in answer.text


async def test_another_site_may_link_here_but_not_load_anything(
    inspector: httpx.AsyncClient,
) -> None:
    for site in ("cross-site", "same-site"):
        for mode, status in (("navigate", 200), ("no-cors", 403), ("cors", 403)):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
            assert (await inspector.get("/", headers=headers)).status_code == status


async def test_the_own_host_and_origin_are_accepted() -> None:
    async with connected() as sessions, client(sessions, hosts=["Agents.Example"]) as http:
        for host in ("agents.example", "AGENTS.example:443", "127.0.0.1:1", "[::1]:1"):
            headers = {"host": host, "origin": f"https://{host}"}
            assert (await http.get("/", headers=headers)).status_code == 200


async def test_every_answer_has_the_headers(inspector: httpx.AsyncClient) -> None:
    paths = ("/", "/none", "/session", "/static/inspector.js", "/static/no")
    for path, authorization in itertools.product(paths, (f"Bearer {TOKEN}", "")):
        headers = (await inspector.get(path, headers={"authorization": authorization})).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


async def test_a_short_token_is_refused() -> None:
    async with connected() as sessions:
        with pytest.raises(InvalidArgumentError, match="secrets.token_urlsafe"):
            perdure.inspector.app(sessions, token="short")
