"""Plans and rebuilds, as users would write them."""

from __future__ import annotations

from typing import assert_type

import perdure.sync
from perdure import Message, Session, SessionManager
from perdure.restore import WorkingContextSnapshotBootstrapOptions
from perdure.types import RebuildReport, RestorePlan


async def planning(sessions: SessionManager, session: Session) -> None:
    options = WorkingContextSnapshotBootstrapOptions(strict=True, system_prompt_policy="keep")
    plan = await session.plan_restore("anthropic", system_prompt="Be kind.", options=options)
    assert_type(plan, RestorePlan)
    assert_type(plan.messages, tuple[Message, ...])
    assert_type(plan.is_sound, bool)
    for document in plan.documents:
        print(document.name, document.fate, document.as_of_seq, document.why)
    for step in (*plan.steps, *plan.stripped):
        print(step.what, step.detail)
    assert_type(await session.apply(plan), int)
    assert_type(await sessions.plan_restore("a", target="openai", session="s"), RestorePlan)
    report = await sessions.rebuild_working_context("a", dry_run=True, on_held="raise", wait=1.0)
    assert_type(report, RebuildReport)
    print(report.wrong, report.rebuilt, report.records)
    await sessions.open("a", strict=True)


def blocking(sessions: perdure.sync.SessionManager, session: perdure.sync.Session) -> None:
    assert_type(session.plan_restore(), RestorePlan)
    assert_type(session.apply(session.plan_restore()), int)
    assert_type(sessions.plan_restore("a"), RestorePlan)
    assert_type(sessions.rebuild_working_context("a"), RebuildReport)
