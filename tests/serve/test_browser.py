"""Pages of another site in a real browser try to run a turn of `perdure serve`: `nox -s browser`."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.asgi.served import Served
from tests.browsers import browser

__all__ = ["browser"]

pytestmark = pytest.mark.deep

SERVE = "perdure serve tests.serve.agents:quick --port {port}".split()
TOKEN = "ann-token-0123456789"
SEND = "method: 'POST', body: '{\"text\": \"a b\"}'"
PAGES = {
    "/simple": "fetch('{url}/agents/simple/messages', {{{send}, mode: 'no-cors'}})",
    "/json": "fetch('{url}/agents/json/messages', {{{send}, "
    "headers: {{'content-type': 'application/json'}}}})",
    "/form": "new Promise(done => {{ const form = document.forms[0]; "
    "document.querySelector('iframe').onload = done; form.submit() }})",
    "/token": "fetch('{url}/agents/token/messages', {{{send}, headers: {{"
    "'content-type': 'application/json', authorization: 'Bearer {token}'}}}})"
    ".then(answer => answer.json()).then(told => document.title = told.text)",
}
FORM = """<form method=post enctype=text/plain target=inside action="{url}/agents/form/messages">
<input name='{{"text": "a b", "x' value='": 1}}'></form><iframe name=inside></iframe>"""


class Site:
    """Another site: its pages send what they can to a server."""

    def __init__(self) -> None:
        self.target = ""
        site = self

        class Pages(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = PAGES.get(self.path, "").format(url=site.target, send=SEND, token=TOKEN)
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                form = FORM.format(url=site.target)
                text = f"{form}<script>window.tried = ({page or 0})</script>"
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
        self.url = f"http://localhost:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.shutdown()
    site.server.server_close()


def opened(browser: Any, site: Site, path: str) -> str:
    """Have a browser open a page, wait until it has tried, and return its title."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{site.url}{path}")
        page.evaluate("Promise.resolve(window.tried).catch(() => 0).then(() => 0)")
        return str(page.title())
    finally:
        context.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_page_of_another_site_runs_a_turn(
    browser: Any, site: Site, host: str, tmp_path: Path
) -> None:
    server = Served(*SERVE, store=f"file:{tmp_path / 'store'}")
    site.target = f"http://{host}:{server.port}"
    try:
        for path in ("/simple", "/json", "/form"):
            opened(browser, site, path)
        assert server.client.get("/agents").json()["agents"] == []
        told = server.client.post("/agents/ours/messages", json={"text": "a b"})
        assert told.json()["text"] == "0 1"
    finally:
        server.close()


def test_a_page_of_a_site_that_is_named_runs_one_with_its_token(
    browser: Any, site: Site, tmp_path: Path
) -> None:
    tokens = json.dumps([{"token": TOKEN}])
    for origin, title in ((site.url, "0 1"), ("https://app.example", "")):
        store = f"file:{tmp_path / 'store'}"
        server = Served(*SERVE, "--allow-origin", origin, store=store, PERDURE_TOKENS=tokens)
        site.target = f"http://127.0.0.1:{server.port}"
        try:
            assert opened(browser, site, "/token") == title
        finally:
            server.close()
