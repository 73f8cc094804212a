"""Forks, copies, renames, forgetting and pruning, in blocking style."""

from __future__ import annotations

import inspect
from pathlib import Path

import perdure.session.lives
import perdure.sync
import perdure.sync.lives
from perdure import Message, Retention
from tests.sync.test_parity import public, shape


def test_both_have_the_same_names_and_arguments() -> None:
    theirs, ours = perdure.session.lives.Lives, perdure.sync.lives.Lives
    assert public(theirs) == public(ours)
    for name in public(theirs):
        assert shape(getattr(theirs, name)) == shape(getattr(ours, name))
        assert inspect.getdoc(getattr(ours, name))


def test_sessions_begin_with_others_and_end(tmp_path: Path) -> None:
    with perdure.sync.connect(tmp_path / "data") as sessions:
        with sessions.open("a", owner="ada") as session:
            for text in ("one", "two"):
                with session.turn():
                    session.append(Message.user(text))
            session.append(Message.user("unsaved"))
            assert session.fork_unsaved("b").at < session.version
            session.close()
        assert sessions.fork("a", "c").at > 0
        assert sessions.copy("a", "d").at > 0
        sessions.rename("d", "e")
        names = [info.key.agent for info in sessions.list()]
        assert names == ["a", "b", "c", "e"]
        assert [info.key.agent for info in sessions.list(owner="ada")] == ["a"]
        assert len(sessions.prune(Retention(keep_turns=1), id="a").pruned) == 1
        for name in names:
            with sessions.open(name) as session:
                texts = [message.text for message in session.context()]
                assert texts == ["one", "two", "unsaved"]
        assert sessions.delete("a")
        assert len(sessions.forget(owner="ada").sessions) == 3
        assert sessions.list() == []
