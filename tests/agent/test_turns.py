"""Which turn runs, and what it waits for."""

from __future__ import annotations

import pytest

from perdure import SessionError, ToolCall
from perdure.agent.memory import TurnTracker


def running() -> TurnTracker:
    tracker = TurnTracker()
    tracker.begin("turn_0007", 7)
    return tracker


def test_a_call_is_open_until_its_result_comes() -> None:
    tracker = running()
    tracker.asked("turn_0007", [ToolCall("a", "x"), ToolCall("b", "x")])
    assert tracker.answered("turn_0007", "a")
    assert [call.id for call in tracker.open_calls()] == ["b"]


def test_a_second_result_of_a_call_is_not_taken() -> None:
    tracker = running()
    tracker.asked("turn_0007", [ToolCall("a", "x")])
    assert [tracker.answered("turn_0007", "a") for _ in range(2)] == [True, False]


def test_the_same_id_may_be_asked_again_in_the_next_answer() -> None:
    """Providers number their calls anew in each answer."""
    tracker = running()
    for _ in range(2):
        tracker.asked("turn_0007", [ToolCall("call_0", "x")])
        assert tracker.answered("turn_0007", "call_0")


def test_what_belongs_to_another_turn_is_refused() -> None:
    tracker = running()
    with pytest.raises(SessionError, match="turn_0006"):
        tracker.answered("turn_0006", "a")
    tracker.end()
    with pytest.raises(SessionError):
        tracker.asked("turn_0007", [])


def test_a_new_turn_knows_nothing_of_the_last_ones_calls() -> None:
    tracker = running()
    tracker.asked("turn_0007", [ToolCall("a", "x")])
    tracker.begin("turn_0008", 8)
    assert tracker.open_calls() == ()
    assert tracker.number == 8
