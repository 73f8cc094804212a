"""Reader of a session's log, without a lease, and salvage reads of a damaged one.

A plan lists the spans of the chain that hold the requested records, each with the length that
counts. It is made between two reads of the epoch: if a takeover is under way, the newest records
may be missing, and the plan is not ``settled``. The bytes of a plan never change afterwards, so
they can be streamed while another process writes.

`plan` blocks: one call into a thread. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator

import anyio.to_thread
import msgspec

from perdure._lib.files import Folder, read_part
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records import records as frames
from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, RETRACT, Position, Record, Scanner
from perdure.stores.file import documents, segments
from perdure.stores.file.layout import (
    LOG,
    QUARANTINE,
    decoded,
    is_tail,
    released_name,
    segment_name,
    segment_of,
    session_path,
)
from perdure.stores.file.leases import LeaseFile, Owners, newest_epoch, newest_lease, require_key
from perdure.stores.file.segments import DurablePosition, LogSegment, starts

SMALL = 1024 * 1024
"""A tip of at most this many bytes is read once, for the plan and for its records."""


class SegmentSpan(msgspec.Struct, frozen=True):
    """A part of one segment that is in the log."""

    segment: LogSegment
    start: Position
    stop: Position
    records: tuple[Record, ...] | None = None
    """Its records, where the plan had to read them anyway."""


class ReadPlan(msgspec.Struct):
    """Where the requested records are, oldest first."""

    spans: tuple[SegmentSpan, ...] = ()
    head: int = 0
    epoch: int = 0
    """The newest epoch that has a record."""
    settled: bool = True


def plan(
    root: Folder,
    key: SessionKey,
    after: int,
    before: int | None,
    durable: Callable[[], DurablePosition | None],
    owners: Owners,
    *,
    reverse: bool = False,
) -> ReadPlan:
    """Plan a read of the log as it is now; a plan that is not settled should be made again.

    Args:
        root: The store's folder.
        key: The session.
        after: Only records after this one are requested.
        before: Only records before this one are requested.
        durable: Returns how far the log is durable by now, if this store holds the session.
        owners: Shows whether the newest epoch's owner is alive.
        reverse: Whether the read begins with the newest of the requested records.

    Raises:
        CorruptRecordError: The log is damaged before its tail.

    """
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return ReadPlan()
    with folder:
        epoch, lease, _ = newest_lease(folder)
        if lease is not None:
            require_key(folder, key, lease)
            if lease.deleted:
                return ReadPlan()
        since = 1 if lease is None else lease.since
        try:
            read_plan = _plan(folder, key, since, after, durable, epoch)
        except CorruptRecordError:
            if newest_epoch(folder) != epoch:
                return ReadPlan(settled=False)  # it was deleted meanwhile
            raise
        read_plan.spans = _narrowed(folder, read_plan.spans, after, before, reverse=reverse)
        read_plan.settled = newest_epoch(folder) == epoch and _is_settled(
            folder, read_plan, lease, owners
        )
        return read_plan


def _narrowed(
    folder: Folder, spans: tuple[SegmentSpan, ...], after: int, before: int | None, *, reverse: bool
) -> tuple[SegmentSpan, ...]:
    """Return the spans to read, of which the first one begins close to the requested records."""
    if before is not None:
        spans = tuple(span for span in spans if span.start.seq + 1 < before)
    seq = after if not reverse else 0 if before is None else before - 1
    if not spans or not seq:
        return spans
    span = spans[-1] if reverse else spans[0]
    if span.records is not None or not span.start.seq < seq < span.stop.seq:
        return spans
    try:
        with folder.enter(LOG) as log:
            start, stop = segments.bracket(log, span.segment, span.start, span.stop, seq)
    except (FileNotFoundError, CorruptRecordError):
        return spans  # trimmed meanwhile, or lost: whoever reads it finds out
    if reverse:
        return (*spans[:-1], msgspec.structs.replace(span, stop=stop))
    return (msgspec.structs.replace(span, start=start), *spans[1:])


def _is_settled(
    folder: Folder, read_plan: ReadPlan, lease: LeaseFile | None, owners: Owners
) -> bool:
    """Return whether no takeover is under way: the newest epoch has its record, or never will."""
    if lease is None or read_plan.epoch == lease.epoch:
        return True
    if folder.stat(released_name(lease.epoch)) is not None:
        return True
    return owners.is_alive(lease.owner, lease.boot) is False


def _plan(
    folder: Folder,
    key: SessionKey,
    since: int,
    after: int,
    durable: Callable[[], DurablePosition | None],
    epoch: int,
) -> ReadPlan:
    # First: what is folded was durable in the log by then, and the log may have grown since.
    manifests = documents.read_manifests(folder, key, since=since)
    position = durable()
    if position is not None and position.epoch != epoch:
        position = None
    read_plan = ReadPlan()
    with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
        tip = segments.find_tip(log, key, since=since)
        if tip is not None:
            spans = _spans(log, key, tip, after, marks_of(manifests), position)
            read_plan = ReadPlan(tuple(spans), spans[-1].stop.seq, tip.epoch)
    documents.require_folded(folder, key, manifests, read_plan.head)
    return read_plan


def marks_of(manifests: list[documents.ManifestFile]) -> dict[tuple[int, int], Position]:
    """Return the positions that manifests prove, by segment."""
    marks: dict[tuple[int, int], Position] = {}
    for file in manifests:
        position = position_of(file.manifest.position)
        if position is not None:
            marks.setdefault((position.epoch, position.number), position.at)
    return marks


def position_of(raw: msgspec.Raw) -> DurablePosition | None:
    """Return the position where the log continues after a fold, None if the manifest has none."""
    # A position in another release's shape is ignored: the reader just reads more.
    return decoded(raw, DurablePosition)


def _spans(
    log: Folder,
    key: SessionKey,
    tip: LogSegment,
    after: int,
    marks: dict[tuple[int, int], Position],
    durable: DurablePosition | None,
) -> list[SegmentSpan]:
    newest = _newest_span(log, tip, after, marks, durable)
    spans = [newest]
    newer = newest.segment
    if newest.start.seq > after:
        for segment in segments.walk(log, tip, key, down_to=after)[1:]:
            prev = newer.first.prev
            assert prev is not None  # the walk followed it
            stop = Position(prev.length, prev.seq, prev.crc)
            mark = marks.get((segment.epoch, segment.number))
            is_near = mark is not None and segment.start.seq <= mark.seq <= min(after, stop.seq)
            spans.append(SegmentSpan(segment, mark if is_near and mark else segment.start, stop))
            newer = segment
    return spans[::-1]


def _newest_span(
    log: Folder,
    tip: LogSegment,
    after: int,
    marks: dict[tuple[int, int], Position],
    durable: DurablePosition | None,
) -> SegmentSpan:
    """Find up to where the tip counts, reading from the last known position."""
    start = marks.get((tip.epoch, tip.number), tip.start)
    end = durable.at if durable is not None and durable.number == tip.number else None
    if end is not None:
        if after >= end.seq:
            return SegmentSpan(tip, end, end, ())
        if start.offset > end.offset:
            start = tip.start
        if end.offset - start.offset > SMALL:
            return SegmentSpan(tip, start if start.seq <= after else tip.start, end)
    mark, up_to = start, None if end is None else end.offset
    start, scanned = segments.scan_from(log, tip, mark, up_to=up_to, keep_bytes=SMALL)
    if scanned.size < mark.offset:
        raise segments.damage_error(f"{log.path}/{tip.name}", scanned.size, mark.offset)
    if start.seq > after:
        return SegmentSpan(tip, tip.start, scanned.end)
    return SegmentSpan(tip, start, scanned.end, scanned.records)


# Bytes at the end of a log that do not count


class CutTail(msgspec.Struct, frozen=True):
    """Bytes at a log's end that are no whole records: of a write that a crash cut, or damage."""

    path: str
    """Where they are."""
    bytes: int
    is_kept: bool
    """Whether they were set aside, so that the log goes on without them."""

    def __str__(self) -> str:
        what = "kept in" if self.is_kept else "at the end of"
        return f"{self.bytes} bytes that are no whole records, {what} {self.path}"


def log_tails(root: Folder, key: SessionKey, owners: Owners) -> list[CutTail]:
    """Return the tails that were set aside and not accepted, and what the next holder sets aside.

    The end of a log that somebody may be writing to is not looked at.
    """
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return []
    with folder:
        tails = kept_tails(folder)
        epoch, lease, _ = newest_lease(folder)
        if (
            lease is not None
            and folder.stat(released_name(epoch)) is None
            and (lease.deleted or owners.is_alive(lease.owner, lease.boot) is not False)
        ):
            return tails
        with contextlib.suppress(FileNotFoundError, CorruptRecordError), folder.enter(LOG) as log:
            ends = _uncounted(folder, log, key, 1 if lease is None else lease.since)
            if newest_epoch(folder) == epoch:
                tails += ends
        return tails


def _uncounted(folder: Folder, log: Folder, key: SessionKey, since: int) -> list[CutTail]:
    names = log.names()
    tip = segments.find_tip(log, key, since=since, names=names)
    tails: list[CutTail] = []
    if tip is not None:
        marks = marks_of(documents.read_manifests(folder, key, since=since))
        mark = marks.get((tip.epoch, tip.number), tip.start)
        _, scanned = segments.scan_from(log, tip, mark)
        if scanned.size > scanned.end.offset:
            size = scanned.size - scanned.end.offset
            tails.append(CutTail(f"{log.path}/{tip.name}", size, is_kept=False))
    for name in segments.unbegun(log, tip, names, since=since):
        status = log.stat(name)
        if status is not None:
            tails.append(CutTail(f"{log.path}/{name}", status.st_size, is_kept=False))
    return tails


def kept_tails(folder: Folder) -> list[CutTail]:
    """Return the tails in a session's quarantine that nobody has accepted."""
    try:
        quarantine = folder.enter(QUARANTINE)
    except FileNotFoundError:
        return []
    with quarantine:
        found = [(name, quarantine.stat(name)) for name in sorted(quarantine.names())]
        return [
            CutTail(f"{quarantine.path}/{name}", status.st_size, is_kept=True)
            for name, status in found
            if is_tail(name) and status is not None
        ]


def accept_tails(root: Folder, key: SessionKey) -> bool:
    """Mark the tails in a session's quarantine as accepted; return whether there were any."""
    accepted = False
    with (
        contextlib.suppress(FileNotFoundError),
        root.enter(*session_path(key), QUARANTINE) as quarantine,
    ):
        for name in filter(is_tail, quarantine.names()):
            quarantine.rename(name, f"{name}.accepted")
            accepted = True
        quarantine.sync()
    return accepted


# Streaming a plan, a part of a file at a time
#
# The bytes are read through aiofiles on asyncio and through trio's own files on trio. No file is
# open while the caller processes a chunk, so an abandoned stream leaks nothing. Bytes that do not
# match the plan are damage, and raise before they are returned.


PART = 256 * 1024
"""A part at most; a reader that goes backward begins with less, for a page of the newest."""
_FIRST_PART = 32 * 1024


class _TrimmedError(Exception):
    """The session's holder removed a file, by a trim or with the session."""


class LogStream:
    """Records of a plan in order, or in reverse; `part` returns the next few."""

    def __init__(self, root: Folder, key: SessionKey, plan: ReadPlan, *, reverse: bool) -> None:
        self._root = root
        self._key = key
        self._path = (*session_path(key), LOG)
        self._reverse = reverse
        self._spans = deque(reversed(plan.spans) if reverse else plan.spans)
        self._open: _ForwardReader | _BackwardReader | None = None

    async def part(self) -> list[Record] | None:
        """Return the next records, None after the last."""
        while True:
            if self._open is None:
                if not self._spans:
                    return None
                span = self._spans.popleft()
                if span.records is not None:
                    return list(span.records[::-1] if self._reverse else span.records)
                self._open = (_BackwardReader if self._reverse else _ForwardReader)(self, span)
            try:
                records = await self._open.part()
            except _TrimmedError:
                if self._reverse:
                    return None  # older records were removed
                raise StoreUnavailableError(
                    f"records of {self._key} were removed while they were read: it was pruned or "
                    "deleted; read it again",
                    key=str(self._key),
                ) from None
            if records is not None:
                return records
            self._open = None

    async def read(self, span: SegmentSpan, start: int, stop: int) -> bytes:
        """Return a part of a span's file."""

        def opener(_: str, flags: int) -> int:
            with self._root.enter(*self._path) as log:
                return log.open(span.segment.name, flags & ~os.O_CREAT)

        try:
            return await read_part(opener, start, stop)
        except FileNotFoundError:
            if await anyio.to_thread.run_sync(self._was_removed, span.segment):
                raise _TrimmedError from None
            return b""

    def _was_removed(self, segment: LogSegment) -> bool:
        with self._root.enter(*session_path(self._key)) as folder:
            lease = newest_lease(folder).lease
            if lease is not None and (lease.deleted or lease.since > segment.epoch):
                return True
            with folder.enter(LOG) as log:
                return segments.starts(log)[-1:] > [(segment.epoch, segment.number)]

    def damage_error(self, span: SegmentSpan, offset: int) -> CorruptRecordError:
        """Return the error for a span that does not match the plan."""
        path = "/".join((self._root.path, *self._path, span.segment.name))
        return segments.damage_error(path, offset, span.stop.offset)


class _ForwardReader:
    def __init__(self, stream: LogStream, span: SegmentSpan) -> None:
        self._stream = stream
        self._span = span
        self._scanner = Scanner(span.segment.epoch, span.start)
        self._at = span.start.offset

    async def part(self) -> list[Record] | None:
        span, stop = self._span, self._span.stop.offset
        if self._at == stop:
            if self._scanner.end != span.stop:
                raise self._stream.damage_error(span, self._scanner.next.offset)
            return None
        data = await self._stream.read(span, self._at, min(self._at + PART, stop))
        self._at += len(data)
        records = self._scanner.feed(data)
        if self._scanner.damage is not None or not data:
            raise self._stream.damage_error(span, self._scanner.next.offset)
        return records


class _BackwardReader:
    """Read a file from its end: each line's checksum covers the one before, in both directions."""

    def __init__(self, stream: LogStream, span: SegmentSpan) -> None:
        self._stream = stream
        self._span = span
        self._at = span.stop.offset
        self._end = span.stop
        """Lines up to here are not returned yet; the line after it holds its checksum."""
        self._partial_line = b""
        """The end of a line whose beginning is not read yet."""
        self._size = _FIRST_PART

    async def part(self) -> list[Record] | None:
        span, start = self._span, self._span.start
        if self._at == start.offset:
            return None
        low = max(start.offset, self._at - self._size)
        self._size = min(self._size * 2, PART)
        data = await self._stream.read(span, low, self._at)
        if len(data) < self._at - low:
            raise self._stream.damage_error(span, low + len(data))
        self._at = low
        data += self._partial_line
        begin = self._first_line(data) if low > start.offset else 0
        self._partial_line = data[:begin]
        return self._records(data[begin:], low + begin)

    def _first_line(self, data: bytes) -> int:
        """Return where the first line begins whose predecessor's checksum is in *data*."""
        return data.find(b"\n", frames.SEED_BYTES - 1) + 1 or len(data)

    def _records(self, data: bytes, offset: int) -> list[Record]:
        if not data:
            return []
        count = data.count(b"\n")
        end = self._end
        seed = self._seed()
        if seed is None:
            raise self._stream.damage_error(self._span, offset)
        before = Position(offset, end.seq - count, seed)
        decoded_lines = frames.lines(data, epoch=self._span.segment.epoch, start=before)
        if decoded_lines.end != end:
            raise self._stream.damage_error(self._span, decoded_lines.end.offset)
        self._end = before
        return decoded_lines.records[::-1]

    def _seed(self) -> int | None:
        """Return the checksum of the line before the next ones, which seeds theirs."""
        if self._at == self._span.start.offset and not self._partial_line:
            return self._span.start.crc
        return frames.seed_of(self._partial_line)


# Salvage reads of a damaged log: the records that can still be proven


class SalvagedLog(msgspec.Struct):
    """All records of a log that can be proven."""

    low: int = 1
    """The seq that the log begins with."""
    records: list[Record] = []
    began_anew: bool = False
    """Whether it was begun anew over records that could not be read then. They come first, and
    what came later follows them under higher numbers."""


def salvaged_log(root: Folder, key: SessionKey) -> SalvagedLog:
    """Return all records of a log that can be proven."""
    by_seq: dict[int, Record] = {}
    low = shift = 0
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        return SalvagedLog()
    with folder:
        since = _since(folder)
        if since is None:
            return SalvagedLog()
        with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
            first_segment = max(starts(log), default=(0, 0))
            for epoch, number in sorted(filter(None, map(segment_of, log.names()))):
                if epoch < since or (epoch, number) < first_segment:
                    continue
                limit, records, begins = _segment(log, epoch, number, key)
                if limit is None:
                    continue
                low = low or (limit if begins or first_segment > (0, 0) else 1)
                if limit == 1 and any(record.kind != EPOCH for record in by_seq.values()):
                    shift = max(by_seq)
                # A later file begins where the one before it was sealed.
                by_seq = {seq: record for seq, record in by_seq.items() if seq < limit + shift}
                by_seq |= {record.seq + shift: record for record in records}
    if shift:
        # A retraction names a record by the number that it had.
        by_seq = {
            seq: msgspec.structs.replace(record, seq=seq)
            for seq, record in by_seq.items()
            if record.seq == seq or record.kind != RETRACT
        }
    records = sorted(by_seq.values(), key=lambda record: record.seq)
    while records and not records[-1].end:  # an incomplete group
        records.pop()
    return SalvagedLog(max(low, 1), records, shift > 0)


def _since(folder: Folder) -> int | None:
    """Return the epoch that the log began with, None if there is no session for readers."""
    lease = newest_lease(folder).lease
    if lease is None:
        return 1
    return None if lease.deleted else lease.since


def _segment(
    log: Folder, epoch: int, number: int, key: SessionKey
) -> tuple[int | None, list[Record], bool]:
    """Return the seq that a file begins with, None if unknown; its records; and whether the log
    is known to begin there."""
    data = frames.unconverted(log.read(segment_name(epoch, number)) or b"")
    segment = segments.segment_of_line(data.partition(b"\n")[0], epoch, number)
    if segment is None or segment.first.key != key:
        records = frames.salvaged(data, epoch=epoch, seq=0, crc=0)
        return (records[0].seq if records else None), records, False
    start = segment.start
    body = data[start.offset :]
    records = frames.salvaged(body, epoch=epoch, seq=start.seq, crc=start.crc)
    return start.seq + 1, records, segment.first.prev is None


def contiguous_run(
    key: SessionKey, salvaged: SalvagedLog, after: int, before: int | None
) -> Iterator[Record]:
    """Yield records with ``after < seq < before``, and raise where some are lost.

    Raises:
        CorruptRecordError: With the next record that can be read as its fact ``next``.

    """
    seq = max(after, salvaged.low - 1)
    for record in salvaged.records:
        if record.seq <= seq:
            continue
        if before is not None and seq + 1 >= before:
            return
        if record.seq != seq + 1:
            raise CorruptRecordError(
                f"a file of the log of {key} is damaged: its next readable record is {record.seq}",
                key=str(key),
                seq=seq + 1,
                next=record.seq,
            )
        yield record
        seq = record.seq
