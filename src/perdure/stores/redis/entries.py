"""The log's entries: one batch of records each, under an id that says where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.errors import (
    CorruptRecordError,
    NotStorableError,
    TooLargeError,
)
from perdure.records import frames
from perdure.records.frames import Position
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.records import Entry, Record
from perdure.store import Batch


class SessionEntry(NamedTuple):
    """What a session's hash says, checked against its log."""

    epoch: int
    head: int
    deleted: bool = False
    base: int = 0
    """The last seq that is not in the log any more."""
    moved: int = 0
    """The last seq that another store keeps."""


def damaged(key: SessionKey, where: str, why: str) -> CorruptRecordError:
    """Return the error for something of a session that is not what its place calls for."""
    message = (
        f"{where} of session {key} is damaged on the server ({why}): it was left as it is; "
        f"restore the session from a backup, or {salvage_cure(key)}"
    )
    return CorruptRecordError(message, key=str(key), where=where)


def span_of(id: bytes) -> tuple[int, int]:
    """Return the first and the last seq of an entry.

    >>> span_of(b"12-10")
    (10, 12)
    """
    last, _, first = id.partition(b"-")
    return int(first), int(last)


def records_of(key: SessionKey, seed: int, entry: Any) -> list[Record]:
    """Return the records of an entry as the server gave it.

    Raises:
        CorruptRecordError: It is not exactly what was appended under this id.

    """
    name, fields = entry
    first, last = span_of(name)
    where = f"entry {name.decode('ascii', 'replace')} of the log"
    if len(fields) != 2 or not fields[0].isdigit():
        raise damaged(key, where, "it has foreign fields")
    epoch, data = int(fields[0]), fields[1]
    found = frames.lines(data, epoch=epoch, start=Position(seq=first - 1, crc=seed))
    if not found.sound or found.end.offset != len(data):
        why = f"the line at byte {found.end.offset} of {len(data)} does not fit its checksum"
        raise damaged(key, where, why)
    if found.end.seq != last or not found.records or not found.records[-1].end:
        raise damaged(key, where, f"it ends at record {found.end.seq}")
    return found.records


def look_of(key: SessionKey, reply: Sequence[Any]) -> SessionEntry:
    """Return what a session is, from the answer of ``look.lua``.

    Raises:
        CorruptRecordError: The session and its log do not fit each other.

    """
    epoch, head, deleted, base, moved, first, last, of = reply
    if epoch is None:
        if last is not None:
            raise damaged(key, "the hash", "it is gone, and the log is there")
        return SessionEntry(0, 0)
    try:
        said, at = int(epoch), int(head or 0)
        trimmed, cold = int(base or 0), int(moved or 0)
    except ValueError:
        raise damaged(key, "the hash", "a number in it is none") from None
    if last is None:
        if at:
            raise damaged(key, "the log", f"it is gone, and {at} records were in it")
        return SessionEntry(said, 0, deleted is not None)
    if span_of(last)[1] != at or int(of) != said:
        why = f"it ends with entry {last.decode()} of epoch {of.decode()}"
        raise damaged(key, "the log", f"{why}, and the session is at record {at} of epoch {said}")
    if span_of(first)[0] != max(trimmed, cold) + 1:
        why = f"it begins with entry {first.decode()}, and left off at record {max(trimmed, cold)}"
        raise damaged(key, "the log", why)
    return SessionEntry(said, at, deleted is not None, trimmed, cold)


def refusal(batch: Batch, most: int) -> Exception | None:
    """Say why a batch will never be accepted, before it is sent."""
    records = batch.records
    largest = max([len(entry.payload) for entry in records], default=0)
    if largest > most:
        message = (
            f"a record of {batch.key} has {largest} bytes, the limit is {most}: keep large "
            "values as blobs"
        )
        return TooLargeError(message, key=batch.key, size=largest)
    if batch.first < 1 or (records and not records[-1].end):
        return _misplaced(batch, "it ends within a group")
    return None


def _misplaced(batch: Batch, why: str) -> NotStorableError:
    message = (
        f"a batch of {batch.key} begins at {batch.first}, and {why}: send whole groups from the "
        "log's head on"
    )
    return NotStorableError(message, key=batch.key, first=batch.first)


def gap(batch: Batch, head: int) -> NotStorableError:
    """Return the error for a batch that begins behind the place where the log ends."""
    return _misplaced(batch, f"the log ends at {head}")


def same(batch: Batch, held: Sequence[Record]) -> bool:
    """Say whether the log holds the beginning of this batch, from this sender.

    Idempotence is only for a sender that repeats itself: the same bytes, the same epoch.
    """
    return len(held) <= len(batch.records) and all(
        record.epoch == batch.epoch and Entry(record.kind, record.payload, record.end) == entry
        for record, entry in zip(held, batch.records, strict=False)
    )
