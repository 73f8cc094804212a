"""Commit rows, and their checks. Pure.

A row proves itself: each line's checksum covers the one before, the first line's the row's seed. A
run of rows proves that none is missing: each begins where the previous one ended, with that one's
checksum as its seed. A row that fails raises, and is never read past.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.records import Position, Record, lines


class SessionState(NamedTuple):
    """A session's row: its lease, and where its log ends."""

    id: int
    epoch: int
    head: int
    crc: int
    epoch_start: int
    generation: int
    since: int
    deleted: bool
    owner: str = ""
    released: bool = False


class CommitRow(NamedTuple):
    """A commit's row."""

    first: int
    last: int
    epoch: int
    seed: int
    lines: bytes


class RowReader:
    """Verifier of one session's rows, read in order, forward or backward."""

    def __init__(self, key: SessionKey, state: SessionState, *, reverse: bool = False) -> None:
        self._key = key
        self._state = state
        self._reverse = reverse
        self._next: tuple[int, int] | None = None
        """Forward, the next row's first seq and seed; backward, its last seq and checksum."""

    def records(self, row: CommitRow) -> list[Record]:
        """Return a row's records in the order of reading.

        Raises:
            CorruptRecordError: The row is damaged, or is not the expected one.

        """
        decoded = lines(row.lines, epoch=row.epoch, start=Position(0, row.first - 1, row.seed))
        end = decoded.end
        is_sound = decoded.sound and end.offset == len(row.lines) and end.seq == row.last
        if not is_sound or not decoded.records or not decoded.records[-1].end:
            raise self._damage_error(row, "it does not match its checksum")
        near, far = (row.first, row.seed), (row.last, end.crc)
        if self._reverse:
            near, far = far, near
        if self._next not in (None, near):
            raise self._damage_error(row, "it does not follow the one before it: some are missing")
        head = self._state.head
        if row.last > head or (row.last == head and end.crc != self._state.crc):
            raise self._damage_error(
                row, f"the session's row has another end of the log, record {head}"
            )
        step = -1 if self._reverse else 1
        self._next = (far[0] + step, far[1])
        return decoded.records[::step]

    def _damage_error(self, row: CommitRow, reason: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"the log of {self._key} is damaged in the commit of records {row.first} to "
            f"{row.last}: {reason}; it was left as it is: restore the table commits from a copy, "
            f"or {salvage_cure(self._key)}",
            key=str(self._key),
            first=row.first,
            last=row.last,
            table="commits",
        )


def missing_rows_error(
    key: SessionKey, state: SessionState, low: int, high: int
) -> CorruptRecordError:
    """Return the error for records whose rows are missing."""
    return CorruptRecordError(
        f"the log of {key} ends at record {state.head}, and the rows with its records {low} to "
        f"{high} are missing: restore the table commits from a copy, or {salvage_cure(key)}",
        key=str(key),
        first=low,
        last=high,
        table="commits",
    )


class OwnedSession(msgspec.Struct):
    """A held session: where this store expects its log to end, which each append checks."""

    id: int
    epoch: int
    head: int
    crc: int
    owner: str


HeldSessionsByKey: TypeAlias = dict[SessionKey, OwnedSession]
