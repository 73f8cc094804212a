"""Entries of the log's stream: one batch of records each, under an id that contains its seqs.

An entry's id is ``<last seq>-<first seq>``, so a range of the stream is a range of the log. Its one
field is named by the epoch; the value holds the records' lines, each with a checksum. The checksums
start from the session's own seed: a flipped bit, a cut value, and an entry of another session are
all reported with the entry's id. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.errors import (
    CorruptRecordError,
    NotStorableError,
    TooLargeError,
)
from perdure.records import records as frames
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.records import Entry, Position, Record
from perdure.store import Batch


class LogState(NamedTuple):
    """State of a session's log: its hash, checked against the stream."""

    epoch: int
    head: int
    deleted: bool = False
    base: int = 0
    """The last seq that was trimmed."""
    moved: int = 0
    """The last seq that was moved to another store."""


def damage_error(key: SessionKey, part: str, reason: str) -> CorruptRecordError:
    """Return the error for a damaged part of a session."""
    message = (
        f"{part} of session {key} is damaged on the server ({reason}): it was left unchanged; "
        f"restore the session from a backup, or {salvage_cure(key)}"
    )
    return CorruptRecordError(message, key=str(key), where=part)


def span_of(id: bytes) -> tuple[int, int]:
    """Return the first and the last seq of an entry.

    >>> span_of(b"12-10")
    (10, 12)
    """
    last, _, first = id.partition(b"-")
    return int(first), int(last)


def records_of(key: SessionKey, seed: int, entry: Any) -> list[Record]:
    """Return the records of an entry, as the server returned it.

    Raises:
        CorruptRecordError: It is not exactly what was appended under its id.

    """
    name, fields = entry
    first, last = span_of(name)
    part = f"entry {name.decode('ascii', 'replace')} of the log"
    if len(fields) != 2 or not fields[0].isdigit():
        raise damage_error(key, part, "it has foreign fields")
    epoch, data = int(fields[0]), fields[1]
    lines = frames.lines(data, epoch=epoch, start=Position(seq=first - 1, crc=seed))
    if not lines.sound or lines.end.offset != len(data):
        reason = f"the line at byte {lines.end.offset} of {len(data)} does not match its checksum"
        raise damage_error(key, part, reason)
    if lines.end.seq != last or not lines.records or not lines.records[-1].end:
        raise damage_error(key, part, f"it ends at record {lines.end.seq}")
    return lines.records


def log_state(key: SessionKey, reply: Sequence[Any]) -> LogState:
    """Return the state of a session's log, from the reply of ``look.lua``.

    Raises:
        CorruptRecordError: The session's hash and its log contradict each other.

    """
    epoch, head, deleted, base, moved, first, last, of = reply
    if epoch is None:
        if last is not None:
            raise damage_error(key, "the hash", "it is missing, but the log exists")
        return LogState(0, 0)
    try:
        newest, length = int(epoch), int(head or 0)
        trimmed, cold = int(base or 0), int(moved or 0)
    except ValueError:
        raise damage_error(key, "the hash", "a field is not a number") from None
    if last is None:
        if length:
            raise damage_error(key, "the log", f"it is missing, but should have {length} records")
        return LogState(newest, 0, deleted is not None)
    if span_of(last)[1] != length or int(of) != newest:
        reason = f"it ends with entry {last.decode()} of epoch {of.decode()}"
        raise damage_error(
            key, "the log", f"{reason}, and the session is at record {length} of epoch {newest}"
        )
    if span_of(first)[0] != max(trimmed, cold) + 1:
        reason = f"it begins with entry {first.decode()}, not at record {max(trimmed, cold) + 1}"
        raise damage_error(key, "the log", reason)
    return LogState(newest, length, deleted is not None, trimmed, cold)


def refusal_reason(batch: Batch, most: int) -> Exception | None:
    """Return why a batch will never be accepted, None if it may be."""
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


def _misplaced(batch: Batch, reason: str) -> NotStorableError:
    message = (
        f"a batch of {batch.key} begins at {batch.first}, and {reason}: send whole groups from the "
        "log's head on"
    )
    return NotStorableError(message, key=batch.key, first=batch.first)


def gap_error(batch: Batch, head: int) -> NotStorableError:
    """Return the error for a batch that begins after the end of the log."""
    return _misplaced(batch, f"the log ends at {head}")


def is_repeated(batch: Batch, stored: Sequence[Record]) -> bool:
    """Return whether the stored records are the beginning of this batch, from this sender.

    A batch may be sent again only by its sender: the same bytes in the same epoch.
    """
    return len(stored) <= len(batch.records) and all(
        record.epoch == batch.epoch and Entry(record.kind, record.payload, record.end) == entry
        for record, entry in zip(stored, batch.records, strict=False)
    )
