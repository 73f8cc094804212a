"""The lease protocol holds in every order of its steps, and each of its rules is needed."""

from __future__ import annotations

import pytest

from tests.properties.lease_model import (
    Line,
    Protocol,
    Segment,
    Size,
    State,
    Writer,
    explore,
    fault_of,
)


@pytest.mark.parametrize(
    ("size", "least_states"),
    [
        (Size(takers=1, appends=2, folds=True), 5_000),
        pytest.param(Size(takers=2, appends=1, folds=True), 80_000, marks=pytest.mark.deep),
        (Size(takers=2, appends=2, reader=False), 15_000),
    ],
    ids=str,
)
def test_no_order_of_steps_breaks_the_protocol(size: Size, least_states: int) -> None:
    explored = explore(Protocol(), size)
    assert explored.finding is None
    # It did go everywhere, and met the Ok that is reported after a takeover.
    assert explored.states > least_states
    assert explored.late_acknowledgements > 0


@pytest.mark.parametrize(
    ("rule", "size", "fault"),
    [
        (
            "follow_chain",
            Size(takers=2, reader=False),
            "the chain of segments does not hold",
        ),
        (
            "sync_predecessor",
            Size(reader=False),
            "after a cut of power, the chain of segments does not hold",
        ),
        ("settle", Size(), "a reader's view is no prefix of the log"),
        ("look_again", Size(), "a reader's view is no prefix of the log"),
        (
            "fold_acknowledged",
            Size(folds=True),
            "a document that its manifest vouches for is no prefix of the log",
        ),
        ("release_by_marker", Size(takers=2, reader=False), "an epoch has two owners"),
        ("prove_epoch", Size(reader=False), "an acknowledged record is lost"),
        ("list_again", Size(reader=False), "an acknowledged record is lost"),
    ],
)
def test_each_rule_is_needed(rule: str, size: Size, fault: str) -> None:
    finding = explore(Protocol()._replace(**{rule: False}), size).finding
    assert finding is not None
    assert finding.fault == fault
    assert len(finding.trace) > 3


def test_every_rule_is_tried() -> None:
    (mark,) = test_each_rule_is_needed.pytestmark
    assert [case[0] for case in mark.args[1]] == list(Protocol._fields)


def state_with(*lines: Line, acknowledged: frozenset[str] = frozenset()) -> State:
    segment = Segment(1, (Line("epoch"), *lines), synced=1 + len(lines), named=True)
    return State(1, (segment,), (Writer("gone", 1),), None, acknowledged)


def test_the_judge_sees_a_lost_record() -> None:
    state = state_with(Line("half", "1.0"), acknowledged=frozenset({"1.0"}))
    assert fault_of(state) == "an acknowledged record is lost"


def test_the_judge_sees_a_doubled_record() -> None:
    state = state_with(Line("end", "1.0"), Line("end", "1.0", "1.0"))
    assert fault_of(state) == "a record is in the log twice"


def test_the_judge_sees_a_wrong_parent() -> None:
    state = state_with(Line("end", "1.0"), Line("end", "1.1", "1.7"))
    assert fault_of(state) == "a record does not follow its parent"


def test_the_judge_sees_what_only_a_cut_of_power_shows() -> None:
    unsynced = Segment(1, (Line("epoch"), Line("end", "1.0")), synced=1, named=True)
    state = State(1, (unsynced,), (Writer("gone", 1),), None, frozenset({"1.0"}))
    assert fault_of(state) == "after a cut of power, an acknowledged record is lost"
