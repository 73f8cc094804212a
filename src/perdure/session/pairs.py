"""A session's events and checkpoints as the pair of files that other kernels know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perdure.checkpoints.saving import TakenPair, save_pair, take_pair
from perdure.session.checkpointing import journal_of, reading_of

if TYPE_CHECKING:
    from perdure.session.session import Session
    from perdure.session.view import SessionView

__all__ = ["TakenPair", "export_pair", "import_pair"]


async def export_pair(view: SessionView, folder: Path) -> list[str]:
    """Write events.jsonl, checkpoints.jsonl and replay.json; return their names.

    None of them is written for a session that has neither events nor checkpoints. A folder that is
    not there is made.

    Raises:
        ConfigError: A file of these names is there.
        CorruptRecordError: A checkpoint's state is lost or damaged.

    """
    if not view._contents.clock:
        return []
    return await save_pair(reading_of(view), folder)


async def import_pair(session: Session, folder: Path) -> TakenPair:
    """Append the events and checkpoints of such files to a session, by their times.

    They go on with the session's own clock: their order stays, their numbers may become others.
    All is durable when this returns. After a kill some thousands of events at the end may be
    missing: remove the session then, and begin again.

    Raises:
        ConfigError: The checkpoints' ids do not go up, or the session has such ids already.

    """
    return await take_pair(journal_of(session), folder)
