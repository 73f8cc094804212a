"""A chart of the trade-off: how often each setting saves, and what a crash costs with it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from perdure.tuning.advice import Advice, Option

_WIDTH, _HEIGHT = 720, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 40, 64, 64

_APART: Final = 12
"""Pixels between points that can have labels of their own."""

_CHARACTER: Final = 7.5
"""The most pixels of a digit in a label, about."""

_LINE: Final = 16
"""The pixels of a line of text."""

_STYLE: Final = """
  .page { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 17px; font-weight: 600 } .small { fill: #57606a }
  .axis { stroke: #8c959f; fill: none } .grid { stroke: #d8dee4; fill: none }
  .line { stroke: #8c959f; stroke-dasharray: 4 4; fill: none }
  .fits { fill: #0969da } .not { fill: none; stroke: #8c959f; stroke-width: 2 }
  .best { fill: #1a7f37 } .best-label { font-weight: 600; fill: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 }
    .axis, .line { stroke: #656c76 } .grid { stroke: #262c36 }
    .fits { fill: #4493f8 } .not { stroke: #656c76 }
    .best { fill: #3fb950 } .best-label { fill: #3fb950 }
  }
"""


def chart(advice: Advice, sessions: int) -> str:
    """Return an SVG: saves in a second to the right, seconds at risk upwards, both logarithmic.

    Args:
        advice: What was weighed.
        sessions: How many are active, for the number of saves.

    """
    across = _Axis(
        [option.cost.saves * sessions for option in advice.options], _LEFT, _WIDTH - _RIGHT
    )
    up = _Axis([option.cost.worst for option in advice.options], _HEIGHT - _BOTTOM, _TOP)
    points = [
        _Point(across.at(option.cost.saves * sessions), up.at(option.cost.worst), option)
        for option in advice.options
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in sorted(points, key=lambda point: point.x))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        "<title>Autosave settings by saves in a second and seconds at risk</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="30">Debounce / longest delay, in seconds</text>',
        f'<text class="small" x="{_LEFT}" y="50">green: recommended; hollow: unsuitable</text>',
        *_grid(across, up),
        f'<polyline class="line" points="{line}"/>',
        *[_circle(point, best=point.option is advice.best) for point in points],
        *_labels(_together(points), advice.best),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Point(NamedTuple):
    x: float
    y: float
    option: Option


class _Axis:
    """Logarithmic position of a number between two ends."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        positive = [value for value in values if value > 0] or [1.0]
        self.low = math.floor(math.log10(min(positive)))
        self.high = max(math.ceil(math.log10(max(positive))), self.low + 1)
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low) if value > 0 else 0.0
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def _grid(across: _Axis, up: _Axis) -> list[str]:
    bottom, right = up.start, across.end
    parts = []
    for value in across.ticks():
        x = across.at(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {up.end}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{value:,g}</text>')
    for value in up.ticks():
        y = up.at(value)
        parts.append(f'<path class="grid" d="M{across.start} {y:.1f}H{right}"/>')
        parts.append(
            f'<text x="{across.start - 10}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>'
        )
    middle = (across.start + right) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 16}" text-anchor="middle">saves in a second</text>'
    )
    parts.append(
        f'<text transform="translate(22 {(bottom + up.end) / 2}) rotate(-90)" '
        f'text-anchor="middle">seconds that a crash costs, at the worst</text>'
    )
    return parts


def _circle(point: _Point, *, best: bool) -> str:
    kind = "best" if best else "not" if point.option.against else "fits"
    return f'<circle class="{kind}" cx="{point.x:.1f}" cy="{point.y:.1f}" r="{7 if best else 5}"/>'


def _together(points: Sequence[_Point]) -> list[list[_Point]]:
    """Return the points in groups that one label is for, because they lie on each other."""
    groups: list[list[_Point]] = []
    for point in points:
        for group in groups:
            if math.dist((point.x, point.y), (group[0].x, group[0].y)) < _APART:
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


_DOT: Final = 7.0
_HEAD: Final = _Box(_LEFT, 0.0, _LEFT + 340.0, 56.0)
"""Where the picture says what it is."""


def _labels(groups: Sequence[Sequence[_Point]], best: Option | None) -> list[str]:
    """Return a label for each group, where no other one is; the recommended one goes first."""
    dots = (point for group in groups for point in group)
    occupied = [_HEAD, *(_Box(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y, _ in dots)]
    parts = []
    for group in sorted(
        groups, key=lambda points: all(point.option is not best for point in points)
    ):
        settings = [point.option.cost.autosave for point in group]
        text = ", ".join(f"{setting.debounce:g} / {setting.max_delay:g}" for setting in settings)
        kind = ' class="best-label"' if any(point.option is best for point in group) else ""
        box = _free(group[0], len(text) * _CHARACTER, occupied)
        occupied.append(box)
        parts.append(f'<text{kind} x="{box.left:.1f}" y="{box.bottom - 3:.1f}">{text}</text>')
    return parts


def _free(point: _Point, width: float, occupied: Sequence[_Box]) -> _Box:
    """Return a place for a label: as near to its point as the page and the others allow."""
    right = min(point.x + 10, _WIDTH - width)  # what is cut by the page cannot be read
    left = max(point.x - 10 - width, 0.0)
    places = [
        _Box(x, y, x + width, y + _LINE)
        for away in range(_HEIGHT // _LINE)
        for y in (point.y - 6 - (1 + away) * _LINE, point.y + 6 + away * _LINE)
        for x in (right, left)
        if 0 <= y <= _HEIGHT - _LINE
    ]
    free = (box for box in places if not any(box.meets(other) for other in occupied))
    return next(free, places[0])
