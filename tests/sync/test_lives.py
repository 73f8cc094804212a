"""Forks, copies, renames, forgetting and pruning, in blocking style."""

from __future__ import annotations

from pathlib import Path

import perdure.sync
from perdure import Message, Retention


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
        owned = [info.key.agent for info in sessions.list(owner="ada")]
        assert owned == names
        assert len(sessions.prune(Retention(keep_turns=1), id="a").pruned) == 1
        for name in names:
            with sessions.open(name) as session:
                texts = [message.text for message in session.context()]
                assert texts == ["one", "two", "unsaved"]
        assert sessions.delete("a")
        assert len(sessions.forget(owner="ada").sessions) == 3
        assert sessions.list() == []
