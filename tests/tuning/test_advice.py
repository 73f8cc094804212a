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
    elif advice.settled_by_turns and best.cost.autosave == Autosave():
        assert "hardly matter" in " ".join(advice.warnings)
    elif wanted.max_loss is not None:
        delayed = [one for one in fitting if one.cost.autosave.max_delay] or fitting
        assert best.cost.saves == min(one.cost.saves for one in delayed)
        most = best.cost.autosave.max_delay + measured.save_time
        assert most <= wanted.max_loss + 1e-6 or best.cost.autosave.max_delay == 0
    if wanted.budget is not None:
        assert best.price <= wanted.budget
    if best.cost.autosave.max_delay == 0:
        assert len(fitting) == 1, "each change at once is recommended only where nothing else fits"


def test_the_knee_is_recommended() -> None:
    """There saves and losses, as shares of the most, add up to the least: where bars are short."""
    advice = advise(made_up(), FAST, Requirements(sessions=20_000))
    assert advice.best is not None
    saves = max(one.cost.saves for one in advice.options)
    lost = max(one.cost.lost for one in advice.options)
    sums = {
        (one.cost.autosave.debounce, one.cost.autosave.max_delay): one.cost.saves / saves
        + one.cost.lost / lost
        for one in advice.options
        if one.cost.autosave.max_delay
    }
    knee = advice.best.cost.autosave
    assert (knee.debounce, knee.max_delay) == min(sums, key=lambda pair: sums[pair]) == (5, 15)


def test_settings_are_listed_from_the_safest_on() -> None:
    lost = [one.cost.lost for one in advise(WORKLOAD, FAST, Requirements()).options]
    assert lost == sorted(lost)


def test_a_busy_store_waits_longer_than_the_knee() -> None:
    some, many = (advise(WORKLOAD, SLOW, Requirements(sessions=n)) for n in (100, 1_500))
    assert some.best is not None
    assert many.best is not None
    assert some.best.cost.autosave.max_delay < many.best.cost.autosave.max_delay
    assert "busy" in many.options[0].against[0]


@pytest.mark.parametrize("measured", [FAST, SLOW], ids=["fast", "slow"])
def test_each_change_is_saved_at_once_for_who_asks_for_no_loss(measured: StoreMeasurement) -> None:
    asked = advise(WORKLOAD, measured, Requirements(sessions=100, max_loss=0.0))
    assert asked.best is not None
    assert asked.best.cost.autosave == Autosave.write_through()
    for sessions in (1, 100, 600):
        free = advise(WORKLOAD, measured, Requirements(sessions=sessions)).best
        assert free is not None
        assert free.cost.autosave.max_delay > 0


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


def test_where_turns_save_at_their_end_the_delays_hardly_matter() -> None:
    """As with an adapter that appends a run's messages when it is over."""
    turns = [[WorkloadChange(8.0 * n, 900, ends_turn=True) for n in range(30)]] * 3
    advice = advise(workload_of(turns, "turns"), SLOW, Requirements(sessions=200))
    assert advice.settled_by_turns
    assert not advice.idle
    assert advice.best is not None
    assert advice.best.cost.autosave == Autosave()
    assert "at least 90% of the saves" in advice.warnings[0]
    assert "the delays hardly matter, and the default is kept" in advice.warnings[0]
    bounded = advise(workload_of(turns, "turns"), SLOW, Requirements(sessions=200, max_loss=9))
    assert bounded.warnings[0].endswith("hardly matter")
    assert not advise(WORKLOAD, SLOW, Requirements(sessions=200)).settled_by_turns


def test_longer_delays_than_turns_take_hardly_matter() -> None:
    turn = [WorkloadChange(0, 900), WorkloadChange(4, 900), WorkloadChange(5, 900, ends_turn=True)]
    changes = [change._replace(at=change.at + 20 * n) for n in range(20) for change in turn]
    wanted = Requirements(sessions=600, max_loss=100)
    advice = advise(workload_of([changes], "turns"), SLOW, wanted)
    assert not advice.settled_by_turns
    assert advice.best is not None
    assert "from 5 / 15 on, at least 90% of the saves" in advice.warnings[0]


def test_a_price_makes_the_choice_matter_on_an_idle_store() -> None:
    free = advise(WORKLOAD, FAST, Requirements(sessions=10))
    paid = advise(WORKLOAD, FAST, Requirements(sessions=10, price=5.0))
    assert free.idle
    assert not paid.idle
    assert paid.best is not None
    assert paid.best.cost.autosave != Autosave()


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
    workload = workload_of([[WorkloadChange(0, 10), WorkloadChange(7, 10)]], "little")
    advice = advise(workload, SLOW, Requirements(sessions=300))
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
def test_the_chart_has_a_row_for_each_setting_in_words(sessions: int) -> None:
    advice = advise(WORKLOAD, FAST, Requirements(sessions=sessions))
    svg = ET.fromstring(chart(advice, sessions))
    rows = svg.findall("{*}g")
    assert len(rows) == len(advice.options)
    for row, option in zip(rows, advice.options, strict=True):
        words = [text.text for text in row.findall("{*}text")]
        assert len(row.findall("{*}rect[@height='14']")) == 2
        assert ("recommended" in words) == (option is advice.best)
        assert ("does not fit" in words) == bool(option.against)
        assert set(option.against) <= set(words)
        assert (words[-1 - len(option.against)] or "").endswith(" s old")
    words = [text.text for text in rows[0].findall("{*}text")]
    assert words[0] == "each change at once"
    names = [row.findall("{*}text")[0].text for row in rows]
    assert "after 2 s of quiet, at most 10 s" in names
    assert "the default, at most 30 s" in names


def test_a_bar_is_a_share_of_the_longest_on_its_side() -> None:
    advice = advise(WORKLOAD, FAST, Requirements(sessions=2_000))
    svg = ET.fromstring(chart(advice, 2_000))
    bars = [row.findall("{*}rect[@height='14']") for row in svg.findall("{*}g")]
    for side, of in ((0, lambda one: one.cost.saves), (1, lambda one: one.cost.lost)):
        widths = [float(pair[side].attrib["width"]) for pair in bars]
        values = [of(one) for one in advice.options]
        assert widths == pytest.approx([88 * value / max(values) for value in values], abs=0.06)


def test_of_nothing_nothing_is_recommended() -> None:
    advice = advise(workload_of([], "nobody"), FAST, Requirements())
    assert advice.best is None
    assert "nothing has changed" in advice.warnings[0]


def test_a_chart_of_nothing_is_a_chart() -> None:
    nothing = workload_of([], "nobody")
    assert chart(advise(nothing, FAST, Requirements()), 1).startswith("<svg")
