"""The chat page of the examples in a real browser, from another site: `nox -s browser`."""

from __future__ import annotations

import http.server
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.asgi.served import ROOT, Served
from tests.browsers import browser

__all__ = ["browser"]

pytestmark = pytest.mark.deep

UVICORN = "uvicorn tests.examples.cross_origin:app --port {port} --log-level warning".split()
LONG = " ".join(str(number) for number in range(60))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[str]:
    """Another site, which has nothing but the examples' folder."""
    handler = partial(Quiet, directory=str(ROOT / "examples"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def chat(browser: Any, pages: str, served: Served, text: str, *, token: str = "ada-token") -> Any:
    page = browser.new_context().new_page()
    page.goto(f"{pages}/chat.html?server={served.url}&chat=tides&token={token}")
    page.fill("input", text)
    page.click("button")
    return page


def test_a_page_of_another_site_streams_an_answer(browser: Any, pages: str, tmp_path: Path) -> None:
    served = Served(*UVICORN, store=f"file:{tmp_path / 'store'}", CHAT_PAGES=pages)
    try:
        page = chat(browser, pages, served, LONG)
        page.wait_for_function("document.querySelector('.assistant')?.textContent.includes(' 5 ')")
        assert page.query_selector("[data-durable]") is None  # it streams
        page.wait_for_selector("[data-durable]")
        assert page.text_content(".assistant") == f"You said: {LONG} "
        refused = chat(browser, pages, served, "Hello", token="another")
        refused.wait_for_function("document.querySelector('#status').textContent !== ''")
        assert "Not answered" in refused.text_content("#status")
    finally:
        served.close()


def test_a_page_cuts_between_characters(browser: Any, pages: str, tmp_path: Path) -> None:
    served = Served(*UVICORN, store=f"file:{tmp_path / 'store'}", CHAT_PAGES=pages)
    try:
        party = f"\N{PARTY POPPER}\N{PARTY POPPER} {LONG}"
        page = chat(browser, pages, served, party)
        page.evaluate(
            """() => {
              window.shown = [];
              new MutationObserver(() => shown.push(document.querySelector(".assistant").textContent))
                .observe(document.querySelector("main"), {childList: true, subtree: true});
            }"""
        )
        page.wait_for_selector("[data-durable]")
        shown = page.evaluate("shown")
        assert len(shown) > 2
        assert [text for text in shown if not f"You said: {party} ".startswith(text)] == []
    finally:
        served.close()


def test_a_page_that_is_not_let_in_gets_nothing(browser: Any, pages: str, tmp_path: Path) -> None:
    served = Served(
        *UVICORN, store=f"file:{tmp_path / 'store'}", CHAT_PAGES="https://app.example.com"
    )
    try:
        page = chat(browser, pages, served, "Hello")
        page.wait_for_function("document.querySelector('#status').textContent !== ''")
        assert page.text_content(".assistant") == ""
    finally:
        served.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_page_has_its_whole_answer_over_a_restart(
    browser: Any, pages: str, tmp_path: Path, how: signal.Signals
) -> None:
    store = f"file:{tmp_path / 'store'}"
    served = Served(*UVICORN, store=store, CHAT_PAGES=pages)
    try:
        page = chat(browser, pages, served, f"{LONG} {LONG} {LONG}")
        page.wait_for_function("document.querySelector('.assistant')?.textContent.includes(' 5 ')")
        served.stop(how)
        page.wait_for_function("document.querySelector('#status').textContent !== ''")
        served.client.close()
        served = Served(*UVICORN, store=store, port=served.port, CHAT_PAGES=pages)
        page.wait_for_selector("[data-durable]", timeout=60_000)
        assert page.text_content(".assistant") == f"You said: {LONG} {LONG} {LONG} "
    finally:
        served.close()
