"""Much at once: batches, records, documents, sealed and opened, in a thread where it is large."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar

from perdure.errors import CorruptRecordError, NotStorableError
from perdure.records.blob_names import require_named
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import Batch, DeadLetter, PendingItem
from perdure.stores.wrapped.transform import Place, Transform

T = TypeVar("T")

LARGE = 512 * 1024
"""Bytes from which on sealing is done in a thread."""


def sealed_batch(seal: Transform, batch: Batch) -> Batch:
    """Return a batch with sealed payloads, each bound to its place in the log."""
    seal_payload = seal.seal_payload
    entries = tuple(
        Entry(
            kind,
            seal_payload(("record", seq, batch.epoch, kind, end), payload),
            end,
        )
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first)
    )
    return Batch(batch.key, batch.epoch, batch.first, entries)


def opened_records(seal: Transform, records: Sequence[Record]) -> tuple[Record, ...]:
    """Return records with their payloads opened."""
    return tuple(opened_record(seal, one) for one in records)


def opened_record(seal: Transform, one: Record) -> Record:
    """Return a record that is linked to no other, opened."""
    if one.kind == EPOCH:
        return one
    place = ("record", one.seq, one.epoch, one.kind, one.end)
    return Record(one.seq, one.epoch, one.kind, seal.open_payload(place, one.payload), one.end)


def require_hashed(blobs: Mapping[str, bytes]) -> None:
    """Refuse blobs whose names are not the hashes of their bytes, a wrapper's own included.

    Raises:
        NotStorableError: There is such a one.

    """
    sealed = next((name for name in blobs if name.startswith("x")), None)
    if sealed is not None:
        message = f"blob {sealed!r} was sealed by another wrapper: a store takes one of each kind"
        raise NotStorableError(message, blob=sealed)
    require_named(blobs)


def posted(key: SessionKey, item: PendingItem) -> Place:
    """Return the place of an item in an inbox."""
    return ("inbox", key.agent, key.session, item.op_id, item.kind)


def opened_item(seal: Transform, key: SessionKey, item: PendingItem) -> PendingItem:
    """Return an item of an inbox opened; one that cannot be says why, and stays as it lies."""
    if item.damage:
        return item
    try:
        payload = seal.open_payload(posted(key, item), item.payload)
    except CorruptRecordError as error:
        return msgspec.structs.replace(item, damage=str(error))
    return msgspec.structs.replace(item, payload=payload)


def sealed_letter(seal: Transform, key: SessionKey, letter: DeadLetter) -> DeadLetter:
    """Return a dead letter with its bytes and its reason sealed, damaged ones too."""
    place = ("dead letter", *posted(key, letter.item))
    item = msgspec.structs.replace(letter.item, payload=seal.seal(place, letter.item.payload))
    reason = seal.seal((*place, "reason"), letter.reason.encode())
    return msgspec.structs.replace(letter, item=item, reason=base64.b64encode(reason).decode())


def opened_letter(
    seal: Transform, key: SessionKey, letter: DeadLetter, *, by_key: bool
) -> DeadLetter:
    """Return a dead letter as it was; one that another key opens by now is whole."""
    item = letter.item
    place = ("dead letter", *posted(key, item))
    try:
        payload = seal.open(place, item.payload)
        reason = seal.open((*place, "reason"), base64.b64decode(letter.reason)).decode()
    except (CorruptRecordError, ValueError) as error:
        item = msgspec.structs.replace(item, damage=f"its dead letter cannot be opened: {error}")
        return msgspec.structs.replace(letter, item=item)
    item = msgspec.structs.replace(item, payload=payload)
    if item.damage and by_key:
        again = opened_item(seal, key, msgspec.structs.replace(item, damage=""))
        item = item if again.damage else again
    return msgspec.structs.replace(letter, item=item, reason=reason)


async def sealed_blobs(seal: Transform, data: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return blobs, sealed to their names."""

    def work() -> dict[str, bytes]:
        return {name: seal.seal(("blob", name), one) for name, one in data.items()}

    return await done(sum(map(len, data.values())), work)


_limiter: RunVar[anyio.CapacityLimiter] = RunVar("perdure_sealing")


async def done(size: int, work: Callable[[], T]) -> T:
    """Do something to so many bytes: much of it beside the event loop, a few at a time."""
    if size < LARGE:
        return work()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(2)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, limiter=limiter)
