"""A real browser draws the chart of `perdure tune`: nothing overlaps, in either theme."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.tuning import LoadLevel, Requirements, StoreMeasurement, advise, chart, made_up
from tests.browsers import browser, pictures

__all__ = ["browser", "pictures"]

pytestmark = pytest.mark.deep

FAST = StoreMeasurement((LoadLevel(1, 0.0004, 9), LoadLevel(64, 0.0096, 9)), 1100)
SLOW = StoreMeasurement((LoadLevel(1, 0.2, 9), LoadLevel(64, 0.8, 9)), 700)
BOXES = """
() => [...document.querySelectorAll("svg text, svg circle")].map((shape) => {
  const { left, top, right, bottom } = shape.getBoundingClientRect();
  return [shape.textContent || "a point", shape.tagName, left, top, right, bottom];
})
"""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 736, "height": 476})
    yield context.new_page()
    context.close()


def drawn(measured: StoreMeasurement, needs: Requirements) -> str:
    svg = chart(advise(made_up(), measured, needs), needs.sessions)
    return f"<!doctype html><body style='margin:8px;width:720px'>{svg}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_for_the_documentation(page: Any, pictures: Path, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.set_content(drawn(FAST, Requirements(sessions=20_000)))
    picture = pictures / f"tuning-{theme}.png"
    page.locator("svg").screenshot(path=picture)
    assert picture.stat().st_size < 100_000


@pytest.mark.parametrize("measured", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("sessions", [100, 2_000, 20_000, 1_000_000])
def test_no_text_of_the_chart_lies_on_another_or_on_a_point(
    page: Any, measured: StoreMeasurement, sessions: int
) -> None:
    page.set_content(drawn(measured, Requirements(sessions=sessions)))
    boxes = page.evaluate(BOXES)
    assert len(boxes) > 15
    for text, _, left, top, right, bottom in boxes:
        assert min(left, top) >= 8, text
        assert max(right - 720, bottom - 460) <= 8, text
    for one, other in itertools.combinations(boxes, 2):
        if one[1] == other[1] == "circle":
            continue
        apart = one[4] <= other[2] or other[4] <= one[2] or one[5] <= other[3] or other[5] <= one[3]
        assert apart, (one, other)
