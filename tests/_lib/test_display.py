"""Small HTML: everything escaped, long text cut."""

from __future__ import annotations

from perdure._lib.logs import LONGEST, card


def test_nothing_that_is_shown_is_markup() -> None:
    shown = card("<script>", {"<b>": '"&<i>'})
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert "&quot;&amp;&lt;i&gt;" in shown


def test_long_text_is_cut_before_it_is_escaped() -> None:
    shown = card("x", {"y": "<" * 1000})
    assert shown.count("&lt;") == LONGEST - 1
    assert shown.count("…") == 1
