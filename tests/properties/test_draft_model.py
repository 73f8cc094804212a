"""Drafts and renewed blobs hold in every order of their steps, and each rule is needed."""

from __future__ import annotations

import pytest

from tests.properties import renew_model
from tests.properties.draft_model import Lease, Protocol, Size, State, explore, fault_of


@pytest.mark.parametrize(
    ("size", "least_states"),
    [
        (Size(openers=2), 9_000),
        (Size(copiers=2, deletes=False), 9_000),
        pytest.param(Size(copiers=2), 16_000, marks=pytest.mark.deep),
        pytest.param(Size(copiers=2, openers=2), 300_000, marks=pytest.mark.deep),
        pytest.param(Size(openers=3), 100_000, marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_no_order_of_steps_breaks_a_draft(size: Size, least_states: int) -> None:
    explored = explore(Protocol(), size)
    assert (explored.fault, explored.trace) == (None, ())
    assert explored.states > least_states
    assert explored.publishes > 100


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("drop_first", "a session whose publish was reported is gone"),
        ("look_for_drop", "a session whose publish was reported is gone"),
        ("sync_mark", "after a cut of power, a session whose publish was reported is gone"),
        ("prove_epoch", "an overtaken holder reports its publish"),
        ("decide_before", "a session whose publish was reported is gone"),
        ("keep_posts", "a post is lost"),
    ],
)
def test_each_rule_is_needed(rule: str, fault: str) -> None:
    explored = explore(Protocol()._replace(**{rule: False}), Size())
    assert explored.fault == fault
    assert len(explored.trace) > 3


def test_every_rule_is_tried() -> None:
    (mark,) = test_each_rule_is_needed.pytestmark
    assert [case[0] for case in mark.args[1]] == list(Protocol._fields)


def test_the_judge_sees_half_a_copy() -> None:
    state = State(Lease(1), logs=frozenset({(1, 1)}), copies=frozenset({1}))
    assert fault_of(state) == "a reader finds half a copy"


@pytest.mark.parametrize("sweeps", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_no_sweep_removes_what_was_renewed(sweeps: int) -> None:
    states, lost = renew_model.explore(renew_model.Protocol(), sweeps)
    assert lost is None
    assert states > 3_000


@pytest.mark.parametrize("rule", renew_model.Protocol._fields)
def test_each_rule_of_renewing_is_needed(rule: str) -> None:
    _, lost = renew_model.explore(renew_model.Protocol()._replace(**{rule: False}))
    assert lost
