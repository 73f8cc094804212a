"""Markdown of a model's answer has structure, and nothing that asks for another address."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from perdure.inspector.markdown import markdown

ALLOWED = set(
    "p br em strong s code pre ul ol li blockquote hr table thead tbody tr th td h3 h4 h5 h6".split()
)


class Strict(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        assert attrs == [] or (tag, attrs[0][0]) == ("ol", "start")


def rendered(text: str) -> str:
    html = str(markdown(text))
    parser = Strict()
    parser.feed(html)
    parser.close()
    return html


def test_it_has_lists_code_tables_and_emphasis() -> None:
    html = rendered("# Tide\n\n**low** at `noon`\n\n1. wall\n2. *path*\n\n```py\nx\n```\n\n> so")
    for part in (
        "<h3>Tide",
        "<strong>low",
        "<code>noon",
        "<ol>",
        "<em>path",
        "<pre>",
        "<blockquote>",
    ):
        assert part in html
    assert "<td>1</td>" in rendered("|a|\n|:-:|\n|1|")
    assert '<ol start="3">' in rendered("3. three")
    assert "one<br" in rendered("one\ntwo")


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "a <b onclick=x>b</b>",
        "![x](http://evil.example/x.png)",
        "[click](javascript:alert(1))",
        "[click](http://evil.example)",
        "<http://evil.example>",
        "[a]\n\n[a]: http://evil.example 'x'",
        '```"><script>alert(1)</script>\nx\n```',
        "    <script>indented</script>",
        "|<script>|\n|-|\n|<img src=x>|",
        "# <iframe src=x>",
        "&lt;script&gt;&#x202e;",
        "\u202e\x1b[31m",
        "*" * 3000,
        "[" * 3000,
        "> " * 1500,
        "`" * 2999 + "x",
    ],
)
def test_hostile_text_stays_text(text: str) -> None:
    html = rendered(text)
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert "<script" not in html


def test_what_is_left_out_of_markdown_is_still_there_to_read() -> None:
    assert "[click](http://evil.example)" in rendered("[click](http://evil.example)")
    assert "&amp;#x202e;" in rendered("&#x202e;")
