"""Checkpoints and events without async."""

from __future__ import annotations

import pytest

import perdure.sync
from perdure import Message


def test_a_script_makes_checkpoints_and_goes_back() -> None:
    with perdure.sync.connect("memory:") as sessions, sessions.open("a") as session:
        session.events.emit("custom", "plan")
        session.append(Message.user("one"))
        first = session.checkpoints.create("one")
        session.append(Message.user("two"))
        second = session.checkpoints.create("given", {"n": 2})
        assert session.checkpoints.latest() == session.checkpoints.get(2) == second
        back = session.checkpoints.rollback(first.id, replay=True)
        assert [event.label for event in back.events] == ["given"]
        assert [message.text for message in session.context()] == ["one"]
        restored = session.checkpoints.restore(second.id)
        assert restored is not None
        assert restored.state == {"n": 2}
        assert session.checkpoints.diff(1, 3) == session.checkpoints.diff(1, 1)
        assert session.checkpoints.prune(keep=[1, 3]) == (2,)
        view = sessions.load("a")
        assert view is not None
        assert [one.id for one in view.checkpoints.states()] == [1, 3]
        assert view.checkpoints.verify().ok
        assert len(view.events.read()) == 4


def test_a_guard_goes_back_when_its_block_fails() -> None:
    with perdure.sync.connect("memory:") as sessions, sessions.open("a") as session:
        session.state.set("plan", 1)
        with pytest.raises(ZeroDivisionError), session.checkpoints.guard("trial"):
            session.state.set("plan", 2)
            _ = 1 / 0
        assert session.state.get("plan") == 1
        with session.checkpoints.guard("trial"):
            session.state.set("plan", 3)
        assert session.state.get("plan") == 3
