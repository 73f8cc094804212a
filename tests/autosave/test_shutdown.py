"""The report: readable, and an error when something is not durable."""

from __future__ import annotations

import pytest

from perdure.autosave.reports import ShutdownReport, Unsaved
from perdure.errors import UnsavedChangesError
from perdure.records.keys import SessionKey


def unsaved(name: str, version: int = 5) -> Unsaved:
    return Unsaved(
        key=SessionKey(name),
        version=version,
        durable=2,
        in_doubt_to=2,
        oldest_age=1.5,
        bytes=300,
        state="failed",
        error="the disk is full",
    )


def test_a_clean_report_raises_nothing() -> None:
    report = ShutdownReport(duration=0.25, clean=True, saved=3)
    report.raise_if_unsaved()
    assert str(report) == "stopped in 0.25 s, saved 3 sessions, nothing unsaved"


def test_what_is_not_durable_raises_with_the_facts() -> None:
    report = ShutdownReport(
        duration=20.0, clean=False, unsaved=(unsaved("a"),), lost=(unsaved("b", 4),)
    )
    with pytest.raises(UnsavedChangesError) as caught:
        report.raise_if_unsaved()
    assert caught.value.facts["report"] is report
    assert caught.value.facts["records"] == 5
    assert "1 unsaved: a (3 records)" in str(caught.value)
    assert "1 lost: b (2 records)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cures"),
    [
        ("unsaved", {"look at the store"}),
        ("in_doubt", {"look at the store"}),
        ("lost", {"taken over"}),
        ("quarantined", set()),
    ],
)
def test_the_error_says_what_helps_what_is_not_durable(name: str, cures: set[str]) -> None:
    report = ShutdownReport(duration=20.0, clean=False, **{name: (unsaved("a"),)})
    with pytest.raises(UnsavedChangesError) as caught:
        report.raise_if_unsaved()
    said = {cure for cure in ("look at the store", "taken over") if cure in str(caught.value)}
    assert said == cures


def test_a_long_report_names_a_few() -> None:
    report = ShutdownReport(
        duration=1.0, clean=False, unsaved=tuple(unsaved(str(n)) for n in range(100))
    )
    assert "100 unsaved: 0 (3 records), 1" in str(report)
    assert str(report).endswith("and 95 more")
    assert len(str(report)) < 200
