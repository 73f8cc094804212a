"""A real browser walks every page of an inspector under load: `nox -s browser`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import PICTURES, browser, pictures
from tests.inspector.conftest import TOKEN

__all__ = ["browser", "pictures"]

axe = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = pytest.mark.deep

PAGES = [
    "?owner=ada",
    *(
        f"{path}agent={agent}"
        for agent in ("harbor-guide", "hostile")
        for path in (
            *("session?", "session?view=timeline&", "session?view=raw&", "context?"),
            *("context?target=anthropic&", "states?", "checkpoints?a=1&b=2&verify=1&"),
            *("restore?target=openai&", "delivery?"),
            *("change?change=fork&", "change?change=forget&", "change?change=rebuild&"),
            "change?change=rollback&checkpoint=1&",
        )
    ),
    *(f"{path}?agent=pilot" for path in ("session", "context", "checkpoints")),  # of LangGraph
    *("inbox", "live", "workers", "actions", "session?agent=stopped", "session?agent=nobody"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.inspector.serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
            assert server.poll() is None
        finally:
            server.kill()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that came by the link; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(15_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"{page.url}: a dialog {dialog.message}"))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(address) or complaints.append(f"asks for {request.url}")
        ),
    )
    page.goto(f"{address}?token={TOKEN}")
    page.wait_for_url(re.compile(re.escape(address) + "[0-9a-f]{32}/$"))
    yield page
    context.close()
    expected = re.compile(r"session\?agent=nobody: .*status of 404")
    assert [text for text in complaints if not expected.search(text)] == []


@pytest.fixture
def home(page: Any) -> str:
    """Return the address that the link leads to, below which all pages are."""
    return str(page.url)


def test_pictures_for_the_documentation(page: Any, home: str, pictures: Path) -> None:
    wide, phone = {"width": 1100, "height": 720}, {"width": 375, "height": 720}
    tall = {"width": 1100, "height": 880}
    for name, path, theme, size in (
        ("conversation", "session?agent=harbor-guide", "light", wide),
        ("sessions", "", "light", tall),
        ("thread", "session?agent=pilot", "light", wide),
        ("workers", "workers", "dark", wide),
        ("timeline", "session?agent=harbor-guide&view=timeline&before=31&limit=12", "dark", wide),
        ("live", "live", "dark", wide),
        ("sessions-phone", "", "light", phone),
    ):
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.goto(home + path)
        if name == "live":
            until(page, f"samples.length > {25 if PICTURES else 2}")
        if name.startswith("sessions"):
            most = 12 if size is tall else 2
            until(page, f"document.querySelectorAll('td.state:not(:empty)').length > {most}")
        picture = pictures / f"inspector-{name}.png"
        page.screenshot(path=picture)
        assert picture.stat().st_size < 150_000


def test_no_page_complains_shows_markup_or_fails_its_readers(page: Any, home: str) -> None:
    for path in PAGES:
        page.goto(home + path)
        assert page.evaluate("document.querySelectorAll('main script, main [onerror]').length") == 0
        if path.endswith("agent=hostile") and "change=" not in path:
            assert "<script>alert(1)</script>" in page.inner_text("main")
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
            serious = [
                (path, theme, one["id"], one["nodes"][0]["html"])
                for one in found.response["violations"]
                if one["impact"] in {"serious", "critical"}
            ]
            assert serious == []


def test_every_page_fits_a_phone(page: Any, home: str) -> None:
    page.set_viewport_size({"width": 375, "height": 700})
    for path in PAGES:
        page.goto(home + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, path


def test_charts_move_and_stop_while_nobody_looks(page: Any, home: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(home + "live")
    saves = page.locator("[data-series=saves]")
    until(page, "document.querySelectorAll('.chart canvas').length === 6")
    until(page, "samples.length > 3")
    drawn = "document.querySelector('[data-series=saves] canvas').toDataURL()"
    page.evaluate(f"() => {{ window.before = {drawn} }}")
    until(page, f"{drawn} !== window.before")
    assert float(saves.locator("output").inner_text().replace(",", "")) >= 0
    hide(page, hidden=True)
    page.wait_for_timeout(1500)
    asked.clear()
    page.wait_for_timeout(2500)
    assert asked == []
    hide(page, hidden=False)
    with page.expect_request(lambda request: "live?after=" in request.url):
        pass


def until(page: Any, claim: str) -> None:
    """Wait for a claim in the page; Playwright's own way evaluates a string, which is forbidden."""
    for _ in range(400):
        if page.evaluate(claim):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never true: {claim}")


def hide(page: Any, *, hidden: bool) -> None:
    script = (
        "hidden => Object.defineProperty(document, 'hidden', {value: hidden, configurable: true})"
    )
    page.evaluate(script, hidden)


def test_a_person_finds_reads_and_changes_a_session(page: Any, home: str) -> None:
    page.keyboard.press("/")
    page.keyboard.type("harbor")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=harbor**")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/session?agent=harbor-guide")
    picture = page.locator("article img")
    picture.scroll_into_view_if_needed()
    until(page, "document.querySelector('article img').naturalWidth === 160")
    page.goto(home + "session?agent=hostile")
    page.get_by_role("button", name="Show all").first.click()
    until(page, "document.querySelector('.text').textContent.length > 9000")
    page.goto(home + "checkpoints?agent=harbor-guide")
    page.get_by_role("button", name="Compare").click()
    assert "/state/route/stage" in page.inner_text("main")
    page.get_by_role("link", name="roll back").first.click()
    page.get_by_role("button", name="Rollback").click()
    page.wait_for_url("**/actions")
    assert "roll back to checkpoint 1" in page.inner_text("main")
    page.goto(home)
    page.fill("input[name=prefix]", "work")
    until(page, "document.querySelectorAll('#ids option').length === 7")
    page.keyboard.press("Escape")
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_session_is_followed_until_the_box_is_cleared(page: Any, home: str) -> None:
    page.goto(home + "session?agent=worker-1")
    newest = "document.querySelector('#conversation').lastElementChild.id"
    page.evaluate(f"() => {{ window.before = {newest} }}")
    page.locator("article").first.focus()
    until(page, f"{newest} !== window.before")  # without a reload: what was set is still there
    until(page, "document.querySelector('#followed').textContent.includes('new')")
    page.locator("#follow").uncheck()
    page.wait_for_timeout(2500)
    page.evaluate(f"() => {{ window.before = {newest} }}")
    page.wait_for_timeout(4500)
    assert page.evaluate(f"{newest} === window.before")


def test_a_list_says_the_status_of_the_rows_in_sight(page: Any, home: str) -> None:
    for width in (1200, 375):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(home + "?q=stopped")
        until(page, "document.querySelector('td.state').textContent === 'failed'")
    page.goto(home)
    page.evaluate("() => { window.before = document.querySelector('#sessions').textContent }")
    until(page, "document.querySelector('#sessions').textContent !== window.before")
    until(page, "document.querySelector('td.state').textContent !== ''")
