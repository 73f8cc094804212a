"""The chain of a session's log files: which there are, what each follows, how far each counts.

The log is a chain of segments. A segment's first line names its predecessor and the
length at which that one is sealed; the newest segment, the tip, counts as far as its last
whole group. What lies behind a seal is not in the log, whoever wrote it.

Blocking; called within one hop into a thread. Nothing here writes, and a reader needs no
lease: a file never changes below the length that was seen, so what was planned stays true.
"""

from __future__ import annotations

import os

import msgspec

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError
from perdure.records import frames
from perdure.records.frames import Position, Scanner
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Record
from perdure.stores.file.layout import segment_name, segment_of, start_of
from perdure.stores.file.sealed import decoded

# The chain of a session's log files: which there are, what each follows, how far each counts


SEGMENT = "segment"
"""The kind of the first line of an epoch's later files; it is no record of the log."""

_MAX_FIRST_LINE = 64 * 1024
_CHUNK = 1024 * 1024


class SegmentEnd(msgspec.Struct, frozen=True, rename={"number": "n"}):
    """The end of the segment before: what its bytes up to ``length`` come to."""

    epoch: int
    number: int
    length: int
    seq: int
    crc: int


class SegmentHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a segment's first line; an epoch record's names its holder as well."""

    key: SessionKey
    prev: SegmentEnd | None = None
    owner: str = ""
    host: str = ""
    pid: int = 0
    at: float = 0.0


class LogSegment(msgspec.Struct, frozen=True):
    """A segment whose first line is sound."""

    epoch: int
    number: int
    start: Position
    """Where its records begin; the epoch record is one, a later segment's first line not."""
    first: SegmentHeader

    @property
    def name(self) -> str:
        """Its file."""
        return segment_name(self.epoch, self.number)


class DurablePosition(msgspec.Struct, frozen=True, rename={"number": "n"}):
    """A position that is known to be sound, so that nothing before it need be read."""

    epoch: int
    number: int
    at: Position


class SegmentScan(msgspec.Struct):
    """What reading a segment from a position to a length, or to its end, has shown."""

    end: Position
    """Behind the last whole group."""
    size: int
    """Bytes that were there."""
    records: tuple[Record, ...] | None = None
    """The records, where they were few."""


def find_tip(
    log: Folder, key: SessionKey, *, since: int = 0, below: int | None = None
) -> LogSegment | None:
    """Return the newest segment that begins soundly, of an epoch from *since* to below *below*.

    An epoch counts from the moment its epoch record is whole; a taker that died before
    leaves nothing that anybody follows.
    """
    found = sorted(filter(None, map(segment_of, log.names())), reverse=True)
    for epoch in sorted({epoch for epoch, _ in found}, reverse=True):
        if epoch < since or (below is not None and epoch >= below):
            continue
        zero = read_first(log, epoch, 0, key)
        if zero is None and not any(of == epoch for of, _ in starts(log)):
            continue
        for number in [number for of, number in found if of == epoch and number]:
            later = read_first(log, epoch, number, key)
            if later is not None:
                return later
        if zero is not None:
            return zero
    return None


def starts(log: Folder) -> list[tuple[int, int]]:
    """Return the segments that a log is said to begin with; the last one counts.

    A mark is there before anything goes: look for it when something is found to be missing.
    """
    return sorted(filter(None, map(start_of, log.names())))


def read_first(log: Folder, epoch: int, number: int, key: SessionKey) -> LogSegment | None:
    """Return a segment by its first line, None if there is none or it was never finished.

    Raises:
        CorruptRecordError: The first line is damaged, yet sound records follow it; or the
            file belongs to another session.

    """
    name = segment_name(epoch, number)
    data = _head_of(log, name)
    if data is None:
        return None
    line, newline, _ = data.partition(b"\n")
    if not newline and len(data) < _MAX_FIRST_LINE:
        return None  # a torn write
    segment = _segment_of(line, epoch, number)
    if segment is None:
        _refuse_if_followed(log, name, 0, 0)
        return None
    require_key(f"{log.path}/{name}", segment.first.key, key)
    return segment


def require_key(path: str, found: SessionKey, key: SessionKey) -> None:
    """Raise CorruptRecordError if a file says that it is another session's."""
    if found != key:
        message = (
            f"{path} belongs to session {found}, not to {key}: put the folder back to where it "
            "came from"
        )
        raise CorruptRecordError(message, path=path, key=str(key))


def _head_of(log: Folder, name: str) -> bytes | None:
    try:
        fd = log.open(name)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, _MAX_FIRST_LINE)
    finally:
        os.close(fd)


def _segment_of(line: bytes, epoch: int, number: int) -> LogSegment | None:
    first = decoded(frames.first_payload(line) or b"", SegmentHeader)
    if first is None:
        return None
    prev = first.prev
    seq, crc = (prev.seq, prev.crc) if prev else (0, 0)
    found = frames.verify(line, seq=seq if number else seq + 1, epoch=epoch, seed=crc)
    if found is None or found[0].kind != (SEGMENT if number else EPOCH) or not found[0].end:
        return None
    if number == 0:
        return LogSegment(epoch, number, Position(0, seq, crc), first)
    if prev is None or prev.epoch != epoch or prev.number >= number:
        return None
    return LogSegment(epoch, number, Position(len(line) + 1, seq, found[1]), first)


def scan(
    log: Folder, segment: LogSegment, start: Position, *, upto: int | None = None, keep: int = 0
) -> SegmentScan:
    """Read a segment's lines from *start* on, as far as whole groups reach.

    Args:
        log: The folder of the segments.
        segment: Which one.
        start: A sound position in it.
        upto: Take no byte behind this one.
        keep: Return the records if this many bytes hold them.

    Raises:
        CorruptRecordError: A line is damaged, and sound ones follow it.

    """
    fd = _open(log, segment.name)
    try:
        size = os.fstat(fd).st_size
        limit = size if upto is None else min(size, upto)
        scanner = Scanner(segment.epoch, start)
        records: list[Record] | None = [] if limit - start.offset <= keep else None
        os.lseek(fd, start.offset, os.SEEK_SET)
        at = start.offset
        while at < limit and scanner.damage is None:
            data = os.read(fd, min(_CHUNK, limit - at))
            if not data:
                break
            at += len(data)
            whole = scanner.feed(data)
            if records is not None:
                records += whole
    finally:
        os.close(fd)
    if scanner.damage is not None:
        _refuse_if_followed(log, segment.name, scanner.damage, scanner.next.crc)
    return SegmentScan(scanner.end, size, None if records is None else tuple(records))


def damaged(path: str, offset: int, length: int | None = None) -> CorruptRecordError:
    """Return the error for damage before the tail of a file."""
    of = "" if length is None else f" of {length} that count"
    message = (
        f"{path} is damaged at byte {offset}{of}, before its end; it was left as it is: "
        "restore the file from a copy, or bring out what is left of the session by `perdure export "
        "ID --salvage --out FILE`"
    )
    return CorruptRecordError(message, path=path, offset=offset)


def _open(log: Folder, name: str) -> int:
    try:
        return log.open(name)
    except FileNotFoundError as error:
        message = (
            f"{log.path}/{name} is missing, and the log goes on behind it: restore the file "
            "from a copy, or bring out what is left of the session by `perdure export ID --salvage "
            "--out FILE`"
        )
        raise CorruptRecordError(message, path=f"{log.path}/{name}", offset=0) from error


def _refuse_if_followed(log: Folder, name: str, offset: int, crc: int) -> None:
    """Raise if sound records lie behind a damaged line: then it is no torn last write."""
    fd = _open(log, name)
    with open(fd, "rb") as file:
        file.seek(offset)
        rest = file.read()
    if frames.follows(rest, crc):
        raise damaged(f"{log.path}/{name}", offset)


def walk(log: Folder, tip: LogSegment, key: SessionKey, *, down_to: int) -> list[LogSegment]:
    """Return the chain from the tip back to the segment that holds record *down_to* + 1.

    Raises:
        CorruptRecordError: A segment that another one follows is missing or damaged.

    """
    chain = [tip]
    while chain[-1].start.seq > down_to and (prev := chain[-1].first.prev) is not None:
        segment = read_first(log, prev.epoch, prev.number, key)
        if segment is None:
            marks = starts(log)
            if marks and marks[-1] > (prev.epoch, prev.number):  # what was older was removed
                return [one for one in chain if (one.epoch, one.number) >= marks[-1]]
            raise damaged(f"{log.path}/{segment_name(prev.epoch, prev.number)}", 0, prev.length)
        chain.append(segment)
    return chain


# What can still be read of a damaged log, for whoever salvages it
