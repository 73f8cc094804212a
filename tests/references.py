"""Forks, copies and renames as releases before 0.1.0 made them: they refer to what is not theirs."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from perdure import Message
from perdure.records.chunks import name_of
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import ForkNote, HistoryIndex, HistorySegment, Origin
from perdure.records.messages import encode_message
from perdure.records.posts import PendingItem
from perdure.records.records import BASE, FORK, Entry, Record
from perdure.session.stored import followed
from perdure.store import Store, Taken, take_after
from perdure.testing.conformance._kit import append_ok


async def records_of(store: Store, id: str) -> list[Record]:
    """Return all records of a session, with those before its own log."""
    async with aclosing(followed(store).read_log(SessionKey(id))) as log:
        return [record async for chunk in log for record in chunk.records]


async def fork_as_before(store: Store, parent: str, child: str, *, at: int = 0) -> None:
    """Begin a session that continues another one's records, which the other one notes."""
    shared = [record for record in await records_of(store, parent) if not at or record.seq <= at]
    note = PendingItem(f"fork-{child}/0", FORK, encode(ForkNote(SessionKey(child))), 0.0)
    await store.enqueue(SessionKey(parent), [note])
    origin = Origin(at=shared[-1].seq, parent=SessionKey(parent), epoch=shared[-1].epoch)
    await _begun(store, child, origin)


async def copy_as_before(store: Store, id: str, new: str, *, moved: bool = False) -> None:
    """Begin a session of which the history is in blobs."""
    records = await records_of(store, id)
    pieces, blobs = list[HistorySegment](), dict[str, bytes]()
    for at in range(0, len(records), 100):
        part = records[at : at + 100]
        data = b"\n".join(
            encode([one.seq, one.epoch, one.kind, one.end, msgspec.Raw(one.payload)])
            for one in part
        )
        pieces.append(HistorySegment(part[0].seq, part[-1].seq, name_of(data)))
        blobs[name_of(data)] = data
    index = encode(HistoryIndex(tuple(pieces)))
    await store.put_blobs("", {**blobs, name_of(index): index})
    origin = Origin(
        at=records[-1].seq,
        epoch=records[-1].epoch,
        kept=name_of(index),
        moved=SessionKey(id) if moved else None,
    )
    await _begun(store, new, origin)


async def say_as_before(store: Store, id: str, *texts: str) -> None:
    """Append messages of the user to a session, under a lease."""
    grant = await _taken(store, id)
    entries = [encode_message(Message.user(text)) for text in texts]
    await append_ok(store, grant, grant.head + 1, *entries)
    await store.release(grant.key, grant.epoch)


async def _begun(store: Store, id: str, origin: Origin) -> None:
    grant = await _taken(store, id)
    await append_ok(store, grant, grant.head + 1, Entry(BASE, encode(origin)))
    await store.release(grant.key, grant.epoch)


async def _taken(store: Store, id: str) -> Taken:
    holder = await store.holder(SessionKey(id))
    return await take_after(store, SessionKey(id), after=0 if holder is None else holder.epoch)
