"""Reads of a session's log that the inspector's pages and ``perdure show`` have in common."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import aclosing
from typing import Any, Final

from perdure.inspector.state import newest_records
from perdure.inspector.threads import ThreadView, thread_status
from perdure.records.keys import SessionKey
from perdure.records.records import TURN, Record
from perdure.session.internals import store_of
from perdure.session.session import SessionView
from perdure.session.stored import followed
from perdure.store import Store

NEAR: Final = 64
"""Records between two that are wanted, which are read along with them."""


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
    runs: list[list[int]] = []
    for seq in sorted(seqs):
        if runs and seq - runs[-1][1] <= NEAR:
            runs[-1][1] = seq
        else:
            runs.append([seq, seq])
    found: dict[int, Record] = {}
    store = followed(store_of(view))
    for first, last in runs:
        async with aclosing(store.read_log(view.key, after=first - 1, before=last + 1)) as log:
            async for chunk in log:
                found |= {record.seq: record for record in chunk.records if record.seq in seqs}
    return found
