"""Small HTML for notebooks: a title and a table of facts, with everything escaped.

What is shown may come from anywhere, an agent's id included, so nothing here is ever
markup, and long text is cut.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

__all__ = ["card"]

LONGEST = 200
_CELL = "text-align:left;padding:0 .8em 0 0"


def card(title: str, facts: Mapping[str, object]) -> str:
    """Return a small table, one row a fact.

    >>> "<td>&lt;b&gt;</td>" in card("Session", {"id": "<b>"}).replace(f' style="{_CELL}"', "")
    True
    """
    rows = "".join(
        f'<tr><th style="{_CELL}">{_text(name)}</th><td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in facts.items()
    )
    caption = f'<caption style="{_CELL};font-weight:bold">{_text(title)}</caption>'
    return f"<table>{caption}{rows}</table>"


def _text(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return html.escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
