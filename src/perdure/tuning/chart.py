"""A picture of the settings that were tried: a row each, with what it saves and what it risks.

Pure. An SVG that can be read without a legend, in the reader's light or dark mode, and at the
width of a phone. The two bars of a row are shares of the longest on their side, so that the knee
of the trade-off is the row whose bars are shortest together.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from perdure.autosave.options import Autosave
from perdure.tuning.advice import Advice

_WIDTH: Final = 420
_MARGIN: Final = 12
_MIDDLE: Final = 152
"""Where saves grow to the left, and losses to the right."""
_BAR: Final = 88
"""The longest bar."""
_HEAD: Final = 92
_ROW: Final = 54
_REASON: Final = 20
"""A line more, for a setting that does not fit."""

_STYLE: Final = """
  svg { max-width: 100%; height: auto }
  .page { fill: #ffffff } text { font: 15px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 18px; font-weight: 600 } .small { font-size: 13px; fill: #57606a }
  .saves { fill: #0969da } .lost { fill: #bc4c00 } .not { fill: #8c959f }
  text.saves, text.lost { font-size: 13px; font-weight: 600 }
  .axis { stroke: #8c959f } .best-row { fill: #dafbe1 }
  .best-label { font-weight: 600; fill: #116329 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 }
    .saves { fill: #4493f8 } .lost { fill: #f0883e } .not { fill: #656c76 }
    .axis { stroke: #656c76 } .best-row { fill: #12261e } .best-label { fill: #56d364 }
  }
"""


def chart(advice: Advice, sessions: int) -> str:
    """Return an SVG with a row for each setting: saves to the left, losses to the right.

    Args:
        advice: What was weighed.
        sessions: How many are active, for the number of saves and of records.

    """
    rows = list(_rows(advice, sessions))
    height = _HEAD + sum(tall for tall, _ in rows) + _MARGIN
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        "<title>Autosave settings: what each one saves, and what a crash loses with it</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        _text("Autosave: when changes are saved", _MARGIN, 30, "title"),
        _text(f"with {sessions:,} sessions active at once", _MARGIN, 52, "small"),
        _text("saves a second", _MIDDLE - 8, _HEAD - 12, "saves", "end"),
        _text("records that a crash loses", _MIDDLE + 8, _HEAD - 12, "lost"),
    ]
    y = _HEAD
    for tall, row in rows:
        parts.append(f'<g transform="translate(0 {y})">{row}</g>')
        y += tall
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(advice: Advice, sessions: int) -> Iterator[tuple[int, str]]:
    """Yield the height of each row, and what is in it."""
    saves = max((option.cost.saves for option in advice.options), default=0.0) or 1.0
    lost = max((option.cost.lost for option in advice.options), default=0.0) or 1.0
    for option in advice.options:
        cost, best = option.cost, option is advice.best
        tall = _ROW + _REASON * len(option.against)
        to_left, to_right = _BAR * cost.saves / saves, _BAR * cost.lost / lost
        losses = f"{_number(cost.lost * sessions)}, {_age(cost.worst)} old"
        parts = []
        name, tag = "", "does not fit" if option.against else ""
        if best:
            name, tag = "best-label", "recommended"
            parts.append(
                f'<rect class="best-row" x="4" width="{_WIDTH - 8}" height="{tall}" rx="6"/>'
            )
        parts += [
            _text(_name(cost.autosave), _MARGIN, 20, name),
            _text(tag, _WIDTH - _MARGIN, 20, name or "small", "end") if tag else "",
            _bar(_MIDDLE - to_left, to_left, "not" if option.against else "saves"),
            _text(_number(cost.saves * sessions), _MIDDLE - to_left - 5, 40, "small", "end"),
            _bar(_MIDDLE, to_right, "not" if option.against else "lost"),
            _text(losses, _MIDDLE + to_right + 5, 40, "small"),
            f'<path class="axis" d="M{_MIDDLE} 25V45"/>',
        ]
        parts += [
            _text(reason, _MARGIN, 40 + _REASON * line, "small")
            for line, reason in enumerate(option.against, 1)
        ]
        yield tall, "".join(parts)


def _name(autosave: Autosave) -> str:
    if not autosave.max_delay:
        return "each change at once"
    if autosave.debounce is None:
        return f"the default, at most {autosave.max_delay:g} s"
    return f"after {autosave.debounce:g} s of quiet, at most {autosave.max_delay:g} s"


def _number(value: float) -> str:
    """Return a number that is short however large it is.

    >>> [_number(value) for value in (0, 0.0421, 12.34, 5123.4, 2_668_800.0)]
    ['0', '0.042', '12', '5,123', '2.7 million']
    """
    if value >= 1_000_000:
        return f"{value / 1_000_000:,.1f} million"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _age(seconds: float) -> str:
    """Return the most that the age of a record was.

    >>> [_age(seconds) for seconds in (0.0004, 0.25, 8.72, 149.4)]
    ['under 0.01 s', 'up to 0.25 s', 'up to 8.7 s', 'up to 149 s']
    """
    if seconds < 0.01:
        return "under 0.01 s"
    digits = 2 if seconds < 1 else 1 if seconds < 10 else 0
    return f"up to {seconds:,.{digits}f} s"


def _bar(x: float, width: float, kind: str) -> str:
    return f'<rect class="bar {kind}" x="{x:.1f}" y="28" width="{width:.1f}" height="14"/>'


def _text(text: str, x: float, y: float, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
