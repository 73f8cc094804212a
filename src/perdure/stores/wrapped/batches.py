"""Batches, records, inbox items, dead letters and blobs, transformed and restored in bulk.

Large amounts are processed in a worker thread (`in_thread_if_large`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar

from perdure.errors import CorruptRecordError, NotStorableError
from perdure.records.chunks import require_named
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import Batch, DeadLetter, PendingItem
from perdure.stores.wrapped.transform import Place, Transform

T = TypeVar("T")

LARGE = 512 * 1024
"""Bytes from which on the work is done in a thread."""


def transform_batch(transform: Transform, batch: Batch) -> Batch:
    """Return a batch with transformed payloads, each bound to its place in the log."""
    transform_payload = transform.transform_payload
    entries = tuple(
        Entry(
            kind,
            transform_payload(("record", seq, batch.epoch, kind, end), payload),
            end,
        )
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first)
    )
    return Batch(batch.key, batch.epoch, batch.first, entries)


def restore_records(transform: Transform, records: Sequence[Record]) -> tuple[Record, ...]:
    """Return records with their original payloads."""
    return tuple(restore_record(transform, record) for record in records)


def restore_record(transform: Transform, record: Record) -> Record:
    """Return a record that has no link hash, with its original payload."""
    if record.kind == EPOCH:
        return record
    place = ("record", record.seq, record.epoch, record.kind, record.end)
    payload = transform.restore_payload(place, record.payload)
    return Record(record.seq, record.epoch, record.kind, payload, record.end)


def require_hashed(blobs: Mapping[str, bytes]) -> None:
    """Refuse blobs whose names are not the hashes of their bytes, such as a wrapper's inner names.

    Raises:
        NotStorableError: A name is not the hash of its bytes.

    """
    wrapped = next((name for name in blobs if name.startswith("x")), None)
    if wrapped is not None:
        raise NotStorableError(
            f"blob {wrapped!r} was written by another wrapper: wrap a store once by each wrapper",
            blob=wrapped,
        )
    require_named(blobs)


def inbox_place(key: SessionKey, item: PendingItem) -> Place:
    """Return the place of an item in an inbox."""
    return ("inbox", key.agent, key.session, item.op_id, item.kind)


def restore_item(transform: Transform, key: SessionKey, item: PendingItem) -> PendingItem:
    """Return the original inbox item; a damaged one stays unchanged, with the damage noted."""
    if item.damage:
        return item
    try:
        payload = transform.restore_payload(inbox_place(key, item), item.payload)
    except CorruptRecordError as error:
        return msgspec.structs.replace(item, damage=str(error))
    return msgspec.structs.replace(item, payload=payload)


def transform_letter(transform: Transform, key: SessionKey, letter: DeadLetter) -> DeadLetter:
    """Return a dead letter with its bytes and its reason transformed, damaged ones too."""
    place = ("dead letter", *inbox_place(key, letter.item))
    payload = transform.transform(place, letter.item.payload)
    item = msgspec.structs.replace(letter.item, payload=payload)
    reason = transform.transform((*place, "reason"), letter.reason.encode())
    return msgspec.structs.replace(letter, item=item, reason=base64.b64encode(reason).decode())


def restore_letter(
    transform: Transform, key: SessionKey, letter: DeadLetter, *, by_key: bool
) -> DeadLetter:
    """Return the original dead letter.

    With ``by_key`` an item that was damaged when it was rejected is tried again: the key that
    decrypts it may have been supplied since.
    """
    item = letter.item
    place = ("dead letter", *inbox_place(key, item))
    try:
        payload = transform.restore(place, item.payload)
        encoded_reason = base64.b64decode(letter.reason)
        reason = transform.restore((*place, "reason"), encoded_reason).decode()
    except (CorruptRecordError, ValueError) as error:
        item = msgspec.structs.replace(item, damage=f"its dead letter cannot be opened: {error}")
        return msgspec.structs.replace(letter, item=item)
    item = msgspec.structs.replace(item, payload=payload)
    if item.damage and by_key:
        retried = restore_item(transform, key, msgspec.structs.replace(item, damage=""))
        item = item if retried.damage else retried
    return msgspec.structs.replace(letter, item=item, reason=reason)


async def transform_blobs(transform: Transform, blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return blobs transformed, each bound to its name."""

    def transform_all() -> dict[str, bytes]:
        return {name: transform.transform(("blob", name), data) for name, data in blobs.items()}

    return await in_thread_if_large(sum(map(len, blobs.values())), transform_all)


_limiter: RunVar[anyio.CapacityLimiter] = RunVar("perdure_transform")


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """Run ``work`` on ``size`` bytes; from `LARGE` on in a thread, at most two at a time."""
    if size < LARGE:
        return work()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(2)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, limiter=limiter)
