"""The site of the documents: each page has its place, and nothing is asked of the network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.site import PARTS, lay_out
from tests.source_tree import ROOT

FETCHED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object", "use", "image"}
LINKS_ONLY = {"canonical", "next", "prev", "alternate"}
REMOTE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
LATE = re.compile(r'class="[^"]*\b(?:mermaid|glightbox|pyodide)\b')
"""What the theme's script would fetch elsewhere."""


class Resources(HTMLParser):
    """Collects what a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in FETCHED:
            names = ("src", "srcset", "data", "href", "xlink:href", "poster")
            self.addresses += [given[name] for name in names if name in given]
        elif tag == "link" and not set(given.get("rel", "").split()) & LINKS_ONLY:
            self.addresses.append(given.get("href", ""))


def remote_resources(page: str) -> list[str]:
    parser = Resources()
    parser.feed(page)
    return [address for address in parser.addresses if REMOTE.match(address)]


def remote_in_style(style: str) -> list[str]:
    addresses = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style)
    return [address for address in addresses if REMOTE.match(address)]


def navigation() -> list[str]:
    """Return the pages that mkdocs.yml lists, in its order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"([\w./-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)


def test_every_page_has_its_place_in_the_navigation() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions"]
    listed = navigation()
    assert {str(page.relative_to(ROOT)) for page in pages} - set(listed) == set()
    assert [page for page in listed if not (ROOT / page).exists()] == []
    assert len(listed) == len(set(listed))


def test_a_resource_from_another_host_is_found() -> None:
    page = '<link rel="stylesheet" href="//a.example/a.css"><img src="b.png"><a href="https://c/">'
    assert remote_resources(page) == ["//a.example/a.css"]
    assert remote_in_style("@import 'https://a/b.css'; i { background: url(b.png) }") == [
        "https://a/b.css"
    ]


def test_reference_pages_have_every_public_name(tmp_path: Path) -> None:
    lay_out(tmp_path / "pages")
    page = (tmp_path / "pages" / "docs" / "api" / "perdure.md").read_text(encoding="utf-8")
    assert "\n        - Session\n" in page
    assert "\n        - connect\n" in page


@pytest.mark.deep
def test_the_built_site_asks_nothing_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings_handlers.python")
    for part in (*PARTS, "src", "tests", "mkdocs.yml", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
        copy(ROOT / part, tmp_path / part)
    build = subprocess.run(
        [sys.executable, "-m", "tests.site"], cwd=tmp_path, capture_output=True, text=True
    )
    assert build.returncode == 0, build.stdout + build.stderr
    site = tmp_path / "site"
    found = {}
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        found[str(path)] = [*remote_resources(page), *LATE.findall(page)]
    for path in site.rglob("*.css"):
        found[str(path)] = remote_in_style(path.read_text(encoding="utf-8"))
    assert len(found) > 100
    assert {path: addresses for path, addresses in found.items() if addresses} == {}
    assert 'id="perdure.Session.append"' in (site / "docs/api/perdure.html").read_text()
