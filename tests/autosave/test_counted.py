"""Saves are counted in virtual time: as many as a setting promises, and when it promises them."""

from __future__ import annotations

import pytest

from perdure import Autosave
from tests import _virtual
from tests.autosave.counted import Change, Save, bounds, broken, count_all, promised

STEADY = [Change(3.0 * n) for n in range(10)]
PATIENT = Autosave(debounce=10, max_delay=120)


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_each_setting_saves_as_often_as_it_says(backend: str) -> None:
    rows = _virtual.run(backend, count_all, lambda name: "memory:", 120.0)
    assert {(row.setting, row.pattern): row.problems for row in rows if row.problems} == {}
    assert len(rows) == 18


@pytest.mark.parametrize(
    ("changes", "debounce", "max_delay", "saves"),
    [
        (STEADY, 2.0, 10.0, 10),
        (STEADY, 5.0, 15.0, 1),
        (STEADY, None, 0.0, 0),
        ([*STEADY, Change(28.0, ends_turn=True)], 5.0, 15.0, 2),
        ([*STEADY, Change(28.0, ends_turn=True)], None, 0.0, 1),
    ],
)
def test_what_is_promised_can_be_told_by_hand(
    changes: list[Change], debounce: float | None, max_delay: float, saves: int
) -> None:
    assert promised(changes, debounce, max_delay, until=30.0) == saves


@pytest.mark.parametrize(
    ("saves", "problem"),
    [
        ([Save(0.5, 0.0, 1)], "at the earliest"),
        ([Save(27.1, 0.0, 10)], "at the earliest"),  # as long as changes go on
        ([Save(40.0, 0.0, 10)], "at the latest"),
    ],
)
def test_a_save_that_comes_at_the_wrong_time_is_told(saves: list[Save], problem: str) -> None:
    (told,) = broken(STEADY, saves, PATIENT, until=60.0, late=0.1)
    assert problem in told


def test_what_is_allowed_is_no_more_than_it_says() -> None:
    assert bounds(STEADY, PATIENT, until=60.0, late=0.1) == (1, 1)
    assert bounds(STEADY, None, until=60.0, late=0.1) == (0, 0)
