"""What a pruned session was at its cut, as records: for whoever needs a log that is whole.

An export and an import know a session by its records alone. Those that were removed amounted to
documents, which are kept; here they become records again, the fewest that amount to the same.
They take the last numbers up to the cut; before them, records that say nothing have theirs.
"""

from __future__ import annotations

import msgspec

from perdure.codec.json import decode, encode
from perdure.memory.context import SNAPSHOT, Snapshot, WorkingContext
from perdure.memory.documents import (
    EPISODIC,
    MEMORY,
    SEMANTIC,
    SESSION,
    Meta,
    SessionDocument,
    StateSet,
    Turned,
    typed,
)
from perdure.memory.index import MemoryDocument, MemoryEntry
from perdure.memory.values import Values
from perdure.model.checkpoints import CHECKPOINTS
from perdure.model.keys import SessionKey
from perdure.model.records import CONTEXT, EPOCH, ITEM, MEMORY_SET, META, STATE, TURN, Entry, Record
from perdure.session.hindsight import base_documents
from perdure.session.lineage import followed
from perdure.store import Store

__all__ = ["remains"]


async def remains(store: Store, key: SessionKey) -> list[Record]:
    """Return records that amount to what was pruned of a session; none for most sessions."""
    lineage = followed(store)
    base = await lineage.base_of(key)
    if base is None or not base.cut:
        return []
    found = {name: one.data for name, one in (await base_documents(lineage, key)).found.items()}
    entries = [*_described(found.pop(SESSION, None)), *_items(found)]
    values = Values(lineage, key)
    memory = decode(found.pop(MEMORY, b"{}"), MemoryDocument)
    entries += [_remembered(entry, await values.of(entry)) for entry in memory.entries]
    snapshot = found.pop(SNAPSHOT, None)
    found.pop(CHECKPOINTS, None)  # they are of this log, and mean nothing in another
    entries += _states(found)
    if snapshot is not None:
        context = WorkingContext.of_snapshot(decode(snapshot, Snapshot), 2**62)
        entries.append(Entry(CONTEXT, context.as_record("pruned")))
    blank = [Entry(META, b"{}")] * (base.cut - len(entries) - 1)
    begun = Entry(EPOCH, b'{"owner":""}')
    return [
        Record(seq, 1, entry.kind, entry.payload, entry.end)
        for seq, entry in enumerate([begun, *blank, *entries], 1)
    ]


def _described(data: bytes | None) -> list[Entry]:
    if data is None:
        return []
    document = decode(data, SessionDocument)
    metadata, about = document.metadata, document.about
    meta = Meta(
        title=metadata.title,
        tags=metadata.tags or None,
        owner=metadata.owner,
        metadata=metadata.extra,
        agent_type=document.agent_type,
        created_at=about.created_at,
    )
    turns = [
        Turned(turn=turn, number=number, phase="end", given=True, at=about.updated_at or 0.0)
        for turn, number in document.turn_ids.items()
    ]
    if document.turns > max((one.number for one in turns), default=0):
        at = about.updated_at or 0.0
        turns.append(Turned(turn="", number=document.turns, phase="end", at=at))
    return [Entry(META, encode(meta)), *(Entry(TURN, encode(turned)) for turned in turns)]


def _items(found: dict[str, bytes]) -> list[Entry]:
    return [
        Entry(ITEM, encode({"memory": memory, "item": msgspec.Raw(line)}))
        for name, memory in ((EPISODIC, "episodic"), (SEMANTIC, "semantic"))
        for line in found.pop(name, b"").splitlines()
    ]


def _remembered(entry: MemoryEntry, value: bytes) -> Entry:
    whole = msgspec.structs.replace(entry, value=msgspec.Raw(value), sha256=msgspec.UNSET)
    return Entry(MEMORY_SET, encode(whole))


def _states(found: dict[str, bytes]) -> list[Entry]:
    entries = []
    for name, data in found.items():
        if name.startswith("typed/"):
            continue
        beside = found.get(typed(name))
        change = encode(StateSet(name, msgspec.Raw(data))) if beside is None else beside
        entries.append(Entry(STATE, change))
    names = {name for name in found if not name.startswith("typed/")}
    entries += [
        Entry(STATE, data)
        for name, data in found.items()
        if name.startswith("typed/") and name.removeprefix("typed/") not in names
    ]
    return entries
