"""Small HTML for notebooks: a title and a table of facts, with everything escaped.

What is shown may come from anywhere, an agent's id included, so nothing here is ever
markup, and long text is cut.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

__all__ = ["card"]

LONGEST = 200


def card(title: str, facts: Mapping[str, object]) -> str:
    """Return a small table, one row a fact.

    >>> card("Session", {"id": "<b>"})
    '<table><caption>Session</caption><tr><th>id</th><td>&lt;b&gt;</td></tr></table>'
    """
    rows = [
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items()
    ]
    return f"<table><caption>{_text(title)}</caption>{''.join(rows)}</table>"


def _text(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return html.escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
