"""A commit's row: a run of sealed lines, and what must be true of it; pure.

A row proves itself: its lines are sealed one to the next, the first to the checksum that the
row names as its seed. A run of rows proves that none is missing: each begins where the one
before it ended, with that one's checksum as its seed. What fails is named, and never read past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from perdure.errors import CorruptRecordError, NotStorableError, TooLargeError
from perdure.records.frames import Position, lines
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.records import Entry, Record
from perdure.store import Batch

MAX_RECORD_BYTES = 16 * 1024 * 1024


class SessionState(NamedTuple):
    """A session's row: where its log ends, and under whom."""

    id: int
    epoch: int
    head: int
    crc: int
    begun: int
    life: int
    since: int
    deleted: bool
    owner: str = ""
    released: bool = False


class CommitRow(NamedTuple):
    """A commit as it is stored."""

    first: int
    last: int
    epoch: int
    seed: int
    lines: bytes


class RowReader:
    """Rows of one session, read one after the other, forwards or backwards."""

    def __init__(self, key: SessionKey, state: SessionState, *, reverse: bool = False) -> None:
        self._key = key
        self._state = state
        self._reverse = reverse
        self._next: tuple[int, int] | None = None
        """Forwards the next row's first seq and seed; backwards its last seq and checksum."""

    def records(self, row: CommitRow) -> list[Record]:
        """Return a row's records in the order of the run.

        Raises:
            CorruptRecordError: It is damaged, or another was expected here.

        """
        found = lines(row.lines, epoch=row.epoch, start=Position(0, row.first - 1, row.seed))
        end = found.end
        whole = found.sound and end.offset == len(row.lines) and end.seq == row.last
        if not whole or not found.records or not found.records[-1].end:
            raise self._damaged(row, "its checksum does not hold")
        here, there = (row.first, row.seed), (row.last, end.crc)
        if self._reverse:
            here, there = there, here
        if self._next not in (None, here):
            raise self._damaged(row, "it does not follow the one before it: some are missing")
        head = self._state.head
        if row.last > head or (row.last == head and end.crc != self._state.crc):
            raise self._damaged(row, f"the session names another end of its log, record {head}")
        step = -1 if self._reverse else 1
        self._next = (there[0] + step, there[1])
        return found.records[::step]

    def _damaged(self, row: CommitRow, why: str) -> CorruptRecordError:
        message = (
            f"the log of {self._key} is damaged in the commit of records {row.first} to "
            f"{row.last}: {why}; it was left as it is: restore the table commits from a copy, or "
            f"{salvage_cure(self._key)}"
        )
        return CorruptRecordError(
            message, key=str(self._key), first=row.first, last=row.last, table="commits"
        )


def missing(key: SessionKey, state: SessionState, low: int, high: int) -> CorruptRecordError:
    """Return the error for records that must be there and are not."""
    message = (
        f"the log of {key} ends at record {state.head}, and the rows with its records {low} to "
        f"{high} are missing: restore the table commits from a copy, or {salvage_cure(key)}"
    )
    return CorruptRecordError(message, key=str(key), first=low, last=high, table="commits")


def as_sent(batch: Batch) -> Exception | None:
    """Return why a batch could never be accepted, whatever the log holds."""
    records = batch.records
    largest = max([len(entry.payload) for entry in records], default=0)
    if largest > MAX_RECORD_BYTES:
        message = (
            f"a record of {batch.key} has {largest} bytes, the limit is {MAX_RECORD_BYTES}: keep "
            "large values as blobs"
        )
        return TooLargeError(message, key=batch.key, size=largest)
    if batch.first < 1 or (records and not records[-1].end):
        message = (
            f"a batch of {batch.key} begins at {batch.first}, or ends within a group: send whole "
            "groups from the head on"
        )
        return NotStorableError(message, key=batch.key, first=batch.first)
    return None


def fresh(
    batch: Batch, state: SessionState, held: Sequence[Record]
) -> tuple[Entry, ...] | Exception:
    """Return what of a batch the log does not hold yet, or why it will never be accepted.

    ``held`` are the log's records from the batch's first on.
    """
    if batch.first > state.head + 1:
        message = (
            f"a batch of {batch.key} begins at {batch.first} with the log's head at {state.head}: "
            "send whole groups from the head on"
        )
        return NotStorableError(message, key=batch.key, first=batch.first, head=state.head)
    if batch.first == state.head + 1:
        return batch.records
    known = batch.records[: len(held)]
    same = all(
        (entry.kind, entry.payload, entry.end) == (record.kind, record.payload, record.end)
        for entry, record in zip(known, held, strict=False)
    )
    # Idempotence is only for a sender that repeats itself: the same bytes, the same epoch.
    if batch.first <= max(state.begun, state.since - 1) or not same:
        message = (
            f"the log of {batch.key} holds other records from {batch.first} on: read the head "
            "again and append behind it"
        )
        return NotStorableError(message, key=batch.key, first=batch.first, head=state.head)
    return batch.records[len(held) :]


class OwnedSession(msgspec.Struct):
    """A session that this store holds: what the next append may expect, a guess to be checked."""

    id: int
    epoch: int
    head: int
    crc: int
    owner: str


Holding: TypeAlias = dict[SessionKey, OwnedSession]
