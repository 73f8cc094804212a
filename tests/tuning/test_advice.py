"""What is recommended fits, and says why the others do not."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from perdure import Autosave
from perdure.tuning import (
    LoadLevel,
    Requirements,
    StoreMeasurement,
    WorkloadChange,
    advise,
    chart,
    made_up,
    replay,
    workload_of,
)

FAST = StoreMeasurement(
    (LoadLevel(1, 0.001, 9), LoadLevel(64, 0.004, 9)), 700
)  # 16,000 in a second
SLOW = StoreMeasurement((LoadLevel(1, 0.2, 9), LoadLevel(64, 0.8, 9)), 700)  # 80
WORKLOAD = made_up(sessions=3, seconds=400)

needs = st.builds(
    Requirements,
    sessions=st.integers(1, 100_000),
    max_loss=st.none() | st.floats(0.0, 100.0),
    shutdown=st.floats(0.1, 60.0),
    price=st.sampled_from([0.0, 5.0]),
    budget=st.none() | st.floats(0.0, 1000.0),
)


@settings(max_examples=30)
@given(needs, st.sampled_from([FAST, SLOW]))
def test_what_is_recommended_fits(wanted: Requirements, measured: StoreMeasurement) -> None:
    advice = advise(WORKLOAD, measured, wanted)
    fitting = [one for one in advice.options if not one.against]
    if advice.best is None:
        assert fitting == []
        assert "no setting fits" in " ".join(advice.warnings)
        return
    best = advice.best
    assert best.load <= 0.6
    assert best.stop <= wanted.shutdown
    if advice.idle:
        assert best.cost.autosave == Autosave()
        assert max(one.load for one in advice.options) <= 0.01
    elif wanted.max_loss is None:
        assert best.cost.lost == min(one.cost.lost for one in fitting)
    else:
        assert best.cost.saves == min(one.cost.saves for one in fitting)
        most = best.cost.autosave.max_delay + measured.save_time
        assert most <= wanted.max_loss + 1e-6 or best.cost.autosave.max_delay == 0
    if wanted.budget is not None:
        assert best.price <= wanted.budget


def test_a_store_that_has_room_saves_at_once_a_busy_one_waits() -> None:
    some, many = (advise(WORKLOAD, SLOW, Requirements(sessions=n)) for n in (10, 600))
    assert some.best is not None
    assert many.best is not None
    assert some.best.cost.autosave.max_delay < many.best.cost.autosave.max_delay
    assert "busy" in many.options[0].against[0]


def test_a_limit_on_losses_bounds_the_longest_delay() -> None:
    advice = advise(WORKLOAD, SLOW, Requirements(max_loss=3.0))
    longest = [one.cost.autosave.max_delay for one in advice.options]
    assert max(longest) == 2.8  # a save takes 0.2 s
    slower = advise(WORKLOAD, SLOW, Requirements(max_loss=0.1))
    assert slower.best is None
    assert "a save alone takes 0.2 s" in slower.options[0].against


@pytest.mark.deep
def test_whoever_accepts_a_loss_is_not_told_to_save_each_change() -> None:
    accepted = advise(made_up(), FAST, Requirements(sessions=2_000, max_loss=10.0)).best
    safest = advise(made_up(), FAST, Requirements(sessions=2_000)).best
    assert accepted is not None
    assert safest is not None
    assert accepted.cost.worst <= 10.0
    assert accepted.cost.saves < safest.cost.saves
    assert accepted.cost.autosave.max_delay > 0


def test_a_budget_keeps_saves_few() -> None:
    wanted = Requirements(sessions=100, price=5.0, budget=100.0)
    advice = advise(WORKLOAD, FAST, wanted)
    assert advice.best is not None
    assert advice.best.price <= 100.0
    assert "a month" in advice.options[0].against[0]


def test_on_an_idle_store_the_default_is_kept() -> None:
    advice = advise(WORKLOAD, FAST, Requirements(sessions=10))
    assert advice.best is not None
    assert advice.best.cost.autosave == Autosave()
    assert "the choice does not matter, and the default is kept" in advice.warnings[0]
    bounded = advise(WORKLOAD, FAST, Requirements(sessions=10, max_loss=5.0))
    assert not bounded.idle
    assert bounded.best is not None
    assert bounded.best.cost.autosave.max_delay < 5.0


def test_the_default_s_debounce_is_taken_to_be_what_the_engine_makes_it() -> None:
    def lost(sessions: int) -> float:
        advice = advise(WORKLOAD, FAST, Requirements(sessions=sessions))
        (default,) = [one for one in advice.options if one.cost.autosave == Autosave()]
        return default.cost.lost

    assert lost(10) == replay(WORKLOAD, Autosave(), save_time=0.001, debounce=0.1).lost
    assert lost(10) < lost(100) < lost(20_000)
    assert lost(20_000) == replay(WORKLOAD, Autosave(), save_time=0.001).lost


@pytest.mark.parametrize("sessions", [10, 2_000, 20_000])
def test_a_debounce_that_is_given_is_replayed_as_it_is(sessions: int) -> None:
    advice = advise(WORKLOAD, FAST, Requirements(sessions=sessions))
    given = [one.cost for one in advice.options if one.cost.autosave.debounce is not None]
    assert given == [replay(WORKLOAD, cost.autosave, save_time=0.001) for cost in given]
    assert len(given) == len(advice.options) - 1


def test_few_changes_are_told() -> None:
    workload = workload_of([[WorkloadChange(0, 10), WorkloadChange(1, 10)]], "little")
    advice = advise(workload, SLOW, Requirements(sessions=1_000))
    assert advice.warnings == ("2 changes tell little: come back when there are more",)


def test_a_store_without_batches_has_nothing_waiting_when_the_engine_looks() -> None:
    """So its debounce becomes as short as it may, however many sessions timers save."""
    needs = Requirements(sessions=2_000)
    together = advise(WORKLOAD, FAST, needs)
    alone = advise(WORKLOAD, msgspec.structs.replace(FAST, batches=False), needs)
    default = [
        next(one.cost for one in advice.options if one.cost.autosave == Autosave())
        for advice in (together, alone)
    ]
    shortest = replay(WORKLOAD, Autosave(), save_time=FAST.save_time, debounce=0.1)
    assert default[1] == shortest
    assert default[0].lost > 2 * shortest.lost


@pytest.mark.parametrize("sessions", [10, 50_000, 10_000_000])
def test_the_chart_shows_each_setting(sessions: int) -> None:
    advice = advise(WORKLOAD, FAST, Requirements(sessions=sessions))
    svg = ET.fromstring(chart(advice, sessions))
    circles = svg.findall(".//{*}circle")
    assert len(circles) == len(advice.options)
    kinds = [circle.get("class") for circle in circles]
    assert kinds.count("best") == (advice.best is not None)
    assert kinds.count("not") == sum(bool(one.against) for one in advice.options)
    width, height = (float(n) for n in svg.attrib["viewBox"].split()[2:])
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height


LABELED = [
    Requirements(sessions=2_000, max_loss=10.0),
    Requirements(),
    Requirements(sessions=50_000, max_loss=1.0),
]


@pytest.mark.parametrize("wanted", LABELED, ids=["2000", "100", "50000"])
@pytest.mark.parametrize("measured", [FAST, SLOW], ids=["fast", "slow"])
def test_no_label_of_the_chart_lies_on_another(
    wanted: Requirements, measured: StoreMeasurement
) -> None:
    """By the width of a digit in this size of type."""
    svg = ET.fromstring(chart(advise(made_up(), measured, wanted), wanted.sessions))
    labels = [one for one in svg.findall(".//{*}text") if " / " in (one.text or "")][1:]
    boxes = []
    for label in labels:
        assert label.get("text-anchor") is None
        left, below = float(label.attrib["x"]), float(label.attrib["y"])
        boxes.append((left, below - 12, left + 7.2 * len(label.text or ""), below))
    assert len(boxes) > 1
    assert all(0 <= left and right <= 720 for left, _, right, _ in boxes)
    for at, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[at + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, (boxes[at], other)


def test_of_nothing_nothing_is_recommended() -> None:
    advice = advise(workload_of([], "nobody"), FAST, Requirements())
    assert advice.best is None
    assert "nothing has changed" in advice.warnings[0]


def test_a_chart_of_nothing_is_a_chart() -> None:
    nothing = workload_of([], "nobody")
    assert chart(advise(nothing, FAST, Requirements()), 1).startswith("<svg")
