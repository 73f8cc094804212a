"""Reversible transform of bytes: the protocol between `CodedStore` and its codecs.

Encryption and compression implement `Transform`. `CodedStore` applies it, by the functions here:
to batches, records, inbox items and dead letters in bulk, large amounts in a worker thread
(`in_thread_if_large`). A *place* says where bytes belong: their kind,
their owner and their name. Encryption binds bytes to their place as associated data, so that they
decrypt nowhere else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.lowlevel import RunVar

from perdure.errors import CorruptRecordError, NotStorableError
from perdure.records.chunks import require_named
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import Batch, DeadLetter, PendingItem

Place = tuple[str | int | bool, ...]


class Transform(Protocol):
    """Transform the bytes of one session or of one tenant, and restore them."""

    def transform(self, place: Place, data: bytes) -> bytes:
        """Return the bytes to store; the same place and bytes always give the same result."""
        ...

    def restore(self, place: Place, data: bytes) -> bytes:
        """Return the original bytes.

        Raises CorruptRecordError when they are damaged or belong to another place.
        """
        ...

    def transform_payload(self, place: Place, payload: bytes) -> bytes:
        """Transform a JSON payload; the result is JSON too."""
        ...

    def restore_payload(self, place: Place, payload: bytes) -> bytes:
        """Return the original payload."""
        ...

    def inner_name(self, name: str) -> str:
        """Return a blob's name in the inner store."""
        ...

    def outer_name(self, inner: str) -> str | None:
        """Return a blob's name from its inner name; None if this transform did not name it."""
        ...

    def token(self, text: str) -> str:
        """Return the form of a text that listings filter by."""
        return text

    def stored_name(self, name: str) -> str:
        """Return the name that a document is stored under."""
        return name

    def plain_name(self, stored: str) -> str:
        """Return a document's name from the one that it is stored under, hidden or not."""
        return stored


def to_text(data: bytes) -> bytes:
    """Return bytes as a JSON string, in base64."""
    return b'"%b"' % base64.b64encode(data)


def from_text(payload: bytes, what: str, start: int = 1) -> bytes:
    """Return the bytes of a JSON string, whose base64 begins at ``start``.

    Raises:
        CorruptRecordError: The payload is not such a string.

    """
    try:
        if payload[:1] != b'"' or payload[-1:] != b'"':
            raise ValueError  # noqa: TRY301  # the same damage as invalid base64
        return base64.b64decode(payload[start:-1], validate=True)
    except (ValueError, binascii.Error) as error:
        raise CorruptRecordError(
            f"{what} is damaged, or was never encrypted: restore it from a copy"
        ) from error


def describe_place(place: Sequence[str | int | bool]) -> str:
    """Return a place as text for error messages."""
    return " ".join(str(part) for part in place if part != "")


# Batches, records, items and dead letters, in bulk


T = TypeVar("T")

LARGE = 512 * 1024
"""Bytes from which on the work is done in a thread."""


def transform_batch(transform: Transform, batch: Batch) -> Batch:
    """Return a batch with transformed payloads, each bound to its place in the log."""
    transform_payload, epoch = transform.transform_payload, batch.epoch
    entries = tuple(
        Entry(kind, transform_payload(("record", seq, epoch, kind, end), payload), end)
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first)
    )
    return msgspec.structs.replace(batch, records=entries)


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


def transform_item(transform: Transform, key: SessionKey, item: PendingItem) -> PendingItem:
    """Return an inbox item transformed."""
    payload = transform.transform_payload(inbox_place(key, item), item.payload)
    return msgspec.structs.replace(item, payload=payload)


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
