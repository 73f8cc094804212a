"""Chain of a session's log files: which exist, what each follows, and up to where each counts.

The log is a chain of segments. A segment's first line names its predecessor and the length at
which that one is sealed; the newest segment, the tip, counts up to its last whole group. Bytes
after a seal are not part of the log, no matter which process wrote them.

Blocking: called within one thread call. Nothing here writes, and a reader needs no lease: a file
never changes below a length that was once read, so a plan stays valid.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import msgspec

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError
from perdure.records import records as frames
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.records import EPOCH, Position, Record, Scanner
from perdure.stores.file.layout import decoded, segment_name, segment_of, start_of

SEGMENT = "segment"
"""The kind of the first line of an epoch's later files; it is not a record of the log."""

_MAX_FIRST_LINE = 64 * 1024
_CHUNK = 1024 * 1024
_NEAR = 8 * 1024
_PROBE = 4 * 1024

_WITHOUT_A_COPY = (
    "or save what is readable of the session with `perdure export ID --salvage --out FILE`; if it "
    "has to open now, open it with on_damage='fresh': that sets the log aside and begins a new one"
)


class SegmentEnd(msgspec.Struct, frozen=True, rename={"number": "n"}):
    """The end of the previous segment: its sealed length, last seq and checksum."""

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
    first: int = 1
    """The number of the log's first record, if it begins here."""
    base: Origin | None = None
    """The history before the log, if it begins here."""


class LogSegment(msgspec.Struct, frozen=True):
    """A segment whose first line is valid."""

    epoch: int
    number: int
    start: Position
    """The place of its first record; a later segment's first line is none, an epoch record is."""
    first: SegmentHeader

    @property
    def name(self) -> str:
        """Its file."""
        return segment_name(self.epoch, self.number)


class DurablePosition(msgspec.Struct, frozen=True, gc=False, rename={"number": "n"}):
    """A position that is known to be valid, so that nothing before it needs to be read."""

    epoch: int
    number: int
    at: Position


class SegmentSpan(msgspec.Struct, frozen=True):
    """A part of one segment that is in the log: whole groups."""

    segment: LogSegment
    start: Position
    stop: Position
    records: tuple[Record, ...] | None = None
    """Its records, if they were read, and are not too many to be kept."""
    size: int = 0
    """The file's size in bytes, if it was read."""


def find_tip(
    log: Folder,
    key: SessionKey,
    *,
    since: int = 0,
    below: int | None = None,
    names: Collection[str] | None = None,
) -> LogSegment | None:
    """Return the newest segment with a valid first line, of an epoch from *since* to below *below*.

    *names* are those in the folder, if they were listed already.

    An epoch counts once its epoch record is complete; a process that died before that leaves
    nothing that a later segment follows.
    """
    tip = open_tip(log, key, since=since, below=below, names=names)
    if tip is None:
        return None
    os.close(tip[1])
    return tip[0]


def open_tip(
    log: Folder,
    key: SessionKey,
    *,
    since: int = 0,
    below: int | None = None,
    names: Collection[str] | None = None,
    flags: int = os.O_RDONLY,
) -> tuple[LogSegment, int] | None:
    """Return what ``find_tip`` finds, with its file open."""
    places = sorted(filter(None, map(segment_of, names or log.names())), reverse=True)
    for epoch, number in places:
        if epoch < since or (below is not None and epoch >= below):
            continue
        # A later file counts only if its epoch has begun.
        if number and not _is_begun(log, epoch, key):
            continue
        segment = _open_first(log, epoch, number, key, flags)
        if segment is not None:
            return segment
    return None


def _is_begun(log: Folder, epoch: int, key: SessionKey) -> bool:
    """Return whether an epoch has its record, or had it in a file that was removed."""
    if read_first(log, epoch, 0, key) is not None:
        return True
    return any(started == epoch for started, _ in starts(log))


def unbegun(
    log: Folder,
    tip: LogSegment | None,
    names: Collection[str],
    *,
    since: int = 0,
    below: int | None = None,
) -> list[str]:
    """Return the files after the tip that hold bytes: none of them has a valid first line."""
    after = (since, -1) if tip is None else (tip.epoch, tip.number)
    places = [place for place in sorted(filter(None, map(segment_of, names))) if place > after]
    newer = [segment_name(*place) for place in places if below is None or place[0] < below]
    return [name for name in newer if (status := log.stat(name)) is not None and status.st_size]


def starts(log: Folder) -> list[tuple[int, int]]:
    """Return the start marks of a log; the last one counts.

    A mark exists before any file is removed: check it when a file is missing.
    """
    return sorted(filter(None, map(start_of, log.names())))


def read_first(log: Folder, epoch: int, number: int, key: SessionKey) -> LogSegment | None:
    """Return a segment by its first line, None if the file or a complete line is missing.

    Raises:
        CorruptRecordError: The first line is damaged; or the file belongs to another session.

    """
    first = _open_first(log, epoch, number, key, os.O_RDONLY)
    if first is None:
        return None
    os.close(first[1])
    return first[0]


def _open_first(
    log: Folder, epoch: int, number: int, key: SessionKey, flags: int
) -> tuple[LogSegment, int] | None:
    try:
        fd = log.open(segment_name(epoch, number), flags)
    except FileNotFoundError:
        return None
    segment = None
    try:
        segment = first_of(log, fd, epoch, number, key)
    finally:
        if segment is None:
            os.close(fd)
    return None if segment is None else (segment, fd)


def first_of(log: Folder, fd: int, epoch: int, number: int, key: SessionKey) -> LogSegment | None:
    """Return what ``read_first`` does, from an open file."""
    name = segment_name(epoch, number)
    os.lseek(fd, 0, os.SEEK_SET)
    data = os.read(fd, _MAX_FIRST_LINE)
    line, newline, _ = data.partition(b"\n")
    if not newline and len(data) < _MAX_FIRST_LINE:
        return None  # a torn write
    segment = segment_of_line(line, epoch, number)
    if segment is None:
        _require_cut_write(log, name, 0)
        return None
    require_key(f"{log.path}/{name}", segment.first.key, key)
    return segment


def require_key(path: str, owner_key: SessionKey, key: SessionKey) -> None:
    """Raise CorruptRecordError if a file belongs to another session."""
    if owner_key != key:
        raise CorruptRecordError(
            f"{path} belongs to session {owner_key}, not to {key}: put the folder back to where it "
            "came from",
            path=path,
            key=str(key),
        )


def segment_of_line(line: bytes, epoch: int, number: int) -> LogSegment | None:
    """Return the segment that a first line begins, None if it is not valid."""
    first = decoded(frames.first_payload(line) or b"", SegmentHeader)
    if first is None:
        return None
    prev = first.prev
    seq, crc = (prev.seq, prev.crc) if prev else (first.first - 1, 0)
    verified = frames.verify(line, seq=seq if number else seq + 1, epoch=epoch, seed=crc)
    if (
        verified is None
        or verified[0].kind != (SEGMENT if number else EPOCH)
        or not verified[0].end
    ):
        return None
    if number == 0:
        return LogSegment(epoch, number, Position(0, seq, crc), first)
    if prev is None or prev.epoch != epoch or prev.number >= number:
        return None
    return LogSegment(epoch, number, Position(len(line) + 1, seq, verified[1]), first)


def scan(
    log: Folder,
    segment: LogSegment,
    start: Position,
    *,
    up_to: int | None = None,
    keep_bytes: int = 0,
    fd: int | None = None,
) -> SegmentSpan:
    """Read a segment's lines from *start* on, up to the last whole group.

    Args:
        log: The folder of the segments.
        segment: The segment to read.
        start: A valid position in it.
        up_to: Read no byte at or after this offset.
        keep_bytes: Return the records if they fit into this many bytes.
        fd: Its file, if it is open.

    Raises:
        CorruptRecordError: A line is damaged, rather than the rest of a write that was cut.

    """
    with contextlib.ExitStack() as stack:
        if fd is None:
            fd = _open(log, segment.name)
            stack.callback(os.close, fd)
        size = os.fstat(fd).st_size
        limit = size if up_to is None else min(size, up_to)
        scanner = Scanner(segment.epoch, start)
        records: list[Record] | None = [] if limit - start.offset <= keep_bytes else None
        os.lseek(fd, start.offset, os.SEEK_SET)
        offset = start.offset
        while offset < limit and scanner.damage is None:
            data = os.read(fd, min(_CHUNK, limit - offset))
            if not data:
                break
            offset += len(data)
            complete = scanner.feed(data)
            if records is not None:
                records += complete
    if scanner.damage is not None:
        _require_cut_write(log, segment.name, scanner.damage)
    kept = None if records is None else tuple(records)
    return SegmentSpan(segment, start, scanner.end, kept, size)


def scan_from(
    log: Folder,
    segment: LogSegment,
    mark: Position,
    *,
    up_to: int | None = None,
    keep_bytes: int = 0,
    fd: int | None = None,
) -> SegmentSpan:
    """Read a segment from a mark on.

    If no whole group follows the mark, the mark may be wrong: then it is decided from the
    beginning, as it is for damage, so that an error names the first damaged byte.
    """
    if mark != segment.start:
        with contextlib.suppress(CorruptRecordError):
            span = scan(log, segment, mark, up_to=up_to, keep_bytes=keep_bytes, fd=fd)
            if span.stop != mark or span.size == mark.offset:
                return span
    return scan(log, segment, segment.start, up_to=up_to, keep_bytes=keep_bytes, fd=fd)


def bracket(
    log: Folder, segment: LogSegment, start: Position, stop: Position, seq: int
) -> tuple[Position, Position]:
    """Return positions around the end of record *seq*, about 8 KiB apart or closer.

    A bisection: lines stand in order of their numbers, and each proves itself by the checksum of
    the line before it. So the log is its own index, and nothing has to be kept next to it. Where
    a line does not prove itself, the bracket stays wide, and reading it finds the damage.

    Args:
        log: The folder of the segments.
        segment: The segment.
        start: A valid position up to *seq*.
        stop: A valid position from *seq* on.
        seq: The record.

    """
    fd = _open(log, segment.name)
    limit = stop.offset
    try:
        while limit - start.offset > _NEAR:
            middle = (start.offset + limit) // 2
            position = _position_after(fd, middle, stop.offset, segment.epoch)
            # No line proves itself there, or its number is impossible: look before it.
            if position is None or not start.seq <= position.seq <= stop.seq:
                limit = middle
            elif position.seq <= seq:
                start = position
            else:
                stop, limit = position, middle
    finally:
        os.close(fd)
    return start, stop


def _position_after(fd: int, offset: int, limit: int, epoch: int) -> Position | None:
    """Return the first position after an offset, if the line after it proves it."""
    size = _PROBE
    while True:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, min(size, limit - offset))
        begin = data.find(b"\n", frames.SEED_BYTES - 1) + 1
        end = data.find(b"\n", begin) if begin else -1
        if end >= 0:
            break
        if size > _CHUNK or len(data) < size:
            return None
        size *= 4
    seed, number = frames.seed_of(data[:begin]), frames.number_of(data[begin:end])
    if seed is None or frames.verify(data[begin:end], seq=number, epoch=epoch, seed=seed) is None:
        return None
    return Position(offset + begin, number - 1, seed)


def damage_error(
    path: str, offset: int, length: int | None = None, *, cause: str = ""
) -> CorruptRecordError:
    """Return the error for damage in a file, other than a write that was cut at its end."""
    of = "" if length is None else f" of {length} that count"
    why = (
        f": {cause}. Convert all files of the store back, restore them from a copy"
        if cause
        else ": restore the file from a copy"
    )
    return CorruptRecordError(
        f"{path} is damaged at byte {offset}{of}; it was left as it is{why}, {_WITHOUT_A_COPY}",
        path=path,
        offset=offset,
    )


def _open(log: Folder, name: str) -> int:
    try:
        return log.open(name)
    except FileNotFoundError as error:
        raise CorruptRecordError(
            f"{log.path}/{name} is missing, and the log continues after it: restore the file "
            f"from a copy, {_WITHOUT_A_COPY}",
            path=f"{log.path}/{name}",
            offset=0,
        ) from error


def _require_cut_write(log: Folder, name: str, offset: int) -> None:
    """Raise unless a file from its first unsound line on is what a crash leaves of a write."""
    with open(_open(log, name), "rb") as file:
        is_short = os.fstat(file.fileno()).st_size - offset <= frames.MAX_LINE_BYTES
        file.seek(offset)
        rest = file.read(frames.MAX_LINE_BYTES if is_short else _CHUNK)
    if not is_short or not frames.is_cut_write(rest):
        raise damage_error(f"{log.path}/{name}", offset, cause=frames.conversion_of(rest))


def walk(log: Folder, tip: LogSegment, key: SessionKey, *, down_to: int) -> list[LogSegment]:
    """Return the chain from the tip back to the segment that holds record *down_to* + 1.

    Raises:
        CorruptRecordError: A segment in the chain is missing or damaged.

    """
    chain = [tip]
    while chain[-1].start.seq > down_to and (prev := chain[-1].first.prev) is not None:
        segment = read_first(log, prev.epoch, prev.number, key)
        if segment is None:
            marks = starts(log)
            if marks and marks[-1] > (prev.epoch, prev.number):  # what was older was removed
                return [
                    segment for segment in chain if (segment.epoch, segment.number) >= marks[-1]
                ]
            raise damage_error(
                f"{log.path}/{segment_name(prev.epoch, prev.number)}", 0, prev.length
            )
        chain.append(segment)
    return chain
