"""How sessions begin with others and how they end, as users would write it."""

from __future__ import annotations

from typing import assert_type

import perdure.sync
from perdure import Retention, Session, SessionKey, SessionManager
from perdure.types import ForgetReport, Fork, LostSession, PruneReport


async def lives(sessions: SessionManager, session: Session) -> None:
    forked = await sessions.fork("a", "b", at=7, session="s", new_session="t", tenant="x")
    assert_type(forked, Fork)
    assert_type(forked.at, int)
    await sessions.fork("a", "c", at="turn-7")
    assert_type(await sessions.copy("a", "d"), Fork)
    assert_type(await sessions.rename("a", "e", on_held="raise", wait=1.0), Fork)
    assert_type(await session.fork_unsaved("f", new_session="t"), Fork)
    assert_type(sessions.lost, tuple[LostSession, ...])
    for lost in sessions.lost:
        assert_type((lost.id, lost.key, lost.epoch), tuple[str, SessionKey, int])
        assert_type((lost.version, lost.durable_version), tuple[int, int])
        assert_type(lost.error, Exception | None)
        assert_type(lost.unsaved()[0].payload, bytes)
        assert_type(await lost.fork_unsaved("f"), Fork)
        assert_type(await lost.discard_unsaved(), int)
    report = await sessions.forget(owner="ada", tag="x", dry_run=True)
    assert_type(report, ForgetReport)
    assert_type(report.bytes, int)
    for kept in report.kept:
        print(kept.what, kept.why, kept.of.agent, kept.by)
    pruned = await sessions.prune(Retention(keep_turns=3, keep_days=30, expire_days=90), id="a")
    assert_type(pruned, PruneReport)
    for one in pruned.pruned:
        print(one.key, one.cut, one.turns, one.bytes)
    await sessions.list(owner="ada", tag="x")


def blocking(sessions: perdure.sync.SessionManager, session: perdure.sync.Session) -> None:
    assert_type(sessions.fork("a", "b"), Fork)
    assert_type(sessions.copy("a", "c"), Fork)
    assert_type(sessions.rename("a", "d"), Fork)
    assert_type(sessions.forget(id="a"), ForgetReport)
    assert_type(sessions.prune(Retention(keep_turns=0)), PruneReport)
    assert_type(session.fork_unsaved("e"), Fork)
    assert_type(sessions.lost, tuple[perdure.sync.LostSession, ...])
    for lost in sessions.lost:
        assert_type(lost.fork_unsaved("e"), Fork)
        assert_type(lost.discard_unsaved(), int)
