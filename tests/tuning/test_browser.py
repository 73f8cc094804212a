"""A real browser draws the chart of `perdure tune`: nothing overlaps, in either theme."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.tuning import LoadLevel, Requirements, StoreMeasurement, advise, chart, made_up
from tests.browsers import browser

__all__ = ["browser"]

pytestmark = pytest.mark.deep

FAST = StoreMeasurement((LoadLevel(1, 0.0004, 9), LoadLevel(64, 0.0096, 9)), 1100)
SLOW = StoreMeasurement((LoadLevel(1, 0.2, 9), LoadLevel(64, 0.8, 9)), 700)
BOXES = """
() => [...document.querySelectorAll("svg text, svg .bar")].map((shape) => {
  const { left, top, right, bottom } = shape.getBoundingClientRect();
  return [shape.textContent || "a bar", shape.tagName, left, top, right, bottom];
})
"""


PHONE = 360
"""Pixels across a narrow phone."""
SMALLEST = 11.0
"""Pixels of the smallest type there."""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": PHONE, "height": 740})
    yield context.new_page()
    context.close()


def drawn(measured: StoreMeasurement, needs: Requirements) -> str:
    svg = chart(advise(made_up(), measured, needs), needs.sessions)
    return f"<!doctype html><body style='margin:0'>{svg}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("measured", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("sessions", [100, 2_000, 20_000, 1_000_000])
def test_no_text_of_the_chart_lies_on_another_or_on_a_bar(
    page: Any, measured: StoreMeasurement, sessions: int, theme: str
) -> None:
    page.emulate_media(color_scheme=theme)
    page.set_content(drawn(measured, Requirements(sessions=sessions, price=5.0, budget=100.0)))
    boxes = page.evaluate(BOXES)
    assert len(boxes) > 40
    for text, _, left, top, right, _ in boxes:
        assert 0 <= left <= right <= PHONE, text
        assert top >= 0, text
    for one, other in itertools.combinations(boxes, 2):
        if one[1] == other[1] == "rect":
            continue
        apart = one[4] <= other[2] or other[4] <= one[2] or one[5] <= other[3] or other[5] <= one[3]
        assert apart, (one, other)


def test_its_type_is_large_enough_on_a_phone(page: Any) -> None:
    page.set_content(drawn(FAST, Requirements(sessions=20_000)))
    scale = page.evaluate("() => document.querySelector('svg').getScreenCTM().a")
    sizes = page.evaluate(
        "() => [...document.querySelectorAll('svg text')]"
        ".map((text) => parseFloat(getComputedStyle(text).fontSize))"
    )
    assert min(sizes) * scale >= SMALLEST


CONTRAST = """
() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9]+/g).slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const fill = (shape) => light(getComputedStyle(shape).fill);
  const page = fill(document.querySelector("svg .page"));
  return [...document.querySelectorAll("svg text, svg .bar")].map((shape) => {
    const row = shape.parentNode.querySelector(":scope > .best-row");
    const [one, other] = [fill(shape), row ? fill(row) : page];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    return [shape.textContent || "a bar", shape.tagName, ratio];
  });
}
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("measured", [FAST, SLOW], ids=["fast", "slow"])
def test_everything_stands_out_in_either_theme(
    page: Any, measured: StoreMeasurement, theme: str
) -> None:
    page.emulate_media(color_scheme=theme)
    page.set_content(drawn(measured, Requirements(sessions=2_000)))
    for text, tag, ratio in page.evaluate(CONTRAST):
        assert ratio >= (4.5 if tag == "text" else 3.0), (text, ratio)
