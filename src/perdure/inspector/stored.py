"""Reads of a session's log that the inspector's pages and ``perdure show`` have in common."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import aclosing
from typing import Any

from perdure.inspector.state import newest_records
from perdure.inspector.threads import ThreadView, thread_status
from perdure.records.keys import SessionKey
from perdure.records.records import TURN, Record
from perdure.session.internals import store_of
from perdure.session.session import SessionView
from perdure.session.stored import followed
from perdure.store import Store, records_near


async def has_thread(view: SessionView) -> bool:
    """Return whether a session is a LangGraph thread: it has no messages, and its log ends so."""
    if view.info.messages:
        return False
    newest = await newest_records(followed(store_of(view)), view.key)
    return thread_status(newest, held=False) is not None


def thread_counts(thread: ThreadView) -> dict[str, Any]:
    """Return what a thread counts, which a session's own counters do not."""
    return {
        "turns": len(thread.turns),
        "messages": len(thread.messages),
        "checkpoints": len(thread.checkpoints),
    }


async def turn_records(
    store: Store, key: SessionKey, *, after: int, before: int | None = None
) -> list[Record]:
    """Return the records of turns in a part of a log; no other is kept."""
    turns: list[Record] = []
    async with aclosing(store.read_log(key, after=max(after, 0), before=before)) as log:
        async for chunk in log:
            turns += [record for record in chunk.records if record.kind == TURN]
    return turns


async def records_of(view: SessionView, seqs: Collection[int]) -> dict[int, Record]:
    """Return records of these numbers, which are close to one another for the most part."""
    async with aclosing(records_near(followed(store_of(view)), view.key, seqs)) as log:
        return {record.seq: record async for record in log if record.seq in seqs}
