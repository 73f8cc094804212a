"""Markdown of a model's answer as HTML that can do nothing: structure and emphasis alone.

A model's output is hostile input. Raw HTML, links and images stay the text that they are, so that a
page names no other address; an entity stays one, so that it cannot hide what `visible` shows.
"""

from __future__ import annotations

from typing import Final

from markdown_it import MarkdownIt
from markupsafe import Markup

from perdure._lib.logs import visible

_LEVELS: Final = 2
"""Levels of headings above those in a message: the page's own."""
_READER: Final = (
    MarkdownIt("commonmark", {"html": False, "breaks": True})
    .enable(["table", "strikethrough"])
    .disable(["link", "autolink", "image", "reference", "entity", "html_inline", "html_block"])
)


def markdown(text: str) -> Markup:
    """Return a text's Markdown as HTML, with no attribute but the number a list begins with."""
    tokens = _READER.parse(visible(text))
    for token in tokens:
        token.attrs = {name: n for name, n in token.attrs.items() if name == "start"}
        token.info = ""
        if token.type in {"heading_open", "heading_close"}:
            token.tag = f"h{min(int(token.tag[1:]) + _LEVELS, 6)}"
    return Markup(_READER.renderer.render(tokens, _READER.options, {}))  # noqa: S704  # escaped
