"""Replays, as users ask for them; it only has to check."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import perdure.sync
from perdure import Session, SessionView
from perdure.checkpoints import AuditPair, CapabilityUse, ReplayReport, TimelineRow, replay_files
from perdure.transfer import export_pair, import_pair


def told(row: TimelineRow) -> None:
    assert_type(row.what, str)
    assert_type(row.token_id, int)


async def replays(view: SessionView, session: Session, folder: Path) -> None:
    report = await view.events.replay(since=4, on_row=told, strict=True)
    assert_type(report, ReplayReport)
    assert_type(report.ok, bool)
    assert_type(report.problems, tuple[str, ...])
    assert_type(report.capabilities, dict[str, CapabilityUse])
    assert_type(await session.events.replay(), ReplayReport)
    assert_type(await replay_files(folder, on_row=told), ReplayReport)
    assert_type(await export_pair(view, folder), list[str])
    assert_type(await import_pair(session, folder), AuditPair)


def blocking(view: perdure.sync.SessionView) -> None:
    assert_type(view.events.replay(since=4), ReplayReport)
