"""From stored bytes to a session again: the ladder.

    snapshot valid? → catch up with the log after it → else rebuild from the log → fresh

Needs no lease, and writes nothing. A cache that cannot be used is rebuilt and reported;
damage in the log itself, which is the truth, raises.
"""

from __future__ import annotations

import contextlib

import msgspec

from perdure.codec.json import decode
from perdure.errors import FormatError
from perdure.memory.context import SNAPSHOT, WorkingContext
from perdure.memory.documents import SESSION, SessionDocument, Turned, note_taken, note_turn
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.model.records import (
    EPOCH,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE_KINDS,
    META,
    STATE,
    TAKEN,
    TURN,
    Record,
)
from perdure.restore.report import RestoreReport, RestoreStep, Source
from perdure.restore.validity import snapshot_of
from perdure.store import Documents, Store

__all__ = ["Restored", "restore"]

KEPT_FOR_LATER = frozenset({ITEM, MEMORY_SET, MEMORY_DROP, STATE, META})
"""Kinds whose documents load when they are first awaited: the tail's records wait for that."""


class Restored(msgspec.Struct, kw_only=True):
    """A session's state as of the log's head."""

    key: SessionKey
    context: WorkingContext
    documents: Documents
    info: SessionDocument | None
    """session.json as it was folded; the tail's changes are in ``tail``."""
    tail: list[Record]
    """What memory, state and metadata need on top of their documents."""
    head: int = 0
    turns: int = 0
    turn_ids: dict[str, int] = {}
    taken: dict[str, int] = {}
    messages: int = 0
    tail_bytes: int = 0
    """Of all records since the last fold."""
    tail_records: int = 0
    report: RestoreReport

    @property
    def manifest(self) -> Manifest | None:
        """What was folded when it was restored."""
        return self.documents.manifest


async def restore(store: Store, key: SessionKey, *, context_bytes: int) -> Restored:
    """Read a session back.

    Args:
        store: Where it is.
        key: Which session.
        context_bytes: How much of the working context to keep.

    Raises:
        CorruptRecordError: The log is damaged before its tail.
        UnsupportedVersionError: It was written by a newer release.

    """
    documents = await store.read_documents(key, {SNAPSHOT, SESSION})
    steps: list[RestoreStep] = [
        RestoreStep("damaged", f"{name}: made anew from the log") for name in documents.damaged
    ]
    context, since = _cached(documents, key, context_bytes, steps)
    info, counted = _described(documents)
    folded = 0 if documents.manifest is None else documents.manifest.as_of_seq
    # A fold that was killed may have written these two and not the documents that load later.
    after = min(since, counted, folded)
    restored = Restored(
        key=key,
        context=context,
        documents=documents,
        info=info,
        tail=[],
        turns=0 if info is None else info.turns,
        turn_ids={} if info is None else dict(info.turn_ids),
        taken={} if info is None else dict(info.taken),
        messages=0 if info is None else info.messages,
        report=RestoreReport(source="fresh"),
    )
    records = 0
    settled, content = True, False
    async with contextlib.aclosing(store.read_log(key, after=after)) as log:
        async for chunk in log:
            settled = settled and chunk.settled
            for record in chunk.records:
                _take_in(restored, record, since, counted, folded)
            records += len(chunk.records)
            content = content or any(one.kind != EPOCH for one in chunk.records)
    restored.head = max(restored.head, folded)
    restored.report = _report(
        restored, documents, steps, since, records, settled=settled, content=content
    )
    return restored


def _cached(
    documents: Documents, key: SessionKey, limit: int, steps: list[RestoreStep]
) -> tuple[WorkingContext, int]:
    """Return the context of the snapshot, or an empty one, and the record it is as of."""
    found = documents.found.get(SNAPSHOT)
    if found is None:
        return WorkingContext(limit), 0
    snapshot = snapshot_of(found.data, key, found.as_of_seq)
    if isinstance(snapshot, str):
        steps.append(RestoreStep("invalid", f"{SNAPSHOT}: {snapshot}"))
        return WorkingContext(limit), 0
    context = WorkingContext.of_snapshot(snapshot, limit)
    context.seq = found.as_of_seq
    return context, found.as_of_seq


def _described(documents: Documents) -> tuple[SessionDocument | None, int]:
    found = documents.found.get(SESSION)
    if found is None:
        return None, 0
    try:
        return decode(found.data, SessionDocument), found.as_of_seq
    except FormatError:  # its hash is right: it was written by somebody else
        return None, 0


def _take_in(restored: Restored, record: Record, since: int, counted: int, folded: int) -> None:
    seq, kind = record.seq, record.kind
    restored.head = seq
    if seq > since:
        restored.context.feed(seq, kind, record.payload)
    if seq > counted:
        if kind in MESSAGE_KINDS:
            restored.messages += 1
        elif kind == TURN:
            turned = decode(record.payload, Turned)
            restored.turns = max(restored.turns, turned.number)
            note_turn(restored.turn_ids, turned)
        elif kind == TAKEN:
            note_taken(restored.taken, seq, record.payload)
    if kind in KEPT_FOR_LATER and (kind != META or seq > counted):
        restored.tail.append(record)
    if seq > folded and kind != EPOCH:
        restored.tail_bytes += len(record.payload)
        restored.tail_records += 1


def _report(
    restored: Restored,
    documents: Documents,
    steps: list[RestoreStep],
    since: int,
    records: int,
    *,
    settled: bool,
    content: bool,
) -> RestoreReport:
    source: Source
    if since == 0 and not content:
        source = "fresh"
        steps.append(RestoreStep("fresh", "no records"))
    elif since == 0:
        source = "rebuild"
        steps.append(RestoreStep("rebuilt", f"the context from {records} records"))
    elif restored.tail_records:
        source = "catch_up"
        steps.append(RestoreStep("caught up", f"with {records} records after {since}"))
    else:
        source = "snapshot"
        steps.append(RestoreStep("read", f"the snapshot as of record {since}"))
    if not settled:
        steps.append(RestoreStep("unsettled", "a takeover was under way"))
    return RestoreReport(
        source=source,
        steps=tuple(steps),
        damaged=documents.damaged,
        records_read=records,
        head=restored.head,
        settled=settled,
    )
