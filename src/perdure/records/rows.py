"""Logs and documents that are kept as rows of a database: pure decisions on rows that were read.

A row of a log proves itself: each line's checksum covers the one before, the first line's the row's
seed. A run of rows proves that none is missing: each begins where the previous one ended, with that
one's checksum as its seed. A row that fails raises, and is never read past.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar, final

from perdure._lib.logs import LogOnce, log_facts
from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import Documents, decode_manifest, matching_documents
from perdure.records.records import MESSAGE_KINDS, Position, Record, lines, open_sealed

NO_END = 2**63 - 1
"""The greatest number that a database has."""

T = TypeVar("T")

_log = logging.getLogger("perdure")
_warned = LogOnce()


class CommitRow(NamedTuple):
    """The row of one commit of a session."""

    first: int
    last: int
    epoch: int
    seed: int
    """The checksum of the record before ``first``."""
    lines: bytes


class LogExtent(NamedTuple):
    """A session's own row, as far as its log is concerned."""

    id: int
    born: int
    """Another number for each life of the session's id."""
    low: int
    """The first record; what was before it was removed."""
    head: int
    """The last record."""
    crc: int
    """That record's checksum."""
    seed: int = 0
    """The origin that record 1 continues."""


class LogPart(NamedTuple):
    """The records to read."""

    after: int = 0
    before: int = NO_END
    limit: int = NO_END
    reverse: bool = False


@final
class LogReader:
    """Verifier of one session's rows, read in order, forward or backward, page after page.

    Args:
        key: The session.
        state: Its row, as of the first page: records that are appended meanwhile do not count.
        part: The records to read.
        table: For messages.

    """

    def __init__(self, key: SessionKey, state: LogExtent, part: LogPart, *, table: str) -> None:
        self.key: SessionKey = key
        self.state: LogExtent = state
        self.reverse: bool = part.reverse
        self.low: int = max(part.after + 1, state.low)
        """The first of the records that are still to be read."""
        self.high: int = min(part.before - 1, state.head)
        """The last of them."""
        self.remaining: int = part.limit
        self._table = table
        self._next: tuple[int, int] | None = None
        """Forward, the next row's first seq and seed; backward, its last seq and checksum."""

    @property
    def is_done(self) -> bool:
        """True if nothing is left to be read."""
        return self.low > self.high or self.remaining <= 0

    def take(
        self, rows: Iterable[CommitRow], *, max_bytes: int = NO_END, messages: int | None = None
    ) -> list[Record]:
        """Return the next records of the part, and move after them.

        Args:
            rows: Whole rows in the order of reading, from the one that holds the next record on.
            max_bytes: The row that brings the page to this many bytes is its last.
            messages: The row that brings it to this many messages is its last.

        Raises:
            CorruptRecordError: A row is damaged or missing.

        """
        taken: list[Record] = []
        if self.is_done:
            return taken
        start, step = (self.high, -1) if self.reverse else (self.low, 1)
        wanted = min(self.remaining, self.high - self.low + 1)
        following = self._next
        for row in rows:
            if not taken and not row.first <= start <= row.last:
                break
            records, following = self._verified(row, following)
            taken += records
            max_bytes -= len(row.lines)
            if messages is not None:
                messages -= len([1 for record in records if record.kind in MESSAGE_KINDS])
                if messages <= 0:
                    break
            if max_bytes <= 0 or (taken[-1].seq - start) * step >= wanted - 1:
                break
        if not taken:
            raise self._damage_error(self.low, self.high, "rows are missing")
        self._next = following
        before = (start - taken[0].seq) * step
        taken = taken[before : before + wanted]
        self.remaining -= len(taken)
        if self.reverse:
            self.high = taken[-1].seq - 1
        else:
            self.low = taken[-1].seq + 1
        return taken

    def _verified(
        self, row: CommitRow, expected: tuple[int, int] | None
    ) -> tuple[list[Record], tuple[int, int]]:
        """Return a row's records in the order of reading, and how the next row begins."""
        decoded = lines(row.lines, epoch=row.epoch, start=Position(0, row.first - 1, row.seed))
        end, state = decoded.end, self.state
        is_sound = decoded.sound and end.offset == len(row.lines) and end.seq == row.last
        if not is_sound or not decoded.records or not decoded.records[-1].end:
            raise self._damage_error(row.first, row.last, "they do not match their checksums")
        near, far = (row.first, row.seed), (row.last, end.crc)
        if self.reverse:
            near, far = far, near
        is_next = expected in (None, near) and (row.first > 1 or row.seed == state.seed)
        is_within = row.last < state.head or (row.last, end.crc) == (state.head, state.crc)
        if not is_next or not is_within:
            reason = "the log lacks records next to them, or they are another log's"
            raise self._damage_error(row.first, row.last, reason)
        step = -1 if self.reverse else 1
        return decoded.records[::step], (far[0] + step, far[1])

    def take_page(
        self,
        rows: Iterable[CommitRow],
        look: Callable[[], LogExtent | None],
        *,
        max_bytes: int = NO_END,
    ) -> list[Record]:
        """Do the same as `take`; what was removed meanwhile is passed over, and no damage.

        Args:
            rows: As there.
            look: Returns the session's row as of now, None if there is no session for readers.
            max_bytes: As there.

        """
        try:
            return self.take(rows, max_bytes=max_bytes)
        except CorruptRecordError:
            now = look()
            if now is None or now.born != self.state.born:
                self.remaining = 0  # deleted, and maybe begun again
            elif now.low > self.low:
                self.low, self._next = now.low, None
            else:
                raise
            return []

    def _damage_error(self, first: int, last: int, reason: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"the log of {self.key}, which ends at record {self.state.head}, is damaged in the "
            f"records {first} to {last}: {reason}; it was left as it is: restore the table "
            f"{self._table} from a copy, or {salvage_cure(self.key)}",
            key=str(self.key),
            first=first,
            last=last,
            table=self._table,
        )


def rest_of_log(
    reader: LogReader, rows: Iterable[CommitRow], *, max_bytes: int = NO_END
) -> tuple[Record, ...] | None:
    """Return all that a reader has to read; None if it is long, or the rows do not have it."""
    try:
        records = reader.take(rows, max_bytes=max_bytes)
    except CorruptRecordError:  # raised when the log is read
        return None
    return tuple(records) if reader.is_done else None


def stored_documents(
    key: SessionKey,
    head: int,
    sealed: object,
    stored: Mapping[str, bytes],
    names: Collection[str] | None,
    *,
    place: Callable[[], str],
) -> Documents:
    """Return documents, each checked against the manifest's hash.

    A manifest carries a checksum, and one that fails it counts as lost: the log has all of it.

    Args:
        key: The session.
        head: Its last record.
        sealed: The manifest's bytes, None if there is none.
        stored: The documents' bytes by name.
        names: Of the documents that are wanted; None for all.
        place: Returns the place of the manifest, for a log line if it is damaged.

    Raises:
        CorruptRecordError: The log ends before what the documents were made from.
        UnsupportedVersionError: The manifest has a newer format.

    """
    body = open_sealed(sealed) if isinstance(sealed, bytes) else None
    manifest = decode_manifest(body, f"the manifest of {key}", key=str(key))
    if manifest is None or manifest.key != key:  # no stored document can be verified
        if sealed is not None and _warned.first((key, sealed)):
            message = "the manifest of session %(session)s is damaged; it is rebuilt from the log"
            log_facts(_log, logging.WARNING, message, session=str(key), place=place())
        return Documents(damaged=tuple(sorted(stored)), remains={**stored})
    if manifest.as_of_seq > head:
        raise CorruptRecordError(
            f"the log of {key} ends at record {head}, but documents were made from record "
            f"{manifest.as_of_seq}: rows are missing; restore the tables from a copy, or "
            f"{salvage_cure(key)}",
            key=str(key),
            head=head,
            as_of_seq=manifest.as_of_seq,
        )
    return matching_documents(manifest, stored, names)


def in_parts(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Split items so that each part has at most so many bytes, or one item.

    >>> list(in_parts(["aa", "b", "ccc"], len, 3))
    [['aa', 'b'], ['ccc']]
    """
    part: list[T] = []
    size = 0
    for item in items:
        if part and size + size_of(item) > max_bytes:
            yield part
            part, size = [], 0
        part.append(item)
        size += size_of(item)
    if part:
        yield part


def named_statements(script: str) -> dict[str, str]:
    """Return the statements of a script by the names that stand above them: ``-- name: word``."""
    _, *parts = re.split(r"^-- name: (\w+)$", script, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
